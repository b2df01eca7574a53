"""VLA over very long rows in float32: does A stay the inverse of M, does the memory stay small, what is its Jacobian?

    python -m experiments.vla_state_norm --lengths=1000,10000,100000 --size=64

`untrained`: ||S|| of a head in the last layer of untrained models (width 128, four heads) after random tokens, as the
paper's code has it: 14.5 for VLA, 1634 for linear attention and 1.2 for what it calls DeltaNet at T = 1000; four seeds.
`random` and `repeated`: one head with K = V = size, penalty directions random or all the same; ||A M - I||, the error
of A, ||S|| beside linear attention's on the same tokens, and the Jacobian J = I - a k^T of the last token, whose norm
the paper says is exactly 1, which holds for c = a . k = 1 alone (docs/notes.md).
Cost: a few minutes on two cores. Measured: docs/results/vla_state_norm.json.
"""

import json
from pathlib import Path

import numpy as np
from absl import flags

from experiments._main import run
from linattn_jax.eval.state_norms import long_rows, untrained
from linattn_jax.provenance import facts

_LENGTHS = flags.DEFINE_list("lengths", "1000,3000,10000,30000,100000", "Tokens at which to measure, ascending.")
_SIZE = flags.DEFINE_integer("size", 32, "K and V of the one head.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the inputs.")
_OUTPUT = flags.DEFINE_string("output", "runs/vla_state_norm.json", "JSON file to write.")


def main(_) -> None:
    """Measures, prints and writes the JSON."""
    lengths = list(map(int, _LENGTHS.value))
    record = facts(_SEED.value) | {"size": _SIZE.value, "untrained": [], "random": [], "repeated": []}
    for length in (250, 500, 1000, 2000):
        norms = {
            name: [untrained(name, length, _SEED.value + i) for i in range(4)]
            for name in ("vla", "linear", "deltanet_vla")
        }
        record["untrained"].append({"T": length} | norms)
        print(f"untrained T {length}", ", ".join(f"{name} {np.mean(x):.4g}" for name, x in norms.items()), flush=True)
    for directions in ("random", "repeated"):
        for row in long_rows(directions, lengths, _SIZE.value, _SEED.value):
            print(directions, ", ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)
            record[directions].append(row)
    Path(_OUTPUT.value).parent.mkdir(parents=True, exist_ok=True)
    Path(_OUTPUT.value).write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    run(main)
