"""Flax NNX modules that own parameters and call a mixer."""
