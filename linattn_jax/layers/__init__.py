"""Flax NNX modules that own parameters and call a mixer."""

from linattn_jax.layers.mixers import (
    EXPANSION,
    GLA,
    GROWING,
    KLA,
    LAYERS,
    DeltaNet,
    GatedDeltaNet,
    LayerState,
    LinearAttention,
    SoftmaxAttention,
)

__all__ = [
    "EXPANSION",
    "GLA",
    "GROWING",
    "KLA",
    "LAYERS",
    "DeltaNet",
    "GatedDeltaNet",
    "LayerState",
    "LinearAttention",
    "SoftmaxAttention",
]
