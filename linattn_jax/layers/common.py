"""What the layers share: projections, initialisation, the short convolution's parameters, norms, rotary positions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from linattn_jax.mixers.chunking import find_segments
from linattn_jax.mixers.convolution import short_convolution, short_convolution_init
from linattn_jax.mixers.softmax import KVCache
from linattn_jax.mixers.state import serializable
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


class ShortConvolution(nnx.Module):
    """Depthwise causal convolution of `width` taps, then SiLU; weight [width, channels], bias [channels] if asked for.

    `silu_from`: the first channel that SiLU is applied to.
    """

    def __init__(
        self,
        channels: int,
        width: int,
        *,
        rngs: nnx.Rngs,
        init: Callable[..., Array] = fan_in_uniform,
        bias: bool = False,
        silu_from: int = 0,
    ):
        self.weight = nnx.Param(init(rngs.params(), (width, channels)))
        self.bias = nnx.Param(jnp.zeros((channels,), jnp.float32)) if bias else None
        self.silu_from = silu_from

    def __call__(
        self, x: Array, *, state: Array | None, segment_ids: Array | None, initial_segment_id: Array | None
    ) -> tuple[Array, Array]:
        y, state = short_convolution(
            x,
            self.weight[...],
            None if self.bias is None else self.bias[...],
            initial_state=state,
            segment_ids=segment_ids,
            initial_segment_id=initial_segment_id,
        )
        plain, active = y[..., : self.silu_from], y[..., self.silu_from :]
        return jnp.concatenate([plain, jax.nn.silu(active)], axis=-1), state

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


def elu_feature(x: Array) -> Array:
    """ELU(x) + 1, the positive features of linear attention."""
    return jax.nn.elu(x) + 1


def rotary(x: Array, position: Array, theta: float) -> Array:
    """Rotary positions (Su et al. 2021): x [B, T, heads, size], size even, turned by position int32 [B, T]."""
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = position[..., None, None].astype(jnp.float32) * frequency
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def positions(x: Array, before: Array | None, segment_ids: Array | None, initial_segment_id: Array | None) -> Array:
    """int32 [B, T]: how many real tokens of its document stand before each token of x, `before` [B] of them carried."""
    batch, length = x.shape[:2]
    start = jnp.zeros((batch, 1), jnp.int32) if before is None else before[:, None]
    segments = find_segments(segment_ids, initial_segment_id, batch, length)
    if segments is None:
        return start + jnp.arange(length, dtype=jnp.int32)
    rank = jnp.cumsum(segments.valid.astype(jnp.int32), axis=1) - 1 + start
    return rank - jax.lax.cummax(jnp.where(segments.reset, rank, 0), axis=1)


def document_length(position: Array, before: Array | None, segment_ids: Array | None) -> Array:
    """int32 [B]: real tokens of the last document, from the positions [B, T] of all and the number carried before."""
    before = jnp.zeros(position.shape[:1], jnp.int32) if before is None else before
    if position.shape[1] == 0:
        return before
    if segment_ids is None:
        return position[:, -1] + 1
    valid = segment_ids >= 0
    last = position.shape[1] - 1 - jnp.argmax(valid[:, ::-1], axis=1)
    length = jnp.take_along_axis(position, last[:, None], axis=1)[:, 0] + 1
    return jnp.where(jnp.any(valid, axis=1), length, before)


@serializable
class LayerState(NamedTuple):
    """What a layer with a short convolution carries: its last inputs [B, W - 1, channels] and the mixer's state."""

    convolution: Array
    memory: Any


@dataclass(frozen=True)
class Make:
    """How a layer makes its parts: where random numbers come from, the kernels' initialisation, the compute dtype."""

    rngs: nnx.Rngs
    init: Callable[..., Array]
    dtype: Any
    norm_eps: float

    def linear(self, inputs: int, outputs: int, bias: bool = False) -> nnx.Linear:
        return linear(inputs, outputs, rngs=self.rngs, dtype=self.dtype, init=self.init, bias=bias)

    def convolution(self, channels: int, width: int, **options: Any) -> ShortConvolution:
        return ShortConvolution(channels, width, rngs=self.rngs, init=self.init, **options)

    def norm(self, size: int) -> RMSNorm:
        return RMSNorm(size, eps=self.norm_eps)

    def normal(self, *shape: int, scale: float = 1.0) -> nnx.Param:
        return nnx.Param(scale * jax.random.normal(self.rngs.params(), shape, jnp.float32))

    def complex_normal(self, *shape: int, scale: float = 1.0) -> tuple[nnx.Param, nnx.Param]:
        """Real and imaginary parts of complex numbers with mean square scale^2."""
        return self.normal(*shape, scale=scale * 0.5**0.5), self.normal(*shape, scale=scale * 0.5**0.5)


