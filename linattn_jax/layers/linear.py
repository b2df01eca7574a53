"""The layers over linear attention: plain, gated (GLA), retention and Mamba-2, and the KLA paper's GLA."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from linattn_jax import gates
from linattn_jax.layers.common import (
    LayerState,
    Make,
    MixerLayer,
    document_length,
    elu_feature,
    heads,
    merge_heads,
    positions,
    rotary,
)
from linattn_jax.mixers.delta import l2_normalize
from linattn_jax.mixers.gla import gla
from linattn_jax.mixers.linear import linear_attention, simple_gla
from linattn_jax.mixers.state import MatrixState, NormalizedState, matrix_init, normalized_init, serializable
from linattn_jax.types import Array


@serializable
class PositionedState(NamedTuple):
    """What a layer with rotary positions carries: the real tokens of its document, int32 [B], and the mixer's state."""

    length: Array
    memory: Any


def turned(
    layer: Retention | GLAOfKLA, x: Array, state: PositionedState | None, packing: dict[str, Any]
) -> tuple[Array, Array, Array]:
    """q and k [B, T, Hk, K] of x, turned by their positions, and how long the last document is afterwards."""
    position = positions(x, None if state is None else state.length, **packing)
    q, k = (rotary(heads(part(x), layer.key_heads), position, layer.theta) for part in (layer.query, layer.key))
    return q, k, document_length(position, None if state is None else state.length, packing["segment_ids"])


class LinearAttention(MixerLayer):
    """Linear attention (Katharopoulos et al. 2020): features ELU + 1 of q and k, normalised reads, no output norm."""

    def build(self, make: Make) -> None:
        self.build_projections(make)
        self.output = make.linear(self.values, self.width)

    def forward(
        self, x: Array, state: NormalizedState | None, packing: dict[str, Any]
    ) -> tuple[Array, NormalizedState]:
        y, state = linear_attention(
            elu_feature(heads(self.query(x), self.key_heads)),
            elu_feature(heads(self.key(x), self.key_heads)),
            heads(self.value(x), self.num_heads),
            normalize_output=True,
            initial_state=state,
            **packing,
            **self.options,
        )
        return self.output(merge_heads(y)), state

    def init_state(self, batch: int, capacity: int | None = None) -> NormalizedState:
        """The empty state; it does not grow, so `capacity` is not used."""
        del capacity
        return normalized_init(batch, self.num_heads, self.key_size, self.value_size, key_heads=self.key_heads)


class GLA(MixerLayer):
    """Gated linear attention (Yang et al. 2023): no convolution; per-channel decay logsigmoid(W_2 W_1 x + b) / 16.

    W_1 maps D to 16 channels. The output is a per-head RMSNorm times SiLU(W_g x), then W_o.
    """

    def build(self, make: Make, *, decay_rank: int = 16) -> None:
        self.build_projections(make)
        self.decay_down = make.linear(self.width, decay_rank)
        self.decay_up = make.linear(decay_rank, self.keys, bias=True)
        self.gate = make.linear(self.width, self.values)
        self.norm = make.norm(self.value_size)
        self.output = make.linear(self.values, self.width)

    def mix(self, q: Array, k: Array, v: Array, log_decay: Array, **options: Any) -> tuple[Array, Any]:
        """Calls the mixer."""
        return gla(q, k, v, log_decay, **options)

    def forward(self, x: Array, state: MatrixState | None, packing: dict[str, Any]) -> tuple[Array, MatrixState]:
        log_decay = gates.logsigmoid_log_decay(heads(self.decay_up(self.decay_down(x)), self.key_heads))
        y, state = self.mix(
            heads(self.query(x), self.key_heads),
            heads(self.key(x), self.key_heads),
            heads(self.value(x), self.num_heads),
            log_decay,
            initial_state=state,
            **packing,
            **self.options,
        )
        y = self.norm(y) * jax.nn.silu(heads(self.gate(x), self.num_heads))
        return self.output(merge_heads(y)), state

    def init_state(self, batch: int, capacity: int | None = None) -> MatrixState:
        """The empty state; it does not grow, so `capacity` is not used."""
        del capacity
        return matrix_init(batch, self.num_heads, self.key_size, self.value_size)


class Retention(MixerLayer):
    """Retention (Sun et al. 2023): rotary q and k, decay 1 - 2^{-5-h} of head h, per-head norm times SiLU(W_g x)."""

    def build(self, make: Make, *, theta: float = 1e4) -> None:
        self.only_even_keys()
        self.theta = theta
        self.build_projections(make)
        self.gate = make.linear(self.width, self.values)
        self.norm = make.norm(self.value_size)
        self.output = make.linear(self.values, self.width)

    def forward(self, x: Array, state: PositionedState | None, packing: dict[str, Any]) -> tuple[Array, Any]:
        q, k, length = turned(self, x, state, packing)
        log_decay = jnp.log1p(-(2.0 ** (-5.0 - jnp.arange(self.num_heads))))
        y, memory = simple_gla(
            q,
            k,
            heads(self.value(x), self.num_heads),
            jnp.broadcast_to(log_decay, (*x.shape[:2], self.num_heads)),
            initial_state=None if state is None else state.memory,
            **packing,
            **self.options,
        )
        y = self.norm(y) * jax.nn.silu(heads(self.gate(x), self.num_heads))
        return self.output(merge_heads(y)), PositionedState(length, memory)

    def init_state(self, batch: int, capacity: int | None = None) -> PositionedState:
        """The empty state; it does not grow, so `capacity` is not used."""
        del capacity
        memory = matrix_init(batch, self.num_heads, self.key_size, self.value_size)
        return PositionedState(jnp.zeros((batch,), jnp.int32), memory)


