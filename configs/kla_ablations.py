"""What KLA's parts do for recall: step, norms, gates, sequence factor, value width, on its multi-query task.

    python -m experiments.kla_ablations --run_dir=runs/kla_ablations

Task, model and recipe of configs/kla_mqar.py; the variants are options of the layer `kla` (layers/kla.py), the last
four widen its values from 1.5 to 2, 4, 8 and 16 times the model's width. The paper has one seed. Cost of a variant,
full: at most 0.5 G tokens, of the widest several times the time. Not measured yet.
"""

from __future__ import annotations

import ml_collections

from configs import kla_mqar
from configs._studies import is_full

# Label: options of the layer, the paper's accuracies at the training length and at eight times it.
STEPS = {
    "kla": ({}, 0.9839, 0.7384),
    "kla_no_norm": ({"step": "sigmoid", "normalize_q": False}, 0.0003, 0.00006),
    "kla_exact": ({"step": "exact", "normalize_q": False}, 0.9781, 0.7768),
    "kla_learned": ({"step": "learned", "normalize_q": False}, 0.9777, 0.7446),
    "kla_sequence": ({"step": "sequence"}, 0.9720, 0.8502),
    "kla_factor_1_t": ({"sequence_factor": "1/t"}, 0.9792, 0.2047),
    "kla_factor_1_sqrt_t": ({"sequence_factor": "1/sqrt(t)"}, 0.9902, 0.5024),
    "kla_factor_1_log_t": ({"sequence_factor": "1/log(t+1)"}, 0.9756, 0.8468),
    "kla_single_gate": ({"single_gate": True}, 0.0001, 0.0003),
}
# Label: V of the four heads of a model of width 256.
WIDER = {
    "kla_values_2": (128, 0.9809, 0.7199),
    "kla_values_4": (256, 0.9888, 0.9134),
    "kla_values_8": (512, 0.9531, 0.9537),
    "kla_values_16": (1024, 0.9918, 0.9263),
}
OTHERS = {"gdn": (0.9872, 0.6681), "gla_kla": (0.0003, 0.0003)}


def get_config(arg: str | None = None) -> ml_collections.ConfigDict:
    """The study; size=full or size=small, a reduced one of minutes on two cores."""
    full = is_full(arg)
    config = kla_mqar.get_config(arg)
    config.study, config.title = "kla_ablations", "What KLA's parts do for recall"
    variants = {name: {"layer": "kla", "options": options} for name, (options, *_) in STEPS.items() if name != "kla"}
    variants |= {name: {"layer": "kla", "options": {}, "model": {"value_size": V}} for name, (V, *_) in WIDER.items()}
    config.variants = variants
    config.mixers = (*STEPS, *WIDER, *OTHERS) if full else ("kla_exact", "kla_no_norm")
    rows = {name: row[1:] for name, row in (STEPS | WIDER).items()} | OTHERS
    config.published = {} if not full else {name: {"1x": one, "8x": eight} for name, (one, eight) in rows.items()}
    config.claims = (
        (
            {
                "text": "Without a norm in the step or on queries and keys, recall fails.",
                "checks": ("kla_no_norm@1x < 0.1",),
            },
            {"text": "One gate for both decay and step fails.", "checks": ("kla_single_gate@1x < 0.1",)},
            {
                "text": "The factor 1/t costs most of the recall at eight times the length.",
                "checks": ("kla_factor_1_t@8x < kla@8x - 0.3",),
            },
            {
                "text": "Wider values extrapolate better.",
                "checks": tuple(f"{name}@8x > kla@8x" for name in list(WIDER)[1:]),
            },
        )
        if full
        else ({"text": "The exact step recalls.", "checks": ("kla_exact@1x > 0.3",)},)
    )
    config.notes = (
        "kla_sequence's step is 1/t in the paper's words; we read it as beta = 1/t with t counted from 1.",
        "The paper's GLA is gla_kla, one decay a head.",
    )
    return config
