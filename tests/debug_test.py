"""Value checks find what tracing cannot, leave padding alone, and cost nothing when off."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import FAMILIES, call, make_inputs, make_state, sequences

from linattn_jax import softmax_attention, softmax_attention_init
from linattn_jax.debug import checked
from linattn_jax.mixers.convolution import short_convolution
from linattn_jax.mixers.dispatch import MIXERS

each_mixer = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAMILIES else pytest.mark.slow) for name in sorted(MIXERS)]
)
IDS = np.array([[0] * 7 + [-1]] * 2, np.int32)


def run(name, inputs, **arrays):
    return (
        checked(functools.partial(call, name))(inputs)
        if not arrays
        else checked(lambda x, ids: call(name, x, segment_ids=ids))(inputs, arrays["segment_ids"])
    )


@each_mixer
def test_good_values_pass_and_padding_is_not_looked_at(name):
    inputs = make_inputs(name, T=8, decay=("spike", -np.inf, 3))
    inputs = {key: np.array(a) for key, a in inputs.items()}
    for key in sequences(name):
        inputs[key][:, 7] = np.nan
    output, _ = run(name, inputs, segment_ids=IDS)
    assert np.all(np.isfinite(output))


@each_mixer
def test_bad_values_are_found(name):
    good = make_inputs(name, T=8)
    first = sequences(name)[0]
    faults = [(first, np.nan, f"{first} is NaN"), (first, np.inf, f"{first} is NaN or infinite")]
    if "log_decay" in good:
        faults += [("log_decay", 0.5, "log_decay is positive"), ("log_decay", np.nan, "log_decay is NaN")]
    if "beta" in good:
        faults += [("beta", 1e3, "outside"), ("beta", -0.5, "outside")]
    if "eta" in good:
        faults += [("eta", 2.1, "outside")]
    for key, value, match in faults:
        bad = np.array(good[key])
        bad[:, 2] = value
        with pytest.raises(ValueError, match=f"{name}: .*{match}"):
            run(name, good | {key: bad})


def test_what_was_compiled_before_is_checked_and_stays_usable():
    """Checks are no part of what is compiled outside, whichever is compiled first; keywords are arguments."""
    good = make_inputs("kaczmarz", T=8)
    bad = good | {"eta": good["eta"] + 3}
    for first in ("outside", "inside"):
        compiled = jax.jit(lambda x: call("kaczmarz", x))
        if first == "outside":
            compiled(bad)
        run = checked(lambda x, ids: compiled(x)[0] * (ids >= 0)[..., None, None])
        with pytest.raises(ValueError, match=r"kaczmarz: .*outside"):
            run(bad, ids=IDS)
        np.testing.assert_array_equal(run(good, ids=IDS)[:, :7], compiled(good)[0][:, :7])
        compiled(bad)


def test_softmax_attention_and_the_convolution():
    """With their states; what a cache holds beyond its length is not looked at."""
    q, history = np.ones((2, 8, 1, 2), np.float32), np.ones((2, 3, 2), np.float32)
    cache = softmax_attention_init(2, 1, 2, 2, capacity=9)._replace(length=jnp.full(2, 1))
    attend = checked(lambda q, cache, ids: softmax_attention(q, q, q, initial_state=cache, segment_ids=ids))
    convolve = checked(lambda x, past, ids: short_convolution(x, q[0, :4, 0], initial_state=past, segment_ids=ids))
    nan = {at: np.where(np.arange(8) == at, np.nan, np.ones((2, 8), np.float32)) for at in (2, 7)}
    attend(q * nan[7][..., None, None], cache._replace(k=cache.k.at[:, 1:].set(np.nan)), IDS)
    convolve(nan[7][..., None] * q[..., 0, :], history, IDS)
    with pytest.raises(ValueError, match="softmax_attention: q is NaN or infinite"):
        attend(q * nan[2][..., None, None], cache, IDS)
    with pytest.raises(ValueError, match=r"softmax_attention: initial_state\.v is NaN or infinite"):
        attend(q, cache._replace(v=cache.v.at[:, 0].set(np.inf)), IDS)
    with pytest.raises(ValueError, match="short_convolution: x is NaN or infinite"):
        convolve(nan[2][..., None] * q[..., 0, :], history, IDS)
    with pytest.raises(ValueError, match="short_convolution: initial_state is NaN or infinite"):
        convolve(q[..., 0, :], history * np.float32(np.nan), IDS)


def test_a_bad_state_is_found():
    inputs, state = make_inputs("ccq_gla", T=8), make_state("ccq_gla")
    bad = state._replace(memory=state.memory._replace(S=state.memory.S.at[0, 0, 0, 0].set(np.nan)))
    advance = checked(lambda x, s: call("ccq_gla", x, initial_state=s))
    advance(inputs, state)
    with pytest.raises(ValueError, match="ccq_gla: initial_state is NaN or infinite somewhere"):
        advance(inputs, bad)


def test_off_means_off():
    inputs = make_inputs("kaczmarz", T=8)
    text = jax.make_jaxpr(functools.partial(call, "kaczmarz"))(inputs).pretty_print()
    assert "check" not in text.replace("checkpoint", "")
