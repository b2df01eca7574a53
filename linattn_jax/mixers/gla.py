"""Gated linear attention: linear attention with one decay per key channel (Yang et al. 2023).

Per value head, with the state S [K, V]: S <- diag(e^{log_decay}) S + k v^T,  o = scale S^T q.
"""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from jax import lax

from linattn_jax.mixers import dispatch
from linattn_jax.mixers.calls import Call, finish_step, prepare, prepare_step
from linattn_jax.mixers.chunking import DIAGONAL, Segments, join_blocks, repeat_heads, scan_affine
from linattn_jax.mixers.state import MatrixState, matrix_empty, matrix_init
from linattn_jax.types import QKV, Argument, Array

gla_init = matrix_init

_ARGUMENTS = QKV | {"log_decay": Argument("B T Hk K", "gate")}


def token(call: Call, state: MatrixState, x: dict[str, Array]) -> tuple[Array, MatrixState]:
    """One token: x holds [B, heads, ...]."""
    q, k, log_decay = (repeat_heads(x[name], call.groups) for name in ("q", "k", "log_decay"))
    memory = jnp.exp(log_decay)[..., None] * state.S + k[..., :, None] * x["v"][..., None, :]
    output = jnp.einsum("bhk,bhkv->bhv", call.scale * q, memory, precision=lax.Precision.HIGHEST)
    return output, MatrixState(memory)