class MixerLayer(nnx.Module):
    """A mixer layer: x [B, T, D] to y of the same shape in the compute dtype, and its state to the new one.

    Args:
        width: D.
        num_heads, key_size, value_size: H, K and V of the mixer.
        rngs: where the initial parameters come from.
        key_heads: heads of q and k; default num_heads, or what the layer's `groups` says.
        norm_eps: of the norms within.
        init: of kernels, (key, shape) to float32.
        dtype: of activations; parameters are float32.
        implementation, chunk_size: given to the mixer.
        options: the layer's own, as its `build` names them.
    """

    groups: int | None = None

    def __init__(
        self,
        width: int,
        num_heads: int,
        key_size: int,
        value_size: int,
        *,
        rngs: nnx.Rngs,
        key_heads: int | None = None,
        norm_eps: float = 1e-5,
        init: Callable[..., Array] = fan_in_uniform,
        dtype: Any = jnp.float32,
        implementation: str | None = None,
        chunk_size: int | None = None,
        **options: Any,
    ):
        self.width, self.num_heads, self.key_heads = width, num_heads, key_heads or self.groups or num_heads
        self.key_size, self.value_size, self.dtype = key_size, value_size, dtype
        self.implementation, self.chunk_size = implementation, chunk_size
        self.build(Make(rngs, init, dtype, norm_eps), **options)

    def build(self, make: Make) -> None:
        """Makes the parts."""
        raise NotImplementedError

    @classmethod
    def option_types(cls) -> dict[str, Any]:
        """The layer's own options and their annotations: of its `build`, and of what that passes `**options` to."""
        types: dict[str, Any] = {}
        for owner in cls.__mro__:
            if "build" not in vars(owner):
                continue
            parameters = inspect.signature(vars(owner)["build"], eval_str=True).parameters.values()
            types = {p.name: p.annotation for p in parameters if p.kind is p.KEYWORD_ONLY} | types
            if all(p.kind is not p.VAR_KEYWORD for p in parameters):
                break
        return types

    @property
    def keys(self) -> int:
        """Channels of all keys."""
        return self.key_heads * self.key_size

    @property
    def values(self) -> int:
        """Channels of all values."""
        return self.num_heads * self.value_size

    def build_projections(self, make: Make) -> None:
        """The projections of x to q, k and v."""
        width = self.width
        self.query, self.key, self.value = (make.linear(width, n) for n in (self.keys, self.keys, self.values))

    @property
    def options(self) -> dict[str, Any]:
        """What the mixer is called with."""
        return {"implementation": self.implementation, "chunk_size": self.chunk_size}

    def __call__(
        self,
        x: Array,
        *,
        state: Any = None,
        segment_ids: Array | None = None,
        initial_segment_id: Array | None = None,
    ) -> tuple[Array, Any]:
        check_float("x", x)
        if x.ndim != 3 or x.shape[2] != self.width:
            raise ValueError(f"x: shape {tuple(x.shape)} given, wanted [B, T, D] with D = {self.width}.")
        if state is not None:
            capacity = state.k.shape[1] if isinstance(state, KVCache) and jnp.ndim(state.k) > 1 else 1
            check_state(state, jax.eval_shape(lambda: self.init_state(x.shape[0], capacity)), "state")
        packing = {"segment_ids": segment_ids, "initial_segment_id": initial_segment_id}
        y, state = self.forward(mask_padding(x, segment_ids), state, packing)
        return mask_padding(y, segment_ids), state

    def forward(self, x: Array, state: Any, packing: dict[str, Any]) -> tuple[Array, Any]:
        """y and the new state; `packing` holds the mixers' arguments segment_ids and initial_segment_id."""
        raise NotImplementedError

    def init_state(self, batch: int, capacity: int | None = None) -> Any:
        """The empty state for `batch` rows; `capacity` is for layers whose state grows with the text."""
        raise NotImplementedError

    def only_even_keys(self) -> None:
        """Raises ValueError where keys cannot be turned by rotary positions."""
        if self.key_size % 2:
            raise ValueError(f"key_size: {self.key_size} given, wanted an even number, as rotary positions turn pairs.")

    def only_value_heads(self) -> None:
        """Raises ValueError where fewer key heads than value heads are asked of a mixer that has none."""
        if self.key_heads != self.num_heads:
            name, wanted = type(self).__name__, self.num_heads
            raise ValueError(f"key_heads: {self.key_heads} given, wanted {wanted}, as {name} has no grouped heads.")
