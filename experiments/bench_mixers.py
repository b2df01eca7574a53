"""Times every mixer in every implementation over lengths, after a correctness gate; writes JSON and a Markdown table.

    python -m experiments.bench_mixers                                              # a CPU
    python -m experiments.bench_mixers --ops=gla,kaczmarz --lengths=512,2048
    python -m experiments.bench_mixers --shape=8,16,16,128,128 --lengths=2048 --dtype=bfloat16 --seconds=0.5 \
        --associative_limit_mb=4000 --output=runs/bench_mixers_h200.json            # an H200

Run again, it measures what the JSON does not have yet of this commit (without changes), device and settings.
Gate, medians and floors are those of `experiments.bench`. Where jax-linear-attention (PyPI) is installed, its chunkwise
forms in plain JAX run on the same inputs in the same run, and "over peer" is the time over theirs.
"""

from functools import partial
from pathlib import Path

from absl import flags

from experiments._main import run
from linattn_jax.eval import timing
from linattn_jax.eval.sweep import plan, sweep, table
from linattn_jax.mixers.dispatch import MIXERS
from linattn_jax.provenance import facts
from linattn_jax.types import UserError

_OPS = flags.DEFINE_list("ops", sorted(MIXERS), "Mixers to time.")
_FORMS = flags.DEFINE_list("implementations", [], "Implementations to time; default all, and the peer's.")
_SHAPE = flags.DEFINE_list("shape", "1,4,4,64,64", "B,Hk,H,K,V[,N,M]: batch, heads of keys and of values, sizes.")
_SMALL = flags.DEFINE_list("small_shape", "1,1,1,16,16,8,8", "As --shape, where the associative form does not fit.")
_LENGTHS = flags.DEFINE_list("lengths", "512,2048,8192", "Values of T.")
_LIMIT = flags.DEFINE_float("associative_limit_mb", 64.0, "Most MB that T states of an associative form may take.")
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16", "float16"], "Type of q, k and v.")
_SECONDS = flags.DEFINE_float("seconds", 1.0, "Time spent on each measurement.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the inputs.")
_OUTPUT = flags.DEFINE_string("output", "runs/bench_mixers.json", "JSON file; the table goes beside it, as .md.")


def main(_) -> None:
    """Measures what is missing, prints and writes the table."""
    if unknown := sorted(set(_OPS.value) - set(MIXERS)):
        raise UserError(f"--ops: {', '.join(unknown)} unknown; known: {', '.join(sorted(MIXERS))}")
    shapes, small = (
        [timing.parse_shape([*sizes[:1], length, *sizes[1:]]) for length in _LENGTHS.value]
        for sizes in (_SHAPE.value, _SMALL.value)
    )
    settings = {"dtype": _DTYPE.value, "seed": _SEED.value, "seconds": _SECONDS.value}
    cases = plan(_OPS.value, shapes, small, _LIMIT.value * 1e6, _FORMS.value, **settings)
    measure = partial(timing.measure, rate=timing.matmul_rate(_DTYPE.value))
    output = Path(_OUTPUT.value)
    rows = sweep(cases, measure, output, facts(_SEED.value))
    print(f"\n{table(rows)}")
    output.with_suffix(".md").write_text(table(rows) + "\n")
    if not all(row.get("gate_passed", True) for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    run(main)
