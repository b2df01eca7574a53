"""KLA's multi-query recall, trained at 256 tokens and tested up to 2048, all mixers.

    python -m experiments.kla_mqar --run_dir=runs/kla_mqar

The paper's code: 32 pairs in 256 tokens, vocabulary of 8192, power-law gaps; two layers of width 256, four heads with
K = 48 and V = 96; 20,000 training examples, batches of 32, AdamW 1e-3 with decay 0.1, at most 10,000 steps, stopped
after 10 looks 200 steps apart without gain; one seed. Ours: decay on matrices only, four seeds, the rate chosen from
three, the parameters of the best look tested. Cost of a mixer, full: at most 0.5 G tokens. Not
measured yet.
"""

from __future__ import annotations

import ml_collections

from configs._studies import MIXERS, is_full, kla_recall

PUBLISHED = {
    "kla": (0.9835, 0.9816, 0.9564, 0.7384),
    "gdn": (0.9874, 0.9836, 0.9431, 0.6681),
    "mamba2": (0.9908, 0.9902, 0.9654, 0.6429),
}


def get_config(arg: str | None = None) -> ml_collections.ConfigDict:
    """The study; size=full or size=small, a reduced one of minutes on two cores."""
    full = is_full(arg)
    return kla_recall(
        "kla_mqar",
        full=full,
        title="KLA's multi-query recall beyond its training length",
        length=256,
        pairs=32,
        small_pairs=4,
        mixers=MIXERS if full else ("kla", "linear"),
        published=PUBLISHED,
        claims=(
            {"text": "KLA recalls at its training length.", "checks": ("kla@1x ~ 0.9835 +- 0.02",)},
            {
                "text": "KLA extrapolates better than Gated DeltaNet and Mamba-2 at eight times the length.",
                "checks": ("kla@8x > gdn@8x", "kla@8x > mamba2@8x"),
            },
            {
                "text": "At the training length Gated DeltaNet and Mamba-2 are ahead of KLA.",
                "checks": ("gdn@1x > kla@1x", "mamba2@1x > kla@1x"),
            },
        )
        if full
        else ({"text": "KLA recalls where linear attention does not.", "checks": ("kla@1x > linear@1x + 0.3",)},),
    )
