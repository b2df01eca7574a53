"""Sixty-four stacks at once: the KLA paper's state-tracking task, trained at 1024 tokens, tested from 256 to 2048.

    python -m experiments.kla_stack --run_dir=runs/kla_stack

Operations of three tokens, PUSH stack value or POP stack value; the value that a POP gives is asked at its stack's
name. Two layers of width 256, two heads with K = 96 and V = 192; batches of 32, at most 20,000 steps, stopped after 20
looks 500 steps apart without gain. Cost of a mixer, full: at most 4 G tokens. Measured: docs/results/kla_stack.
"""

from __future__ import annotations

import ml_collections

from configs._studies import LONG_MIXERS, kla_study, size_of

LENGTHS = (256, 512, 1024, 2048)
PUBLISHED = {
    "kla": (0.9997, 0.9985, 0.9925, 0.9694),
    "gdn": (0.9993, 0.9973, 0.9894, 0.9564),
    "mamba2": (0.9998, 0.9994, 0.9954, 0.9382),
}


def get_config(arg: str | None = None) -> ml_collections.ConfigDict:
    """The study; size=full or size=small, a reduced one of minutes on two cores."""
    full = size_of(arg) == "full"
    lengths = LENGTHS if full else (24, 48)
    sizes = {"length": 1024} if full else {"length": 48, "stacks": 2, "values": 4, "vocab_size": 16}
    columns = {f"T={length}": length for length in lengths}
    return kla_study(
        "kla_stack",
        full=full,
        title="Sixty-four stacks at once",
        task="stack",
        sizes=sizes,
        evaluations={column: {"length": length} for column, length in columns.items()},
        columns=columns,
        x_label="tokens T",
        heads=2,
        steps=20_000,
        eval_every=500,
        patience=20,
        train_examples=0,
        mixers=LONG_MIXERS if full else ("kla",),
        published={mixer: dict(zip(map("T={}".format, LENGTHS), row, strict=True)) for mixer, row in PUBLISHED.items()},
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
