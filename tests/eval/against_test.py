"""Kernels beside other implementations: the gate, what is compared, processes that fail, ratios and the table."""

import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import jax
import pytest

from linattn_jax.eval import against, against_record, timing
from linattn_jax.eval.against import Comparison
from linattn_jax.eval.kernels import KERNELS
from linattn_jax.eval.timing import Shape
from linattn_jax.mixers.dispatch import MIXERS

TINY = Shape(2, 72, 1, 2, 16, 8)
LARGE = Shape(8, 2048, 16, 16, 128, 128)
LATER = float("inf")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(timing, "time_calls", lambda *_, seconds: {"median_ms": 1.0})


@pytest.mark.parametrize(("op", "tokens"), [("delta_rule", 100), ("gated_delta_rule", 32), ("kaczmarz", 32)])
def test_the_gate_passes_and_is_exact(monkeypatch, op, tokens):
    """Also where only the first tokens are checked: in float32 nothing of the later ones is left in the errors."""
    monkeypatch.setattr(against, "TOKENS", tokens)
    rows = []
    against.measure(Comparison(op, TINY, "chunkwise", "float32", smoke=True), ["ours", "chunkwise"], rows.append)
    for row in rows:
        assert set(row["errors"]) == {"output", "state", *(f"d{name}" for name in MIXERS[op].arguments)}
        assert all(0 < error < 2e-6 for error in row["errors"].values())
        assert row["within_limits"]
        assert row["forward"]["wall_ms"] == row["both"]["wall_ms"] == 1.0


def wrong(what):
    """gated_delta_rule, but for `what`; reading ahead is by one token, which is zero at the row's end."""

    def call(q, k, v, log_decay, beta):
        if what == "dk":
            k = 1.02 * k - jax.lax.stop_gradient(0.02 * k)
        if what == "dbeta":
            beta = 1.05 * beta - jax.lax.stop_gradient(0.05 * beta)
        output, state = MIXERS["gated_delta_rule"].call(q, k, v, log_decay, beta, implementation="chunkwise")
        if what == "output":
            output = output + 0.05 * jax.numpy.roll(v, -1, axis=1)
        if what == "last row":
            output = output.at[-1].mul(1.02)
        if what == "not finite":
            output = output.at[0, -1, 0, 0].set(jax.numpy.nan)
        return output, state._replace(S=1.02 * state.S) if what == "state" else state

    return call


@pytest.mark.parametrize(
    "what",
    ["dk", "last row", "not finite", *(pytest.param(w, marks=pytest.mark.slow) for w in ("dbeta", "output", "state"))],
)
def test_the_gate_catches(monkeypatch, what):
    """What is wrong is not timed; a NaN counts also beyond what is compared."""
    monkeypatch.setattr(against, "TOKENS", 32)
    monkeypatch.setattr(against, "_find", lambda *_: wrong(what))
    rows = []
    against.measure(Comparison("gated_delta_rule", TINY, smoke=True), ["ours"], rows.append)
    assert rows[0]["finite"] == (what != "not finite")
    assert rows[0]["within_limits"] == (what == "not finite")
    if what in rows[0]["errors"]:
        assert max(rows[0]["errors"], key=rows[0]["errors"].get) == what
    assert "forward" not in rows[0]
    assert not against_record.right(rows[0])
    assert "not timed, as it failed the gate" in against_record.table(rows)


