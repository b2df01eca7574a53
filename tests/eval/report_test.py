"""Reports of recorded trials: reading, means, verdicts, the page, the figure and the program."""

import json
import os
import runpy
import struct
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from linattn_jax.eval import report_figure
from linattn_jax.eval.report import Records, newest_protocol, read_trials, reported, summary, table, verdict
from linattn_jax.eval.report_figure import family, figure, style
from linattn_jax.eval.report_page import overview, page, write_reports
from linattn_jax.layers import LAYERS
from linattn_jax.types import UserError

CONFIG = """
from ml_collections import ConfigDict

def get_config(arg=None):
    config = ConfigDict()
    config.title = "Pairs"
    config.paper = "Someone 2026"
    config.columns = ("n=4", "n=64")
    config.x, config.x_label, config.chance = (4, 64), "pairs n", 0.1
    config.mixers = ("vla", "linear")
    config.published = {"vla": {"n=4": 0.9835}, "linear": {"n=64": 0.2}}
    config.claims = ({"text": "VLA recalls.", "checks": ("vla@n=4 >= 0.98", "vla@n=4 > linear@n=4 + 0.5")},)
    config.notes = ("A note.",)
    return config
"""


def config(**fields):
    namespace = {}
    exec(CONFIG, namespace)
    made = namespace["get_config"]()
    for name, value in fields.items():
        del made[name]
        made[name] = value
    return made


def trial(mixer="vla", seed=0, metrics=None, **fields):
    row = {"study": "pairs", "mixer": mixer, "layer": mixer, "options": {}, "seed": seed, "learning_rate": 1e-3}
    row |= {"setting": {}, "stage": "report", "status": "done", "metrics": metrics or {"n=4": 0.5, "n=64": 0.25}}
    row |= {"validation": 0.5, "loss": 0.1, "steps": 1500, "stopped": "steps", "parameters": 12345, "tokens": 1000}
    row |= {"seconds": 2.0, "protocol": "p1", "commit": "a" * 40, "dirty": False, "versions": {"jax": "0.12"}}
    row |= {"devices": {"platform": "cpu", "kind": "cpu", "count": 1, "cores": 2}, "started": "2026-01-01T00:00:00Z"}
    return row | fields


def three(mixer, values, column="n=4", **fields):
    return [trial(mixer, seed, {column: value}, **fields) for seed, value in enumerate(values)]


def write(path, rows, end=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + end)
    return path