class GLAOfKLA(MixerLayer):
    """What the KLA paper's code calls GLA: one decay per head, rotary and L2-normalised q and k.

    log_decay = logsigmoid(W_a x) / 16. No convolution, no gate or norm of the output. The published layer is `GLA`.
    """

    def build(self, make: Make, *, theta: float = 1e4) -> None:
        self.only_even_keys()
        self.theta = theta
        self.build_projections(make)
        self.log_decay = make.linear(self.width, self.num_heads)
        self.output = make.linear(self.values, self.width)

    def forward(self, x: Array, state: PositionedState | None, packing: dict[str, Any]) -> tuple[Array, Any]:
        q, k, length = turned(self, x, state, packing)
        y, memory = simple_gla(
            l2_normalize(q),
            l2_normalize(k),
            heads(self.value(x), self.num_heads),
            gates.logsigmoid_log_decay(self.log_decay(x)),
            initial_state=None if state is None else state.memory,
            **packing,
            **self.options,
        )
        return self.output(merge_heads(y)), PositionedState(length, memory)

    def init_state(self, batch: int, capacity: int | None = None) -> PositionedState:
        """The empty state; it does not grow, so `capacity` is not used."""
        del capacity
        memory = matrix_init(batch, self.num_heads, self.key_size, self.value_size)
        return PositionedState(jnp.zeros((batch,), jnp.int32), memory)


class Mamba2(MixerLayer):
    """Mamba-2 (Dao and Gu 2024): x, B, C = SiLU(conv(W x) + b); dt = softplus(W_dt x + dt_bias); SSD; gated norm; W_o.

    The state matrix is B (dt x)^T with decay -exp(A_log) dt, read with C, plus D x. B and C, of key_size channels, have
    one group for all heads unless `key_heads` says more. `head_dim`, where it divides the num_heads * value_size inner
    channels, cuts them into heads; the norm is over all of them, after SiLU(W_z x) has multiplied.
    """

    groups = 1

    def build(self, make: Make, *, head_dim: int = 64, conv_width: int = 4) -> None:
        inner = self.values
        size = head_dim if inner % head_dim == 0 else self.value_size
        self.num_heads, self.value_size = inner // size, size
        if self.num_heads % self.key_heads:
            wanted = f"a divisor of the {self.num_heads} heads of {size} channels"
            raise ValueError(f"key_heads: {self.key_heads} given, wanted {wanted}.")
        self.value = make.linear(self.width, inner)
        self.key, self.query = make.linear(self.width, self.keys), make.linear(self.width, self.keys)
        self.convolution = make.convolution(2 * self.keys + inner, conv_width, bias=True)
        self.step = make.linear(self.width, self.num_heads)
        self.a_log = nnx.Param(gates.a_log_init(make.rngs.params(), self.num_heads, low=1.0))
        self.dt_bias = nnx.Param(gates.dt_bias_init(make.rngs.params(), self.num_heads))
        self.skip = nnx.Param(jnp.ones((self.num_heads,), jnp.float32))
        self.gate = make.linear(self.width, inner)
        self.norm = make.norm(inner)
        self.output = make.linear(inner, self.width)

    def mix(self, q: Array, k: Array, v: Array, log_decay: Array, **options: Any) -> tuple[Array, Any]:
        """Calls the mixer."""
        return simple_gla(q, k, v, log_decay, scale=1.0, **options)

    def forward(self, x: Array, state: LayerState | None, packing: dict[str, Any]) -> tuple[Array, LayerState]:
        parts = jnp.concatenate([self.query(x), self.key(x), self.value(x)], axis=-1)
        parts, history = self.convolution(parts, state=None if state is None else state.convolution, **packing)
        q, k, v = jnp.split(parts, [self.keys, 2 * self.keys], axis=-1)
        v = heads(v, self.num_heads)
        dt = jax.nn.softplus(self.step(x).astype(jnp.float32) + self.dt_bias[...])
        y, memory = self.mix(
            heads(q, self.key_heads),
            heads(k, self.key_heads),
            (dt[..., None] * v).astype(v.dtype),
            -jnp.exp(self.a_log[...]) * dt,
            initial_state=None if state is None else state.memory,
            **packing,
            **self.options,
        )
        y = y + self.skip[...][:, None].astype(v.dtype) * v
        return self.output(self.norm(merge_heads(y) * jax.nn.silu(self.gate(x)))), LayerState(history, memory)

    def init_state(self, batch: int, capacity: int | None = None) -> LayerState:
        """The empty state; it does not grow, so `capacity` is not used."""
        del capacity
        memory = matrix_init(batch, self.num_heads, self.key_size, self.value_size)
        return LayerState(self.convolution.init_state(batch), memory)