def _scores(q: Array, k: Array, log_decay: Array, precision: lax.Precision | None) -> tuple[Array, Array, Array]:
    """Scores sum_d q_id k_jd e^{G_id - G_jd} for i >= j, all arguments [B, Hk, C, K], C a power of two.

    By halving: in a block of 2s rows the scores of its later rows against its earlier ones factor around the boundary,
    where both factors are at most 1, and the two halves are blocks of size s. Every exponent is a sum over its own
    span, so the scores are exact for any gate (-100 a token and -inf too) and nothing can overflow; no C x C x K array
    appears. Also returns the log decays from the chunk's start through each row, and from after each row to the chunk's
    end.
    """
    precise = partial(jnp.einsum, "...id,...jd->...ij", precision=precision)
    length = q.shape[2]
    blocks = lambda x, size: x.reshape(*x.shape[:2], length // (2 * size), 2, size, x.shape[-1])
    size = 1
    scores = jnp.sum(q * k, axis=-1)[..., None, None]
    through, after = log_decay[..., None, :], jnp.zeros_like(log_decay)[..., None, :]  # [B, Hk, C / size, size, K]
    while size < length:
        first_through, through = (blocks(through, size)[..., i, :, :] for i in (0, 1))
        first_after, after = (blocks(after, size)[..., i, :, :] for i in (0, 1))
        later_q = blocks(q, size)[..., 1, :, :] * jnp.exp(through)
        earlier_k = blocks(k, size)[..., 0, :, :] * jnp.exp(first_after)
        pairs = scores.reshape(*scores.shape[:2], length // (2 * size), 2, size, size)
        scores = join_blocks(pairs[..., 0, :, :], precise(later_q, earlier_k), pairs[..., 1, :, :])
        first_total, total = first_through[..., -1:, :], through[..., -1:, :]
        through = jnp.concatenate([first_through, first_total + through], axis=-2)
        after = jnp.concatenate([first_after + total, after], axis=-2)
        size *= 2
    return scores[:, :, 0], through[:, :, 0], after[:, :, 0]


def chunk(call: Call, state: MatrixState, x: dict[str, Array], segments: Segments | None) -> tuple[Array, MatrixState]:
    """One chunk: x holds [B, heads, C, ...]."""
    log_decay = x["log_decay"]
    if segments is not None:
        log_decay = jnp.where(segments.reset[:, None, :, None], -jnp.inf, log_decay)
    product = partial(jnp.einsum, precision=call.precision)
    q, k = call.scale * x["q"], x["k"]
    scores, through, after = _scores(q, k, log_decay, call.precision)
    scores, read, write, total = (
        repeat_heads(a, call.groups)
        for a in (scores, jnp.exp(through) * q, jnp.exp(after) * k, jnp.exp(through[:, :, -1]))
    )
    output = product("bhik,bhkv->bhiv", read, state.S) + product("bhij,bhjv->bhiv", scores, x["v"])
    return output, MatrixState(total[..., None] * state.S + product("bhik,bhiv->bhkv", write, x["v"]))


def whole(call: Call, state: MatrixState, x: dict[str, Array], segments: Segments | None) -> tuple[Array, MatrixState]:
    """All tokens at once, by a scan of diagonal maps: x holds [B, T, heads, ...]."""
    q, k, log_decay = (repeat_heads(x[name], call.groups, axis=2) for name in ("q", "k", "log_decay"))
    memory = scan_affine(
        DIAGONAL,
        MatrixState(jnp.exp(log_decay)[..., None]),
        MatrixState(k[..., :, None] * x["v"][..., None, :]),
        state,
        call.empty,
        segments,
    ).S
    output = jnp.einsum("bthk,bthkv->bthv", call.scale * q, memory, precision=lax.Precision.HIGHEST)
    return output, MatrixState(memory[:, -1])


@dispatch.on_any_mesh
def gla(
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    *,
    scale: float | Array | None = None,
    initial_state: MatrixState | None = None,
    segment_ids: Array | None = None,
    initial_segment_id: Array | None = None,
    implementation: str | None = None,
    chunk_size: int | None = None,
) -> tuple[Array, MatrixState]:
    """Gated linear attention (Yang et al. 2023): S <- diag(e^{log_decay}) S + k v^T.

    The other arguments, results and errors are those of `delta_rule`. Nothing raises on values: a positive log decay
    grows the state without bound, and NaN does what it does there.

    Ours: the chunkwise form's scores, by halving the chunk: exact for every gate, and nothing can overflow.

    Args:
        log_decay: [B, T, Hk, K], natural log of the decay per key channel, in [-inf, 0].

    >>> import jax.numpy as jnp
    >>> k = jnp.ones((1, 3, 1, 2))
    >>> v = jnp.ones((1, 3, 1, 1))
    >>> log_decay = jnp.zeros((1, 3, 1, 2)).at[..., 1].set(-jnp.inf)      # keep channel 0, forget channel 1
    >>> output, _ = gla(k, k, v, log_decay, scale=1.0)
    >>> output[0, :, 0, 0].tolist()
    [2.0, 3.0, 4.0]
    """
    call = prepare(
        {"q": q, "k": k, "v": v, "log_decay": log_decay},
        _ARGUMENTS,
        matrix_empty,
        scale=scale,
        initial_state=initial_state,
        segment_ids=segment_ids,
        initial_segment_id=initial_segment_id,
    )
    forms = {
        "recurrent": call.recurrent(partial(token, call)),
        "associative": call.associative(partial(whole, call)),
        "chunkwise": call.chunkwise(partial(chunk, call), chunk_size),
    }
    return call.run("gla", forms, implementation)


@dispatch.on_any_mesh
def gla_step(
    state: MatrixState, q: Array, k: Array, v: Array, log_decay: Array, *, scale: float | Array | None = None
) -> tuple[Array, MatrixState]:
    """One token of `gla`: q, k, log_decay [B, Hk, K], v [B, H, V]; returns output [B, H, V] and the new state."""
    arrays = {"q": q, "k": k, "v": v, "log_decay": log_decay}
    return finish_step(prepare_step(state, arrays, _ARGUMENTS, matrix_empty, scale=scale), token)


_FORMS = ("recurrent", "associative", "chunkwise")
dispatch.register(dispatch.Mixer("gla", gla, gla_step, matrix_empty, _ARGUMENTS, _FORMS))
