"""What the layers share: projections, initialisation, the short convolution's parameters, norms, rotary positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from linattn_jax.mixers.convolution import short_convolution, short_convolution_init
from linattn_jax.mixers.softmax import KVCache
from linattn_jax.types import Array, check_float, check_integer, check_shape, check_state


def fan_in_uniform(key: Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
    """U(-1/sqrt(fan_in), 1/sqrt(fan_in)) for a kernel [fan_in, fan_out]: PyTorch's default, KLA's initialisation."""
    bound = shape[0] ** -0.5
    return jax.random.uniform(key, shape, dtype, -bound, bound)


def normal_002(key: Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
    """N(0, 0.02^2), the initialisation of the published GLA, DeltaNet and Gated DeltaNet models."""
    return 0.02 * jax.random.normal(key, shape, dtype)


INITIALIZERS: dict[str, Callable[..., Array]] = {"fan_in_uniform": fan_in_uniform, "normal_002": normal_002}


def linear(
    inputs: int, outputs: int, *, rngs: nnx.Rngs, dtype: Any, init: Callable[..., Array], bias: bool = False
) -> nnx.Linear:
    """A projection with float32 parameters (bias 0) computing in `dtype`."""
    return nnx.Linear(inputs, outputs, use_bias=bias, dtype=dtype, param_dtype=jnp.float32, kernel_init=init, rngs=rngs)


def heads(x: Array, count: int) -> Array:
    """[B, T, count * size] to [B, T, count, size]."""
    return x.reshape(*x.shape[:-1], count, x.shape[-1] // count)


def merge_heads(x: Array) -> Array:
    """[B, T, count, size] to [B, T, count * size]."""
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def mask_padding(x: Array, segment_ids: Array | None) -> Array:
    """x [B, T, D] with zeros on padding (negative ids).

    The mixers never read padding, but projections do, and in the gradient of their kernels 0 * NaN is NaN.
    """
    if segment_ids is None:
        return x
    check_integer("segment_ids", segment_ids)
    check_shape("segment_ids", segment_ids, "B T", {"B": x.shape[0], "T": x.shape[1]})
    return jnp.where((segment_ids >= 0)[..., None], x, jnp.zeros((), x.dtype))


def check_call(layer: Any, x: Array, state: Any) -> None:
    """Checks what every layer is called with: x [B, T, D] and None or a state like those of its `init_state`."""
    check_float("x", x)
    width = layer.query.in_features
    if x.ndim != 3 or x.shape[2] != width:
        raise ValueError(f"x: shape {tuple(x.shape)} given, wanted [B, T, D] with D = {width}.")
    if state is not None:
        capacity = state.k.shape[1] if isinstance(state, KVCache) and jnp.ndim(state.k) > 1 else 1
        check_state(state, jax.eval_shape(lambda: layer.init_state(x.shape[0], capacity)), "state")


class ShortConvolution(nnx.Module):
    """Depthwise causal convolution of `width` taps without bias, then SiLU; weight [width, channels]."""

    def __init__(self, channels: int, width: int, *, rngs: nnx.Rngs, init: Callable[..., Array] = fan_in_uniform):
        self.weight = nnx.Param(init(rngs.params(), (width, channels)))

    def __call__(
        self, x: Array, *, state: Array | None, segment_ids: Array | None, initial_segment_id: Array | None
    ) -> tuple[Array, Array]:
        y, state = short_convolution(
            x, self.weight[...], initial_state=state, segment_ids=segment_ids, initial_segment_id=initial_segment_id
        )
        return jax.nn.silu(y), state

    def init_state(self, batch: int) -> Array:
        """An empty history."""
        width, channels = self.weight.shape
        return short_convolution_init(batch, channels, width)


class RMSNorm(nnx.Module):
    """x / sqrt(mean x^2 + eps) * scale over the last axis, computed in float32, returned in the dtype of x."""

    def __init__(self, size: int, *, eps: float):
        self.scale = nnx.Param(jnp.ones((size,), jnp.float32))
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * self.scale[...]).astype(x.dtype)


def rotary(x: Array, position: Array, theta: float) -> Array:
    """Rotary positions (Su et al. 2021): x [B, T, heads, size], size even, turned by position int32 [B, T]."""
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = position[..., None, None].astype(jnp.float32) * frequency
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
