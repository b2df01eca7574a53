"""Pages of recorded trials, the overview, and the program that makes them."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from made_up_study import CONFIG, SUMMARY, config, png_size, rows_of, three, trial, write

from linattn_jax.eval.report import Records, newest_protocol, summary, verdict
from linattn_jax.eval.report_page import overview, page, write_reports
from linattn_jax.types import UserError

# The page


def page_of(trials, made=None, records=None):
    made = made or config()
    kept = newest_protocol(trials)[0]
    results = summary(made, kept)
    found = records or Records(trials, 0, 0)
    return page("pairs", made, found, results, [verdict(claim, results) for claim in made.claims])


def test_the_page():
    text = page_of([*three("vla", (1.0, 0.98, 0.99)), *three("linear", (0.2, 0.3, 0.4))])
    assert text.startswith("# Pairs\n\nAfter Someone 2026.")
    for wanted in (
        "python -m experiments.pairs\npython -m experiments.report --studies=pairs\n",
        "![Pairs](pairs.png)",
        "| `vla` | 99.0 ± 1.0 (3) [98.35] | – | 0.001 | 12,345 |",
        "- A note.",
        "- **holds**: VLA recalls.\n  - `vla@n=4 >= 0.98`: yes; vla@n=4 99.0 ± 1.0 (3)",
        "- 6 trials: 6 report; 6 done.",
        "- 6,000 tokens of training in 12 seconds of the processes: 500 tokens/s each, sharing devices or not.",
        "- Started 2026-01-01T00:00:00Z.",
        "- Commit: aaaaaaaaaaaa.",
        "- Device: 1 × cpu, 2 cores.",
        "- Versions: jax 0.12.",
        "- Protocol p1.",
        "Without a number: `vla` at n=64; `linear` at n=64.",
    ):
        assert wanted in text
    for unwanted in ("**The trials come", "Left out", "torn", "repeat", "Diverged and failed", "Not in the records"):
        assert unwanted not in text


def test_the_page_says_what_is_missing():
    trials = [
        *three("vla", (1.0, 0.98, 0.99)),
        *three("gla", (0.5,)),
        trial("kla") | {"metrics": {}, "status": "failed"},
    ]
    claims = ({"text": "So.", "checks": ("softmax@n=4 > 0.1",)},)
    text = page_of(trials, config(claims=claims, columns=("n=4",), published={"s4d": {"n=4": 0.5}}))
    assert "Not in the records: `linear`, `softmax`, `s4d`." in text
    assert "Without a number: `kla`." in text
    assert "Fewer than 3 seeds: `gla` (1)." in text
    assert "- **not measured**: So.\n  - `softmax@n=4 > 0.1`: not measured; softmax@n=4 –" in text
    assert rows_of(text)["s4d"][0] == "– [50]"


def test_the_page_says_what_does_not_count():
    select = [trial(stage="select", seed=0, learning_rate=1e-2, metrics={"n=4": 0.1, "extra": 0.5})]
    earlier = [trial(seed=5, learning_rate=1e-1, started="2025-12-31T00:00:00Z")]
    old = three("vla", (0.0, 0.0), protocol="old", started="2025-01-01T00:00:00Z")
    trials = [*old, *select, *earlier, *three("vla", (1.0, 0.98))]
    text = page_of(trials, records=Records(trials, 1, 4))
    assert "Left out: 2 trials of 1 other protocols**, which do not mean the same: 2 old." in text
    assert "Left out: 1 report trials at a learning rate other than that of the latest." in text
    assert "Recorded and not shown: extra." in text
    assert "4 lines repeat a trial" in text
    assert "The last line is torn" in text
    assert rows_of(text)["vla"][0] == "99.0 ± 1.4 (2) [98.35]"
    assert "- 4 trials: 3 report, 1 select; 4 done." in text


def test_the_page_says_where_the_trials_are_from():
    second = trial(seed=1, commit="b" * 40, dirty=True, versions={"jax": "0.13"}, started="2026-01-02T00:00:00Z")
    text = page_of([trial(), second])
    assert "**The trials come from 2 commits**: aaaaaaaaaaaa (1 trials); bbbbbbbbbbbb with changes (1 trials)." in text
    assert "**The trials come from 2 sets of versions**: jax 0.12 (1 trials); jax 0.13 (1 trials)." in text
    assert "Device: 1 × cpu, 2 cores." in text
    assert "Started 2026-01-01T00:00:00Z to 2026-01-02T00:00:00Z." in text


def test_the_page_lists_what_went_wrong_and_what_was_cut():
    trials = [
        trial(stopped="patience"),
        trial(seed=1, stopped="solved"),
        trial("linear", stopped="solved"),
        trial(seed=2, status="diverged", stopped=None),
        trial(seed=3, status="failed", error="out of\nmemory", stage="select", stopped=None) | {"metrics": {}},
    ]
    text = page_of([row | {"setting": {"pairs": 4}} for row in trials], config(claims=()))
    assert "- Training ended by: 1 patience, 2 solved. Of those in the table, out of patience: `vla` 1 of 4." in text
    assert "- `vla`, pairs 4, learning rate 0.001, seed 2 (report) diverged after 1,500 steps" in text
    assert "- `vla`, pairs 4, learning rate 0.001, seed 3 (select) failed: out of memory" in text
    assert "## Claims" not in text
    many = page_of([trial(seed=seed, status="failed") | {"metrics": {}} for seed in range(45)])
    assert many.count(" failed after ") == 40
    assert "- and 5 more" in many


def test_the_overview():
    verdicts = [verdict({"text": f"Claim {i}.", "checks": (f"vla@n=4 > {i}",)}, SUMMARY) for i in (0, 1)]
    text = overview({"pairs": (config(), verdicts), "bare": (config(title="No | claims"), [])})
    assert "Claims: holds 1, does not hold 1." in text
    assert "| [Pairs](pairs/README.md), Someone 2026 | Claim 0. | holds |\n|  | Claim 1. | does not hold |" in text
    assert "| [No \\| claims](bare/README.md), Someone 2026 |  | no claim |" in text


# The program


@pytest.fixture
def start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    old = trial(protocol="old", started="2025-01-01T00:00:00Z")
    new = [*three("vla", (1.0, 0.98, 0.99)), *three("linear", (0.2, 0.3, 0.4))]
    write(Path("docs/results/pairs/trials.jsonl"), [old, *new])
    Path("docs/results/norm").mkdir()
    Path("docs/results/norm/norm.json").write_text("{}")
    Path("configs").mkdir()
    Path("configs/pairs.py").write_text(CONFIG)

    def config_of(study):
        if not Path(f"configs/{study}.py").is_file():
            raise UserError(f"the study {study} has records but no configs/{study}.py")
        return runpy.run_path(f"configs/{study}.py")["get_config"]()

    def start(records="docs/results", output=None, studies=None):
        for sentence in write_reports(Path(records), Path(output or records), studies, config_of):
            print(sentence)

    return start


def test_the_program(start, capsys):
    start(output="out")
    assert sorted(str(path) for path in Path("out").rglob("*") if path.is_file()) == [
        "out/pairs/README.md",
        "out/pairs/pairs.png",
        "out/studies.md",
    ]
    assert png_size("out/pairs/pairs.png")[0] > 800
    assert "| `linear` | 30.0 ± 10.0 (3) | – [20] |" in Path("out/pairs/README.md").read_text()
    assert "| VLA recalls. | holds |" in Path("out/studies.md").read_text()
    assert "holds: VLA recalls." in capsys.readouterr().out
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-m", "experiments.report"]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": root}, capture_output=True, text=True, timeout=120, check=True
    )
    assert "holds: VLA recalls." in done.stdout
    assert Path("docs/results/pairs/README.md").read_text() == Path("out/pairs/README.md").read_text()


def test_chosen_studies(start, capsys):
    write(Path("docs/results/other/trials.jsonl"), [trial(study="other")])
    start(studies=["pairs"], output="out")
    assert not Path("out/studies.md").exists()
    assert not Path("out/other").exists()
    assert "studies.md left as it is" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"the study other has records but no configs/other.py"):
        start(output="out")
    with pytest.raises(UserError, match=r"no docs/results/norm/trials.jsonl; studies with records: other, pairs"):
        start(studies=["norm"])
    with pytest.raises(UserError, match=r"there is no trials.jsonl in a folder of configs"):
        start(records="configs")
    write(Path("docs/results/pairs/trials.jsonl"), [trial(study="other")])
    with pytest.raises(UserError, match="line 1: a trial of other, wanted pairs"):
        start(studies=["pairs"])
