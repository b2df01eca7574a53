"""What a curvature-conditioned query adds: each backbone with and without it, equal steps and all but equal parameters.

    python -m experiments.ccq_gain --run_dir=runs/ccq_gain

The paper measures language models only; this is recall (the KLA paper's generator) at 96 pairs in 512 tokens, three
times the keys that its own study asks for. `ccq_gdn_backbone` weighs keys in Sigma as the memory does, `ccq_gdn_open`
starts the gate at 1/2 instead of 0.12, `ccq_gdn_gain` multiplies it by 8. Cost of a mixer, full: at most 1 G tokens.
Not measured yet.
"""

from __future__ import annotations

import ml_collections

from configs._studies import is_full, kla_recall

BACKBONES = ("gla", "gdn", "kla", "deltanet", "mamba2")
VARIANTS = {
    "ccq_gdn_backbone": {"layer": "ccq_gdn", "options": {"decay": "backbone"}},
    "ccq_gdn_open": {"layer": "ccq_gdn", "options": {"gate_bias": 0.0}},
    "ccq_gdn_gain": {"layer": "ccq_gdn", "options": {"gain": 8.0}},
}


def get_config(arg: str | None = None) -> ml_collections.ConfigDict:
    """The study; size=full or size=small, a reduced one of minutes on two cores."""
    full = is_full(arg)
    pairs = tuple(name for backbone in BACKBONES for name in (backbone, f"ccq_{backbone}"))
    return kla_recall(
        "ccq_gain",
        full=full,
        title="Each backbone with and without a curvature-conditioned query",
        paper="Le et al. 2026, arXiv 2606.01294",
        length=512,
        pairs=96,
        small_pairs=4,
        mixers=(*pairs, *VARIANTS) if full else ("gdn", "ccq_gdn"),
        variants=VARIANTS,
        claims=tuple(
            {
                "text": f"The query's contraction helps {backbone} at {length} the training length.",
                "checks": (f"ccq_{backbone}@{length} > {backbone}@{length} + 0.005",),
            }
            for backbone in (BACKBONES if full else ("gdn",))
            for length in ("1x", "8x")
        ),
        notes=("The task is ours; the paper shows no synthetic recall.",),
    )
