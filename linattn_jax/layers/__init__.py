"""Flax NNX modules that own parameters and call a mixer; LAYERS names them for configurations.

Where the code of a paper compares with something else under a published layer's name, both are here: the name alone is
the published layer, `name_paper` the paper's own.
"""

from linattn_jax.layers.common import LayerState, MixerLayer
from linattn_jax.layers.curvature import CCQGLA, CCQKLA, CCQDeltaNet, CCQGatedDeltaNet, CCQMamba2
from linattn_jax.layers.delta import DeltaNet, DeltaNetOfKLA, DeltaNetOfVLA, GatedDeltaNet, LonghornOfKLA
from linattn_jax.layers.kla import KLA
from linattn_jax.layers.linear import GLA, GLAOfKLA, LinearAttention, Mamba2, PositionedState, Retention
from linattn_jax.layers.softmax import SoftmaxAttention, SoftmaxWithoutPositions
from linattn_jax.layers.state_space import S4D, Interdomain, Longhorn, S4DControl
from linattn_jax.layers.variational import VLA

LAYERS: dict[str, type[MixerLayer]] = {
    "softmax": SoftmaxAttention,
    "softmax_vla": SoftmaxWithoutPositions,
    "linear": LinearAttention,
    "retention": Retention,
    "mamba2": Mamba2,
    "gla": GLA,
    "gla_kla": GLAOfKLA,
    "deltanet": DeltaNet,
    "deltanet_kla": DeltaNetOfKLA,
    "deltanet_vla": DeltaNetOfVLA,
    "gdn": GatedDeltaNet,
    "kla": KLA,
    "vla": VLA,
    "ccq_gla": CCQGLA,
    "ccq_gdn": CCQGatedDeltaNet,
    "ccq_kla": CCQKLA,
    "ccq_deltanet": CCQDeltaNet,
    "ccq_mamba2": CCQMamba2,
    "interdomain": Interdomain,
    "s4d": S4D,
    "s4d_interdomain": S4DControl,
    "longhorn": Longhorn,
    "longhorn_kla": LonghornOfKLA,
}

# Layers whose state grows with the text.
GROWING = frozenset({"softmax", "softmax_vla"})

# key_size / head size and value_size / head size where a paper departs from 1.
EXPANSION: dict[str, tuple[float, float]] = {
    "gla": (0.5, 1.0),
    "ccq_gla": (0.5, 1.0),
    "retention": (1.0, 2.0),
    "mamba2": (1.0, 2.0),
    "ccq_mamba2": (1.0, 2.0),
    "longhorn": (1.0, 2.0),
}

__all__ = [
    "CCQGLA",
    "CCQKLA",
    "EXPANSION",
    "GLA",
    "GROWING",
    "KLA",
    "LAYERS",
    "S4D",
    "VLA",
    "CCQDeltaNet",
    "CCQGatedDeltaNet",
    "CCQMamba2",
    "DeltaNet",
    "DeltaNetOfKLA",
    "DeltaNetOfVLA",
    "GLAOfKLA",
    "GatedDeltaNet",
    "Interdomain",
    "LayerState",
    "LinearAttention",
    "Longhorn",
    "LonghornOfKLA",
    "Mamba2",
    "MixerLayer",
    "PositionedState",
    "Retention",
    "S4DControl",
    "SoftmaxAttention",
    "SoftmaxWithoutPositions",
]
