"""What the configs of studies share: who is compared, the papers' models and recipes, how a study is put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ml_collections

from configs.common import parse_arg
from linattn_jax.layers import LAYERS
from linattn_jax.types import UserError

# The most telling first: a sitting that is cut short has these.
MIXERS = (
    "vla", "kla", "gdn", "deltanet", "softmax", "linear", "deltanet_vla", "softmax_vla", "mamba2", "interdomain",
    "ccq_gdn", "gla", "ccq_gla", "s4d_interdomain", "longhorn", "ccq_kla", "ccq_deltanet", "ccq_mamba2",
    "deltanet_kla", "gla_kla", "longhorn_kla", "retention", "s4d",
)  # fmt: skip
assert sorted(MIXERS) == sorted(LAYERS), "a study compares every layer there is"

# The KLA paper's synthetic models: two layers of width 256, four heads of K = 48 and V = 96.
KLA_MODEL = {
    "kind": "decoder", "layers": 2, "width": 256, "heads": 4, "head_size": 48, "value_size": 96, "mlp_width": 1024,
    "norm_eps": 1e-5,
}  # fmt: skip

# Where a trial takes 1e16 operations: the papers' mixers and what they are compared with most.
LONG_MIXERS = ("kla", "gdn", "vla", "ccq_gdn", "interdomain", "mamba2", "softmax")


def optimizer(steps: int, *, constant: bool, weight_decay: float) -> dict[str, Any]:
    """AdamW clipped at 1, with the VLA paper's schedule or at a constant rate, as the KLA paper has it."""
    return {
        "name": "adamw",
        "learning_rate": 1.0,  # times the trial's
        "warmup_steps": 0 if constant else steps // 10,
        "final_fraction": 1.0 if constant else 0.0,
        "weight_decay": weight_decay,
        "beta1": 0.9,
        "beta2": 0.999,
        "clip_norm": 1.0,
    }


def study(
    name: str,
    *,
    full: bool,
    title: str,
    paper: str,
    task: str,
    model: Mapping[str, Any],
    optimizer: Mapping[str, Any],
    trials: Mapping[str, Any],
    buckets: Sequence[Mapping[str, Any]],
    evaluations: Mapping[str, Mapping[str, int]],
    columns: Mapping[str, float],
    x_label: str,
    mixers: Sequence[str],
    claims: Sequence[Mapping[str, Any]],
    sizes: Mapping[str, Any] = {},
    variants: Mapping[str, Mapping[str, Any]] = {},
    chance: float | Sequence[float] = (),
    published: Mapping[str, Sequence[float]] = {},
    notes: Sequence[str] = (),
) -> ml_collections.ConfigDict:
    """The config of a study: four seeds and three rates if `full`, else one of each and nothing published.

    task, sizes: of `data.recall.make_task`. model: kind "tiny" or "decoder", and fields of its config but for mixer
    and vocabulary. trials: fields of `train.trials.Recipe`. buckets: {"settings": sizes that vary between trials of
    one program, "sizes": the task's in this program}. evaluations: the test's columns, "n={pairs}" or "8x", and what
    in the task differs there. columns: the table's, with their places on the figure's axis. published: the paper's
    accuracies in the order of the columns, which may end early.
    """
    config = ml_collections.ConfigDict()
    config.study, config.title, config.paper = name, title, paper
    config.mixers, config.variants = tuple(mixers), variants
    config.seeds, config.learning_rates = ((0, 1, 2, 3), (3e-4, 1e-3, 3e-3)) if full else ((0,), (3e-3,))
    config.buckets, config.select = tuple(map(dict, buckets)), ()
    config.max_trials, config.checkpoint_minutes = 32, 5.0
    config.protocol = {
        "task": {"name": task, "sizes": sizes},
        "evaluations": evaluations,
        "model": model,
        "optimizer": optimizer,
        "trials": trials,
    }
    config.columns, config.x, config.x_label = tuple(columns), tuple(columns.values()), x_label
    config.chance = chance if isinstance(chance, float) else tuple(chance)
    rows = {mixer: dict(zip(columns, row, strict=False)) for mixer, row in published.items()}
    config.published, config.claims, config.notes = rows if full else {}, tuple(map(dict, claims)), tuple(notes)
    return config


