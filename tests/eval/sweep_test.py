"""Records of many measurements: resuming, growth, the plan and the table."""

import json
import math

import jax
import pytest
from absl import flags
from absl.testing import flagsaver

from experiments import bench_mixers
from linattn_jax.eval import peers, timing
from linattn_jax.eval.sweep import exponent, plan, series, sweep, table
from linattn_jax.eval.timing import Case, Shape
from linattn_jax.mixers.dispatch import MIXERS

SHAPE = Shape(1, 512, 4, 4, 64, 64)
FACTS = {
    "commit": "abc",
    "dirty": False,
    "devices": {"kind": "cpu", "cores": 2},
    "versions": {"jax": "0.12"},
    "seed": 0,
}


def synthetic(case, factor=1e-3, power=1.5, floors=True):
    """A row as `measure` gives it, whose times are powers of T."""
    ms = factor * case.shape.T**power
    row = case.settings() | {"errors": {"output": 1e-7, "dk": 2e-7}, "gate_passed": True}
    row["memory"] = {"forward": {"peak": 1_000_000 * case.shape.T}, "both": {"peak": 2_000_000 * case.shape.T}}
    times = lambda ms: {"median_ms": ms, "least_ms": ms / 2, "most_ms": 3 * ms}
    row |= {"forward": times(ms), "both": times(3 * ms * case.shape.T)}
    return row | ({"floors": {"forward": ms / 4, "both": row["both"]["median_ms"] / 2}} if floors else {})


class Measure:
    """Counts what it measures; fails at the case numbered `fails`."""

    def __init__(self, fails=None, error=KeyboardInterrupt):
        self.cases, self.fails, self.error = [], fails, error

    def __call__(self, case):
        if len(self.cases) == self.fails:
            raise self.error
        self.cases.append(case)
        return synthetic(case)


CASES = [Case("gla", SHAPE._replace(T=length), form) for form in ("recurrent", "chunkwise") for length in (512, 2048)]


def test_what_is_done_is_not_done_again(tmp_path):
    path = tmp_path / "runs" / "a.json"
    with pytest.raises(KeyboardInterrupt):
        sweep(CASES, Measure(fails=2), path, FACTS)
    assert len(json.loads(path.read_text())["rows"]) == 2
    measure = Measure()
    rows = sweep(CASES, measure, path, FACTS)
    assert measure.cases == CASES[2:]
    assert [row["shape"]["T"] for row in rows] == [512, 2048, 512, 2048]
    assert rows == json.loads(path.read_text())["rows"]


@pytest.mark.parametrize(
    "change",
    [{"commit": "def"}, {"devices": {"kind": "cpu", "cores": 3}}, {"versions": {"jax": "0.13"}}, {"dirty": True},
     {"commit": None, "dirty": None}],
)  # fmt: skip
def test_other_code_and_devices_are_measured_again(tmp_path, change):
    path, measure = tmp_path / "a.json", Measure()
    sweep(CASES[:1], Measure(), path, FACTS)
    for _ in range(2):
        sweep(CASES[:1], measure, path, FACTS | change)
    again = 2 if change.get("dirty") or change.get("commit", "") is None else 1
    assert len(measure.cases) == again
    assert len(json.loads(path.read_text())["rows"]) == 2  # the old one stays, an untrusted one is replaced


@pytest.mark.parametrize(
    "change", [{"dtype": "bfloat16"}, {"seed": 1}, {"seconds": 2.0}, {"chunk_size": 64}, {"shape": SHAPE._replace(N=1)}]
)
def test_other_settings_are_measured(tmp_path, change):
    path, measure = tmp_path / "a.json", Measure()
    sweep(CASES[:1], Measure(), path, FACTS)
    sweep([CASES[0]._replace(**change)], measure, path, FACTS)
    assert len(measure.cases) == 1


def test_what_is_not_served_is_said(tmp_path):
    rows = sweep(CASES[:1], Measure(0, NotImplementedError("no kernel here")), tmp_path / "a.json", FACTS)
    assert rows[0]["skipped"] == "no kernel here"
    assert table(rows).endswith("gla recurrent T=512: no kernel here")
    full = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory allocating 1 TB")
    assert sweep(CASES[1:2], Measure(0, full), tmp_path / "a.json", FACTS)[0]["skipped"] == "out of memory"
    with pytest.raises(ValueError, match="a bug"):
        sweep(CASES[1:], Measure(0, ValueError("a bug")), tmp_path / "a.json", FACTS)


def test_exponents():
    """T^1.5 and T^2.5, whatever the factor and order; other shapes are another series; one length has none."""
    long = [synthetic(Case("gla", SHAPE._replace(T=length), "chunkwise")) for length in (8192, 512, 2048)]
    other = [synthetic(Case("gla", SHAPE._replace(T=512, K=16), "chunkwise"), factor=7.0)]
    first, second = series(long + other)
    assert [row["shape"]["T"] for row in first] == [512, 2048, 8192]
    assert exponent(first, "forward") == pytest.approx(1.5)
    assert exponent(first, "both") == pytest.approx(2.5)
    assert math.isnan(exponent(second, "forward"))


