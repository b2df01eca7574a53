"""A language model on text: any mixer, any size, any corpus.

    python -m experiments.train --config=configs/lm.py:mixer=kla,size=125m,data=/path/*.txt --run_dir=runs/125m

Keys of the argument (a value that holds commas goes in quotes: data="/a/*.txt,/b/*.txt"):
    mixer       name of a mixer; several joined by + repeat up the layers: mixer=kla+kla+kla+softmax
    size        tiny, 30m, 125m, 350m, kla400m or 1.3b; decides also the defaults of the keys marked *
    data        file, folder, glob, "stdlib" (this Python's own source), tfds:name, or a folder of experiments.tokenize
    heldout     source to measure on; without it a hash of the names holds some documents back from data
    tokenizer   "bytes" or a Hugging Face tokenizers JSON file
    seq_len*, batch*, steps*, lr*       tokens a row, rows a step, steps, peak learning rate
    optimizer   adamw, muon, lion, nadamw, sgd, adafactor; AdamW's rate is scaled where another's differs in kind
    layout      packed, or contiguous (rows go on in the next batch)
    carry       true: the recurrent state goes from batch to batch (takes the contiguous layout)
    accumulate  microbatches a step; dtype: auto, bfloat16, float32; seed; remat: none, dots, full
    init_from   run directory whose newest parameters to begin with

Any other field is set with --config.x.y=value, for example --config.optimizer.weight_decay=0.05. Steps and
modes of state-space layers learn at --config.optimizer.modes_rate, 0.1 of the learning rate. The options of the layers
chosen by `mixer` are fields too: --config.model.options.vla.penalty=1.0 (null is the layer's default).
`size=kla400m` has the optimizer settings, batch and length of the paper's 0.4B run (AdamW, 1e-4 to 1e-5, 477 steps of
512 x 4096 tokens); its decay is not on all parameters as there, but on matrices only.

Cost with the defaults, 6 operations per parameter and token without the mixers' own, vocabulary of 257:
    size      steps x tokens a step          tokens      operations
    tiny       1000 x   16 x  256             4.1 M       ~2e13
    30m        5000 x   64 x 1024             330 M       ~5e16
    125m      20000 x   64 x 2048             2.6 G       ~1.4e18
    350m      30000 x  128 x 2048             7.9 G       ~1.4e19
    kla400m     477 x  512 x 4096             1.0 G       ~2.5e18
    1.3b      50000 x  256 x 4096              52 G       ~4e20
"""

from __future__ import annotations

import dataclasses
from typing import get_args

import ml_collections
from ml_collections import config_dict

from configs.common import parse_arg
from linattn_jax.layers import LAYERS
from linattn_jax.models.presets import PRESETS, DecoderConfig
from linattn_jax.types import UserError

# Peak learning rate of AdamW, rows a step, tokens a row, steps.
SIZES = {
    "tiny": (3e-3, 16, 256, 1000),
    "30m": (1e-3, 64, 1024, 5000),
    "125m": (6e-4, 64, 2048, 20_000),
    "350m": (4e-4, 128, 2048, 30_000),
    "kla400m": (1e-4, 512, 4096, 477),
    "1.3b": (3e-4, 256, 4096, 50_000),
}
# Lion moves every weight by the whole rate: about a fifth of AdamW's suits it, with decay raised to match; plain
# momentum lives on another scale. Muon's updates are scaled to AdamW's.
RATE_SCALE = {"lion": 0.2, "sgd": 30.0}

# What a preset leaves to DecoderConfig's defaults, so that a run's config.json says all.
_MODEL = {
    field.name: field.default
    for field in dataclasses.fields(DecoderConfig)
    if field.name not in ("vocab_size", "dtype", "implementation", "chunk_size")
    and field.default is not dataclasses.MISSING
}

KEYS = {
    "mixer": "kla",
    "size": "tiny",
    "data": "stdlib",
    "heldout": "",
    "tokenizer": "bytes",
    "seq_len": int,
    "batch": int,
    "steps": int,
    "optimizer": "adamw",
    "lr": float,
    "layout": str,
    "carry": False,
    "accumulate": 1,
    "dtype": "auto",
    "remat": str,
    "seed": 0,
    "init_from": "",
}


def _options(mixer: str) -> dict[str, config_dict.FieldReference]:
    """A field without a value for every option of a layer, of the option's type."""
    types = {name: (get_args(kind) or (kind,))[0] for name, kind in LAYERS[mixer].option_types().items()}
    return {name: config_dict.placeholder(kind) for name, kind in types.items()}


def get_config(arg: str | None = None) -> ml_collections.ConfigDict:
    """The config for an argument as the module's docstring says.

    Raises:
        UserError: an unknown key, size or layout, or a value of the wrong type.
    """
    given = parse_arg(arg, KEYS)
    if given["size"] not in SIZES:
        raise UserError(f"unknown size {given['size']!r}; known: {', '.join(SIZES)}")
    mixers = tuple(given["mixer"].split("+"))
    for mixer in mixers:
        if mixer not in LAYERS:
            raise UserError(f"unknown mixer {mixer!r}; known: {', '.join(sorted(LAYERS))}")
    rate, rows, seq_len, steps = SIZES[given["size"]]
    steps = given["steps"] or steps
    layout = given["layout"] or ("contiguous" if given["carry"] else "packed")
    if layout not in ("packed", "contiguous"):
        raise UserError(f"unknown layout {layout!r}; known: packed, contiguous")
    config = ml_collections.ConfigDict()
    config.seed = given["seed"]
    config.steps = steps
    config.batch_size = given["batch"] or rows
    config.accumulate = given["accumulate"]
    config.log_every = 10
    config.carry_state = given["carry"]
    config.init_from = given["init_from"]
    config.max_bad_steps = 10
    config.compute_dtype = given["dtype"]
    config.time_limit_minutes = 0.0
    config.z_loss = 0.0
    config.model = {"preset": given["size"]} | _MODEL | PRESETS[given["size"]]
    config.model.mixers = mixers
    config.model.options = {mixer: _options(mixer) for mixer in mixers}
    config.model.remat = given["remat"] or ("dots" if given["size"] in ("350m", "kla400m", "1.3b") else "none")
    config.model.implementation = config_dict.placeholder(str)
    config.model.chunk_size = config_dict.placeholder(int)
    config.data = {
        "train": given["data"],
        "heldout": given["heldout"],
        "tokenizer": given["tokenizer"],
        "seq_len": given["seq_len"] or seq_len,
        "layout": layout,
        "text_field": "text",
        "data_dir": "",
        "heldout_percent": 5.0,
        "workers": 0,
    }
    config.optimizer = {
        "name": given["optimizer"],
        "learning_rate": rate * RATE_SCALE.get(given["optimizer"], 1.0) if given["lr"] is None else given["lr"],
        "warmup_steps": max(1, steps // 100) if given["size"] == "kla400m" else min(steps // 10, 2000),
        "final_fraction": 0.1,
        "weight_decay": 0.1,
        "beta1": 0.9,
        "beta2": 0.95,
        "clip_norm": 1.0,
        "modes_rate": 0.1,
    }
    config.eval = {"every": max(1, steps // 10), "max_bytes": 2_000_000}
    config.checkpoint = {"every": max(1, steps // 10), "keep": 3}
    config.sample = {"prompt": "", "length": 256, "temperature": 0.8}
    config.mesh = {"data": -1, "fsdp": 1}
    return config
