"""Causal softmax attention, the quadratic baseline: JAX's own, cuDNN's on NVIDIA GPUs, with a cache for decoding."""

from __future__ import annotations

import numbers
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from linattn_jax import debug
from linattn_jax.mixers.chunking import Segments, find_segments
from linattn_jax.mixers.state import serializable
from linattn_jax.types import Array, check_float, check_integer, check_scale, check_shape


@serializable
class KVCache(NamedTuple):
    """Keys k [B, capacity, Hk, K], values v [B, capacity, Hk, V] and how many of them are real, length int32 [B]."""

    k: Array
    v: Array
    length: Array


def softmax_attention_init(
    batch: int, key_heads: int, key_size: int, value_size: int, *, capacity: int, dtype: DTypeLike = jnp.float32
) -> KVCache:
    """An empty cache for `capacity` tokens; unlike the other mixers' states it grows with what must be remembered."""
    return KVCache(
        jnp.zeros((batch, capacity, key_heads, key_size), dtype),
        jnp.zeros((batch, capacity, key_heads, value_size), dtype),
        jnp.zeros((batch,), jnp.int32),
    )


def _check(
    q: Array,
    k: Array,
    v: Array,
    cache: KVCache | None,
    scale: float | Array | None,
    window: int | None,
    implementation: str | None,
) -> None:
    if cache is not None and not isinstance(cache, KVCache):
        raise TypeError(f"initial_state: {type(cache).__name__} given, wanted KVCache.")
    cached = () if cache is None else (("initial_state.k", cache.k), ("initial_state.v", cache.v))
    for name, x in (("q", q), ("k", k), ("v", v), *cached):
        check_float(name, x)
        if x.ndim != 4:
            shape = tuple(x.shape)
            raise ValueError(f"{name}: rank {x.ndim} (shape {shape}) given, wanted rank 4, [B, T, heads, size].")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: dtype {x.dtype} given, wanted that of q, {q.dtype}.")
    sizes = {"B": q.shape[0], "T": q.shape[1], "H": q.shape[2], "K": q.shape[3], "Hk": k.shape[2], "V": v.shape[3]}
    check_shape("k", k, "B T Hk K", sizes)
    check_shape("v", v, "B T Hk V", sizes)
    if min(sizes["H"], sizes["Hk"], sizes["K"], sizes["V"]) < 1:
        raise ValueError(f"q and v: shapes {tuple(q.shape)} and {tuple(v.shape)} given, wanted heads and sizes >= 1.")
    if sizes["H"] % sizes["Hk"]:
        raise ValueError(f"q: {sizes['H']} query heads given, wanted a multiple of the {sizes['Hk']} heads of k and v.")
    if scale is not None:
        check_scale(scale)
    if window is not None and (not isinstance(window, numbers.Integral) or isinstance(window, bool)):
        raise TypeError(f"window: {window!r} given, wanted an integer of at least 1 or None.")
    if window is not None and window < 1:
        raise ValueError(f"window: {window} given, wanted at least 1.")
    if implementation not in (None, "xla", "cudnn"):
        raise ValueError(f"implementation: {implementation!r} given, wanted None, 'xla' or 'cudnn'.")
    if implementation == "cudnn" and isinstance(scale, jax.Array):
        raise NotImplementedError("softmax_attention has no implementation 'cudnn' here: scale is an array.")
    if cache is not None:
        sizes["capacity"] = cache.k.shape[1]
        check_shape("initial_state.k", cache.k, "B capacity Hk K", sizes)
        check_shape("initial_state.v", cache.v, "B capacity Hk V", sizes)
        check_integer("initial_state.length", cache.length)
        check_shape("initial_state.length", cache.length, "B", sizes)
        if sizes["T"] > sizes["capacity"]:
            capacity, length = sizes["capacity"], sizes["T"]
            raise ValueError(
                f"initial_state: capacity {capacity} given, wanted at least the {length} tokens, padding counted."
            )


