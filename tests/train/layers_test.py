"""Every layer in a small decoder: it trains by the real step, and generates from a state that does not grow."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest
from flax import nnx
from ml_collections import ConfigDict

from linattn_jax.layers import GROWING, LAYERS
from linattn_jax.models import Decoder, DecoderConfig
from linattn_jax.models.generate import generate
from linattn_jax.sharding import make_mesh
from linattn_jax.train.functional import initialise
from linattn_jax.train.optimizer import make_optimizer
from linattn_jax.train.step import init_state, make_train_step

OPTIMIZER = {"name": "adamw", "learning_rate": 0.01, "warmup_steps": 0, "final_fraction": 1.0, "weight_decay": 0.1}
OPTIMIZER |= {"beta1": 0.9, "beta2": 0.95, "clip_norm": 1.0}
ROWS, T, VOCABULARY, STEPS = 2, 8, 17, 6


# Forms of a layer that differ in a projection or a norm, as the papers have them; and CCQ on other layers than two.
VARIANTS = {name for name in LAYERS if re.search("_(kla|vla|interdomain|deltanet|mamba2)$", name)}


@pytest.mark.parametrize(
    "mixer", [pytest.param(name, marks=pytest.mark.slow if name in VARIANTS else ()) for name in LAYERS]
)
def test_trains_and_generates(mixer):
    """The loss of a batch seen again and again falls at every step; greedy text goes on the same from any prefix."""
    sizes = {"layers": 1, "width": 16, "heads": 2, "head_size": 8, "mlp_width": 16}
    sizes |= {"implementation": "recurrent"}  # quickest to compile
    config = DecoderConfig(VOCABULARY, mixers=(mixer,), **sizes)
    mesh = make_mesh(devices=jax.devices()[:1])
    functional, params = initialise(lambda: Decoder(config, rngs=nnx.Rngs(0)), mesh)
    optimizer, rate = make_optimizer(ConfigDict(OPTIMIZER), STEPS)
    state = init_state(functional, params, optimizer, mesh, rows=ROWS, carry_state=mixer not in GROWING)
    step = make_train_step(functional, optimizer, rate, mesh)
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (ROWS, T + 1), dtype=np.int32)
    losses = []
    for index in range(STEPS):
        ids = np.full((ROWS, T), index, np.int32)  # another document at every step: what is carried is dropped
        state, seen = step(state, {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "segment_ids": ids})
        losses.append(float(seen["loss"]))
    assert int(state.skipped) == 0
    assert np.all(np.diff(losses) < 0), losses
    assert losses[-1] < losses[0] - 0.3, losses

    model = functional.module(state.params)
    text = np.concatenate([tokens[:, :5], *generate(model, tokens[:, :5], 4, temperature=0.0, block=2)], axis=1)
    again = np.concatenate([text[:, :7], *generate(model, text[:, :7], 2, temperature=0.0, block=2)], axis=1)
    np.testing.assert_array_equal(again, text)

    def size(capacity):
        return sum(leaf.nbytes for leaf in jax.tree.leaves(model.init_state(1, capacity)))

    assert (size(64) == size(8)) == (mixer not in GROWING)
