"""The short causal convolution that stands before most mixers: depthwise, with carried state, within documents."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from linattn_jax import debug
from linattn_jax.mixers.chunking import Segments, find_segments
from linattn_jax.types import Array, check_float, check_shape


def short_convolution_init(batch: int, channels: int, width: int, *, dtype: DTypeLike = jnp.float32) -> Array:
    """An empty history [batch, width - 1, channels], zeros."""
    return jnp.zeros((batch, width - 1, channels), dtype)


def short_convolution(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    initial_state: Array | None = None,
    segment_ids: Array | None = None,
    initial_segment_id: Array | None = None,
) -> tuple[Array, Array]:
    """y_t = sum_j weight[W - 1 - j] x_{t - j} + bias over lags j < W, per channel, reading real tokens of one document.

    Args:
        x: [B, T, D]; weight: [W, D], the last row for the current token; bias: [D].
        initial_state: [B, W - 1, D], the inputs before the first, latest last; default zeros.
        segment_ids, initial_segment_id: as for `delta_rule`; padding (negative ids) is skipped over wherever it stands,
            and its output is 0.

    Returns:
        Output [B, T, D] in x.dtype, and the history after the last real token, float32 (float64 for float64 inputs).

    Raises:
        ValueError, TypeError: naming the argument, what was seen and what was wanted.

    >>> import jax.numpy as jnp
    >>> x = jnp.array([1.0, 2.0, 4.0]).reshape(1, 3, 1)
    >>> y, history = short_convolution(x, jnp.array([[10.0], [1.0]]))
    >>> y[0, :, 0].tolist(), history[0, :, 0].tolist()
    ([1.0, 12.0, 24.0], [4.0])
    """
    check_float("x", x)
    check_float("weight", weight)
    if x.ndim != 3 or weight.ndim != 2:
        raise ValueError(f"x, weight: ranks {x.ndim} and {weight.ndim} given, wanted 3, [B, T, D], and 2, [W, D].")
    batch, length, channels = x.shape
    width = weight.shape[0]
    sizes = {"B": batch, "T": length, "D": channels, "W": width, "W - 1": width - 1}
    if weight.shape[1] != channels:
        raise ValueError(f"weight: shape {tuple(weight.shape)} given, wanted [W, D] with D = {channels}.")
    if width < 1:
        raise ValueError(f"weight: shape {tuple(weight.shape)} given, wanted [W, D] with W >= 1.")
    if bias is not None:
        check_float("bias", bias)
        check_shape("bias", bias, "D", sizes)
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    if initial_state is None:
        # Zeros that lie as x lies, where the mesh is explicit.
        history = jnp.pad(x[:, :0].astype(dtype), [(0, 0), (width - 1, 0), (0, 0)])
    else:
        check_float("initial_state", initial_state)
        if tuple(initial_state.shape) != (batch, width - 1, channels):
            seen, wanted = tuple(initial_state.shape), (batch, width - 1, channels)
            raise ValueError(f"initial_state: shape {seen} given, wanted [B, W - 1, D] = {wanted}.")
        history = initial_state.astype(dtype)
    segments = find_segments(segment_ids, initial_segment_id, batch, length)
    debug.check_inputs("short_convolution", {"x": x}, None if segments is None else segments.valid)
    debug.check_inputs("short_convolution", {"initial_state": history}, None)
    if length == 0:
        return x, history
    weight = weight.astype(dtype)
    if segments is None:
        y, history = _convolve(x, weight, history, None, None)
    else:
        x = jnp.where(segments.valid[..., None], x, jnp.zeros((), x.dtype))
        y, history = _within_documents(x, weight, history, segments)
    if bias is not None:
        y = y + bias.astype(dtype)
    if segments is not None:
        y = jnp.where(segments.valid[..., None], y, 0)
    return y.astype(x.dtype), history


def _within_documents(x: Array, weight: Array, history: Array, segments: Segments) -> tuple[Array, Array]:
    """The convolution where padding may stand anywhere: rows with padding before a real token are compacted first."""
    valid, reset = segments
    document = jnp.cumsum(reset.astype(jnp.int32), axis=1)
    count = jnp.sum(valid, axis=1, dtype=jnp.int32)

    def compacted() -> tuple[Array, Array]:
        order = jnp.argsort(~valid, axis=1, stable=True)
        back = jnp.argsort(order, axis=1)
        numbers = jnp.take_along_axis(document, order, axis=1)
        y, last = _convolve(_permute(x, order), weight, history, numbers, count)
        return _permute(y, back), last

    gaps = jnp.any(valid[:, 1:] & ~valid[:, :-1])
    return lax.cond(gaps, compacted, lambda: _convolve(x, weight, history, document, count))


def _convolve(
    x: Array, weight: Array, history: Array, document: Array | None, count: Array | None
) -> tuple[Array, Array]:
    """Shifts and adds over rows whose `count` real tokens come first; `document` [B, T] numbers documents from 0."""
    width, length = weight.shape[0], x.shape[1]
    extended = jnp.concatenate([history, x.astype(history.dtype)], axis=1)
    if document is None or count is None:
        y = jnp.zeros(x.shape, history.dtype)
        for tap in range(width):
            y = y + weight[tap] * extended[:, tap : tap + length]
        return y, extended[:, length:]
    numbers = jnp.pad(document, [(0, 0), (width - 1, 0)])
    y = jnp.zeros((*x.shape[:2], 1), history.dtype)
    for tap in range(width):
        same = numbers[:, tap : tap + length] == document
        y = y + weight[tap] * jnp.where(same[..., None], extended[:, tap : tap + length], 0)
    at = count[:, None] + jnp.arange(width - 1)
    newest = jnp.take_along_axis(numbers, (count + width - 2)[:, None], axis=1) if width > 1 else at
    same = jnp.take_along_axis(numbers, at, axis=1) == newest
    return y, jnp.where(same[..., None], jnp.take_along_axis(extended, at[..., None], axis=1), 0)


def _permute(x: Array, order: Array) -> Array:
    """x [B, T, D] in another order along T; as indices are unique its gradient, a scatter, is deterministic."""
    return jax.vmap(lambda row, at: row.at[at].get(mode="promise_in_bounds", unique_indices=True))(x, order)


def short_convolution_step(state: Array, x: Array, weight: Array, bias: Array | None = None) -> tuple[Array, Array]:
    """One token of `short_convolution`: x [B, D]; returns output [B, D] and the new history."""
    y, state = short_convolution(x[:, None], weight, bias, initial_state=state)
    return y[:, 0], state
