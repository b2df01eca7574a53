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

# The VLA paper's TinyLM and its recipe: warm-up over a tenth, then cosine to 0.
TINY = {"kind": "tiny"}
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
    sizes: Mapping[str, Any] = {},
    mixers: Sequence[str] = MIXERS,
    variants: Mapping[str, Mapping[str, Any]] = {},
    learning_rates: Sequence[float] = (3e-4, 1e-3, 3e-3),
    seeds: Sequence[int] = (0, 1, 2, 3),
    select: Sequence[Mapping[str, int]] = (),
    chance: float | Sequence[float] = (),
    published: Mapping[str, Mapping[str, float]] = {},
    claims: Sequence[Mapping[str, Any]] = (),
    notes: Sequence[str] = (),
) -> ml_collections.ConfigDict:
    """The config of a study.

    task, sizes: of `data.recall.make_task`. model: kind "tiny" or "decoder", and fields of its config but for mixer
    and vocabulary. trials: fields of `train.trials.Recipe`. buckets: {"settings": sizes that vary between trials of
    one program, "sizes": the task's in this program}. evaluations: the test's columns, "n={pairs}" or "8x", and what
    in the task differs there. columns: the table's, with their places on the figure's axis.
    """
    config = ml_collections.ConfigDict()
    config.study, config.title, config.paper = name, title, paper
    config.mixers, config.variants = tuple(mixers), variants
    config.seeds, config.learning_rates = tuple(seeds), tuple(learning_rates)
    config.buckets, config.select = tuple(map(dict, buckets)), tuple(map(dict, select))
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
    config.published, config.claims, config.notes = published, tuple(map(dict, claims)), tuple(notes)
    return config


def kla_study(
    name: str,
    *,
    full: bool,
    task: str,
    sizes: Mapping[str, int],
    paper: str = "Zou, Ren and Liu 2026, arXiv 2605.08587",
    x_label: str = "length, in training lengths",
    heads: int = 4,
    steps: int = 10_000,
    eval_every: int = 200,
    patience: int = 10,
    train_examples: int = 20_000,
    published: Mapping[str, Mapping[str, float]] = {},
    **rest: Any,
) -> ml_collections.ConfigDict:
    """A study in the KLA paper's recipe: constant rate, decay 0.1, batches of 32, early stop, 2000 examples to test.

    Without `full`, a model of width 64 for 600 steps, one seed and rate. rest: arguments of `study`.
    """
    size = {"heads": heads, "head_size": 192 // heads, "value_size": 384 // heads}
    small_model = {"width": 64, "heads": 2, "head_size": 16, "value_size": 32, "mlp_width": 128}
    if not full:
        steps, eval_every, patience, train_examples = 600, 100, 0, 0
    count = 2000 if full else 128
    return study(
        name,
        paper=paper,
        task=task,
        sizes=sizes,
        x_label=x_label,
        model=KLA_MODEL | (size if full else small_model),
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
        learning_rates=(3e-4, 1e-3, 3e-3) if full else (3e-3,),
        seeds=(0, 1, 2, 3) if full else (0,),
        published=published if full else {},
        **rest,
    )


def size_of(arg: str | None) -> str:
    """ "full" or "small", as the argument `size=` says.

    Raises:
        UserError: another key or size.
    """
    size = parse_arg(arg, {"size": "full"})["size"]
    if size not in ("full", "small"):
        raise UserError(f"size {size!r} is not known; known are full, small.")
    return size
