"""The mixer layers: projections, gates and norms around the pure mixers, each as its paper defines it.

Every layer maps x [B, T, D] to the same shape in its compute dtype:
    y, state = layer(x, state=None, segment_ids=None, initial_segment_id=None)
with `layer.init_state(batch, capacity)` the state that decoding starts from. Parameters are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from linattn_jax import gates
from linattn_jax.layers.common import (
    RMSNorm,
    ShortConvolution,
    check_call,
    fan_in_uniform,
    heads,
    linear,
    mask_padding,
    merge_heads,
    rotary,
)
from linattn_jax.mixers.chunking import find_segments
from linattn_jax.mixers.delta import delta_rule, gated_delta_rule, kaczmarz
from linattn_jax.mixers.gla import gla
from linattn_jax.mixers.linear import linear_attention
from linattn_jax.mixers.softmax import KVCache, softmax_attention, softmax_attention_init
from linattn_jax.mixers.state import MatrixState, NormalizedState, matrix_init, normalized_init, serializable
from linattn_jax.types import Array


@serializable
class LayerState(NamedTuple):
    """What a layer with a short convolution carries: its last inputs [B, W - 1, channels] and the mixer's state."""

    convolution: Array
    memory: MatrixState


class _DeltaLayer(nnx.Module):
    """q, k, v = SiLU(conv(W x)); delta rule; per-head RMSNorm, gated by SiLU(W_g x) if `gated_output`; W_o."""

    decay = False
    gated_output = False
    strength_bias = False

    def __init__(
        self,
        width: int,
        num_heads: int,
        key_size: int,
        value_size: int,
        *,
        rngs: nnx.Rngs,
        key_heads: int | None = None,
        conv_width: int = 4,
        norm_eps: float = 1e-5,
        init: Callable[..., Array] = fan_in_uniform,
        dtype: Any = jnp.float32,
        implementation: str | None = None,
        chunk_size: int | None = None,
    ):
        self.num_heads, self.key_heads = num_heads, key_heads or num_heads
        self.key_size, self.value_size = key_size, value_size
        self.implementation, self.chunk_size = implementation, chunk_size
        keys, values = self.key_heads * key_size, num_heads * value_size
        project = partial(linear, rngs=rngs, dtype=dtype, init=init)
        self.query, self.key, self.value = project(width, keys), project(width, keys), project(width, values)
        self.convolution = ShortConvolution(2 * keys + values, conv_width, rngs=rngs, init=init)
        self.strength = project(width, num_heads, bias=self.strength_bias)
        if self.decay:
            self.log_decay = project(width, num_heads)
            self.a_log = nnx.Param(gates.a_log_init(rngs.params(), num_heads))
            self.dt_bias = nnx.Param(gates.dt_bias_init(rngs.params(), num_heads))
        if self.gated_output:
            self.gate = project(width, values)
        self.norm = RMSNorm(value_size, eps=norm_eps)
        self.output = project(values, width)

    def mix(self, q: Array, k: Array, v: Array, x: Array, **options: Any) -> tuple[Array, MatrixState]:
        """Calls the mixer with the gates that this layer makes of its input x."""
        raise NotImplementedError

    def decays(self, x: Array) -> Array:
        return gates.mamba_log_decay(self.log_decay(x), self.a_log[...], self.dt_bias[...])

    def __call__(
        self,
        x: Array,
        *,
        state: LayerState | None = None,
        segment_ids: Array | None = None,
        initial_segment_id: Array | None = None,
    ) -> tuple[Array, LayerState]:
        check_call(self, x, state)
        x = mask_padding(x, segment_ids)
        packing = {"segment_ids": segment_ids, "initial_segment_id": initial_segment_id}
        keys = self.key_heads * self.key_size
        qkv = jnp.concatenate([self.query(x), self.key(x), self.value(x)], axis=-1)
        qkv, history = self.convolution(qkv, state=None if state is None else state.convolution, **packing)
        q, k, v = jnp.split(qkv, [keys, 2 * keys], axis=-1)
        y, memory = self.mix(
            heads(q, self.key_heads),
            heads(k, self.key_heads),
            heads(v, self.num_heads),
            x,
            initial_state=None if state is None else state.memory,
            **packing,
            implementation=self.implementation,
            chunk_size=self.chunk_size,
        )
        y = self.norm(y)
        if self.gated_output:
            y = y * jax.nn.silu(heads(self.gate(x), self.num_heads))
        return self.output(merge_heads(y)), LayerState(history, memory)

    def init_state(self, batch: int, capacity: int | None = None) -> LayerState:
        """The empty state; it does not grow, so `capacity` is not used."""
        del capacity
        memory = matrix_init(batch, self.num_heads, self.key_size, self.value_size)
        return LayerState(self.convolution.init_state(batch), memory)


