"""The decoder, its presets and generation."""

from linattn_jax.models.decoder import Decoder
from linattn_jax.models.presets import PRESETS, DecoderConfig, decoder_config

__all__ = ["PRESETS", "Decoder", "DecoderConfig", "decoder_config"]
