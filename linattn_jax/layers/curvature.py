"""CCQ's layers: a backbone whose queries are contracted along dense key directions before the read.

The gate is lambda = sigmoid(w . q + b) per key head, of the query that reads (after its normalisation, before the
scale), with w = 0 and b = -2 at first, so that a layer starts near its backbone (our reading; the paper does not say).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from linattn_jax import gates
from linattn_jax.layers.common import LayerState, Make, MixerLayer
from linattn_jax.layers.delta import DeltaLayer, DeltaNet, GatedDeltaNet
from linattn_jax.layers.linear import GLA, Mamba2
from linattn_jax.mixers.ccq import CCQState, ccq_gated_delta_rule, ccq_gla, ccq_init, ccq_kaczmarz
from linattn_jax.mixers.curvature import curvature_query
from linattn_jax.mixers.delta import l2_normalize
from linattn_jax.mixers.linear import simple_gla
from linattn_jax.types import Array


class Contraction(nnx.Module):
    """The gate lambda of a query, and how Sigma is made.

    decay: "none" weighs all keys alike in Sigma, "backbone" as the backbone's memory does.
    normalize_keys: take Sigma of k / ||k||.
    gain: multiplies lambda; Sigma of unit keys is about I / K in all but dense directions.
    """

    def __init__(self, key_heads: int, key_size: int, decay: str, normalize_keys: bool, gain: float, bias: float):
        self.weight = nnx.Param(jnp.zeros((key_heads, key_size), jnp.float32))
        self.bias = nnx.Param(jnp.full((key_heads,), bias, jnp.float32))
        self.decay, self.normalize_keys, self.gain = decay, normalize_keys, gain

    def gate(self, q: Array) -> Array:
        """float32 [B, T, Hk] of q [B, T, Hk, K]."""
        return jax.nn.sigmoid(jnp.einsum("bthk,hk->bth", q.astype(jnp.float32), self.weight[...]) + self.bias[...])

    @property
    def settings(self) -> dict[str, Any]:
        return {"decay": self.decay, "normalize_keys": self.normalize_keys, "gain": self.gain}


class _Conditioned(MixerLayer):
    """Mixed into a backbone's class: adds the contraction's parameters and its part of the state."""

    def build(
        self,
        make: Make,
        *,
        decay: str = "none",
        normalize_keys: bool = True,
        gain: float = 1.0,
        gate_bias: float = -2.0,
        **options: Any,
    ) -> None:
        super().build(make, **options)
        self.contraction = Contraction(self.key_heads, self.key_size, decay, normalize_keys, gain, gate_bias)

    def init_state(self, batch: int, capacity: int | None = None) -> Any:
        """The empty state; it does not grow, so `capacity` is not used."""
        del capacity
        memory = ccq_init(batch, self.num_heads, self.key_size, self.value_size, key_heads=self.key_heads)
        return LayerState(self.convolution.init_state(batch), memory) if hasattr(self, "convolution") else memory


class CCQGLA(_Conditioned, GLA):
    """CCQ on GLA (Le et al. 2026)."""

    def mix(self, q: Array, k: Array, v: Array, log_decay: Array, **options: Any) -> tuple[Array, CCQState]:
        return ccq_gla(q, k, v, log_decay, self.contraction.gate(q), **self.contraction.settings, **options)


class CCQGatedDeltaNet(_Conditioned, GatedDeltaNet):
    """CCQ on Gated DeltaNet (Le et al. 2026)."""

    def mix(self, q: Array, k: Array, v: Array, x: Array, **options: Any) -> tuple[Array, CCQState]:
        beta, gate = gates.sigmoid_strength(self.strength(x)), self.contraction.gate(l2_normalize(q))
        options |= self.contraction.settings | {"normalize_q": True, "normalize_k": True}
        return ccq_gated_delta_rule(q, k, v, self.decays(x), beta, gate, **options)


class CCQKLA(_Conditioned, DeltaLayer):
    """CCQ on KLA: the combination is ours."""

    decay = "mamba"
    gated_output = strength_bias = True

    def mix(self, q: Array, k: Array, v: Array, x: Array, **options: Any) -> tuple[Array, CCQState]:
        eta, gate = gates.sigmoid_strength(self.strength(x)), self.contraction.gate(l2_normalize(q))
        options |= self.contraction.settings | {"normalize_q": True}
        return ccq_kaczmarz(q, k, v, self.decays(x), eta, gate, **options)


class CCQDeltaNet(_Conditioned, DeltaNet):
    """CCQ on DeltaNet: the combination is ours. It runs as Gated DeltaNet without decay."""

    def mix(self, q: Array, k: Array, v: Array, x: Array, **options: Any) -> tuple[Array, CCQState]:
        beta, gate = gates.sigmoid_strength(self.strength(x)), self.contraction.gate(l2_normalize(q))
        options |= self.contraction.settings | {"normalize_q": True, "normalize_k": True}
        return ccq_gated_delta_rule(q, k, v, jnp.zeros_like(beta), beta, gate, **options)


class CCQMamba2(_Conditioned, Mamba2):
    """CCQ on Mamba-2, whose queries are C and keys B: the combination is ours."""

    def mix(self, q: Array, k: Array, v: Array, log_decay: Array, **options: Any) -> tuple[Array, CCQState]:
        state, settings = options.pop("initial_state"), self.contraction.settings
        if settings.pop("decay") == "backbone":
            settings["log_decay"] = jnp.mean(log_decay.reshape(*q.shape[:3], -1), axis=-1)
        query, memory = (None, None) if state is None else state
        q, query = curvature_query(q, k, self.contraction.gate(q), initial_state=query, **settings, **options)
        y, memory = simple_gla(q, k, v, log_decay, scale=1.0, initial_state=memory, **options)
        return y, CCQState(query, memory)
