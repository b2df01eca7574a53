"""What the trainer asks of the real decoder, from shapes alone."""

from __future__ import annotations

import jax
import pytest
from flax import nnx

from linattn_jax.layers import GROWING, LAYERS
from linattn_jax.models.decoder import Decoder
from linattn_jax.models.presets import DecoderConfig
from linattn_jax.train.functional import batch_axes, has_fixed_size, split


@pytest.mark.parametrize("mixer", sorted(LAYERS))
def test_rows_of_the_state_are_found_without_parameters(mixer):
    sizes = {"vocab_size": 17, "layers": 2, "width": 16, "heads": 1, "head_size": 16, "mlp_width": 16}
    functional, params = split(
        nnx.eval_shape(lambda: Decoder(DecoderConfig(**sizes, mixers=(mixer,)), rngs=nnx.Rngs(0)))
    )
    assert has_fixed_size(functional, params) == (mixer not in GROWING)
    if mixer not in GROWING:
        assert set(jax.tree.leaves(batch_axes(functional, params))) == {1}  # after the stacked layers
