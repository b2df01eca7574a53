"""A row of one chunk, where a compiler sees that the state is zeros: every mixer against its token recurrence."""

import jax
import numpy as np
import pytest
from cases import make_inputs

from linattn_jax.mixers.dispatch import MIXERS


@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in sorted(MIXERS)), ("linear_attention", {"normalize_output": True})],
)
def test_single_chunk(name, options):
    # Sizes at which XLA's CPU compiler once left a column of linear_attention's output unwritten.
    inputs = make_inputs(name, B=64, T=32, Hk=2, H=2, K=16, V=32)
    if options:
        inputs |= {key: np.abs(inputs[key]) for key in ("q", "k")}

    def output(form):
        return np.asarray(jax.jit(lambda x: MIXERS[name].call(**x, **options, implementation=form)[0])(inputs))

    wanted = output("recurrent")
    assert np.linalg.norm(output("chunkwise") - wanted) <= 1e-5 * np.linalg.norm(wanted)
