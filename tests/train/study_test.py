"""Studies: what is planned and trained, what is never trained twice, and how little is lost when something breaks."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import pathlib
import subprocess
import sys
import threading
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import _studies
from linattn_jax.eval.report import read_trials, summary
from linattn_jax.train import study
from linattn_jax.train.rundir import write_json
from linattn_jax.train.trials import Programs, Progress
from linattn_jax.types import UserError

SMALL = {"settings": [{"pairs": 1, "used": 5}, {"pairs": 2, "used": 8}], "sizes": {"max_pairs": 2, "length": 8}}
LARGE = {"settings": [{"pairs": 3, "used": 10}], "sizes": {"max_pairs": 3, "length": 10}}
ONE, TWO, THREE = (("pairs", 1), ("used", 5)), (("pairs", 2), ("used", 8)), (("pairs", 3), ("used", 10))
STEPS, BATCH = 6, 4


def config(**changes):
    """Two mixers, rates and seeds; two settings that train together and one by itself."""
    given = {
        "title": "A study",
        "paper": "Nobody 2026",
        "task": "vla_mqar",
        "sizes": {"vocab_size": 12},
        "model": {"kind": "tiny", "layers": 1, "width": 16, "heads": 1, "mlp_width": 16, "positions": 16},
        "optimizer": _studies.optimizer(STEPS, constant=True, weight_decay=0.01),
        "trials": {
            "steps": STEPS, "batch": BATCH, "eval_every": 2,
            "validation_examples": 8, "test_examples": 6, "eval_batch": 4,
        },
        "buckets": [SMALL, LARGE],
        "evaluations": {"n={pairs}": {}},
        "columns": {"n=1": 1, "n=2": 2, "n=3": 3},
        "x_label": "pairs n",
        "mixers": ("linear", "deltanet"),
        "claims": (),
    }  # fmt: skip
    settled = {"learning_rates": (1e-3, 1e-2), "seeds": (0, 1), "select": (), "max_trials": 32}
    settled |= {name: changes.pop(name) for name in settled if name in changes}
    made = _studies.study("tiny", full=True, **(given | changes))
    for name, value in settled.items():
        setattr(made, name, value)
    return made


# The plan.


def planned(made):
    return [(group.name, group.bucket, list(group.trials)) for group in study.plan(made)]


def test_the_plan_of_a_study():
    """The rate is chosen on the first seed in the first bucket; those trials are not among the reported ones again."""
    wanted = []
    for mixer in ("linear", "deltanet"):
        chosen = [(0, 1e-3, ONE), (0, 1e-2, ONE), (0, 1e-3, TWO), (0, 1e-2, TWO)]
        wanted.append((f"{mixer} select", 0, chosen))
        wanted.append((f"{mixer} report 1", 0, [(1, None, ONE), (1, None, TWO)]))
        wanted.append((f"{mixer} report 2", 1, [(0, None, THREE), (1, None, THREE)]))
    assert planned(config()) == wanted


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"learning_rates": (0.1,)}, [("report 1", [(0, 0.1, ONE), (1, 0.1, ONE), (0, 0.1, TWO), (1, 0.1, TWO)])]),
        ({"seeds": (5,)}, [("select", [(5, rate, s) for s in (ONE, TWO) for rate in (1e-3, 1e-2)])]),
        (
            {"select": ({"used": 8, "pairs": 2},)},
            [
                ("select", [(0, 1e-3, TWO), (0, 1e-2, TWO)]),
                ("report 1", [(0, None, ONE), (1, None, ONE), (1, None, TWO)]),
            ],
        ),
        (
            {"buckets": [{"settings": [{}]}], "sizes": {"max_pairs": 2, "length": 8}},
            [("select", [(0, 1e-3, ()), (0, 1e-2, ())]), ("report 1", [(1, None, ())])],
        ),
        (
            {"learning_rates": (1.0, 2.0, 3.0), "max_trials": 4, "seeds": (0, 1, 2, 3)},
            [
                ("select", [(0, 1.0, ONE), (0, 2.0, ONE), (0, 3.0, ONE)]),
                ("select", [(0, 1.0, TWO), (0, 2.0, TWO), (0, 3.0, TWO)]),
                ("report 1", [(1, None, ONE), (2, None, ONE), (3, None, ONE)]),
                ("report 1", [(1, None, TWO), (2, None, TWO), (3, None, TWO)]),
            ],
        ),
    ],
)  # fmt: skip
def test_plans_of_other_studies(changes, wanted):
    made = config(**({"mixers": ("linear",), "buckets": [SMALL]} | changes))
    assert planned(made) == [(f"linear {name}", 0, trials) for name, trials in wanted]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"select": ({"pairs": 3, "used": 10},)}, "is no setting of the first bucket"),
        ({"buckets": [SMALL, SMALL]}, r"the setting {'pairs': 1, 'used': 5} occurs twice"),
        ({"mixers": ("linear", "lineal")}, "mixer 'lineal' is not known; known are .*linear"),
    ],
)
def test_a_plan_that_cannot_be(changes, sentence):
    with pytest.raises(UserError, match=sentence):
        study.plan(config(**changes))


def test_a_variant_is_a_layer_with_options():
    made = config(variants={"narrow": {"layer": "linear", "options": {"chunk_size": 4}}})
    assert study.variant(made, "narrow") == ("linear", {"chunk_size": 4}, {})
    assert study.variant(made, "kla") == ("kla", {}, {})


def test_the_protocol_is_what_a_trial_means():
    same = config(mixers=("kla",), seeds=(3,), learning_rates=(7.0,), buckets=[LARGE], max_trials=2)
    assert study.protocol(same) == study.protocol(config())
    assert study.protocol(config(sizes={"vocab_size": 13})) != study.protocol(config())


def select(rate, validation, status="done", mixer="linear", stage="select"):
    kept = {"learning_rate": rate, "validation": validation, "status": status}
    return {"mixer": mixer, "stage": stage} | kept


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ([], None),
        ([select(1.0, 0.5), select(2.0, 0.6), select(1.0, 0.5), select(2.0, 0.3)], 1.0),
        ([select(2.0, 0.5), select(1.0, 0.5)], 1.0),  # of equals the lower
        ([select(1.0, 0.5), select(2.0, 0.9, "diverged")], 1.0),
        ([select(1.0, 0.0, "diverged"), select(2.0, 0.0, "diverged")], 1.0),
        ([select(1.0, None, "failed"), select(2.0, 0.1)], 2.0),
        ([select(1.0, None, "failed")], None),
        # What failed in the hard setting is not better for it.
        ([select(1.0, 0.9), select(1.0, None, "failed"), select(2.0, 0.8), select(2.0, 0.3)], 2.0),
        ([select(1.0, 0.1), select(2.0, 0.9, mixer="vla"), select(2.0, 0.9, stage="report")], 1.0),
    ],
)
def test_the_rate_that_is_chosen(rows, wanted):
    assert study.chosen_rate(rows, "linear") == wanted


# Sittings, with programs that only pretend to train: an accuracy is known from the trial.


def accuracy(seed, rate, pairs):
    return np.float32(0.9 - 0.2 * abs(np.log10(rate) + 2) - 0.01 * seed - 0.1 * pairs)


class Pretence:
    """Counts what is compiled and trained, and fails where it is told to."""

    def __init__(self):
        self.compiled, self.trained = [], []
        self.most, self.broken, self.late, self.held = 99, {}, False, []

    def recipe(self, config, mixer, bucket):
        self.mixer, self.bucket = mixer, bucket
        return self.real(config, mixer, bucket)

    def compile(self, recipe, count, names):
        mixer = self.mixer
        self.compiled.append((mixer, self.bucket, count))
        if mixer in self.broken:
            raise self.broken[mixer]
        if count > self.most and not self.late:
            raise RuntimeError(f"RESOURCE_EXHAUSTED: out of memory for {count}")

        def init(given):
            number, whole = jnp.zeros(count), jnp.zeros(count, jnp.int32)
            params, yes = {"w": jnp.ones(count)}, jnp.ones(count, bool)
            self.held.append(weakref.ref(params["w"]))
            return Progress(params, (), params, number - 1, number, number, whole, whole, yes, yes, whole)

        def segment(state, given, first):
            if count > self.most:
                raise RuntimeError(f"RESOURCE_EXHAUSTED: out of memory for {count}")
            self.alive = sum(held() is not None for held in self.held)
            if first == 0:
                pairs = given.setting.get("pairs", np.zeros(count, int))
                one = zip(given.seed.tolist(), given.learning_rate.tolist(), pairs.tolist(), strict=True)
                self.trained += [(mixer, seed, round(rate, 6), pairs) for seed, rate, pairs in one]
            steps = jnp.full(count, first + recipe.eval_every, jnp.int32)
            now = test(state, given)
            return state._replace(steps=steps, accuracy=now, best_accuracy=now, loss=1 - now)

        def test(state, given):
            pairs = given.setting.get("pairs", np.zeros(count, int))
            return jnp.array([accuracy(*one) for one in zip(given.seed, given.learning_rate, pairs, strict=True)])

        return Programs(init, segment, dict.fromkeys(recipe.evaluations, test))


@pytest.fixture
def pretence(monkeypatch):
    made = Pretence()
    made.real = study.recipe
    monkeypatch.setattr(study, "recipe", made.recipe)
    monkeypatch.setattr(study, "compile_programs", made.compile)
    monkeypatch.setattr(study, "parameter_count", lambda recipe: 123)
    return made


def lines(run_dir):
    return [json.loads(line) for line in (run_dir / "trials.jsonl").read_text().splitlines()]


def identities(rows):
    return [(row["mixer"], row["seed"], row["learning_rate"], row["setting"].get("pairs", 0)) for row in rows]


# The pretended accuracies are best at the rate 1e-2.
TRAINED = [
    (mixer, seed, rate, pairs)
    for mixers, pairs_of in ((("linear", "deltanet"), (1, 2)), (("linear", "deltanet"), (3,)))
    for mixer in mixers
    for stage in ("select", "report")
    for pairs in pairs_of
    for seed in (0, 1)
    for rate in (1e-3, 1e-2)
    if (stage == "select") == (seed == 0 and pairs < 3) and (stage == "select" or rate == 1e-2)
]


def test_a_whole_study_and_its_records(tmp_path, pretence):
    rows = study.run_study(config(), tmp_path)
    assert pretence.trained == TRAINED == identities(rows) == identities(lines(tmp_path))
    assert len(set(TRAINED)) == len(TRAINED) == 2 * (4 + 2 + 2)
    # Select and report of a bucket have programs of their own size, and each mixer its own.
    assert pretence.compiled == [(m, 0, n) for m in ("linear", "deltanet") for n in (4, 2)] + [
        (m, 1, 2) for m in ("linear", "deltanet")
    ]
    assert rows == lines(tmp_path)
    first, last = rows[0], rows[-1]
    assert first["setting"] == {"pairs": 1, "used": 5}
    assert first["metrics"] == {"n=1": pytest.approx(0.6)}
    assert first["validation"] == first["metrics"]["n=1"] == pytest.approx(1 - first["loss"])
    assert (first["stage"], last["stage"]) == ("select", "report")
    assert (last["setting"], list(last["metrics"])) == ({"pairs": 3, "used": 10}, ["n=3"])
    assert (last["study"], last["layer"], last["options"]) == ("tiny", "deltanet", {})
    assert (last["status"], last["stopped"], last["steps"], last["parameters"]) == ("done", "steps", STEPS, 123)
    assert (first["tokens"], last["tokens"]) == (STEPS * BATCH * 5, STEPS * BATCH * 10)
    assert last["protocol"] == study.protocol(config())
    assert last["versions"]["jax"] == jax.__version__
    assert last["devices"]["count"] == jax.device_count()
    assert last["started"].endswith("Z")
    assert {"commit", "dirty", "seconds"} < set(last)
    assert last["seconds"] >= 0
    assert not list((tmp_path / "groups").glob("*"))
    assert json.loads((tmp_path / "config.json").read_text())["study"] == "tiny"


def test_the_records_make_a_report(tmp_path, pretence):
    made = config()
    study.run_study(made, tmp_path)
    found = read_trials(tmp_path / "trials.jsonl", "tiny")
    assert (found.torn, found.repeated) == (0, 0)
    results = summary(made, found.trials)
    for pairs in (1, 2, 3):
        cell = results["deltanet"].cells[f"n={pairs}"]
        assert cell.values == pytest.approx([accuracy(seed, 1e-2, pairs) for seed in (0, 1)])
        assert cell.learning_rate == 1e-2


def test_what_is_recorded_is_not_trained_again(tmp_path, pretence):
    study.run_study(config(), tmp_path)
    before = (tmp_path / "trials.jsonl").read_text()
    pretence.trained.clear()
    pretence.compiled.clear()
    rows = study.run_study(config(), tmp_path)
    assert (pretence.trained, pretence.compiled) == ([], [])
    assert (tmp_path / "trials.jsonl").read_text() == before
    assert identities(rows) == TRAINED
    # A line taken away is one trial to train, in a program of one.
    removed = before.splitlines(keepends=True)
    del removed[5]
    (tmp_path / "trials.jsonl").write_text("".join(removed))
    study.run_study(config(), tmp_path)
    assert pretence.trained == [TRAINED[5]]
    assert pretence.compiled == [("linear", 0, 1)]
    # What diverged is known too.
    diverged = [row | {"status": "diverged"} if i == 9 else row for i, row in enumerate(lines(tmp_path))]
    (tmp_path / "trials.jsonl").write_text("".join(json.dumps(row) + "\n" for row in diverged))
    pretence.trained.clear()
    study.run_study(config(), tmp_path)
    assert pretence.trained == []


def test_more_seeds_are_only_added(tmp_path, pretence):
    study.run_study(config(), tmp_path)
    pretence.trained.clear()
    study.run_study(config(seeds=(0, 1, 2)), tmp_path)
    assert pretence.trained == [(m, 2, 1e-2, n) for ns in ((1, 2), (3,)) for m in ("linear", "deltanet") for n in ns]


@pytest.mark.parametrize(
    ("changes", "trained", "pairs"),
    [
        ({"buckets": [{"settings": [{}]}], "sizes": {"vocab_size": 12, "max_pairs": 2, "length": 8}}, 3, {0}),
        ({"learning_rates": (1e-3,)}, 6, {1, 2, 3}),
        ({"seeds": (4,)}, 5, {1, 2, 3}),
        ({"select": ({"pairs": 2, "used": 8},)}, 7, {1, 2, 3}),
    ],
)
def test_studies_of_another_cut(tmp_path, pretence, changes, trained, pairs):
    """No settings, one rate, one seed, a rate chosen on one setting."""
    made = config(**({"mixers": ("linear",)} | changes))
    if pairs == {0}:
        made.protocol.evaluations = {"8x": {"length": 20}}
    rows = study.run_study(made, tmp_path)
    assert len(set(pretence.trained)) == len(pretence.trained) == trained == len(rows)
    assert {row["setting"].get("pairs", 0) for row in rows} == pairs
    assert {column for row in rows for column in row["metrics"]} == (
        {f"n={n}" for n in pairs} if pairs != {0} else {"8x"}
    )
    reported = {
        (row["seed"], row["setting"].get("pairs", 0)) for row in rows if row["learning_rate"] == made.learning_rates[-1]
    }
    assert reported == {(seed, n) for seed in made.seeds for n in pairs}
    study.run_study(made, tmp_path)
    assert len(pretence.trained) == trained


def test_another_protocol_or_option_is_another_trial(tmp_path, pretence):
    first = {"narrow": {"layer": "linear", "options": {"chunk_size": 4}}}
    made = {"mixers": ("narrow",), "buckets": [SMALL]}
    study.run_study(config(**made, variants=first), tmp_path)
    before = lines(tmp_path)
    assert before[0]["options"] == {"chunk_size": 4}
    for other in (
        config(**made, variants=first, sizes={"vocab_size": 13}),
        config(**made, variants={"narrow": {"layer": "linear", "options": {"chunk_size": 8}}}),
        config(**made, variants={"narrow": {"layer": "deltanet", "options": {"chunk_size": 8}}}),
    ):
        pretence.trained.clear()
        rows = study.run_study(other, tmp_path)
        assert len(pretence.trained) == len(rows) == 6
        assert lines(tmp_path)[-6:] == rows
    assert lines(tmp_path)[:6] == before
    pretence.trained.clear()
    assert study.run_study(config(**made, variants=first), tmp_path) == before
    assert pretence.trained == []


def test_an_error_fails_its_mixer_alone_and_is_tried_again(tmp_path, pretence, capsys):
    pretence.broken = {"linear": ValueError("no such\n  thing")}
    rows = study.run_study(config(), tmp_path)
    assert pretence.trained == [trial for trial in TRAINED if trial[0] == "deltanet"]
    failed = [row for row in rows if row["mixer"] == "linear"]
    assert identities(failed) == [trial for trial in TRAINED if trial[0] == "linear"][:4]  # without a rate no others
    for row in failed:
        assert (row["status"], row["error"]) == ("failed", "ValueError: no such thing")
        assert (row["metrics"], row["validation"]) == ({}, None)
    said = capsys.readouterr().out
    assert "linear select: failed: ValueError: no such thing" in said
    assert said.count("linear report 1: no learning rate could be chosen") == 1
    summary(config(), read_trials(tmp_path / "trials.jsonl").trials)  # a record like any other

    pretence.broken = {}
    pretence.trained.clear()
    rows = study.run_study(config(), tmp_path)
    assert pretence.trained == [trial for trial in TRAINED if trial[0] == "linear"]
    assert sorted(identities(rows)) == sorted(TRAINED)
    assert {row["status"] for row in rows} == {"done"}  # though the failures are still in the file
    assert sum(row["status"] == "failed" for row in lines(tmp_path)) == 4


def test_what_failed_before_is_tried_last(tmp_path, pretence):
    pretence.broken = {"linear": ValueError("no")}
    study.run_study(config(buckets=[SMALL]), tmp_path)
    pretence.compiled.clear()
    study.run_study(config(seeds=(0, 1, 2), buckets=[SMALL]), tmp_path)
    assert [mixer for mixer, _, _ in pretence.compiled] == ["deltanet", "linear"]


@pytest.mark.parametrize("late", [False, True], ids=["compiling", "training"])
def test_what_does_not_fit_is_halved(tmp_path, pretence, late):
    """And what is known not to fit is not tried again; the arrays of what failed are gone by then."""
    pretence.most, pretence.late = 2, late
    made = config(mixers=("linear",), seeds=(0, 1, 2, 3), learning_rates=(1e-2,))  # 8 trials and 4
    rows = study.run_study(made, tmp_path)
    assert [count for _, _, count in pretence.compiled] == [8, 4, 2, 4, 2]
    assert {row["status"] for row in rows} == {"done"}
    wanted = [("linear", seed, 1e-2, pairs) for pairs in (1, 2, 3) for seed in (0, 1, 2, 3)]
    assert pretence.trained == identities(rows) == wanted
    assert pretence.alive == 1


def test_what_does_not_fit_alone_fails(tmp_path, pretence):
    pretence.most = 0
    rows = study.run_study(config(mixers=("linear",), learning_rates=(1e-2,), buckets=[LARGE]), tmp_path)
    assert [row["error"] for row in rows] == ["RuntimeError: RESOURCE_EXHAUSTED: out of memory for 1"] * 2


def test_a_device_that_no_longer_answers_ends_the_study(tmp_path, pretence, monkeypatch):
    pretence.broken = {"linear": ValueError("bad address")}

    def dead(*_):
        raise RuntimeError("gone")

    monkeypatch.setattr(study.jax, "block_until_ready", dead)
    with pytest.raises(RuntimeError, match="the device no longer answers, start again: ValueError: bad address"):
        study.run_study(config(), tmp_path)
    assert pretence.trained == []
    assert len(lines(tmp_path)) == 4
    assert (tmp_path / "sittings.jsonl").exists()


@pytest.mark.parametrize(("cut", "left"), [(40, 15), (1, 16)], ids=["torn", "without its end"])
def test_a_line_cut_short_is_taken_away(tmp_path, pretence, cut, left):
    study.run_study(config(), tmp_path)
    whole = (tmp_path / "trials.jsonl").read_bytes()
    (tmp_path / "trials.jsonl").write_bytes(whole[:-cut])
    assert len(study.Records(tmp_path / "trials.jsonl").read()) == left
    pretence.trained.clear()
    study.run_study(config(seeds=(0, 1, 2)), tmp_path)
    assert len(pretence.trained) == 6 + (16 - left)
    found = read_trials(tmp_path / "trials.jsonl", "tiny")  # accepts no torn line but the last
    assert (len(found.trials), found.torn, found.repeated) == (16 + 6, 0, 0)


def test_a_line_that_another_process_is_writing_is_not_taken_for_torn(tmp_path):
    path = tmp_path / "trials.jsonl"
    writer = threading.Thread(target=lambda: study.Records(path).add([{"writer": 2}]))
    with path.open("ab", buffering=0) as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        other.write(b'{"wri')
        writer.start()
        writer.join(0.3)
        assert writer.is_alive()
        other.write(b'ter": 1}\n')
    writer.join()
    assert study.Records(path).read() == [{"writer": 1}, {"writer": 2}]


def test_mixers_that_another_process_is_at_are_left_to_it(tmp_path, pretence, capsys):
    (tmp_path / "locks").mkdir()
    with (tmp_path / "locks" / "linear").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        study.run_study(config(), tmp_path)
    assert pretence.trained == [trial for trial in TRAINED if trial[0] == "deltanet"]
    assert capsys.readouterr().out.count("linear: another process is at it") == 2
    study.run_study(config(), tmp_path)
    assert sorted(pretence.trained) == sorted(TRAINED)


def test_two_processes_may_write_their_config_at_once(tmp_path, monkeypatch):
    path, real, pids = tmp_path / "config.json", pathlib.Path.replace, [11, 22]
    monkeypatch.setattr(os, "getpid", lambda: pids[0])

    def replace(self, target):
        if pids.pop(0) == 11:
            write_json(path, "the other's")
        real(self, target)

    monkeypatch.setattr(pathlib.Path, "replace", replace)
    write_json(path, "mine")
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
    assert json.loads(path.read_text()) == "mine"


def test_a_sitting_is_noted(tmp_path, pretence, capsys):
    study.run_study(config(mixers=("linear",)), tmp_path)
    study.run_study(config(), tmp_path)
    study.run_study(config(), tmp_path)
    notes = [json.loads(line) for line in (tmp_path / "sittings.jsonl").read_text().splitlines()]
    tokens = STEPS * BATCH * (3 * 5 + 3 * 8 + 2 * 10)
    assert [(note["trials"], note["tokens"]) for note in notes] == [(8, tokens), (8, tokens), (0, 0)]
    assert all(note["seconds"] >= 0 and note["versions"] and note["started"] for note in notes)
    assert capsys.readouterr().out.count("8 trials and 0.0 M tokens in") == 2


def test_the_progress_line(tmp_path, pretence, capsys):
    study.run_study(config(mixers=("linear",), learning_rates=(1e-2,)), tmp_path)
    said = capsys.readouterr().out.splitlines()
    wanted = r"[1/2] linear report 1, compiled in 0 s: step 6/6, accuracy 0.690 0.790 0.800, 4 of 4 running, "
    assert said[0].startswith(wanted), said[0]
    assert said[0].endswith(" M tokens/s")


# Real training, interrupted.

REAL = {"mixers": ("linear",), "learning_rates": (1e-2,), "buckets": [SMALL]}


@pytest.fixture(scope="module")
def compile_once():
    """compile_programs, once for this module's one program."""
    made, real = {}, study.compile_programs

    def compile_programs(recipe, count, names):
        if count not in made:
            made[count] = real(recipe, count, names)
        return made[count]

    return compile_programs


