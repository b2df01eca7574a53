"""Longhorn (Liu et al. 2024): a diagonal state per channel, written by an implicit step of online regression.

Per channel, with the state h [N] and keys and queries shared by all channels:
    step = delta / (1 + delta ||k||^2),  h <- (1 - step k^2) h + step x k,  y = h . q,
the products of vectors taken element by element. Nothing here is a product of matrices: the chunkwise form is a scan
over chunks with an associative scan inside.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from linattn_jax.mixers import chunking, dispatch
from linattn_jax.mixers.calls import Call, finish_step, prepare, prepare_step
from linattn_jax.mixers.chunking import Segments
from linattn_jax.mixers.state import serializable
from linattn_jax.types import Argument, Array

_ARGUMENTS = {
    "x": Argument("B T D"),
    "k": Argument("B T N"),
    "q": Argument("B T N"),
    "delta": Argument("B T D", "gate"),
}


@serializable
class LonghornState(NamedTuple):
    """The state of every channel: h [B, D, N]."""

    h: Array


def longhorn_init(batch: int, channels: int, state_size: int, *, dtype: DTypeLike = jnp.float32) -> LonghornState:
    """The empty state, zeros."""
    return LonghornState(jnp.zeros((batch, channels, state_size), dtype))


def _empty(sizes: Mapping[str, int], dtype: DTypeLike) -> LonghornState:
    return longhorn_init(sizes["B"], sizes["D"], sizes["N"], dtype=dtype)


def _write(x: dict[str, Array]) -> tuple[Array, Array]:
    """What multiplies the state and what is added to it, both [..., D, N]."""
    k = x["k"][..., None, :]
    step = (x["delta"] / (1 + x["delta"] * jnp.sum(x["k"] * x["k"], axis=-1, keepdims=True)))[..., None]
    return 1 - step * k * k, step * x["x"][..., None] * k


def _read(h: Array, q: Array) -> Array:
    return jnp.einsum("...dn,...n->...d", h, q, precision=lax.Precision.HIGHEST)


def _token(call: Call, state: LonghornState, x: dict[str, Array]) -> tuple[Array, LonghornState]:
    kept, added = _write(x)
    h = kept * state.h + added
    return _read(h, x["q"]), LonghornState(h)


def _whole(
    call: Call, state: LonghornState, x: dict[str, Array], segments: Segments | None
) -> tuple[Array, LonghornState]:
    h = chunking.scan_affine(chunking.DIAGONAL, *_write(x), state.h, call.empty.h, segments)
    return _read(h, x["q"]), LonghornState(h[:, -1])


def _chunk(
    call: Call, state: LonghornState, x: dict[str, Array], segments: Segments | None
) -> tuple[Array, LonghornState]:
    y, state = _whole(call, state, {name: jnp.moveaxis(a, 1, 2) for name, a in x.items()}, segments)
    return jnp.moveaxis(y, 1, 2), state


@dispatch.on_any_mesh
def longhorn(
    x: Array,
    k: Array,
    q: Array,
    delta: Array,
    *,
    initial_state: LonghornState | None = None,
    segment_ids: Array | None = None,
    initial_segment_id: Array | None = None,
    implementation: str | None = None,
    chunk_size: int | None = None,
) -> tuple[Array, LonghornState]:
    """Longhorn's mixer (Liu et al. 2024): h <- (1 - step k^2) h + step x k with step = delta / (1 + delta ||k||^2).

    Ours: nothing in the recurrence.

    Args:
        x: [B, T, D]; float16, bfloat16, float32 or float64.
        k, q: [B, T, N], dtype of x; one key and query for all channels.
        delta: [B, T, D], any float, >= 0 (the layer's sigmoid); 0 writes nothing. Then 0 <= step k^2 < 1: it contracts.
        initial_state, segment_ids, initial_segment_id, implementation, chunk_size: as for `delta_rule`. All forms but
            the recurrent hold D N numbers per token, the chunkwise one for a chunk at a time.

    Returns:
        Output [B, T, D] in x.dtype, and LonghornState(h [B, D, N]), float32 (float64 for float64 inputs).

    Raises:
        ValueError, TypeError: naming the argument, what was seen and what was wanted.

    >>> import jax.numpy as jnp
    >>> one = jnp.ones((1, 3, 1))
    >>> y, _ = longhorn(one, one, one, one)                       # each token halves the distance to x
    >>> y[0, :, 0].tolist()
    [0.5, 0.75, 0.875]
    """
    call = prepare(
        {"x": x, "k": k, "q": q, "delta": delta},
        _ARGUMENTS,
        _empty,
        initial_state=initial_state,
        segment_ids=segment_ids,
        initial_segment_id=initial_segment_id,
    )
    forms = {
        "recurrent": call.recurrent(partial(_token, call)),
        "associative": call.associative(partial(_whole, call)),
        "chunkwise": call.chunkwise(partial(_chunk, call), chunk_size),
    }
    return call.run("longhorn", forms, implementation)


@dispatch.on_any_mesh
def longhorn_step(state: LonghornState, x: Array, k: Array, q: Array, delta: Array) -> tuple[Array, LonghornState]:
    """One token of `longhorn`: x, delta [B, D], k, q [B, N]; returns y [B, D] and the new state."""
    arrays = {"x": x, "k": k, "q": q, "delta": delta}
    return finish_step(prepare_step(state, arrays, _ARGUMENTS, _empty), _token)


_FORMS = ("recurrent", "associative", "chunkwise")
dispatch.register(dispatch.Mixer("longhorn", longhorn, longhorn_step, _empty, _ARGUMENTS, _FORMS, output="B T D"))