class KLA(_DeltaLayer):
    """Kaczmarz linear attention in the form the paper reports (Zou, Ren and Liu 2026).

    q is L2-normalised, k is not; eta = sigmoid(W_b x + b_b); Mamba's decay; gated output norm.
    """

    decay = gated_output = strength_bias = True

    def mix(self, q: Array, k: Array, v: Array, x: Array, **options: Any) -> tuple[Array, MatrixState]:
        eta = gates.sigmoid_strength(self.strength(x))
        return kaczmarz(q, k, v, self.decays(x), eta, normalize_q=True, **options)


class GatedDeltaNet(_DeltaLayer):
    """Gated DeltaNet (Yang, Kautz and Hatamizadeh 2024): q and k L2-normalised, beta = sigmoid(W_b x), no bias."""

    decay = gated_output = True

    def mix(self, q: Array, k: Array, v: Array, x: Array, **options: Any) -> tuple[Array, MatrixState]:
        beta = gates.sigmoid_strength(self.strength(x))
        return gated_delta_rule(q, k, v, self.decays(x), beta, normalize_q=True, normalize_k=True, **options)


class DeltaNet(_DeltaLayer):
    """DeltaNet (Yang et al. 2024): q and k L2-normalised, beta = sigmoid(W_b x), no decay, no output gate."""

    def mix(self, q: Array, k: Array, v: Array, x: Array, **options: Any) -> tuple[Array, MatrixState]:
        beta = gates.sigmoid_strength(self.strength(x))
        return delta_rule(q, k, v, beta, normalize_q=True, normalize_k=True, **options)


