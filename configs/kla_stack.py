"""Sixty-four stacks at once: the KLA paper's state-tracking task, trained at 1024 tokens, tested from 256 to 2048.

    python -m experiments.kla_stack --run_dir=runs/kla_stack

Operations of three tokens, PUSH stack value or POP stack value; the value that a POP gives is asked at its stack's
name. Two layers of width 256, two heads with K = 96 and V = 192; batches of 32, at most 20,000 steps, stopped after 20
looks 500 steps apart without gain. Cost of a mixer, full: at most 4 G tokens. Not measured yet.
"""

from __future__ import annotations

import ml_collections

from configs._studies import is_full, kla_tracking

LENGTHS = (256, 512, 1024, 2048)
PUBLISHED = {
    "kla": (0.9997, 0.9985, 0.9925, 0.9694),
    "gdn": (0.9993, 0.9973, 0.9894, 0.9564),
    "mamba2": (0.9998, 0.9994, 0.9954, 0.9382),
}


def get_config(arg: str | None = None) -> ml_collections.ConfigDict:
    """The study; size=full or size=small, a reduced one of minutes on two cores."""
    full = is_full(arg)
    return kla_tracking(
        "kla_stack",
        full=full,
        title="Sixty-four stacks at once",
        task="stack",
        size="length",
        sizes={"length": 1024} if full else {"length": 48, "stacks": 2, "values": 4, "vocab_size": 16},
        lengths=LENGTHS if full else (24, 48),
        x_label="tokens T",
        published=PUBLISHED,
        claims=(
            {"text": "KLA tracks the stacks at the training length.", "checks": ("kla@T=1024 ~ 0.9925 +- 0.01",)},
            {
                "text": "At twice the length KLA is ahead of Gated DeltaNet and Mamba-2.",
                "checks": ("kla@T=2048 > gdn@T=2048", "kla@T=2048 > mamba2@T=2048"),
            },
        )
        if full
        else ({"text": "KLA tracks the stacks.", "checks": ("kla@T=48 > 0.5",)},),
    )