def _attend(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None,
    scale: float | Array | None,
    window: int | None,
    implementation: str | None,
) -> Array:
    """JAX's attention for any value size: causal where mask is None, else by mask [B, 1, T, S] alone."""
    size, value_size = q.shape[-1], v.shape[-1]
    wide = max(size, value_size)
    factor: Any = size**-0.5 if scale is None else scale

    def pad(x: Array) -> Array:
        return jnp.pad(x, [(0, 0)] * 3 + [(0, wide - x.shape[-1])])

    def attend(implementation: Any, q: Array, k: Array, v: Array, mask: Array | None) -> Array:
        output = jax.nn.dot_product_attention(
            pad(q),
            pad(k),
            pad(v),
            mask=mask,
            scale=factor,
            is_causal=mask is None,
            local_window_size=None if window is None or mask is not None else (window - 1, 0),
            implementation=implementation,
        )
        return output[..., :value_size]

    xla, cudnn = partial(attend, "xla"), partial(attend, "cudnn")
    if implementation is not None:
        return attend(implementation, q, k, v, mask)
    # What cuDNN's flash attention takes, forward and backward (which wants even lengths); everything else is XLA's.
    served = q.dtype in (jnp.float16, jnp.bfloat16) and wide <= 128 and wide % 8 == 0
    if served and q.shape[1] % 2 == k.shape[1] % 2 == 0 and not isinstance(scale, jax.Array):
        try:
            jax.eval_shape(cudnn, q, k, v, mask)
        except RuntimeError:  # JAX can trace it only where cuDNN is installed
            return xla(q, k, v, mask)
        return lax.platform_dependent(q, k, v, mask, cuda=cudnn, default=xla)
    return xla(q, k, v, mask)


def softmax_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float | Array | None = None,
    window: int | None = None,
    initial_state: KVCache | None = None,
    segment_ids: Array | None = None,
    initial_segment_id: Array | None = None,
    implementation: str | None = None,
) -> tuple[Array, KVCache | None]:
    """Causal softmax attention with grouped queries.

    Args:
        q: [B, T, H, K]; k: [B, T, Hk, K]; v: [B, T, Hk, V]; query head h reads key head h // (H // Hk).
        scale: multiplies q . k, a number or an array of rank 0; default K ** -0.5.
        window: tokens that a query sees, itself included; default all.
        initial_state: a cache of earlier tokens (`softmax_attention_init` makes an empty one). Only with it is a cache
            returned. Its capacity is at least T, padding counted; tokens that do not fit behind those it holds are
            dropped and wrongly missing from later reads.
        segment_ids, initial_segment_id: as for `delta_rule`: attention stays within a document, negative ids are inert.
        implementation: "xla", "cudnn" or None: cuDNN in programs lowered for NVIDIA GPUs where it is installed and
            serves the call (16 bits, even lengths, a number for `scale`), else XLA. Through cuDNN there is no jvp, and
            jax.export wants to be told that its custom calls may stay.

    Returns:
        Output [B, T, H, V] in q.dtype, and the cache holding the last document's tokens, or None. The softmax itself is
        JAX's, in float32 for float64 inputs too.

    Raises:
        ValueError, TypeError: naming the argument, what was seen and what was wanted.

    >>> import jax.numpy as jnp
    >>> q = k = jnp.zeros((1, 3, 1, 2))
    >>> v = jnp.array([1.0, 2.0, 6.0]).reshape(1, 3, 1, 1)
    >>> output, cache = softmax_attention(q, k, v)                     # equal scores: a running mean
    >>> output[0, :, 0, 0].tolist(), cache
    ([1.0, 1.5, 3.0], None)
    """
    _check(q, k, v, initial_state, scale, window, implementation)
    batch, length = q.shape[:2]
    segments = find_segments(segment_ids, initial_segment_id, batch, length)
    if scale is not None and not isinstance(scale, jax.Array):
        scale = float(scale)
    debug.check_inputs("softmax_attention", {"q": q, "k": k, "v": v}, None if segments is None else segments.valid)
    if length == 0:
        return jnp.zeros((*q.shape[:3], v.shape[-1]), q.dtype), initial_state
    if segments is None and initial_state is None:
        return _attend(q, k, v, None, scale, window, implementation), None
    if segments is None:
        nowhere = jnp.zeros_like(q[:, :, 0, 0], bool)
        segments = Segments(~nowhere, nowhere)
    valid, reset = segments
    q, k, v = (jnp.where(valid[:, :, None, None], x, jnp.zeros((), x.dtype)) for x in (q, k, v))
    document = jnp.cumsum(reset.astype(jnp.int32), axis=1)
    rank = jnp.cumsum(valid.astype(jnp.int32), axis=1) - 1
    seen = _visible(document, rank, valid, document, rank, valid, window)
    keys, values, cache = k, v, initial_state
    if initial_state is not None:
        capacity = initial_state.k.shape[1]
        slot = jnp.arange(capacity)[None, :]
        held = slot < initial_state.length[:, None]
        old = _visible(document, rank, valid, 0 * slot, slot - initial_state.length[:, None], held, window)
        cached = {"initial_state.k": initial_state.k, "initial_state.v": initial_state.v}
        debug.check_inputs("softmax_attention", cached, held)
        keep = held[..., None, None]
        keys = jnp.concatenate([jnp.where(keep, initial_state.k, 0).astype(k.dtype), k], axis=1)
        values = jnp.concatenate([jnp.where(keep, initial_state.v, 0).astype(v.dtype), v], axis=1)
        seen = jnp.concatenate([old, seen], axis=-1)
        cache = _extend(initial_state, k, v, valid, document)
    output = _attend(q, keys, values, seen[:, None], scale, window, implementation)
    return jnp.where(valid[:, :, None, None], output, jnp.zeros((), output.dtype)), cache


