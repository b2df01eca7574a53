"""How large memories become, and how VLA's penalty matrix and its steps behave, over very long rows in float32."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from linattn_jax.mixers.linear import linear_attention
from linattn_jax.mixers.variational import variational
from linattn_jax.models.tiny import TinyConfig, TinyLM


@jax.jit
def _advance(k, v, u, state, additive):
    return variational(k, k, v, u, initial_state=state)[1], linear_attention(k, k, v, initial_state=additive)[1]


def long_rows(directions: str, lengths: Sequence[int], size: int, seed: int) -> Iterator[dict[str, float]]:
    """A row of measurements at each of `lengths`, ascending, of one head with K = V = `size`.

    Keys are ELU + 1 of normal numbers, values random of norm 1, penalty directions of norm 1 / sqrt(K) that are random
    ("random") or all the same ("repeated"). A row has: T; ||A M - I||; the relative error of A against the inverse of
    M summed in float64; ||S|| of VLA and of linear attention; and what `jacobian` says of the last token.
    """
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
        row |= {"VLA ||S||": norm(S), "linear ||S||": norm(np.asarray(additive.S[0, 0]))}
        yield {name: float(value) for name, value in (row | jacobian(A, k[0, -1, 0])).items()}


def jacobian(A: np.ndarray, k: np.ndarray) -> dict[str, float]:
    """What J = I - a k^T is like, k made of norm 1 and a that of A k.

    c = a . k; the largest singular value of J, measured and by (1 + sqrt(5 - 4 c)) / 2; the spectral radius.
    """
    k, a = k / np.linalg.norm(k), A @ k / np.linalg.norm(A @ k)
    c, J = float(a @ k), np.eye(k.size) - np.outer(a, k)
    measured = {"||J||": float(np.linalg.norm(J, 2)), "||J|| by formula": (1 + (5 - 4 * c) ** 0.5) / 2}
    return {"c": c} | measured | {"radius of J": float(np.abs(np.linalg.eigvals(J)).max())}


def untrained(mixer: str, length: int, seed: int) -> float:
    """||S||, mean over the heads of the last layer of an untrained `TinyLM`, after `length` random tokens."""
    model = TinyLM(TinyConfig(mixer), rngs=nnx.Rngs(seed))
    tokens = jax.random.randint(jax.random.key(seed), (1, length), 0, model.config.vocab_size)
    x = model.embedding[...][tokens] + model.positions[:length]
    *before, last = model.blocks
    for block in before:
        x = block(x)
    state: Any = last.mixer(last.mixer_norm(x))[1]
    return float(jnp.mean(jnp.linalg.norm(state.S.reshape(model.config.heads, -1), axis=1)))
