"""Exported programs that take and return states can be serialised, and registering needs no flatbuffers."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linattn_jax.layers import LayerState
from linattn_jax.mixers.dispatch import MIXERS
from linattn_jax.mixers.softmax import softmax_attention_init

SIZES = {"B": 1, "H": 2, "Hk": 1, "K": 3, "V": 4, "N": 3, "M": 2, "D": 4}
STATES = {name: mixer.empty(SIZES, jnp.float32) for name, mixer in MIXERS.items()}
STATES |= {"softmax": softmax_attention_init(1, 2, 3, 4, capacity=5)}
STATES |= {"layer": LayerState(jnp.zeros((1, 3, 2)), STATES["kaczmarz"])}


@pytest.mark.skipif(importlib.util.find_spec("flatbuffers") is None, reason="serialising needs flatbuffers")
def test_states_can_be_serialised():
    exported = jax.export.export(jax.jit(lambda states: jax.tree.map(lambda a: a + 1, states)))(STATES)
    after = jax.export.deserialize(exported.serialize()).call(STATES)
    assert jax.tree.structure(after) == jax.tree.structure(STATES)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b + 1), after, STATES)
