"""Sizes by name, and the decoder's configuration made from a preset and its overrides."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from linattn_jax.layers import LAYERS
from linattn_jax.layers.common import INITIALIZERS
from linattn_jax.mixers.dispatch import IMPLEMENTATIONS
from linattn_jax.types import UserError

REMAT = ("none", "dots", "full")
KNOWN = {
    "remat": REMAT,
    "init": tuple(INITIALIZERS),
    "dtype": ("float32", "bfloat16"),
    "implementation": (None, *IMPLEMENTATIONS, "xla", "cudnn"),
}


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """What a decoder is made of; see `Decoder`.

    mixers: a name of `LAYERS`, or several, repeated to the number of layers: ("kla", "kla", "softmax") is a hybrid.
    head_size, value_size: K and V per head before a mixer's own expansion (GLA halves K); value_size 0 means head_size.
    key_heads: heads of q and k (of k and v for softmax), 0 means heads.
    options: of layers, by the mixer's name: {"vla": {"penalty": 1.0}}; None is the layer's default. A layer's options
        are the keywords of its `build`, which its docstring explains.
    mlp_width: hidden channels of SwiGLU; 0 means 8/3 width rounded up to a multiple of 256.
    remat: "none" keeps activations, "dots" keeps matrix products, "full" keeps only what enters each layer.
    """

    vocab_size: int
    layers: int
    width: int
    heads: int
    head_size: int = 128
    value_size: int = 0
    key_heads: int = 0
    mixers: tuple[str, ...] = ("kla",)
    options: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict, hash=False)
    mlp_width: int = 0
    tie_embeddings: bool = True
    norm_eps: float = 1e-6
    init: str = "fan_in_uniform"
    remat: str = "none"
    implementation: str | None = None
    chunk_size: int | None = None
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if not isinstance(self.mixers, str | tuple | list):
            raise UserError(f"model.mixers is {self.mixers!r}, wanted names of mixers.")
        mixers = (self.mixers,) if isinstance(self.mixers, str) else tuple(self.mixers)
        object.__setattr__(self, "mixers", mixers)
        for name in mixers:
            if name not in tuple(LAYERS):
                raise UserError(f"mixer {name!r} is not known; known are {', '.join(sorted(LAYERS))}.")
        if not mixers:
            raise UserError("model.mixers is empty; name at least one mixer.")
        object.__setattr__(self, "options", _given(self.options))
        for field, allowed in KNOWN.items():
            if getattr(self, field) not in allowed:
                names = ", ".join(map(str, allowed))
                raise UserError(f"model.{field} {getattr(self, field)!r} is not known; known are {names}.")
        least = dict.fromkeys(("vocab_size", "layers", "width", "heads", "head_size"), 1)
        for field, wanted in (least | dict.fromkeys(("value_size", "key_heads", "mlp_width"), 0)).items():
            value = getattr(self, field)
            if not isinstance(value, Integral) or isinstance(value, bool) or value < wanted:
                raise UserError(f"model.{field} is {value!r}, wanted an integer of at least {wanted}.")
        if not isinstance(self.norm_eps, Real) or not 0 < self.norm_eps < math.inf:
            raise UserError(f"model.norm_eps is {self.norm_eps!r}, wanted a positive number.")
        if self.key_heads and self.heads % self.key_heads:
            raise UserError(f"model.heads {self.heads} is not a multiple of model.key_heads {self.key_heads}.")

    @property
    def layer_mixers(self) -> tuple[str, ...]:
        """One mixer name per layer."""
        return tuple(self.mixers[i % len(self.mixers)] for i in range(self.layers))

    @property
    def mlp_channels(self) -> int:
        return self.mlp_width or -(-8 * self.width // (3 * 256)) * 256


def _given(options: Any) -> dict[str, dict[str, Any]]:
    """A copy of `options` without what is None; raises UserError for a name or a type that does not fit."""
    if not hasattr(options, "items"):
        raise UserError(f"model.options is {options!r}, wanted options by name of mixer.")
    given: dict[str, dict[str, Any]] = {}
    for mixer, values in options.items():
        if mixer not in tuple(LAYERS):
            raise UserError(f"model.options.{mixer} is of no mixer; known are {', '.join(sorted(LAYERS))}.")
        if not hasattr(values, "items"):
            raise UserError(f"model.options.{mixer} is {values!r}, wanted values by name of option.")
        types = LAYERS[mixer].option_types()
        for option, value in values.items():
            name = f"model.options.{mixer}.{option}"
            if option not in types:
                known = f"known are {', '.join(sorted(types))}" if types else "the layer has none"
                raise UserError(f"{name} is not known; {known}.")
            wanted = types[option]
            fits = isinstance(value, (wanted, int) if wanted is float else wanted)
            if value is not None and (not fits or (isinstance(value, bool) and wanted is not bool)):
                raise UserError(f"{name} is {value!r}, wanted {getattr(wanted, '__name__', wanted)}.")
        if chosen := {option: value for option, value in values.items() if value is not None}:
            given[mixer] = chosen
    return given


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"layers": 4, "width": 128, "heads": 2, "head_size": 64, "mlp_width": 384},
    "30m": {"layers": 8, "width": 512, "heads": 4},
    "125m": {"layers": 12, "width": 768, "heads": 6},
    "350m": {"layers": 24, "width": 1024, "heads": 8},
    "kla400m": {
        "layers": 11,
        "width": 1536,
        "heads": 12,
        "head_size": 96,
        "value_size": 192,
        "norm_eps": 1e-5,
        "mlp_width": 6144,
    },
    "1.3b": {"layers": 24, "width": 2048, "heads": 16, "mlp_width": 5632, "tie_embeddings": False},
}


def decoder_config(model: Mapping[str, Any], vocab_size: int, dtype: str) -> DecoderConfig:
    """The configuration that `model` asks for: `preset` names a size, every other field of DecoderConfig overrides it.

    A field that is None keeps the preset's value. Raises UserError for an unknown preset, mixer or field.
    """
    fields = {field.name for field in dataclasses.fields(DecoderConfig)} - {"vocab_size", "dtype"}
    values = {key: value for key, value in dict(model).items() if key != "preset"}
    unknown = sorted(set(values) - fields)
    if unknown:
        raise UserError(f"model.{unknown[0]} is not known; known are preset, {', '.join(sorted(fields))}.")
    preset = model.get("preset", "tiny")
    if preset not in PRESETS:
        raise UserError(f"size {preset!r} is not known; known are {', '.join(PRESETS)}.")
    values = PRESETS[preset] | {key: value for key, value in values.items() if value is not None}
    return DecoderConfig(vocab_size=vocab_size, dtype=dtype, **values)
