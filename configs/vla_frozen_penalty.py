"""What VLA's penalty matrix is worth: the ablation that the paper lacks, a^ = k^, beside other starting penalties.

    python -m experiments.vla_frozen_penalty --run_dir=runs/vla_frozen_penalty

The capacity study (configs/vla_capacity.py) from n = 16 past a head's 32 channels, for VLA with no penalty directions
(`vla_frozen`: A stays a multiple of I, the write direction is the key, so that VLA is DeltaNet with beta = 1 on
ELU + 1 keys and a ratio read-out), with starting penalties of 1 and 10 (the paper's earlier code) in place of 0.1, and
DeltaNet as published. Cost of a variant, full: at most 0.5 G tokens. Not measured yet.
"""

from __future__ import annotations

import ml_collections

from configs import vla_capacity
from configs._studies import is_full

VARIANTS = {
    "vla_frozen": {"layer": "vla", "options": {"directions": "none"}},
    "vla_penalty_1": {"layer": "vla", "options": {"penalty": 1.0}},
    "vla_penalty_10": {"layer": "vla", "options": {"penalty": 10.0}},
}


def get_config(arg: str | None = None) -> ml_collections.ConfigDict:
    """The study; size=full or size=small, a reduced one of minutes on two cores."""
    full = is_full(arg)
    config = vla_capacity.get_config(arg)
    config.study = "vla_frozen_penalty"
    config.title = "VLA with and without its penalty matrix"
    config.variants = VARIANTS
    config.published = {}
    if full:
        config.mixers = ("vla", *VARIANTS, "deltanet")
        groups = ((16, 24), (32, 48, 64))
        config.buckets = tuple(vla_capacity.bucket(group) for group in groups)
        counts = [n for group in groups for n in group]
        config.columns, config.x = tuple(f"n={n}" for n in counts), tuple(counts)
        config.chance = tuple(1 / n for n in counts)
    else:
        config.mixers = ("vla_frozen",)
    config.claims = (
        (
            {
                "text": "The penalty matrix lets VLA recall more than it does with a^ = k^.",
                "checks": tuple(f"vla@{column} > vla_frozen@{column} + 0.01" for column in config.columns[1:]),
            },
            {
                "text": "With a starting penalty of 10, as in the paper's earlier code, VLA only guesses.",
                "checks": ("vla_penalty_10@n=16 < 0.2",),
            },
        )
        if full
        else ({"text": "Without its penalty matrix VLA still recalls.", "checks": ("vla_frozen@n=8 > 0.5",)},)
    )
    config.notes = ("All of this is ours: the paper has no such ablation.",)
    return config
