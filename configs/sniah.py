"""One needle in ever longer text: the KLA paper's S-NIAH, all mixers, trained at 1024 tokens and tested up to 8192.

    python -m experiments.sniah --run_dir=runs/sniah

The paper's 100 % is of this proxy: its multi-query recall with a single pair. RULER's task, with a tokenizer and text
of one's own, is `experiments.needles`. Recipe as in configs/kla_mqar.py. Cost of a mixer, full: at most 2 G tokens.
Measured: docs/results/sniah.
"""

from __future__ import annotations

import ml_collections

from configs._studies import MIXERS, kla_study, size_of

LENGTHS = {"1x": 1, "2x": 2, "4x": 4, "8x": 8}
PUBLISHED = {
    "kla": (1.0, 1.0, 1.0, 1.0),
    "gdn": (0.9885, 0.9825, 0.9805, 0.9850),
    "mamba2": (0.0, 0.0, 0.0, 0.0),
}


def get_config(arg: str | None = None) -> ml_collections.ConfigDict:
    """The study; size=full or size=small, a reduced one of minutes on two cores."""
    full = size_of(arg) == "full"
    sizes = {"length": 1024, "pairs": 1, "vocab_size": 8192} if full else {"length": 32, "pairs": 1, "vocab_size": 64}
    return kla_study(
        "sniah",
        full=full,
        title="A single needle beyond the training length",
        task="kla_mqar",
        sizes=sizes,
        evaluations={name: {"length": times * sizes["length"]} for name, times in LENGTHS.items()},
        columns=LENGTHS,
        mixers=MIXERS if full else ("kla",),
        published={mixer: dict(zip(LENGTHS, row, strict=True)) for mixer, row in PUBLISHED.items()},
        claims=(
            {
                "text": "KLA finds the needle at every length.",
                "checks": tuple(f"kla@{length} >= 0.99" for length in LENGTHS),
            },
            {
                "text": "Gated DeltaNet finds it less often than KLA.",
                "checks": tuple(f"kla@{length} > gdn@{length}" for length in LENGTHS),
            },
            {"text": "Mamba-2 does not learn it.", "checks": ("mamba2@1x < 0.05",)},
        )
        if full
        else ({"text": "KLA finds the needle.", "checks": ("kla@1x > 0.5",)},),
        notes=("Published Mamba-2 results are given as about 0, the training having failed.",),
    )
