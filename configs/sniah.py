"""One needle in ever longer text: the KLA paper's S-NIAH, all mixers, trained at 1024 tokens and tested up to 8192.

    python -m experiments.sniah --run_dir=runs/sniah

The paper's 100 % is of this proxy: its multi-query recall with a single pair. RULER's task, with a tokenizer and text
of one's own, is `experiments.needles`. Recipe as in configs/kla_mqar.py. Cost of a mixer, full: at most 2 G tokens.
Not measured yet.
"""

from __future__ import annotations

import ml_collections

from configs._studies import MIXERS, is_full, kla_recall

PUBLISHED = {
    "kla": (1.0, 1.0, 1.0, 1.0),
    "gdn": (0.9885, 0.9825, 0.9805, 0.9850),
    "mamba2": (0.0, 0.0, 0.0, 0.0),
}


def get_config(arg: str | None = None) -> ml_collections.ConfigDict:
    """The study; size=full or size=small, a reduced one of minutes on two cores."""
    full = is_full(arg)
    return kla_recall(
        "sniah",
        full=full,
        title="A single needle beyond the training length",
        length=1024,
        pairs=1,
        small_pairs=1,
        mixers=MIXERS if full else ("kla",),
        published=PUBLISHED,
        claims=(
            {
                "text": "KLA finds the needle at every length.",
                "checks": tuple(f"kla@{length} >= 0.99" for length in ("1x", "2x", "4x", "8x")),
            },
            {
                "text": "Gated DeltaNet finds it less often than KLA.",
                "checks": tuple(f"kla@{length} > gdn@{length}" for length in ("1x", "2x", "4x", "8x")),
            },
            {"text": "Mamba-2 does not learn it.", "checks": ("mamba2@1x < 0.05",)},
        )
        if full
        else ({"text": "KLA finds the needle.", "checks": ("kla@1x > 0.5",)},),
        notes=("Published Mamba-2 results are given as about 0, the training having failed.",),
    )
