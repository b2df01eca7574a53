"""VLA over very long rows in float32: does A stay the inverse of M, and does the memory stay small?

    python -m experiments.vla_state_norm --lengths=1000,10000,100000 --size=64

Random ELU + 1 keys and unit values, with penalty directions of norm 1 / sqrt(K) that are random, or all the same. At
each length: ||A M - I||, ||A - M^{-1}|| / ||M^{-1}|| with M summed in float64, the state norm ||S|| of VLA, and that of
linear attention on the same tokens. Cost: under a minute on two cores. Measured: docs/results/vla_state_norm.json.
"""

import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from experiments._main import run
from linattn_jax import linear_attention, variational
from linattn_jax.provenance import facts

_LENGTHS = flags.DEFINE_list("lengths", "1000,3000,10000,30000,100000", "Tokens at which to measure, ascending.")
_SIZE = flags.DEFINE_integer("size", 32, "K and V of the one head.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the inputs.")
_OUTPUT = flags.DEFINE_string("output", "runs/vla_state_norm.json", "JSON file to write.")


@jax.jit
def _advance(k, v, u, state, additive):
    return variational(k, k, v, u, initial_state=state)[1], linear_attention(k, k, v, initial_state=additive)[1]


def measure(directions: str, lengths: list[int], size: int, seed: int):
    """Yields a row for each length; the state is carried from one to the next."""
    rng, state, additive, exact = np.random.default_rng(seed), None, None, 0.1 * np.eye(size)
    unit, norm = (lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)), np.linalg.norm
    same = unit(rng.standard_normal((1, 1, 1, size)))
    for start, length in itertools.pairwise([0, *lengths]):
        raw, v, free = (rng.standard_normal((1, length - start, 1, size)) for _ in "kvu")
        u = np.asarray((unit(free) if directions == "random" else same + 0 * free) / size**0.5, np.float32)
        k = np.exp(np.minimum(raw, 0)) + np.maximum(raw, 0)
        state, additive = _advance(*(jnp.asarray(x, jnp.float32) for x in (k, unit(v), u)), state, additive)
        exact = exact + u[0, :, 0].astype(np.float64).T @ u[0, :, 0].astype(np.float64)
        (M, A, S), inverse = (np.asarray(x[0, 0], np.float64) for x in state[:3]), np.linalg.inv(exact)
        row = {"T": length, "A M - I": norm(A @ M - np.eye(size)), "A error": norm(A - inverse) / norm(inverse)}
        yield row | {"VLA ||S||": norm(S), "linear ||S||": float(norm(additive.S[0, 0]))}


def main(_) -> None:
    """Measures, prints and writes the JSON."""
    record = facts(_SEED.value) | {"size": _SIZE.value, "random": [], "repeated": []}
    for directions in ("random", "repeated"):
        for row in measure(directions, list(map(int, _LENGTHS.value)), _SIZE.value, _SEED.value):
            print(directions, ", ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)
            record[directions].append(row)
    Path(_OUTPUT.value).parent.mkdir(parents=True, exist_ok=True)
    Path(_OUTPUT.value).write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    run(main)
