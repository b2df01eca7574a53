"""The delta-rule layers: Gated DeltaNet and DeltaNet, and what the papers compare with under their names."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from linattn_jax import gates
from linattn_jax.layers.common import (
    LayerState,
    Make,
    MixerLayer,
    elu_feature,
    heads,
    merge_heads,
)
from linattn_jax.mixers.delta import delta_rule, gated_delta_rule
from linattn_jax.mixers.state import MatrixState, matrix_init
from linattn_jax.types import Array


class DeltaLayer(MixerLayer):
    """q, k, v = SiLU(conv(W x)); delta rule; per-head RMSNorm, gated by SiLU(W_g x) if `gated_output`; W_o."""

    decay: str | None = None  # "mamba" or "logsigmoid"
    gated_output = False
    has_strength = True
    strength_bias = False
    silu_from = 0

    def build(self, make: Make, *, conv_width: int = 4) -> None:
        self.build_projections(make)
        self.convolution = make.convolution(2 * self.keys + self.values, conv_width, silu_from=self.silu_from)
        if self.has_strength:
            self.strength = make.linear(self.width, self.num_heads, bias=self.strength_bias)
        if self.decay:
            self.log_decay = make.linear(self.width, self.num_heads, bias=self.decay == "logsigmoid")
        if self.decay == "mamba":
            self.a_log = nnx.Param(gates.a_log_init(make.rngs.params(), self.num_heads))
            self.dt_bias = nnx.Param(gates.dt_bias_init(make.rngs.params(), self.num_heads))
        if self.gated_output:
            self.gate = make.linear(self.width, self.values)
        self.norm = make.norm(self.value_size)
        self.output = make.linear(self.values, self.width)

    def mix(self, q: Array, k: Array, v: Array, x: Array, **options: Any) -> tuple[Array, Any]:
        """Calls the mixer with the gates that this layer makes of its input x."""
        raise NotImplementedError

    def decays(self, x: Array) -> Array:
        if self.decay == "logsigmoid":
            return gates.logsigmoid_log_decay(self.log_decay(x))
        return gates.mamba_log_decay(self.log_decay(x), self.a_log[...], self.dt_bias[...])

    def forward(self, x: Array, state: LayerState | None, packing: dict[str, Any]) -> tuple[Array, LayerState]:
        qkv = jnp.concatenate([self.query(x), self.key(x), self.value(x)], axis=-1)
        qkv, history = self.convolution(qkv, state=None if state is None else state.convolution, **packing)
        q, k, v = jnp.split(qkv, [self.keys, 2 * self.keys], axis=-1)
        y, memory = self.mix(
            heads(q, self.key_heads),
            heads(k, self.key_heads),
            heads(v, self.num_heads),
            x,
            initial_state=None if state is None else state.memory,
            **packing,
            **self.options,
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


class GatedDeltaNet(DeltaLayer):
    """Gated DeltaNet (Yang, Kautz and Hatamizadeh 2024): q and k L2-normalised, beta = sigmoid(W_b x), no bias."""

    decay = "mamba"
    gated_output = True

    def mix(self, q: Array, k: Array, v: Array, x: Array, **options: Any) -> tuple[Array, Any]:
        beta = gates.sigmoid_strength(self.strength(x))
        return gated_delta_rule(q, k, v, self.decays(x), beta, normalize_q=True, normalize_k=True, **options)


class DeltaNet(DeltaLayer):
    """DeltaNet (Yang et al. 2024): q and k L2-normalised, beta = sigmoid(W_b x), no decay, no output gate."""

    def mix(self, q: Array, k: Array, v: Array, x: Array, **options: Any) -> tuple[Array, Any]:
        beta = gates.sigmoid_strength(self.strength(x))
        return delta_rule(q, k, v, beta, normalize_q=True, normalize_k=True, **options)


class DeltaNetOfKLA(DeltaLayer):
    """What the KLA paper's code calls DeltaNet, which is not the published layer.

    q and k are softmaxes over their features, without SiLU; decay e^{logsigmoid(W_a x + b_a) / 16}; gated output norm;
    beta = sigmoid(W_b x + b_b).
    """

    decay = "logsigmoid"
    gated_output = strength_bias = True

    def build(self, make: Make, **options: Any) -> None:
        self.silu_from = 2 * self.keys
        super().build(make, **options)

    def mix(self, q: Array, k: Array, v: Array, x: Array, **options: Any) -> tuple[Array, Any]:
        q, k = jax.nn.softmax(q, axis=-1), jax.nn.softmax(k, axis=-1)
        return gated_delta_rule(q, k, v, self.decays(x), gates.sigmoid_strength(self.strength(x)), **options)


class LonghornOfKLA(DeltaLayer):
    """What the KLA paper's code calls Longhorn: Gated DeltaNet on raw q and k with beta = s / (1 + s ||k||^2).

    s = sigmoid(W_b x + b_b). The published layer is `Longhorn`.
    """

    decay = "mamba"
    gated_output = strength_bias = True

    def mix(self, q: Array, k: Array, v: Array, x: Array, **options: Any) -> tuple[Array, Any]:
        s = gates.sigmoid_strength(self.strength(x))
        square = jnp.sum(jnp.square(k.astype(jnp.float32)), axis=-1)
        beta = s / (1 + s * jnp.repeat(square, self.num_heads // self.key_heads, axis=2))
        return gated_delta_rule(q, k, v, self.decays(x), beta, **options)


class DeltaNetOfVLA(MixerLayer):
    """What the VLA paper's code calls DeltaNet: S <- S diag(g) + k (v - S^T k)^T with a gate g per value channel.

    g = sigmoid(W_g x), about 1/2 at first, so that the memory halves at every token; q is ELU + 1 and k L2-normalised;
    no convolution, norm or scale. Run as a gated delta rule with one head per value channel: with beta = 1 / g and
    values g v it is the same recurrence.
    """

    def build(self, make: Make) -> None:
        self.build_projections(make)
        self.gate = make.linear(self.width, self.values)
        self.output = make.linear(self.values, self.width)

    def forward(self, x: Array, state: MatrixState | None, packing: dict[str, Any]) -> tuple[Array, MatrixState]:
        log_decay = jax.nn.log_sigmoid(self.gate(x).astype(jnp.float32))
        y, state = gated_delta_rule(
            elu_feature(heads(self.query(x), self.key_heads)),
            heads(self.key(x), self.key_heads),
            (self.value(x) * jnp.exp(log_decay)).astype(self.dtype)[..., None],
            log_decay,
            jnp.exp(-log_decay),
            scale=1.0,
            normalize_k=True,
            initial_state=state,
            **packing,
            **self.options,
        )
        return self.output(y[..., 0]), state

    def init_state(self, batch: int, capacity: int | None = None) -> MatrixState:
        """The empty state; it does not grow, so `capacity` is not used."""
        del capacity
        return matrix_init(batch, self.values, self.key_size, 1)