def rows_of(text):
    """{mixer: cells} of a table."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return {line[0].strip("`"): line[1:] for line in lines}


# Reading


def test_a_torn_last_line_is_counted(tmp_path):
    found = read_trials(write(tmp_path / "trials.jsonl", [trial(), trial(seed=1)], '{"study": "pairs", "mi'))
    assert [row["seed"] for row in found.trials] == [0, 1]
    assert (found.torn, found.repeated) == (1, 0)
    assert read_trials(write(tmp_path / "trials.jsonl", [trial()])).torn == 0


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"study": "pairs", "mi', "not JSON"),
        ("3", "not an object"),
        (json.dumps({k: v for k, v in trial().items() if k != "seed"}), "seed is None"),
        (json.dumps(trial(status="fine")), "status is 'fine', wanted one of done, diverged, failed"),
        (json.dumps(trial(metrics={"n=4": 98.4})), r"n=4 is 98.4, wanted an accuracy in \[0, 1\]"),
        (json.dumps(trial(metrics={"n=4": float("nan")})), "n=4 is nan"),
        (json.dumps(trial() | {"metrics": {}}), "done has no metrics"),
        (json.dumps(trial(study="other")), "a trial of other, wanted pairs"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, said):
    path = write(tmp_path / "trials.jsonl", [trial()], line + "\n" + json.dumps(trial(seed=1)) + "\n")
    with pytest.raises(UserError, match=rf"trials.jsonl, line 2: .*{said}"):
        read_trials(path, "pairs")


def test_a_bad_line_with_its_end_is_not_torn(tmp_path):
    with pytest.raises(UserError, match="line 2"):
        read_trials(write(tmp_path / "trials.jsonl", [trial()], '{"study": \n'))


def test_of_a_repeated_trial_the_last_that_is_done_counts(tmp_path):
    lines = [
        trial(metrics={"n=4": 0.1}),
        trial(metrics={"n=4": 0.2}),
        trial(status="failed", metrics={}, error="no memory"),
        trial(seed=1, status="failed", metrics={}),
        trial(seed=1, metrics={"n=4": 0.4}),
        trial(learning_rate=1e-2),
        trial(setting={"pairs": 4}),
        trial(protocol="p0"),
        trial("linear"),
    ]
    found = read_trials(write(tmp_path / "trials.jsonl", lines))
    assert found.repeated == 3
    assert len(found.trials) == 6
    assert [row["metrics"] for row in found.trials[:2]] == [{"n=4": 0.2}, {"n=4": 0.4}]


# Means


def test_cells():
    trials = [*three("vla", (0.98, 0.984, 0.988)), *three("linear", (0.3,), "n=64")]
    lines = rows_of(table(config(), summary(config(), trials)))
    assert lines["vla"] == ["98.4 ± 0.4 (3) [98.35]", "–", "0.001", "12,345"]
    assert lines["linear"] == ["–", "30.0 (1) [20]", "0.001", "12,345"]
    cell = summary(config(), trials)["vla"].cells["n=4"]
    np.testing.assert_allclose(cell.std, np.std([0.98, 0.984, 0.988], ddof=1), rtol=1e-12)


def test_settings_fill_their_columns():
    trials = [
        trial(mixer, 0, {f"n={n}": value}, setting={"pairs": n}, learning_rate=rate, parameters=size)
        for mixer, n, value, rate, size in (
            ("vla", 4, 1.0, 1e-2, 1000), ("vla", 64, 0.5, 1e-3, 2000), ("linear", 4, 0.75, 1e-3, 1000),
        )
    ]  # fmt: skip
    lines = rows_of(table(config(published={}), summary(config(published={}), trials)))
    assert lines["vla"] == ["100.0 (1)", "50.0 (1)", "0.001, 0.01", "1,000 to 2,000"]
    assert lines["linear"] == ["75.0 (1)", "–", "0.001", "1,000"]
    clash = [trial(metrics={"n=4": 0.5}, setting={"pairs": n}) for n in (4, 8)]
    with pytest.raises(UserError, match=r"vla: the column n=4 has numbers of .*4.* and .*8"):
        summary(config(), clash)


def test_diverged_and_failed_trials_are_counted():
    trials = [
        *three("vla", (0.9, 0.7)),
        trial(seed=2, metrics={"n=4": 0.5}, status="diverged"),
        trial(seed=3) | {"metrics": {}, "status": "diverged"},
        trial(seed=4) | {"metrics": {}, "status": "failed"},
    ]
    cell = summary(config(), trials)["vla"].cells["n=4"]
    assert (cell.values, cell.diverged, cell.failed) == ((0.9, 0.7, 0.5), 2, 1)
    cells = rows_of(table(config(published={}), summary(config(published={}), trials)))["vla"]
    assert cells[0] == "70.0 ± 20.0 (3), 2 diverged, 1 failed"


def test_the_rate_is_that_of_the_report_trials():
    select = [trial(stage="select", learning_rate=rate, validation=v) for rate, v in ((1e-3, 0.5), (1e-2, 0.9))]
    report = [trial(seed=seed, learning_rate=1e-3) for seed in (1, 2)]
    select[1]["started"] = "2026-03-01T00:00:00Z"
    kept = reported([*select, *report])
    assert [(row["seed"], row["learning_rate"], row["stage"]) for row in kept] == [
        (0, 1e-3, "select"), (1, 1e-3, "report"), (2, 1e-3, "report"),
    ]  # fmt: skip
    later = trial(seed=1, learning_rate=1e-4, started="2026-02-01T00:00:00Z")
    assert {row["learning_rate"] for row in reported([later, *report])} == {1e-4}


def test_without_report_trials_the_best_rate_of_the_grid_is_taken():
    grid = [
        trial(stage="select", learning_rate=rate, validation=validation, setting={"pairs": n}, status=status)
        for rate, n, validation, status in (
            (1e-4, 4, 0.5, "done"), (1e-4, 64, 0.1, "done"),
            (1e-3, 4, 0.6, "done"), (1e-3, 64, 0.2, "done"),
            (1e-2, 4, 0.7, "done"), (1e-2, 64, 0.9, "diverged"),
        )
    ]  # fmt: skip
    assert {row["learning_rate"] for row in reported(grid)} == {1e-3}
    tied = [trial(stage="select", learning_rate=rate) for rate in (1e-2, 1e-3)]
    assert {row["learning_rate"] for row in reported(tied)} == {1e-3}


def test_protocols_are_not_mixed():
    old = three("vla", (0.1, 0.2), protocol="old", started="2025-01-01T00:00:00Z")
    new = three("vla", (0.8, 0.9), protocol="new")
    for trials in ([*old, *new], [*new, *old]):
        kept, left_out = newest_protocol(trials)
        assert kept == new
        assert left_out == {"old": 2}
    with pytest.raises(UserError, match="2 values of protocol"):
        summary(config(), [*old, *new])
    assert newest_protocol([]) == ([], {})


def test_published_numbers_must_fit():
    with pytest.raises(UserError, match=r"published: vla has 98.3"):
        summary(config(published={"vla": {"n=4": 98.3}}), [trial()])
    with pytest.raises(UserError, match="in n=5"):
        summary(config(published={"vla": {"n=5": 0.3}}), [trial()])


def test_the_order_of_mixers():
    trials = [trial(name, layer=layer) for name, layer in (("vla_x", "vla"), ("zzz", "gla"), ("kla", "kla"))]
    labels = list(summary(config(mixers=("linear", "vla")), trials))
    assert labels == ["linear", "vla", "zzz", "kla", "vla_x"]
    assert list(summary(config(mixers={"vla": {}, "kla": {}, "linear": {}}), [])) == ["linear", "kla", "vla"]


# Verdicts

SUMMARY = summary(config(), [*three("vla", (0.9, 0.8, 0.7)), *three("linear", (0.3, 0.3, 0.3))])


@pytest.mark.parametrize(
    ("check", "holds"),
    [
        ("vla@n=4 >= 0.8", True),  # the mean is 0.7999999999999999
        ("vla@n=4 >= 0.81", False),
        ("vla@n=4 > 0.79", True),
        ("vla@n=4 > 0.8", False),
        ("vla@n=4 <= 0.8", True),
        ("vla@n=4 <= 0.79", False),
        ("vla@n=4 < 0.81", True),
        ("vla@n=4 < 0.8", False),
        ("0.9 > vla@n=4", True),
        ("0.7 > vla@n=4", False),
        ("vla@n=4 > linear@n=4", True),
        ("linear@n=4 > vla@n=4", False),
        ("vla@n=4 > linear@n=4 + 0.4", True),
        ("vla@n=4 > linear@n=4 + 0.5", False),
        ("vla@n=4 >= linear@n=4 + 0.5", True),
        ("linear@n=4 >= vla@n=4 - 0.6", True),
        ("linear@n=4 >= vla@n=4 - 0.4", False),
        ("vla@n=4 ~ 0.7 +- 0.1", True),
        ("vla@n=4 ~ 0.9 +- 0.1", True),
        ("vla@n=4 ~ 0.7 +- 0.09", False),
        ("vla@n=4 ~ 0.9 +- 0.09", False),
        ("vla@n=4 ~ linear@n=4 +- 0.5", True),
        ("vla@n=64 > 0.5", None),
        ("0.5 < gla@n=4", None),
    ],
)
def test_operators(check, holds):
    results = SUMMARY | {"gla": SUMMARY["vla"]._replace(cells=dict.fromkeys(("n=4",), SUMMARY["vla"].cells["n=64"]))}
    (made,) = verdict({"text": "", "checks": (check,)}, results).checks
    assert made.holds is holds


@pytest.mark.parametrize(
    ("checks", "result"),
    [
        (("vla@n=4 > 0.5", "vla@n=4 < 0.9"), "holds"),
        (("vla@n=4 > 0.5", "vla@n=4 > 0.9"), "holds in part"),
        (("vla@n=4 < 0.5", "vla@n=4 > 0.9"), "does not hold"),
        (("vla@n=4 > 0.5", "vla@n=64 > 0.9"), "not measured"),
        ((), "not measured"),
    ],
)
def test_results(checks, result):
    assert verdict({"text": "It does.", "checks": checks}, SUMMARY)[:2] == ("It does.", result)


def test_the_numbers_that_decided():
    numbers = lambda check: verdict({"text": "", "checks": (check,)}, SUMMARY).checks[0].numbers
    assert (
        numbers("vla@n=4 > linear@n=4 + 0.2") == "vla@n=4 80.0 ± 10.0 (3), linear@n=4 30.0 ± 0.0 (3), difference +50.0"
    )
    for check in ("vla@n=4 > 0.6", "vla@n=4 > 0.95", "vla@n=4 ~ 0.6 +- 0.05"):
        assert numbers(check) == "vla@n=4 80.0 ± 10.0 (3)"
    for check in ("vla@n=4 > 0.75", "vla@n=4 > 0.85", "vla@n=4 ~ 0.7 +- 0.15"):
        assert numbers(check) == "vla@n=4 80.0 ± 10.0 (3), nearer to the limit than the spread of the seeds"
    assert numbers("vla@n=64 > 0.5") == "vla@n=64 –"


@pytest.mark.parametrize(
    ("check", "said"),
    [
        ("vla@n=5 > 0.1", "there is no vla@n=5"),
        ("gla@n=4 > 0.1", "there is no gla@n=4"),
        ("vla@n=4 = 0.1", "wanted"),
        ("vla@n=4>=0.1", "wanted"),
        ("vla@n=4 ~ 0.1", "wanted"),
        ("vla@n=4 > 0.1 +- 0.1", "wanted"),
        ("vla@n=4 > much", "'much' is neither"),
    ],
)
def test_checks_that_are_none(check, said):
    with pytest.raises(UserError, match=said):
        verdict({"text": "", "checks": (check,)}, SUMMARY)


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
        "- 6,000 tokens of training in 12 seconds: 500 tokens/s.",
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


# The figure


def png_size(path):
    data = Path(path).read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert data.endswith(b"IEND\xaeB`\x82")
    assert len(data) > 10_000
    return struct.unpack(">II", data[16:24])


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draws, and gives the axes."""
    kept = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (kept.append(self), save(self, *a, **k)))

    def draw(made, trials):
        figure(made, summary(made, trials), tmp_path / "a.png")
        png_size(tmp_path / "a.png")
        return kept[-1].axes

    return draw


