"""Recorded trials: reading, means and verdicts."""

import json

import numpy as np
import pytest
from made_up_study import SUMMARY, config, rows_of, three, trial, write

from linattn_jax.eval.report import newest_protocol, read_trials, reported, summary, table, verdict
from linattn_jax.types import UserError

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
