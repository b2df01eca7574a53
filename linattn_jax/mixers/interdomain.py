"""Interdomain attention (Kiyohara et al. 2026): queries read the coefficients that a state-space model keeps.

Per head, with N complex modes x [N, K + V] shared by all channels of keys and values, and M basis functions:
    x <- e^{log_a} x + b [k; v],  [u_m | gamma_m] = 2 Re(c_m x),  o = sum_m (q . u_m) gamma_m.
The output is homogeneous of degree 1 in q and 2 in [k; v]: quadratic in the state, so no one linear attention. Nothing
in the recurrence depends on the data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from linattn_jax.mixers import chunking, dispatch
from linattn_jax.mixers.calls import Call, finish_step, prepare, prepare_step
from linattn_jax.mixers.chunking import Segments
from linattn_jax.mixers.powers import Transition, counted, split_modes
from linattn_jax.mixers.s4d import (
    ModeTable,
    Span,
    make_span,
    mixed_product,
    mode_scores,
    mode_table,
    one_token,
    real_product,
    recurrent,
    write_modes,
)
from linattn_jax.mixers.state import serializable
from linattn_jax.types import Argument, Array, complex_dtype

_ARGUMENTS = {
    "q": Argument("B T H K"),
    "k": Argument("B T H K"),
    "v": Argument("B T H V"),
    "log_a": Argument("H N", "complex"),
    "b": Argument("H N", "complex"),
    "c": Argument("H M N", "complex"),
}


@serializable
class InterdomainState(NamedTuple):
    """The modes of keys and values: x [B, H, N, K + V], complex64 (complex128 for float64 inputs)."""

    x: Array


def interdomain_init(
    batch: int, heads: int, key_size: int, value_size: int, *, modes: int, dtype: DTypeLike = jnp.float32
) -> InterdomainState:
    """The empty state, zeros; `dtype` is that of its real parts."""
    return InterdomainState(jnp.zeros((batch, heads, modes, key_size + value_size), complex_dtype(dtype)))


def _empty(sizes: Mapping[str, int], dtype: DTypeLike) -> InterdomainState:
    return interdomain_init(sizes["B"], sizes["H"], sizes["K"], sizes["V"], modes=sizes["N"], dtype=dtype)


def _read(q: Array, c: Array, x: Array) -> Array:
    """o [..., H, V] of q [..., H, K] and modes x [..., H, N, K + V]."""
    parts = lambda a, sign: jnp.concatenate([a.real, sign * a.imag], axis=-2)
    c = jnp.concatenate([c.real, c.imag], axis=-1)
    product = partial(jnp.einsum, precision=lax.Precision.HIGHEST)
    coefficients = 2 * product("hmn,...hnd->...hmd", c, parts(x, -1))
    keys, values = jnp.split(coefficients, [q.shape[-1]], axis=-1)
    return product("...hm,...hmv->...hv", product("...hk,...hmk->...hm", q, keys), values)


def _token(call: Call, a: Transition, state: InterdomainState, x: dict[str, Array]) -> tuple[Array, InterdomainState]:
    p = call.parameters
    both = jnp.concatenate([x["k"], x["v"]], axis=-1)
    modes = a.expanded().advance(state.x, p["b"][..., None] * both[..., None, :])
    return _read(call.scale * x["q"], p["c"], modes), InterdomainState(modes)


def _whole(
    call: Call, state: InterdomainState, x: dict[str, Array], segments: Segments | None
) -> tuple[Array, InterdomainState]:
    p = call.parameters
    offset = p["b"][..., None] * jnp.concatenate([x["k"], x["v"]], axis=-1)[..., None, :]
    ones = jnp.ones((1, offset.shape[1]), call.dtype)
    modes = chunking.scan_affine(counted(split_modes(p["log_a"])), ones, offset, state.x, call.empty.x, segments)
    return _read(call.scale * x["q"], p["c"], modes), InterdomainState(modes[:, -1])


def _query_modes(q: Array, k: Array, b: Array, span: Span, precision: lax.Precision | None) -> Array:
    """sum_j (q_i . k_j) b_n a_n^{tau(i, j)} over rows j <= i of one segment: complex [B, H, C, N]; as `mode_scores`."""
    length, size = q.shape[2], 1
    modes = jnp.sum(q * k, axis=-1)[..., None] * b[:, None]
    while size < length:
        later_power, earlier_power, together = span.halves(size)
        blocks = lambda x, i, s=size: x.reshape(*x.shape[:2], length // (2 * s), 2, s, x.shape[3])[:, :, :, i]
        scores = jnp.einsum("...ik,...jk->...ij", blocks(q, 1), blocks(k, 0), precision=precision)
        scores = scores if together is None else scores * together
        cross = later_power * mixed_product(scores, b[:, None, None] * earlier_power, precision)
        modes = modes + jnp.stack([jnp.zeros_like(cross), cross], axis=3).reshape(modes.shape)
        size *= 2
    return modes


def _chunk(
    call: Call,
    table: ModeTable,
    state: InterdomainState,
    x: dict[str, Array],
    segments: Segments | None,
    rows: Array,
) -> tuple[Array, InterdomainState]:
    """One chunk. With p_i = sum_j (q_i . k_j) b a^{i - j} over the keys: q_i . u_m = 2 Re(c_m . p_i); so too values."""
    p, precision, q, k, v = call.parameters, call.precision, call.scale * x["q"], x["k"], x["v"]
    span = make_span(table, segments, q.shape[2], rows)
    from_start = span.from_start()
    keys, values = jnp.split(state.x, [k.shape[-1]], axis=-1)
    carried = from_start * mixed_product(q, jnp.swapaxes(keys, -1, -2), precision)
    modes = carried + _query_modes(q, k, p["b"], span, precision)
    weights = mixed_product(2 * real_product(modes, p["c"], precision), p["c"], precision)
    output = 2 * real_product(weights * from_start, jnp.swapaxes(values, -1, -2), precision)
    scores = mode_scores(weights, p["b"], span, precision)
    output = output + jnp.einsum("bhij,bhjv->bhiv", scores, v, precision=precision)
    both = jnp.concatenate([k, v], axis=-1)
    return output, InterdomainState(write_modes(state.x, p["b"], both, span, precision))


def _chunkwise(call: Call, chunk_size: int | None) -> Callable[..., Any]:
    def form(
        inputs: dict[str, Array], state: InterdomainState, segments: Segments | None
    ) -> tuple[Array, InterdomainState]:
        table = mode_table(call.parameters["log_a"], call.chunk(chunk_size), call.sizes["T"])
        return call.chunkwise(partial(_chunk, call, table), chunk_size, counted=True)(inputs, state, segments)

    return form


@dispatch.on_any_mesh
def interdomain(
    q: Array,
    k: Array,
    v: Array,
    log_a: Array,
    b: Array,
    c: Array,
    *,
    scale: float | Array | None = None,
    initial_state: InterdomainState | None = None,
    segment_ids: Array | None = None,
    initial_segment_id: Array | None = None,
    implementation: str | None = None,
    chunk_size: int | None = None,
) -> tuple[Array, InterdomainState]:
    """Interdomain attention (Kiyohara et al. 2026), discretised: o = sum_m (q . u_m) gamma_m, [u | gamma] = 2 Re(c x).

    Ours: the chunkwise form, two passes of matrix products without an N x K or M x V tensor per token.

    Args:
        q, k: [B, T, H, K]; float16, bfloat16, float32 or float64.
        v: [B, T, H, V], dtype of q.
        log_a, b: [H, N], complex64 or complex128: the modes x <- e^{log_a} x + b [k; v]; Re log_a <= 0.
        c: [H, M, N], complex: the M basis functions that the N modes are mixed into.
        scale: multiplies q; default 1.
        initial_state, segment_ids, initial_segment_id, implementation, chunk_size: as for `delta_rule`. The associative
            form holds N (K + V) complex numbers per token.

    Returns:
        Output [B, T, H, V] in v.dtype, and InterdomainState(x [B, H, N, K + V]), complex64 (complex128 for float64
        inputs).

    Raises:
        ValueError, TypeError: naming the argument, what was seen and what was wanted.

    >>> import jax.numpy as jnp
    >>> one = jnp.full((1, 1), 0.5, jnp.complex64)                   # one mode that keeps all it is given
    >>> k = jnp.ones((1, 3, 1, 1))
    >>> output, _ = interdomain(k, k, k, 0 * one, one, 2 * one[None])
    >>> output[0, :, 0, 0].tolist()                                  # (1 + ... + 1)^2
    [1.0, 4.0, 9.0]
    """
    call = prepare(
        {"q": q, "k": k, "v": v, "log_a": log_a, "b": b, "c": c},
        _ARGUMENTS,
        _empty,
        scale=1.0 if scale is None else scale,
        initial_state=initial_state,
        segment_ids=segment_ids,
        initial_segment_id=initial_segment_id,
    )
    forms = {
        "recurrent": recurrent(call, _token),
        "associative": call.associative(partial(_whole, call)),
        "chunkwise": _chunkwise(call, chunk_size),
    }
    return call.run("interdomain", forms, implementation)


@dispatch.on_any_mesh
def interdomain_step(
    state: InterdomainState,
    q: Array,
    k: Array,
    v: Array,
    log_a: Array,
    b: Array,
    c: Array,
    *,
    scale: float | Array | None = None,
) -> tuple[Array, InterdomainState]:
    """One token of `interdomain`: q, k [B, H, K], v [B, H, V]; returns output [B, H, V] and the new state."""
    arrays = {"q": q, "k": k, "v": v, "log_a": log_a, "b": b, "c": c}
    call = prepare_step(state, arrays, _ARGUMENTS, _empty, scale=1.0 if scale is None else scale)
    return finish_step(call, one_token(_token))


_FORMS = ("recurrent", "associative", "chunkwise")
dispatch.register(dispatch.Mixer("interdomain", interdomain, interdomain_step, _empty, _ARGUMENTS, _FORMS))
