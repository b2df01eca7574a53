"""Pallas kernels behind the mixers, usable without Flax. There are none so far: mixers run their plain JAX forms."""
