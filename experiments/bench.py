"""Times a mixer on the present device after a correctness gate: its forms in plain JAX, or its kernel against others.

    python -m experiments.bench --op=kaczmarz --shape=1,2048,4,4,64,64
    python -m experiments.bench --op=gla --implementations=recurrent,chunkwise --chunk_sizes=32,64,128 --dtype=bfloat16
    python -m experiments.bench --op=gated_delta_rule --against=peers --time_limit_minutes=20       # a Hopper GPU
    python -m experiments.bench --op=kaczmarz --against=chunkwise --shapes=8x2048x16x16x128x128,1x8192x16x32x128x128
    python -m experiments.bench --op=delta_rule --against=peers --smoke                             # a CPU

Without --against, times are medians of repeated calls. "of floor" is the time that the chunkwise form's matrix products
would take at the rate of a large matrix product measured in the same run (three forward passes for forward and
backward), over the time taken. Errors are relative L2 against the token loop in float64 on the first 512 tokens; what
fails is not timed. What the JSON has already of this commit (without changes), device and settings is not measured
again: delete it to do so. `experiments.bench_mixers` goes over mixers and lengths.

With --against=peers our kernel, `ours`, stands beside the packages that are installed of jax-linear-attention, FLA
(flash-linear-attention) and FlashQLA; `kaczmarz`, which no package has, beside our `gated_delta_rule`, whose time it
should take. With --against=chunkwise it stands beside our own form in plain JAX, with --against=packed beside itself on
rows of documents of 512 tokens on average. All get the same inputs: q and k of
unit norm, in the type of --dtype, decays log sigmoid and strengths sigmoid of normal numbers, float32.

* Gate: output, final state and all gradients on the first 2,048 tokens of the last row and key head, against the token
  loop in float64; cotangents and gates after these are zero. Limits: linattn_jax/eval/tolerances.py. Ours is not timed
  if it fails; the others' errors are reported.
* ms: all kernels of a call by the GPU's own clock (CUPTI; torch's profiler), median of launches. wall ms: per call.
* of floor: time to move the arrays at the device's copy rate, where that is known, over ms. Forward: q k v o once,
  gates in float32. Forward and backward: these, q k v and the gates again, the cotangent of o, and all gradients.
* temp MB: temporary memory of forward and backward beside arguments and results.
* ratio: the fastest other's time over ours, forward / forward and backward; where that is below 1, we are behind, and
  the table says so. What is missing, refuses or fails has a row that says so.

A process for each shape measures it: a failed launch or a hang costs its row, the rest goes on. The JSON has every row
as soon as it is measured; another run with the same --output replaces the rows of its shapes and keeps the others.
"""

import shlex
import sys
import time
from functools import partial
from pathlib import Path

from absl import flags

from experiments._main import run
from linattn_jax.eval import against, against_record, timing
from linattn_jax.eval.kernels import KERNELS
from linattn_jax.eval.sweep import sweep, table
from linattn_jax.mixers.dispatch import MIXERS
from linattn_jax.provenance import commit, facts
from linattn_jax.types import UserError

# Batch, time, heads of keys and values, sizes: ours, then FlashQLA's published ones, then a wide one.
SHAPES = (
    "8x2048x16x16x128x128", "1x16384x16x16x128x128", "1x65536x8x8x128x128", "8x2048x16x16x64x64",
    "1x8192x16x32x128x128", "1x32768x16x64x128x128", "1x32768x2x4x128x128", "4x4096x6x6x256x512",
)  # fmt: skip
SMOKE = ("2x72x1x2x16x8",)