def labels_of(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_few_mixers_share_a_panel(drawn):
    trials = [
        *three("linear", (0.2, 0.3, 0.4)),
        *three("vla", (0.5, 0.7)),
        *three("vla_x", (0.1,), "n=64", layer="vla"),
    ]
    (axes,) = drawn(config(), trials)
    assert labels_of(axes) == ["vla", "linear", "vla_x", "hollow: the paper's", "chance"]
    lines = {line.get_label(): line for line in axes.lines}
    np.testing.assert_allclose(lines["vla"].get_xydata(), [[4, 60], [64, np.nan]])
    np.testing.assert_allclose(lines["chance"].get_xydata(), [[4, 10], [64, 10]])
    np.testing.assert_allclose(to_rgb_of(lines["linear"]), style("linear").colour)
    hollow = [line for line in axes.lines if line.get_markerfacecolor() == "none"]
    points = [(line.get_xydata().tolist(), to_rgb_of(line)) for line in hollow if np.isfinite(line.get_ydata()).any()]
    np.testing.assert_allclose([point for point, _ in points], [[[4, 98.35], [64, np.nan]], [[4, np.nan], [64, 20]]])
    assert [colour for _, colour in points] == [style("vla").colour, style("linear").colour]
    vertices = [path.get_paths() for path in axes.collections]
    heights = np.concatenate([path.vertices[:, 1] for paths in vertices for path in paths])
    np.testing.assert_allclose(heights.min(), 20, atol=1e-6)  # 30 - 10, of linear
    np.testing.assert_allclose(heights.max(), 60 + 100 * np.std([0.5, 0.7], ddof=1), atol=1e-6)


def to_rgb_of(line):
    return tuple(line.get_color())


@pytest.mark.parametrize(
    ("x", "scale"), [((4, 64), "log"), ((8, 64), "log"), ((16, 64), "linear"), ((0, 64), "linear")]
)
def test_the_axis_is_logarithmic_where_it_spans_eightfold(drawn, x, scale):
    (axes,) = drawn(config(x=x), three("vla", (0.5, 0.7)))
    assert axes.get_xscale() == scale
    if scale == "log":
        assert axes.xaxis.get_transform().base == 2
    assert [text.get_text() for text in axes.get_xticklabels()] == [str(tick) for tick in x]


def test_many_mixers_have_a_panel_a_family(drawn):
    rows = [row for name in LAYERS for row in three(name, (0.5, 0.6))]
    panels = drawn(config(), [*rows, *three("mine", (0.3,), layer="somewhere")])
    assert [axes.get_title() for axes in panels] == [
        "softmax attention",
        "linear attention and decay",
        "delta rules",
        "variational linear attention",
        "curvature-corrected queries",
        "state-space models",
        "others",
    ]
    own = [set(labels_of(axes)) - {"the others", "chance", "hollow: the paper's"} for axes in panels]
    assert own[3] == {"vla"}
    assert own[6] == {"mine"}
    assert set().union(*own) == {*LAYERS, "mine"}
    assert sum(map(len, own)) == len(LAYERS) + 1
    assert sum(line.get_color() == "0.85" for line in panels[3].lines) == len(LAYERS)


def test_one_column_has_a_row_a_mixer(drawn):
    made = config(columns=("n=4",), x=(4,), published={"vla": {"n=4": 0.9}})
    (axes,) = drawn(made, [*three("linear", (0.2, 0.3, 0.4)), *three("vla", (0.5,)), *three("kla", (0.6, 0.7))])
    assert [text.get_text() for text in axes.get_yticklabels()] == ["linear", "vla", "kla"]


def test_lengths_must_agree(tmp_path):
    for wrong, said in (({"x": (1,)}, "x has 1"), ({"chance": (0.1, 0.2, 0.3)}, "chance has 3")):
        with pytest.raises(UserError, match=said):
            figure(config(**wrong), SUMMARY, tmp_path / "a.png")


def test_layers_look_different():
    for a, b in combinations(LAYERS, 2):
        assert style(a) != style(b), (a, b)
        if family(a) == family(b):
            distance = np.abs(np.subtract(style(a).colour, style(b).colour)).max()
            assert distance > 0.1, (a, b)
    assert style("vla_frozen") == style("vla_frozen") not in (style("vla"), style("vla_identity"))
    assert {family(name) for name in LAYERS} == set(report_figure._FAMILIES.values())


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