class GLA(nnx.Module):
    """Gated linear attention (Yang et al. 2023): no convolution; per-channel decay logsigmoid(W_2 W_1 x + b) / 16.

    W_1 maps D to 16 channels. The output is a per-head RMSNorm times SiLU(W_g x), then W_o.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        key_size: int,
        value_size: int,
        *,
        rngs: nnx.Rngs,
        key_heads: int | None = None,
        decay_rank: int = 16,
        norm_eps: float = 1e-5,
        init: Callable[..., Array] = fan_in_uniform,
        dtype: Any = jnp.float32,
        implementation: str | None = None,
        chunk_size: int | None = None,
    ):
        self.num_heads, self.key_heads = num_heads, key_heads or num_heads
        self.key_size, self.value_size = key_size, value_size
        self.implementation, self.chunk_size = implementation, chunk_size
        keys, values = self.key_heads * key_size, num_heads * value_size
        project = partial(linear, rngs=rngs, dtype=dtype, init=init)
        self.query, self.key, self.value = project(width, keys), project(width, keys), project(width, values)
        self.decay_down, self.decay_up = project(width, decay_rank), project(decay_rank, keys, bias=True)
        self.gate = project(width, values)
        self.norm = RMSNorm(value_size, eps=norm_eps)
        self.output = project(values, width)

    def __call__(
        self,
        x: Array,
        *,
        state: MatrixState | None = None,
        segment_ids: Array | None = None,
        initial_segment_id: Array | None = None,
    ) -> tuple[Array, MatrixState]:
        check_call(self, x, state)
        x = mask_padding(x, segment_ids)
        log_decay = gates.logsigmoid_log_decay(heads(self.decay_up(self.decay_down(x)), self.key_heads))
        y, state = gla(
            heads(self.query(x), self.key_heads),
            heads(self.key(x), self.key_heads),
            heads(self.value(x), self.num_heads),
            log_decay,
            initial_state=state,
            segment_ids=segment_ids,
            initial_segment_id=initial_segment_id,
            implementation=self.implementation,
            chunk_size=self.chunk_size,
        )
        y = self.norm(y) * jax.nn.silu(heads(self.gate(x), self.num_heads))
        return self.output(merge_heads(y)), state

    def init_state(self, batch: int, capacity: int | None = None) -> MatrixState:
        """The empty state; it does not grow, so `capacity` is not used."""
        del capacity
        return matrix_init(batch, self.num_heads, self.key_size, self.value_size)


class LinearAttention(nnx.Module):
    """Linear attention (Katharopoulos et al. 2020): features ELU + 1 of q and k, normalised reads, no output norm."""

    def __init__(
        self,
        width: int,
        num_heads: int,
        key_size: int,
        value_size: int,
        *,
        rngs: nnx.Rngs,
        key_heads: int | None = None,
        init: Callable[..., Array] = fan_in_uniform,
        dtype: Any = jnp.float32,
        implementation: str | None = None,
        chunk_size: int | None = None,
        norm_eps: float = 1e-5,
    ):
        del norm_eps  # there is no norm; accepted because every layer takes it
        self.num_heads, self.key_heads = num_heads, key_heads or num_heads
        self.key_size, self.value_size = key_size, value_size
        self.implementation, self.chunk_size = implementation, chunk_size
        keys, values = self.key_heads * key_size, num_heads * value_size
        project = partial(linear, rngs=rngs, dtype=dtype, init=init)
        self.query, self.key, self.value = project(width, keys), project(width, keys), project(width, values)
        self.output = project(values, width)

    def __call__(
        self,
        x: Array,
        *,
        state: NormalizedState | None = None,
        segment_ids: Array | None = None,
        initial_segment_id: Array | None = None,
    ) -> tuple[Array, NormalizedState]:
        check_call(self, x, state)
        x = mask_padding(x, segment_ids)

        def feature(y: Array) -> Array:
            return jax.nn.elu(heads(y, self.key_heads)) + 1

        y, state = linear_attention(
            feature(self.query(x)),
            feature(self.key(x)),
            heads(self.value(x), self.num_heads),
            normalize_output=True,
            initial_state=state,
            segment_ids=segment_ids,
            initial_segment_id=initial_segment_id,
            implementation=self.implementation,
            chunk_size=self.chunk_size,
        )
        return self.output(merge_heads(y)), state

    def init_state(self, batch: int, capacity: int | None = None) -> NormalizedState:
        """The empty state; it does not grow, so `capacity` is not used."""
        del capacity
        return normalized_init(batch, self.num_heads, self.key_size, self.value_size, key_heads=self.key_heads)


class SoftmaxAttention(nnx.Module):
    """Causal softmax attention with rotary positions, grouped queries and optional RMSNorm of q and k (`qk_norm`).

    `key_heads` is the number of key and value heads. Positions count from the start of each document.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        key_size: int,
        value_size: int,
        *,
        rngs: nnx.Rngs,
        key_heads: int | None = None,
        theta: float = 1e4,
        window: int | None = None,
        qk_norm: bool = False,
        norm_eps: float = 1e-5,
        init: Callable[..., Array] = fan_in_uniform,
        dtype: Any = jnp.float32,
        implementation: str | None = None,
        chunk_size: int | None = None,
    ):
        del chunk_size  # there are no chunks; accepted because every layer takes it
        if key_size % 2:
            raise ValueError(f"key_size: {key_size} given, wanted an even number, as rotary positions turn pairs.")
        self.num_heads, self.key_heads = num_heads, key_heads or num_heads
        self.key_size, self.value_size, self.theta, self.window = key_size, value_size, theta, window
        self.implementation = implementation
        project = partial(linear, rngs=rngs, dtype=dtype, init=init)
        self.query = project(width, num_heads * key_size)
        self.key, self.value = project(width, self.key_heads * key_size), project(width, self.key_heads * value_size)
        if qk_norm:
            self.query_norm, self.key_norm = RMSNorm(key_size, eps=norm_eps), RMSNorm(key_size, eps=norm_eps)
        self.qk_norm = qk_norm
        self.output = project(num_heads * value_size, width)
        self.dtype = dtype

    def __call__(
        self,
        x: Array,
        *,
        state: KVCache | None = None,
        segment_ids: Array | None = None,
        initial_segment_id: Array | None = None,
    ) -> tuple[Array, KVCache | None]:
        check_call(self, x, state)
        x = mask_padding(x, segment_ids)
        q, k, v = heads(self.query(x), self.num_heads), heads(self.key(x), self.key_heads), self.value(x)
        if self.qk_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        position = self._positions(x.shape[0], x.shape[1], state, segment_ids, initial_segment_id)
        q, k = rotary(q, position, self.theta), rotary(k, position, self.theta)
        y, state = softmax_attention(
            q,
            k,
            heads(v, self.key_heads),
            window=self.window,
            initial_state=state,
            segment_ids=segment_ids,
            initial_segment_id=initial_segment_id,
            implementation=self.implementation,
        )
        return self.output(merge_heads(y)), state

    def _positions(
        self, batch: int, length: int, state: KVCache | None, segment_ids: Array | None, initial: Array | None
    ) -> Array:
        """int32 [B, T]: how many real tokens of its document stand before each token, the cache's included."""
        before = jnp.zeros((batch, 1), jnp.int32) if state is None else state.length[:, None]
        segments = find_segments(segment_ids, initial, batch, length)
        if segments is None:
            return before + jnp.arange(length, dtype=jnp.int32)
        rank = jnp.cumsum(segments.valid.astype(jnp.int32), axis=1) - 1 + before
        start = jax.lax.cummax(jnp.where(segments.reset, rank, 0), axis=1)
        return rank - start

    def init_state(self, batch: int, capacity: int | None = None) -> KVCache:
        """An empty cache for `capacity` tokens in the compute dtype."""
        if capacity is None:
            raise ValueError("capacity: None given, wanted the number of tokens that softmax attention must cache.")
        return softmax_attention_init(
            batch, self.key_heads, self.key_size, self.value_size, capacity=capacity, dtype=self.dtype
        )


# Names in configurations. A layer whose state grows with the text is listed in GROWING.
LAYERS: dict[str, type[nnx.Module]] = {
    "softmax": SoftmaxAttention,
    "linear": LinearAttention,
    "gla": GLA,
    "deltanet": DeltaNet,
    "gdn": GatedDeltaNet,
    "kla": KLA,
}
GROWING = frozenset({"softmax"})

# key_size / head size and value_size / head size where a paper departs from 1.
EXPANSION: dict[str, tuple[float, float]] = {"gla": (0.5, 1.0)}