def test_what_is_missing_or_fails_has_a_row(monkeypatch):
    def fails(*_):
        raise ValueError("no such tile\nand more")

    monkeypatch.setattr(against.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(against, "_measure_jax", fails)
    rows = []
    against.measure(Comparison("gated_delta_rule", TINY), ["ours", "fla", "flash_qla"], rows.append)
    assert rows[0]["failed"] == "ValueError: no such tile"
    assert [("skipped" in row, "failed" in row) for row in rows] == [(False, True), (True, False), (True, False)]
    assert rows[1]["skipped"] == "torch and fla are not installed"
    assert not against_record.right(rows[0])
    assert against_record.right(rows[1])


def test_a_failed_launch_ends_the_process(monkeypatch):
    def fails(*_):
        raise jax.errors.JaxRuntimeError("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS\nand more")

    monkeypatch.setattr(against, "_measure_jax", fails)
    rows = []
    with pytest.raises(jax.errors.JaxRuntimeError):
        against.measure(Comparison("delta_rule", TINY), ["ours", "fla"], rows.append)
    assert [row["failed"] for row in rows] == ["JaxRuntimeError: INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS"]


def test_floors():
    """By hand: 67 MB each of q, k, v, o and their kin, 1 MB each of the gates; keys of shared heads count once."""
    each, gate = 2 * 8 * 2048 * 16 * 128, 4 * 8 * 2048 * 16
    floors = against.floor_bytes(Comparison("gated_delta_rule", LARGE))
    assert floors == {"forward": 4 * each + 2 * gate, "both": 11 * each + 6 * gate}
    assert 1e3 * floors["forward"] / 4.25e12 == pytest.approx(0.0637, abs=1e-4)
    shared = against.floor_bytes(Comparison("delta_rule", LARGE._replace(Hk=8)))
    assert shared == {"forward": 3 * each + gate, "both": 8 * each + 3 * gate}


def measured(comparison, name, ms, **more):
    """A row as `measure` gives it on a GPU."""
    row = comparison.settings() | {"implementation": name, "errors": {"output": 1e-3, "dk": 2e-3}}
    row |= {"within_limits": True, "finite": True}
    times = {"wall_ms": 2 * ms, "device_ms": ms, "of_floor": 0.25 / ms, "temporary": 3e6}
    return row | {"forward": times, "both": {**times, "device_ms": 4 * ms}} | more


def test_ratios():
    """The fastest other over ours, by the same clock, of the same shape."""
    one, other = Comparison("delta_rule", LARGE), Comparison("delta_rule", LARGE._replace(T=64))
    rows = [measured(one, "ours", 2.0), measured(one, "fla", 3.0), measured(one, "jax-linear-attention", 1.5)]
    rows += [measured(other, "fla", 0.1), {**other.settings(), "implementation": "ours", "failed": "x"}]
    first, *rest = against_record.with_ratios(rows)
    assert first["ratio"]["forward"] == {"over_ours": 0.75, "of": "jax-linear-attention", "clock": "device_ms"}
    assert not any("ratio" in row for row in rest)
    del rows[0]["forward"]["device_ms"]
    rows[2]["both"] = {"wall_ms": 0.1}
    first, *_ = against_record.with_ratios(rows)
    assert first["ratio"]["forward"]["clock"] == "wall_ms"
    assert first["ratio"]["both"] == {"over_ours": 1.5, "of": "fla", "clock": "device_ms"}


def test_table():
    one = Comparison("kaczmarz", LARGE)
    rows = [measured(one, "ours", 1.0, form="mosaic_gpu"), measured(one, "gated_delta_rule", 0.5)]
    rows += [{**one.settings(), "implementation": "fla", "skipped": "fla is not installed"}]
    rows[1]["both"]["device_ms"] = 6.0
    head, _, first, second, *rest = against_record.table(against_record.with_ratios(rows)).splitlines()
    cells = lambda line: [cell.strip() for cell in line.strip("|").split("|")]
    assert dict(zip(cells(head), cells(first), strict=True)) == {
        "mixer": "kaczmarz", "B, T, Hk/H, K, V": "8, 2048, 16/16, 128, 128", "implementation": "ours (mosaic_gpu)",
        "ms": "1.000 / 4.000", "wall ms": "2.000 / 2.000", "of floor": "25% / 25%", "temp MB": "3.0",
        "ratio": "0.50 / 1.50, behind", "error": "2.0e-03 (dk)",
    }  # fmt: skip
    assert cells(second)[-2] == ""
    assert "* kaczmarz 8, 2048, 16/16, 128, 128, fla: fla is not installed" in rest
    assert rest[-1] == "* kaczmarz 8, 2048, 16/16, 128, 128, forward: 0.50 of gated_delta_rule"


class Starts:
    """In place of processes: writes the rows of the names that `script` has for each start, then ends as it says."""

    def __init__(self, path, *script):
        self.record, self.script, self.names, self.seconds = against_record.Record(path), list(script), [], []

    def __call__(self, comparison, names, path, seconds):
        self.names.append(list(names))
        self.seconds.append(seconds)
        done, failure = self.script.pop(0)
        self.record.write([measured(comparison, name, 1.0) for name in done])
        return failure


def driven(monkeypatch, tmp_path, comparison, *script, names=(), deadline=LATER):
    starts = Starts(tmp_path / "a.json", *script)
    monkeypatch.setattr(against_record, "start", starts)
    against_record.drive([comparison], names, starts.record, deadline, 60)
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    return starts, {row["implementation"]: row.get("failed", row.get("skipped", "timed")) for row in rows}


def test_the_rest_goes_on(monkeypatch, tmp_path):
    """After a crash the first without a row has failed; after a failed launch that has its row, nobody else has."""
    one = Comparison("gated_delta_rule", LARGE)
    script = ([], "its process ended with code -11"), (["jax-linear-attention"], None), (["fla"], "killed after 60 s")
    starts, seen = driven(monkeypatch, tmp_path, one, *script)
    assert starts.names == [[*one.implementations()], [*one.implementations()[1:]], ["fla", "flash_qla"]]
    assert seen == {
        "ours": "its process ended with code -11", "jax-linear-attention": "timed", "fla": "timed",
        "flash_qla": "killed after 60 s",
    }  # fmt: skip


def test_a_process_that_does_nothing(monkeypatch, tmp_path):
    _, seen = driven(monkeypatch, tmp_path, Comparison("delta_rule", LARGE), ([], None), names=["fla"])
    assert seen == {"fla": "its process ended without a row"}


def test_the_time_limit(monkeypatch, tmp_path):
    one = Comparison("delta_rule", LARGE)
    starts, seen = driven(monkeypatch, tmp_path, one, (["ours"], "x"), deadline=time.monotonic() + 40, names=["ours"])
    assert 30 < starts.seconds[0] <= 40
    assert seen == {"ours": "timed"}
    starts, seen = driven(monkeypatch, tmp_path, one, deadline=time.monotonic() + 1)
    assert starts.names == []
    assert set(seen.values()) == {"not measured: the time limit was reached"}
    assert set(seen) == set(one.implementations())


def test_what_is_not_served_starts_nothing(monkeypatch, tmp_path):
    starts, seen = driven(monkeypatch, tmp_path, Comparison("delta_rule", LARGE._replace(K=320, V=512)))
    assert starts.names == []
    assert list(seen) == ["ours"]
    assert seen["ours"].startswith("not served: ")
    assert "not 320" in seen["ours"]


def test_rows_of_other_shapes_stay(monkeypatch, tmp_path):
    one = Comparison("delta_rule", LARGE)
    names = [*one.implementations()]
    driven(monkeypatch, tmp_path, one._replace(shape=LARGE._replace(T=64)), (names, None))
    driven(monkeypatch, tmp_path, one, (names, None))
    driven(monkeypatch, tmp_path, one, (["fla"], None), names=["fla"])
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert sorted((row["shape"]["T"], row["implementation"]) for row in rows) == sorted(
        (T, name) for T in (64, 2048) for name in names
    )


@pytest.mark.parametrize(
    ("script", "failure"),
    [("exit 0", None), ("exit 3", None), ("exit 7", "its process ended with code 7"), ("sleep 60", "killed after 1 s")],
)
def test_how_a_process_ends(monkeypatch, tmp_path, script, failure):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert against_record.start(Comparison("delta_rule", TINY), ["ours"], tmp_path / "a.json", 1) == failure


def bench(*arguments):
    """The program in a process of its own, as its flags have the names of other programs'."""
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "experiments.bench", "--against=peers", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root)


