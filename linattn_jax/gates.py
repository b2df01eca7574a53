"""Gate parametrisations: pure functions from what a layer projects to what a mixer takes, and their initialisation."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from linattn_jax.types import Array


def mamba_log_decay(x: Array, a_log: Array, dt_bias: Array) -> Array:
    """log_decay = -exp(a_log) softplus(x + dt_bias), float32, <= 0 (Gu and Dao 2023).

    x: [..., H], any float dtype; a_log, dt_bias: [H], float32.
    """
    return -jnp.exp(a_log.astype(jnp.float32)) * jax.nn.softplus(x.astype(jnp.float32) + dt_bias.astype(jnp.float32))


def logsigmoid_log_decay(x: Array, normalizer: float = 16.0) -> Array:
    """log_decay = logsigmoid(x) / normalizer, float32, <= 0 (GLA, Yang et al. 2023)."""
    return jax.nn.log_sigmoid(x.astype(jnp.float32)) / normalizer


def sigmoid_strength(x: Array, bias: Array | None = None, *, maximum: float = 1.0) -> Array:
    """maximum * sigmoid(x + bias), float32: a write strength beta or eta (maximum = 2 allows negative eigenvalues)."""
    x = x.astype(jnp.float32)
    return maximum * jax.nn.sigmoid(x if bias is None else x + bias.astype(jnp.float32))


def a_log_init(key: Array, heads: int, low: float = 1e-3, high: float = 16.0) -> Array:
    """log A with A ~ U(low, high), float32 [heads]. The published range starts at 0, where log A has no bound."""
    return jnp.log(jax.random.uniform(key, (heads,), jnp.float32, low, high))


def dt_bias_init(key: Array, heads: int, low: float = 1e-3, high: float = 1e-1, floor: float = 1e-4) -> Array:
    """The inverse softplus of dt with log dt ~ U(log low, log high), floored; float32 [heads]."""
    dt = jnp.exp(jax.random.uniform(key, (heads,), jnp.float32, jnp.log(low), jnp.log(high)))
    dt = jnp.maximum(dt, floor)
    return dt + jnp.log(-jnp.expm1(-dt))
