"""Gates against their formulas in float64, and the ranges of what initialises them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import assert_close

from linattn_jax import gates

X = np.linspace(-30, 30, 61, dtype=np.float32)


def softplus(x):
    return np.logaddexp(0.0, np.asarray(x, np.float64))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_mamba_log_decay(dtype):
    x = jnp.asarray(X[:60].reshape(5, 3, 4), dtype)
    a_log, dt_bias = np.array([-6.0, 0.0, 1.0, 2.7], np.float32), np.array([-7.0, -2.0, 0.0, 1.0], np.float32)
    seen = gates.mamba_log_decay(x, a_log, dt_bias)
    assert seen.dtype == np.float32
    assert_close(seen, -np.exp(np.float64(a_log)) * softplus(np.asarray(x, np.float64) + dt_bias), 1e-6)
    assert np.all(seen <= 0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_logsigmoid_log_decay(dtype):
    x = jnp.asarray(X, dtype)
    seen = gates.logsigmoid_log_decay(x)
    assert seen.dtype == np.float32
    assert_close(seen, -softplus(-np.asarray(x, np.float64)) / 16, 1e-6)
    assert_close(gates.logsigmoid_log_decay(x, 4.0), 4 * np.asarray(seen), 1e-6)
    assert np.all(seen <= 0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_sigmoid_strength(dtype):
    x = jnp.asarray(X[:60].reshape(15, 4), dtype)
    wide = np.asarray(x, np.float64)
    bias = np.array([-1.0, 0.0, 0.5, 2.0], np.float32)
    for seen, wanted in (
        (gates.sigmoid_strength(x), 1 / (1 + np.exp(-wide))),
        (gates.sigmoid_strength(x, bias), 1 / (1 + np.exp(-wide - bias))),
        (gates.sigmoid_strength(x, maximum=2.0), 2 / (1 + np.exp(-wide))),
    ):
        assert seen.dtype == np.float32
        assert_close(seen, wanted, 1e-6)
        assert np.all(np.asarray(seen) >= 0)
        assert np.max(np.asarray(seen)) <= (2 if wanted.max() > 1 else 1)


def test_gradients_are_finite_far_out():
    far = np.array([-1e4, -100.0, 100.0, 1e4], np.float32)
    zeros = np.zeros(4, np.float32)
    for gate in (lambda x: gates.mamba_log_decay(x, zeros, zeros), gates.logsigmoid_log_decay, gates.sigmoid_strength):
        assert np.all(np.isfinite(jax.grad(lambda x, gate=gate: jnp.sum(gate(x)))(far)))


def test_initial_decay():
    """A ~ U(0, 16), kept off 0, and dt log-uniform in [1e-3, 1e-1], seen through softplus."""
    a = np.exp(np.asarray(gates.a_log_init(jax.random.key(0), 4000), np.float64))
    assert a.dtype == np.float64
    assert 1e-3 * 0.999 <= a.min() < 0.1
    assert 15.9 < a.max() <= 16.001
    assert abs(a.mean() - 8) < 0.3
    dt = softplus(gates.dt_bias_init(jax.random.key(1), 4000))
    assert 1e-3 * 0.999 <= dt.min() < 1.05e-3
    assert 0.095 < dt.max() <= 0.1 * 1.001
    assert abs(np.log(dt).mean() - np.log(1e-2)) < 0.1
    floored = softplus(gates.dt_bias_init(jax.random.key(1), 400, floor=1e-2))
    assert abs(floored.min() - 1e-2) < 1e-5
    assert gates.a_log_init(jax.random.key(0), 3).dtype == gates.dt_bias_init(jax.random.key(0), 3).dtype == np.float32
    assert not np.array_equal(gates.a_log_init(jax.random.key(0), 3), gates.a_log_init(jax.random.key(1), 3))
