"""The benchmark's gate: what passes, and that what is wrong does not."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linattn_jax.eval import peers, timing
from linattn_jax.mixers.dispatch import MIXERS, Mixer
from linattn_jax.types import Argument, UserError

TINY = timing.Shape(B=2, T=20, Hk=2, H=4, K=4, V=3, N=3, M=2)
# The contract tests every form: here a mixer's arguments and states are what counts, and one form tells of them.
FORMS = [
    pytest.param(name, form, marks=() if form == "recurrent" else pytest.mark.slow)
    for name, mixer in sorted(MIXERS.items())
    for form in mixer.implementations
]


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_every_form_passes(name, form):
    inputs = timing.make_inputs(MIXERS[name], TINY, "float32", 0)
    options = (("chunk_size", 8), ("implementation", form))
    try:
        errors, passed = timing.gate(MIXERS[name], TINY, inputs, MIXERS[name].call, options)
    except NotImplementedError as error:
        pytest.skip(str(error))
    assert passed, errors
    assert {f"d{argument}" for argument in MIXERS[name].arguments} < set(errors)


def wrong(q, k, v, log_decay, implementation, chunk_size=None):
    """simple_gla, but for what `implementation` names."""
    if implementation == "dk":
        k = 1.001 * k - jax.lax.stop_gradient(0.001 * k)
    output, state = MIXERS["simple_gla"].call(q, k, v, log_decay, implementation="recurrent")
    if implementation == "output":
        output = output.at[0, -1].add(0.01)
    return output, state._replace(S=1.001 * state.S) if implementation == "state S" else state


@pytest.mark.parametrize("where", ["output", "state S", "dk"])
def test_the_gate_catches(monkeypatch, where):
    """The wrong form is not timed, and the largest error is where it is wrong."""
    monkeypatch.setitem(MIXERS, "wrong", dataclasses.replace(MIXERS["simple_gla"], name="wrong", call=wrong))
    row = timing.measure(timing.Case("wrong", TINY, where), rate=1.0)
    assert not row["gate_passed"]
    assert max(row["errors"], key=row["errors"].get) == where
    assert "forward" not in row
    assert "both" not in row


class Modes(NamedTuple):
    h: jax.Array


class Nested(NamedTuple):
    modes: Modes
    count: jax.Array


def nested_empty(sizes, dtype):
    return Nested(Modes(jnp.zeros((sizes["B"], sizes["H"], sizes["N"]), complex)), jnp.zeros(sizes["B"], dtype))


def modes(x, log_a, c, implementation, slip=0.0):
    """h = e^{log_a} h + x, y = Re(c h), with a slip of the state's phase."""
    h, outputs = jnp.zeros((x.shape[0], *log_a.shape), log_a.dtype), []
    for t in range(x.shape[1]):
        h = jnp.exp(log_a) * h + x[:, t, :, None]
        outputs.append(jnp.sum(jnp.real(c * h), -1))
    slipped = h * np.exp(0 if implementation == "recurrent" else 1j * slip)
    return jnp.stack(outputs, 1), Nested(Modes(slipped), jnp.full(len(x), x.shape[1], x.dtype))


def test_complex_parameters_and_nested_states():
    """Modes are those of S4D; heads are channels; an error in a complex leaf of a nested state is seen."""
    arguments = {
        "x": Argument("B T H"),
        "log_a": Argument("H N", "complex"),
        "c": Argument("H N", "complex"),
    }
    mixer = Mixer("modes", modes, modes, nested_empty, arguments, ("recurrent", "other"), "B T H")
    shape = TINY._replace(T=3)
    inputs = timing.make_inputs(mixer, shape, "float32", 0)
    assert inputs[0]["x"].shape == inputs[1].shape == (2, 3, 12)
    log_a = np.asarray(inputs[0]["log_a"])
    step = -2 * log_a.real
    assert np.all((step > 0.99e-3) & (step < 1.01e-1))
    np.testing.assert_allclose(log_a.imag, np.pi * step * np.arange(3), rtol=1e-5)
    assert timing.state_bytes(mixer, TINY) == 2 * (12 * 3 * 8 + 4)
    for slip, passes in ((0.0, True), (1e-3, False)):
        errors, passed = timing.gate(mixer, shape, inputs, modes, (("implementation", "other"), ("slip", slip)))
        assert passed == passes
        assert list(errors) == ["output", "state modes.h", "state count", "dc", "dlog_a", "dx"]
        assert errors["state modes.h"] == pytest.approx(slip, abs=1e-6)


def test_positive_keys_where_reads_are_normalised():
    arguments = {name: Argument("B T H K") for name in ("q", "k", "penalty_direction")}
    mixer = Mixer("normalised", modes, modes, nested_empty, arguments, ("recurrent",), "B T H V")
    inputs, cotangent = timing.make_inputs(mixer, TINY, "float32", 0)
    assert cotangent.shape == (2, 20, 4, 3)
    assert np.all(inputs["q"] >= 0)
    assert np.all(inputs["k"] >= 0)
    assert np.any(inputs["penalty_direction"] < 0)
    np.testing.assert_allclose(np.linalg.norm(inputs["k"], axis=-1), 1, rtol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(inputs["penalty_direction"], axis=-1), 4**-0.5, rtol=1e-5)


def test_memory_is_that_of_the_arrays():
    """x [8] and y [8] in, two results of [8] out."""
    x = jnp.ones(8)
    sizes = timing.memory(jax.jit(lambda x, y: (x + y, x * y)).lower(x, x).compile())
    assert (sizes["arguments"], sizes["peak"]) == (64, 64 + sizes["outputs"] + sizes["temporary"])
    assert 64 <= sizes["outputs"] <= 96  # a tuple of pointers may be counted


def test_flops_are_known_or_none():
    """One chunk of one row, by hand, at C = K = V = 1; a mixer with other arguments has no count."""
    shape = timing.Shape(1, 1, 1, 1, 1, 1)
    assert timing.chunkwise_flops(MIXERS["simple_gla"], shape, None) == 2 * 4
    assert timing.chunkwise_flops(MIXERS["kaczmarz"], shape, None) == pytest.approx(2 * (4 + 3 + 1 / 3))
    more = dataclasses.replace(MIXERS["gla"], arguments={**MIXERS["gla"].arguments, "gate": Argument("B T Hk", "gate")})
    assert timing.chunkwise_flops(more, shape, None) is None
    fewer = dataclasses.replace(more, arguments={"q": Argument("B T Hk K"), "k": Argument("B T Hk K")})
    assert timing.chunkwise_flops(fewer, shape, None) is None


@pytest.mark.parametrize("words", ["1,2,3", "1,2,2,2,a,4", "1,2,2,3,4,4", "1,2,0,2,4,4"])
def test_wrong_shapes(words):
    with pytest.raises(UserError, match=words):
        timing.parse_shape(words.split(","))
    assert timing.parse_shape(["1", "2", "1", "2", "4", "4", "5"]).N == 5


def test_the_peer_computes_the_same():
    pytest.importorskip("jla", reason="jax-linear-attention is not installed")
    shape = TINY._replace(Hk=4)
    inputs = timing.make_inputs(MIXERS["gated_delta_rule"], shape, "float32", 0)
    errors, passed = timing.gate(MIXERS["gated_delta_rule"], shape, inputs, peers.find("gated_delta_rule"))
    assert passed, errors
    assert peers.find("kaczmarz") is None