@pytest.fixture
def clock(monkeypatch, compile_once):
    """A clock that a segment of training moves on by a minute; `clock.segments` counts them."""
    clock = types.SimpleNamespace(now=0.0, segments=0, kill_at=None)

    def compile_programs(*arguments):
        compiled = compile_once(*arguments)

        def segment(*arguments):
            clock.now += 60
            clock.segments += 1
            if clock.segments == clock.kill_at:
                raise KeyboardInterrupt
            return compiled.segment(*arguments)

        return compiled._replace(segment=segment)

    monkeypatch.setattr(study, "compile_programs", compile_programs)
    monkeypatch.setattr(study, "time", types.SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def meaning(rows):
    return [{k: row[k] for k in row if k not in ("commit", "dirty", "started")} for row in rows]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return tmp_path_factory.mktemp("whole")


@pytest.fixture
def undisturbed(whole, clock):
    """The rows of a study that ran in one sitting."""
    rows = study.run_study(config(**REAL), whole)
    clock.segments = 0
    return rows


def test_the_parameters_are_counted(undisturbed):
    width, vocabulary, hidden, positions = 16, 12, 16, 16
    attention, norms = 4 * width * width, 3 * 2 * width
    mlp = 2 * width * hidden + hidden + width
    assert {row["parameters"] for row in undisturbed} == {(vocabulary + positions) * width + attention + norms + mlp}


def test_a_sitting_that_ends_goes_on_to_identical_results(tmp_path, undisturbed, clock, monkeypatch, caplog):
    """Ended after each of the two looks on the way; Orbax says nothing of the saves."""
    monkeypatch.setattr(logging.getLogger("absl"), "filters", [])
    caplog.set_level(logging.DEBUG, "absl")
    for segments in (1, 2):
        with pytest.raises(study.OutOfTime, match=r"the sitting's 0.5 minutes are over; run again to go on"):
            study.run_study(config(**REAL), tmp_path, time_limit_minutes=0.5)
        assert clock.segments == segments
        assert not (tmp_path / "trials.jsonl").exists()
        assert [[step.name for step in group.iterdir()] for group in (tmp_path / "groups").iterdir()] == [
            [str(2 * segments)]
        ]
    rows = study.run_study(config(**REAL), tmp_path, time_limit_minutes=0.5)  # the last look ends it in time
    assert clock.segments == STEPS // 2
    assert meaning(rows) == meaning(undisturbed)  # the seconds of all three sittings too
    assert {row["seconds"] for row in rows} == {3 * 60 / 4}
    assert not list((tmp_path / "groups").iterdir())
    notes = [json.loads(line) for line in (tmp_path / "sittings.jsonl").read_text().splitlines()]
    assert [(note["trials"], note["seconds"]) for note in notes] == [(0, 60.0), (0, 60.0), (4, 60.0)]
    assert [record.getMessage() for record in caplog.records if record.name == "absl"] == []


def test_after_a_kill_training_goes_on_from_what_was_saved_last(tmp_path, undisturbed, clock):
    made = config(**REAL)
    made.checkpoint_minutes = 1.5  # the second look is the first after that
    clock.kill_at = 3
    with pytest.raises(KeyboardInterrupt):
        study.run_study(made, tmp_path)
    assert [step.name for step in (tmp_path / "groups").glob("*/*")] == ["4"]
    rows = study.run_study(made, tmp_path)
    assert clock.segments == 3 + 1
    assert meaning(rows) == meaning(undisturbed)


def test_a_state_that_cannot_be_read_is_begun_anew(tmp_path, undisturbed, clock, capsys):
    with pytest.raises(study.OutOfTime):
        study.run_study(config(**REAL), tmp_path, time_limit_minutes=0.5)
    (saved,) = (tmp_path / "groups").glob("*/2")
    for path in saved.iterdir():
        if path.is_file():
            path.write_text("")
    clock.segments = 0
    rows = study.run_study(config(**REAL), tmp_path)
    assert clock.segments == STEPS // 2
    assert "cannot be read" in capsys.readouterr().out
    assert meaning(rows) == meaning(undisturbed)


def test_a_full_disk_does_not_stop_training(tmp_path, undisturbed, clock, monkeypatch, capsys):
    made = config(**REAL)
    made.checkpoint_minutes = 0.5

    def full(self, path, *_, **__):
        (path.parent / f"{path.name}.orbax-checkpoint-tmp").mkdir(parents=True)
        raise ValueError("RESOURCE_EXHAUSTED: Failed to write: No space left on device")

    monkeypatch.setattr(study.ocp.StandardCheckpointer, "save", full)
    rows = study.run_study(made, tmp_path)
    assert meaning(rows) == meaning(undisturbed)
    assert capsys.readouterr().out.count("was not saved: no space left on the disk of") == 2
    assert clock.segments == STEPS // 2
    assert not list((tmp_path / "groups").iterdir())


# The program.


def test_the_program_says_what_it_takes_and_what_it_does_not(tmp_path):
    root = pathlib.Path(__file__).parents[2]
    env = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", "JAX_PLATFORMS": "cpu"}
    start = lambda *arguments: subprocess.Popen(
        [sys.executable, "-m", "experiments.vla_capacity", *arguments],
        cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wrong, helped = start("--mixers=vla,liner", "--config=configs/vla_capacity.py:size=small"), start("--help")
    out, error = wrong.communicate(timeout=120)
    assert (wrong.returncode, out) == (2, "")
    assert error.startswith("error: mixer 'liner' is not known; known are ccq_deltanet, ")
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())
    out, error = helped.communicate(timeout=120)
    assert (helped.returncode, error) == (0, "")
    for flag in ("--config", "--run_dir", "--mixers", "--time_limit_minutes"):
        assert f"  {flag}" in out
