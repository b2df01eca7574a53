"""Pallas kernels for the chunkwise mixers; usable without Flax."""