_OP = flags.DEFINE_enum("op", "kaczmarz", sorted(MIXERS), f"Mixer to time; with --against one of {', '.join(KERNELS)}.")
_SHAPE = flags.DEFINE_list(
    "shape", "1,2048,4,4,64,64", "B,T,Hk,H,K,V[,N,M]: batch, time, heads of keys and values, sizes."
)
_DTYPE = flags.DEFINE_enum(
    "dtype", None, ["float32", "bfloat16", "float16"], "Type of q, k and v; default float32, with --against bfloat16."
)
_FORMS = flags.DEFINE_list("implementations", None, "Implementations to time; default all there are to compare.")
_CHUNKS = flags.DEFINE_list("chunk_sizes", "64", "Rows per chunk, powers of two.")
_SECONDS = flags.DEFINE_float("seconds", 2.0, "Time spent on each measurement.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the inputs.")
_OUTPUT = flags.DEFINE_string(
    "output", None, "JSON file; default bench_<op>.json, with --against bench_<op>_<against>.json, under runs/."
)
_AGAINST = flags.DEFINE_enum(
    "against", None, ["peers", "chunkwise", "packed"], "Hold the mixer's kernel against these."
)
_SHAPES = flags.DEFINE_list(
    "shapes", None, f"BxTxHkxHxKxV of --against, separated by commas; default {','.join(SHAPES)}."
)
_LIMIT = flags.DEFINE_float("time_limit_minutes", 30.0, "Of --against: no measurement goes on for longer.")
_SHAPE_LIMIT = flags.DEFINE_float("shape_limit_minutes", 5.0, "Of --against: the most for one shape's process.")
_SMOKE = flags.DEFINE_bool(
    "smoke", False, "Of --against: on the CPU, at a tiny shape, by the wall's clock, a stand-in for the kernel."
)


def main(_) -> None:
    """Times, prints a table, writes the JSON."""
    if _AGAINST.value:
        compare(_OP.value, _AGAINST.value)
        return
    shape = timing.parse_shape(_SHAPE.value)
    try:
        chunks = [int(c) for c in _CHUNKS.value]
    except ValueError:
        raise UserError(f"--chunk_sizes {_CHUNKS.value} must be integers") from None
    dtype = _DTYPE.value or "float32"
    rate = timing.matmul_rate(dtype)
    print(f"matrix product: {rate / 1e9:.0f} GFLOP/s in {dtype}", flush=True)
    cases = [
        timing.Case(_OP.value, shape, form, chunk, dtype, _SEED.value, _SECONDS.value)
        for form in _FORMS.value or MIXERS[_OP.value].implementations
        for chunk in (chunks if form not in ("recurrent", "associative") else [None])
    ]
    output = Path(_OUTPUT.value or f"runs/bench_{_OP.value}.json")
    rows = sweep(cases, partial(timing.measure, rate=rate), output, facts(_SEED.value))
    print(f"{table(rows)}\nwritten to {output}")
    if not all(row.get("gate_passed", True) for row in rows):
        raise SystemExit(1)


def compare(op: str, others: str) -> None:
    """Measures the kernel and what it is held against; prints and writes tables, and the JSON."""
    if op not in KERNELS:
        raise UserError(f"--against: {op} has no kernel; those that have: {', '.join(KERNELS)}")
    shapes = [timing.parse_shape(text.split("x")) for text in _SHAPES.value or (SMOKE if _SMOKE.value else SHAPES)]
    dtype = _DTYPE.value or "bfloat16"
    comparisons = [against.Comparison(op, shape, others, dtype, _SEED.value, _SMOKE.value) for shape in shapes]
    record = against_record.Record(Path(_OUTPUT.value or f"runs/bench_{op}_{others}.json"))
    names = _FORMS.value or []
    if unknown := sorted(set(names) - set(comparisons[0].implementations())):
        known = ", ".join(comparisons[0].implementations())
        raise UserError(f"--implementations: {', '.join(unknown)} unknown; known: {known}")
    began = {"started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **commit()}
    record.write(**began, command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]))
    deadline = time.monotonic() + 60 * _LIMIT.value
    against_record.drive(comparisons, names, record, deadline, 60 * _SHAPE_LIMIT.value)
    print(f"written to {record.path}, the table beside it")
    if not all(against_record.right(row) for row in record.read()["rows"]):
        raise SystemExit(1)


if __name__ == "__main__":
    run(main)