def _visible(
    document: Array,
    rank: Array,
    valid: Array,
    key_document: Array,
    key_rank: Array,
    key_valid: Array,
    window: int | None,
) -> Array:
    """bool [B, T, S]: which keys a query may see, by document and by rank among the real tokens."""
    distance = rank[:, :, None] - key_rank[:, None, :]
    seen = (document[:, :, None] == key_document[:, None, :]) & (distance >= 0) & key_valid[:, None, :]
    if window is not None:
        seen = seen & (distance < window)
    return seen & valid[:, :, None]


def _extend(cache: KVCache, k: Array, v: Array, valid: Array, document: Array) -> KVCache:
    """The cache after the call: the last document's real tokens, behind what the cache held if it is the first."""
    last = document[:, -1:]
    kept = valid & (document == last)
    start = jnp.where(last == 0, cache.length[:, None], 0)
    place = jnp.where(kept, start + jnp.cumsum(kept.astype(jnp.int32), axis=1) - 1, cache.k.shape[1])
    write = jax.vmap(lambda buffer, at, x: buffer.at[at].set(x.astype(buffer.dtype), mode="drop"))
    length = start[:, 0] + jnp.sum(kept, axis=1, dtype=jnp.int32)
    return KVCache(
        write(cache.k, place, k), write(cache.v, place, v), jnp.minimum(length, cache.k.shape[1]).astype(jnp.int32)
    )


def softmax_attention_step(
    state: KVCache, q: Array, k: Array, v: Array, *, scale: float | Array | None = None, window: int | None = None
) -> tuple[Array, KVCache]:
    """One token of `softmax_attention`: q [B, H, K], k [B, Hk, K], v [B, Hk, V]; returns output, cache."""
    if not isinstance(state, KVCache):
        raise TypeError(f"state: {type(state).__name__} given, wanted KVCache.")
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_float(name, x)
    q, k, v = (x[:, None] for x in (q, k, v))
    output, cache = softmax_attention(q, k, v, scale=scale, window=window, initial_state=state)
    assert cache is not None
    return output[:, 0], cache
