"""Value checks find what tracing cannot, leave padding alone, and cost nothing when off."""

import functools

import jax
import numpy as np
import pytest
from cases import call, make_inputs, sequences

from linattn_jax.debug import checked
from linattn_jax.mixers.dispatch import MIXERS

IDS = np.array([[0] * 7 + [-1]] * 2, np.int32)


def run(name, inputs, **arrays):
    return (
        checked(functools.partial(call, name))(inputs)
        if not arrays
        else checked(lambda x, ids: call(name, x, segment_ids=ids))(inputs, arrays["segment_ids"])
    )


@pytest.mark.parametrize("name", sorted(MIXERS))
def test_good_values_pass_and_padding_is_not_looked_at(name):
    inputs = make_inputs(name, T=8, decay=("spike", -np.inf, 3))
    inputs = {key: np.array(a) for key, a in inputs.items()}
    for key in sequences(name):
        inputs[key][:, 7] = np.nan
    output, _ = run(name, inputs, segment_ids=IDS)
    assert np.all(np.isfinite(output))


@pytest.mark.parametrize("name", sorted(MIXERS))
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


def test_off_means_off():
    inputs = make_inputs("kaczmarz", T=8)
    text = jax.make_jaxpr(functools.partial(call, "kaczmarz"))(inputs).pretty_print()
    assert "check" not in text.replace("checkpoint", "")