def test_the_program(tmp_path):
    """A process of its own measures a small shape on the CPU; the JSON says what, where and how."""
    path = tmp_path / "runs" / "a.json"
    done = bench(
        "--op=gated_delta_rule", "--smoke", "--seed=3", "--seconds=0.1", f"--output={path}",
        "--implementations=ours,jax-linear-attention,fla",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    content = json.loads(path.read_text())
    assert {"started", "commit", "dirty", "command", "versions", "devices"} < set(content)
    assert content["seed"] == 3
    ours, *others = content["rows"]
    assert ours["shape"] == {"B": 2, "T": 72, "Hk": 1, "H": 2, "K": 16, "V": 8}
    assert (ours["op"], ours["implementation"], ours["against"], ours["dtype"]) == (
        "gated_delta_rule", "ours", "peers", "bfloat16",
    )  # fmt: skip
    assert ours["smoke"]
    assert ours["form"] == "chunkwise, in place of the kernel"
    assert ours["within_limits"]
    assert ours["finite"]
    assert set(ours["errors"]) == {"output", "state", "dq", "dk", "dv", "dlog_decay", "dbeta"}
    for way in ("forward", "both"):
        assert ours[way]["wall_ms"] > 0
        assert ours[way]["temporary"] > 0
        assert ours["floor_bytes"][way] > 0
    assert ours["devices"]["platform"] == "cpu"
    assert [row["implementation"] for row in others] == ["jax-linear-attention", "fla"]
    assert "a GPU alone" in others[1]["skipped"]
    table = path.with_suffix(".md").read_text()
    assert table == against_record.table(content["rows"]) + "\n"
    assert "fla runs on a GPU alone" in table


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--op=gla"], "gla has no kernel"),
        (
            ["--op=delta_rule", "--implementations=ours,flash_qla"],
            "flash_qla unknown; known: ours, jax-linear-attention",
        ),
        (["--op=delta_rule", "--shapes=1x2x3"], "shape 1,2,3 given"),
    ],
)
def test_what_is_asked_wrongly(arguments, sentence):
    done = bench(*arguments)
    assert done.returncode != 0
    assert sentence in done.stderr + done.stdout


