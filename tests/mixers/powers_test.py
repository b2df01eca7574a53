"""Powers of the modes of state-space mixers, and long rows of slow modes: digits that one float32 number would lose."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import MIXERS, call, make_inputs, make_state
from reference import fields, reference
from tolerances import assert_close, limit

from linattn_jax.mixers.powers import split_modes

ROUNDING = 2.0**-24  # of one float32 operation


def log_modes(rng, shape, slowest=-14, largest=99.0):
    """Modes whose memories last from a token to a million, and whose angles are anywhere."""
    log_a = -np.exp(rng.uniform(slowest, 2, shape)) + 1j * rng.uniform(-largest, largest, shape)
    return log_a.astype(np.complex64)


@pytest.mark.parametrize("largest", [1e-2, np.pi, 99.0])
def test_transitions_have_more_digits_than_float32(largest):
    """To 1e-9 of a slow mode's, where float32 rounds by 6e-8; and to a few roundings in a faster mode's life."""
    log_a = log_modes(np.random.default_rng(0), 20_000, largest=largest)
    a = jax.jit(lambda x: split_modes(x).transition())(log_a)
    exact = np.exp(log_a.astype(np.complex128))
    seen = np.asarray(a.coarse, np.complex128) + np.asarray(a.fine, np.complex128)
    error = np.abs(seen - exact) / np.abs(exact)
    assert np.all(error <= 1e-9 - 8 * ROUNDING * log_a.real)


@pytest.mark.parametrize("exponent", [1, 63, 64, 4095])
def test_powers_are_those_of_the_given_log(exponent):
    """At 4095 tokens the angle that float32 holds is off by 5e-4 for modes of half a turn."""
    log_a = log_modes(np.random.default_rng(1), 20_000)
    seen = jax.jit(lambda x, n: split_modes(x).raised(n).value())(log_a, np.float32(exponent))
    assert np.max(np.abs(seen - np.exp(exponent * log_a.astype(np.complex128)))) <= 10 * ROUNDING


def test_modes_that_forget_at_once():
    """Infinite decay, infinite exponents, and exponents of 0; every gradient finite."""
    log_a = np.array([-np.inf + 0.3j, -np.inf, 0, 0.5j, -120 + 1j], np.complex64)
    for exponent, wanted in ((0, 1), (1, np.exp(log_a)), (np.inf, 0)):
        power = lambda x: split_modes(x).raised(np.float32(exponent)).value()
        np.testing.assert_allclose(power(log_a), np.broadcast_to(wanted, log_a.shape), rtol=0, atol=2e-7)
        assert np.all(np.isfinite(jax.grad(lambda x: jnp.sum(power(x).real))(log_a)))
    step = lambda x: split_modes(x).transition().advance(1 + 2j, np.complex64(0))
    np.testing.assert_allclose(step(log_a), np.exp(log_a) * (1 + 2j), rtol=0, atol=4e-7)
    assert not np.any(step(log_a)[:2])
    gradient = jax.grad(lambda x: jnp.sum(step(x).real))(log_a)
    np.testing.assert_allclose(gradient, np.exp(log_a) * (1 + 2j), rtol=0, atol=4e-7)


def slow_inputs(name, decay, T, **sizes):
    x = make_inputs(name, B=1, T=T, Hk=2, H=2, **{"K": 4, "V": 4, "N": 6, "M": 4} | sizes)
    return x | {"log_a": (-decay + 1j * x["log_a"].imag).astype(np.complex64)}


FORMS = ("recurrent", "associative", "chunkwise")
slow = pytest.mark.parametrize("decay", [1e-3, 1e-5])
each = pytest.mark.parametrize(("name", "form"), [(name, form) for name in ("s4d", "interdomain") for form in FORMS])


# The slowest packed, and the less slow not; the other two are in the long test.
@pytest.mark.parametrize(
    ("decay", "packed"),
    [
        (1e-3, False),
        (1e-5, True),
        pytest.param(1e-3, True, marks=pytest.mark.slow),
        pytest.param(1e-5, False, marks=pytest.mark.slow),
    ],
)
@each
def test_long_rows_of_slow_modes(name, form, decay, packed):
    """8192 roundings, one a token, of which the errors add up as of independent ones: within sqrt(8192) times one."""
    T, arrays = 8192, {}
    if packed:
        arrays["segment_ids"] = np.repeat([[0, 1]], [T // 3, T - T // 3], axis=1).astype(np.int32)
        arrays["segment_ids"][:, 5::7] = -1
    x = slow_inputs(name, decay, T)
    wanted, final = reference(name, x, **arrays)
    output, state = jax.jit(lambda x, arrays: call(name, x, implementation=form, **arrays))(x, arrays)
    bound = T**0.5 * ROUNDING
    assert_close(output, wanted, bound, "output")
    for field, s in fields(state).items():
        assert_close(s, final[field], bound, field)


@slow
@pytest.mark.parametrize("name", ["s4d", "interdomain"])
def test_many_steps_keep_a_slow_state(name, decay):
    """A state left alone for 8192 calls of `_step` is a^8192 times itself."""
    T = 8192
    x = slow_inputs(name, decay, 1)
    token = {key: a if key in ("log_a", "b", "c", "d") else np.zeros_like(a[:, 0]) for key, a in x.items()}
    before = make_state(name, B=1, Hk=2, H=2, K=4, V=4, N=6, M=4)

    def body(state, _):
        return MIXERS[name].step(state, *(token[key] for key in MIXERS[name].arguments))[1], None

    after = jax.jit(lambda s: jax.lax.scan(body, s, length=T)[0])(before)[0]
    power = np.exp(T * x["log_a"].astype(np.complex128))
    wanted = power.reshape(*power.shape, *(1,) * (after.ndim - 3)) * np.asarray(before[0])
    assert_close(after, wanted, T**0.5 * ROUNDING)


@each
def test_gradients_of_slow_modes(name, form):
    x = slow_inputs(name, 1e-4, 1024)
    output = lambda x: call(name, x, implementation=form)[0]
    weight = np.random.default_rng(2).standard_normal(jax.eval_shape(output, x).shape)
    gradients = lambda x: jax.jit(jax.grad(lambda x: jnp.sum(output(x) * jnp.asarray(weight, x["b"].real.dtype))))(x)
    seen = gradients(x)
    with jax.enable_x64(True):
        wide = {key: a.astype(np.complex128 if np.iscomplexobj(a) else np.float64) for key, a in x.items()}
        wanted = jax.tree.map(np.asarray, gradients(wide))
    for key, g in seen.items():
        assert_close(g, wanted[key], limit(key, "float32", gradient=True), key)