def vla_study(name: str, *, full: bool, steps: int, eval_every: int, **rest: Any) -> ml_collections.ConfigDict:
    """A study of the VLA paper's MQAR in its recipe: TinyLM, warm-up over a tenth, cosine to 0, decay 0.01.

    Without `full`, a model of width 64 with two heads of 32. rest: arguments of `study`.
    """
    small = {} if full else {"width": 64, "heads": 2, "mlp_width": 128, "positions": 64}
    counts = {"test_examples": 640} if full else {"test_examples": 128, "validation_examples": 128}
    return study(
        name,
        full=full,
        paper="Pandey and Singh 2026, arXiv 2605.11196",
        task="vla_mqar",
        model={"kind": "tiny"} | small,
        optimizer=optimizer(steps, constant=False, weight_decay=0.01),
        trials={"steps": steps, "batch": 64, "eval_every": eval_every, "solved": 0.9995} | counts,
        **rest,
    )


def kla_study(
    name: str,
    *,
    full: bool,
    heads: int,
    steps: int,
    eval_every: int,
    patience: int,
    train_examples: int,
    paper: str = "Zou, Ren and Liu 2026, arXiv 2605.08587",
    **rest: Any,
) -> ml_collections.ConfigDict:
    """A study in the KLA paper's recipe: constant rate, decay 0.1, batches of 32, early stop, 2000 examples to test.

    Without `full`, a model of width 64 for 600 steps. rest: arguments of `study`.
    """
    size = {"heads": heads, "head_size": 192 // heads, "value_size": 384 // heads}
    small = {"width": 64, "heads": 2, "head_size": 16, "value_size": 32, "mlp_width": 128}
    if not full:
        steps, eval_every, patience, train_examples = 600, 100, 0, 0
    count = 2000 if full else 128
    return study(
        name,
        full=full,
        paper=paper,
        model=KLA_MODEL | (size if full else small),
        optimizer=optimizer(steps, constant=True, weight_decay=0.1),
        trials={
            "steps": steps,
            "batch": 32,
            "eval_every": eval_every,
            "patience": patience,
            "train_examples": train_examples,
            "validation_examples": count,
            "test_examples": count,
        },
        buckets=({"settings": ({},)},),
        **rest,
    )


def kla_recall(name: str, *, full: bool, length: int, pairs: int, small_pairs: int, **rest: Any) -> Any:
    """A `kla_study` of its multi-query recall, tested at one to eight times the training length; 10,000 steps."""
    length, pairs, vocab_size = (length, pairs, 8192) if full else (32, small_pairs, 64)
    times = {"1x": 1, "2x": 2, "4x": 4, "8x": 8}
    return kla_study(
        name,
        full=full,
        heads=4,
        steps=10_000,
        eval_every=200,
        patience=10,
        train_examples=20_000,
        task="kla_mqar",
        sizes={"length": length, "pairs": pairs, "vocab_size": vocab_size},
        evaluations={column: {"length": n * length} for column, n in times.items()},
        columns=times,
        x_label="length, in training lengths",
        **rest,
    )


def kla_tracking(
    name: str, *, full: bool, task: str, sizes: Mapping[str, int], size: str, lengths: Sequence[int], **rest: Any
) -> Any:
    """A `kla_study` of a task that takes 20,000 steps of fresh examples, tested at several values of its `size`."""
    columns = {f"{'T' if size == 'length' else size}={length}": length for length in lengths}
    return kla_study(
        name,
        full=full,
        heads=2,
        steps=20_000,
        eval_every=500,
        patience=20,
        train_examples=0,
        task=task,
        sizes=sizes,
        evaluations={column: {size: length} for column, length in columns.items()},
        columns=columns,
        mixers=LONG_MIXERS if full else ("kla",),
        **rest,
    )


def is_full(arg: str | None) -> bool:
    """Whether the argument says `size=full`, as it does unless it says `size=small`.

    Raises:
        UserError: another key or size.
    """
    size = parse_arg(arg, {"size": "full"})["size"]
    if size not in ("full", "small"):
        raise UserError(f"size {size!r} is not known; known are full, small.")
    return size == "full"