def test_device_times(monkeypatch):
    """The median launch, not that of kernels; kernels by name over a launch."""
    from jax.experimental.mosaic.gpu import profiler

    launches = [
        [("a", 1.0), ("b", 2.0), ("a", 1.0)],
        [("a", 5.0), ("b", 0.0), ("a", 5.0)],
        [("a", 0.0), ("b", 6.0), ("a", 0.0)],
    ]
    monkeypatch.setattr(profiler, "measure", lambda f, aggregate, iterations: lambda *x: (f(*x), launches))
    seen = against.device_times(lambda x: x, 1)
    assert seen == {
        "device_ms": 6.0, "least_ms": 4.0, "most_ms": 10.0, "launched": 3,
        "kernels": {"a": pytest.approx(4.0), "b": pytest.approx(8 / 3)},
    }  # fmt: skip
    monkeypatch.setattr(profiler, "measure", lambda f, aggregate, iterations: lambda *x: (f(*x), None))
    assert against.device_times(lambda x: x, 1) == {"device_error": "the profiler saw no kernel"}


@pytest.mark.parametrize("op", sorted(KERNELS))
def test_kernels_take_what_the_mixers_take(op):
    """Traced, not run: results and gradients have the types of the mixer's own form."""
    mixer, shape = MIXERS[op], Shape(1, 128, 1, 2, 64, 64)
    inputs = timing.make_inputs(mixer, shape, "bfloat16", 0)
    kernel = partial(mixer.call, implementation=KERNELS[op].name)
    types = [jax.eval_shape(lambda *x: timing.both(*x, call), *inputs) for call in (kernel, mixer.call)]
    assert jax.tree.structure(types[0]) == jax.tree.structure(types[1])
    assert types[0] == types[1]


PROGRAM = """
import json, sys
from pathlib import Path
import numpy as np
folder = Path(sys.argv[1])
job = json.loads((folder / "job.json").read_text())
for name, dtype in (*job["arguments"].items(), ("cotangent", job["dtype"])):
    x = np.load(folder / f"{name}.npy")
    assert x.dtype == {"bfloat16": np.int16, "float32": np.float32}[dtype]
    if name in job["quiet"]:
        assert dtype == "float32" and x[:, job["tokens"]:].all()  # it is this process that silences them
    checked = x[-1:, :job["tokens"], -job["heads"]["output" if name == "cotangent" else name]:]
    np.save(folder / ("output.npy" if name == "cotangent" else f"d{name}.npy"), 0.0 * checked)
times = {"device_ms": 2.0, "wall_ms": 3.0}
(folder / "result.json").write_text(json.dumps({"version": "1", "forward": times, "both": times}))
"""


def test_torch_is_asked_through_files(monkeypatch, tmp_path):
    """What is asked for fits: zeros in the place of all results have an error of 1 each."""
    program = tmp_path / "torch_peers.py"
    program.write_text(PROGRAM)
    monkeypatch.setattr(against, "TOKENS", 32)
    monkeypatch.setattr(against.torch_peers, "__file__", str(program))
    monkeypatch.setattr(against.importlib.util, "find_spec", lambda name: name)
    rows = []
    against.measure(Comparison("gated_delta_rule", TINY), ["fla"], rows.append)
    assert rows[0]["errors"] == dict.fromkeys(["output", "dq", "dk", "dv", "dlog_decay", "dbeta"], 1.0)
    assert not rows[0]["within_limits"]
    assert (rows[0]["version"], rows[0]["both"]["device_ms"]) == ("1", 2.0)
    assert "errors beyond the limits of ours" in against_record.table(rows)
    program.write_text("raise SystemExit('no GPU here')")
    against.measure(Comparison("gated_delta_rule", TINY), ["fla"], rows.append)
    assert rows[1]["failed"] == "RuntimeError: ended with code 1: no GPU here"
