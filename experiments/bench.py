"""Times the implementations of a mixer on the present device, after a correctness gate, and writes JSON.

    python -m experiments.bench --op=kaczmarz --shape=1,2048,4,4,64,64
    python -m experiments.bench --op=gla --implementations=recurrent,chunkwise --chunk_sizes=32,64,128 --dtype=bfloat16

Times are medians of repeated calls. "of floor" is the time that the chunkwise form's matrix products would take at the
rate of a large matrix product measured in the same run (three forward passes for forward and backward), over the time
taken. Errors are relative L2 against the token loop in float64 on the first 512 tokens; what fails is not timed. What
the JSON has already of this commit (without changes), device and settings is not measured again: delete it to do so.
`experiments.bench_mixers` goes over mixers and lengths.
"""

from functools import partial
from pathlib import Path

from absl import flags

from experiments._main import run
from linattn_jax.eval import timing
from linattn_jax.eval.sweep import sweep, table
from linattn_jax.mixers.dispatch import MIXERS
from linattn_jax.provenance import facts
from linattn_jax.types import UserError

_OP = flags.DEFINE_enum("op", "kaczmarz", sorted(MIXERS), "Mixer to time.")
_SHAPE = flags.DEFINE_list(
    "shape", "1,2048,4,4,64,64", "B,T,Hk,H,K,V[,N,M]: batch, time, heads of keys and values, sizes."
)
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16", "float16"], "Type of q, k and v.")
_FORMS = flags.DEFINE_list("implementations", None, "Implementations to time; default all of the mixer's.")
_CHUNKS = flags.DEFINE_list("chunk_sizes", "64", "Rows per chunk, powers of two.")
_SECONDS = flags.DEFINE_float("seconds", 2.0, "Time spent on each measurement.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the inputs.")
_OUTPUT = flags.DEFINE_string("output", None, "JSON file to write; default bench_<op>.json under runs/.")


def main(_) -> None:
    """Times, prints a table, writes the JSON."""
    shape = timing.parse_shape(_SHAPE.value)
    try:
        chunks = [int(c) for c in _CHUNKS.value]
    except ValueError:
        raise UserError(f"--chunk_sizes {_CHUNKS.value} must be integers") from None
    rate = timing.matmul_rate(_DTYPE.value)
    print(f"matrix product: {rate / 1e9:.0f} GFLOP/s in {_DTYPE.value}", flush=True)
    cases = [
        timing.Case(_OP.value, shape, form, chunk, _DTYPE.value, _SEED.value, _SECONDS.value)
        for form in _FORMS.value or MIXERS[_OP.value].implementations
        for chunk in (chunks if form not in ("recurrent", "associative") else [None])
    ]
    output = Path(_OUTPUT.value or f"runs/bench_{_OP.value}.json")
    rows = sweep(cases, partial(timing.measure, rate=rate), output, facts(_SEED.value))
    print(f"{table(rows)}\nwritten to {output}")
    if not all(row.get("gate_passed", True) for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    run(main)