def test_plan_of_the_associative_form():
    """A state of gla takes 4 * 64 * 64 * 4 bytes: 2048 of them fit below 200 MB, and small ones at every length."""
    shapes = [SHAPE._replace(T=length) for length in (512, 2048, 8192)]
    small = [Shape(1, length, 1, 1, 16, 16) for length in (512, 2048, 8192)]
    chosen = lambda limit: [c.shape for c in plan(["gla"], shapes, small, limit, ["associative"])]
    assert chosen(200e6) == [*shapes[:2], *small]
    assert chosen(1e9) == shapes
    assert chosen(3e6) == small[:2]
    forms = {case.implementation for case in plan(["gla"], shapes, small, 200e6)}
    assert {"recurrent", "associative", "chunkwise"} <= forms


def test_plan_of_kernels():
    """A kernel, which not every device serves, is measured where it is named."""
    planned = lambda *named: [case.implementation for case in plan(["kaczmarz"], [SHAPE], [], 1e9, named)]
    assert "mosaic_gpu" not in planned()
    assert planned("chunkwise", "mosaic_gpu") == ["chunkwise", "mosaic_gpu"]


def test_table():
    cases = [Case("gla", SHAPE._replace(T=length), form) for form in ("chunkwise", peers.NAME) for length in (64, 256)]
    rows = [synthetic(case, 1e-3 if case.implementation == "chunkwise" else 4e-3) for case in cases]
    other = synthetic(Case("linear_attention", SHAPE._replace(T=256), "recurrent", 32), floors=False)
    failed = cases[1]._replace(op="delta_rule").settings() | {"gate_passed": False, "errors": {"dv": 0.5, "dq": 0.1}}
    head, _, *lines = (line.strip("| ").split(" | ") for line in table([*rows, other, failed]).splitlines())
    assert head[3:] == ["ms, T=64", "ms, T=256", "spread", "growth", "peak MB", "of floor", "over peer", "error"]
    assert lines[0] == [
        "gla", "chunkwise", "B=1 Hk=4 K=64 H=4 V=64", "0.512 / 98.304", "4.096 / 3,145.728", "6.0 / 6.0", "1.50 / 2.50",
        "256.0 / 512.0", "25% / 50%", "0.25 / 0.25", "2.0e-07 (dk)",
    ]  # fmt: skip
    assert lines[2][1:5] == ["recurrent, 32", "B=1 Hk=4 K=64 H=4 V=64", "", "4.096 / 3,145.728"]
    assert lines[2][8:10] == ["", ""]  # no floor is known, no peer was timed
    assert lines[3][3:5] == ["", "FAILED"]
    assert lines[3][-1] == "5.0e-01 (dv)"


def test_the_program_measures_the_associative_form_at_a_small_shape(tmp_path, monkeypatch):
    """By default: at all lengths, for every mixer, and the other forms at theirs."""
    monkeypatch.setattr(timing, "matmul_rate", lambda dtype: 1.0)
    monkeypatch.setattr(timing, "measure", lambda case, rate: synthetic(case))
    path = tmp_path / "all.json"
    with flagsaver.flagsaver():
        flags.FLAGS(["bench_mixers", f"--output={path}"])
        bench_mixers.main([])
    rows = json.loads(path.read_text())["rows"]
    for name, mixer in MIXERS.items():
        for form in mixer.implementations:
            shape = Shape(1, 0, 1, 1, 16, 16, 8, 8) if form == "associative" else Shape(1, 0, 4, 4, 64, 64, 32, 64)
            seen = [Shape(**row["shape"]) for row in rows if (row["op"], row["implementation"]) == (name, form)]
            if form == "associative":  # and at the large shape as far as it fits
                seen = [other for other in seen if other.K == 16]
            assert seen == [shape._replace(T=length) for length in (512, 2048, 8192)], (name, form)


def test_the_program(tmp_path, monkeypatch):
    """Every mixer, implementation and length is in the JSON, the table beside it; a failed gate is the exit code."""
    monkeypatch.setattr(timing, "matmul_rate", lambda dtype: 1.0)
    monkeypatch.setattr(timing, "measure", lambda case, rate: synthetic(case))
    path = tmp_path / "all.json"
    with flagsaver.flagsaver():
        flags.FLAGS(["bench_mixers", "--lengths=16,32", "--shape=1,1,2,4,4,3,2", f"--output={path}"])
        bench_mixers.main([])
        flags.FLAGS(["bench_mixers", f"--output={path.with_name('failed.json')}"])
        monkeypatch.setattr(timing, "measure", lambda case, rate: synthetic(case) | {"gate_passed": False})
        with pytest.raises(SystemExit):
            bench_mixers.main([])
    rows = json.loads(path.read_text())["rows"]
    seen = {(row["op"], row["implementation"], row["shape"]["T"]) for row in rows}
    assert seen == {(n, form, T) for n, mixer in MIXERS.items() for form in mixer.implementations for T in (16, 32)}
    assert {(row["shape"]["H"], row["shape"]["N"], row["shape"]["M"]) for row in rows} == {(2, 3, 2)}
    assert path.with_suffix(".md").read_text() == table(rows) + "\n"
