"""A text to say backwards: the KLA paper's Palindrome, trained on sources of 1024 tokens, tested from 256 to 2048.

    python -m experiments.kla_palindrome --run_dir=runs/kla_palindrome

source SEP reversed source, every token of the second half asked. Model and recipe as in configs/kla_stack.py. Cost of
a mixer, full: at most 8 G tokens. Not measured yet.
"""

from __future__ import annotations

import ml_collections

from configs._studies import is_full, kla_tracking

LENGTHS = (256, 512, 1024, 2048)
PUBLISHED = {
    "kla": (0.9984, 0.9950, 0.9722, 0.7596),
    "gdn": (0.9994, 0.9981, 0.9824, 0.8074),
    "mamba2": (0.032, 0.179, 0.882, 0.0086),
}


def get_config(arg: str | None = None) -> ml_collections.ConfigDict:
    """The study; size=full or size=small, a reduced one of minutes on two cores."""
    full = is_full(arg)
    return kla_tracking(
        "kla_palindrome",
        full=full,
        title="A text said backwards",
        task="palindrome",
        size="source",
        sizes={"source": 1024} if full else {"source": 16, "vocab_size": 8},
        lengths=LENGTHS if full else (8, 16),
        x_label="tokens of the source",
        published=PUBLISHED,
        claims=(
            {
                "text": "KLA says the training length backwards.",
                "checks": ("kla@source=1024 ~ 0.9722 +- 0.02",),
            },
            {
                "text": "Gated DeltaNet is ahead of KLA at every length.",
                "checks": tuple(f"gdn@source={length} > kla@source={length}" for length in LENGTHS),
            },
            {"text": "Mamba-2 fails away from its training length.", "checks": ("mamba2@source=2048 < 0.1",)},
        )
        if full
        else ({"text": "KLA says a text backwards.", "checks": ("kla@source=16 > 0.4",)},),
    )
