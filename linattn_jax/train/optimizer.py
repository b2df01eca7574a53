"""Optimizers by name: one chain of clipping, direction, masked decay and a warmed-up cosine rate."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from linattn_jax.sharding import logical_axes, path_name
from linattn_jax.types import UserError

# Matrices that Muon leaves to Adam: rows of an embedding and columns of an unembedding are looked up or compared
# one at a time, a convolution's taps are no linear map of the width, and CCQ's gate is a vector for each head.
NOT_FOR_MUON = r"(^|/)[^/]*(embed|head|conv|contraction)[^/]*(/|$)"
# Of what has two logical axes, what does not decay.
NO_DECAY = r"(^|/)[^/]*(norm|conv)[^/]*/|(^|/)([aA]_log|dt_bias|bias|scale)$"
# Times, dampings and frequencies of state-space models: layers/state_space.py's Modes.
MODES = r"(^|/)modes/(log_dt|a_log|a_imag)$"
# Muon's updates get the root mean square of AdamW's, so that one learning rate serves both (arXiv 2502.16982).
MUON_RMS = 0.2


def schedule(config: Any, steps: int) -> Callable[[Any], Any]:
    """Learning rate by number of updates made: linear warm-up from 0, then cosine to final_fraction of the peak.

    Args:
        config: the fields learning_rate, warmup_steps, final_fraction.
        steps: optimizer steps of the whole run.
    Raises:
        UserError: warmup_steps longer than the run, or a value out of range.
    """
    peak, warmup, final = float(config.learning_rate), int(config.warmup_steps), float(config.final_fraction)
    if peak < 0:
        raise UserError(f"optimizer.learning_rate must not be negative, got {peak}")
    if not 0 <= final <= 1:
        raise UserError(f"optimizer.final_fraction must lie in [0, 1], got {final}")
    if not 0 <= warmup <= steps:
        raise UserError(f"optimizer.warmup_steps must lie in [0, steps={steps}], got {warmup}")

    def rate(count):
        count = jnp.asarray(count, jnp.float32)
        # The first update is made at peak / warmup, not at 0: no step is wasted.
        rising = (count + 1) / max(warmup, 1)
        progress = jnp.clip((count - warmup) / max(steps - warmup, 1), 0, 1)
        falling = final + (1 - final) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
        return peak * jnp.where(count < warmup, rising, falling)

    return rate


def decay_mask(params: Any) -> Any:
    """True where weight decay applies: matrices per layer; never norms, biases, A_log, dt_bias, convolutions.

    Nor anything of a state-space model's own: steps, modes, what reads them (mix and c) and the weight of the input.
    Decay would pull modes to one frequency and time, and what reads them is complex numbers held as two real arrays.
    """

    def decays(path, _):
        name = path_name(path)
        return len(logical_axes(name) or ()) >= 2 and not re.search(NO_DECAY, name)

    return jax.tree_util.tree_map_with_path(decays, params)


def muon_mask(params: Any) -> Any:
    """True for the parameters that Muon updates: decayed matrices other than (un)embeddings."""
    return jax.tree_util.tree_map_with_path(
        lambda path, decays: decays and not re.search(NOT_FOR_MUON, path_name(path)), decay_mask(params)
    )


def modes_mask(params: Any) -> Any:
    """True for the steps and modes of state-space models, which learn at a rate of their own."""
    return jax.tree_util.tree_map_with_path(lambda path, _: bool(re.search(MODES, path_name(path))), params)


def _muon(config: Any) -> optax.GradientTransformation:
    def dimensions(updates):
        # The last two axes are the matrix; a stack of layers before them is a batch of matrices.
        return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(-2, -1), updates)

    def match_rms(updates, params=None):
        return jax.tree.map(lambda u: u * (MUON_RMS * max(u.shape[-2:]) ** 0.5), updates)

    matrices = optax.chain(
        optax.contrib.scale_by_muon(beta=config.beta1, weight_dimension_numbers=dimensions),
        optax.stateless(match_rms),
    )
    return optax.partition(
        {"muon": matrices, "adam": _adam(config)},
        lambda params: jax.tree.map(lambda muon: "muon" if muon else "adam", muon_mask(params)),
    )


def _adam(config: Any) -> optax.GradientTransformation:
    return optax.scale_by_adam(b1=config.beta1, b2=config.beta2)


# Each gives the direction of an update, before decay and learning rate.
DIRECTIONS: dict[str, Callable[[Any], optax.GradientTransformation]] = {
    "adamw": _adam,
    "muon": _muon,
    "lion": lambda config: optax.scale_by_lion(b1=config.beta1, b2=config.beta2),
    "nadamw": lambda config: optax.scale_by_adam(b1=config.beta1, b2=config.beta2, nesterov=True),
    "sgd": lambda config: optax.trace(decay=config.beta1) if config.beta1 else optax.identity(),
    "adafactor": lambda config: optax.chain(
        optax.scale_by_factored_rms(decay_rate=0.8), optax.clip_by_block_rms(1.0), optax.trace(decay=config.beta1)
    ),
}


def make_optimizer(config: Any, steps: int) -> tuple[optax.GradientTransformation, Callable[[Any], Any]]:
    """The optimizer named by `config.name` and its schedule (learning rate by number of updates made).

    All share one chain: global-norm clipping at clip_norm (0 = none), the direction, decoupled weight decay of
    the matrices (times the learning rate, as in AdamW), the learning rate, of which steps and modes of state-space
    models get the fraction modes_rate. beta1 is the momentum of sgd and Muon too. S4D's authors give these parameters a
    smaller rate too; a fraction for it, of whatever direction, is our reading.

    Args:
        config: name, learning_rate, warmup_steps, final_fraction, weight_decay, beta1, beta2, clip_norm; modes_rate is
            1 where it is absent.
        steps: optimizer steps of the whole run.
    Raises:
        UserError: an unknown name or a value out of range.
    """
    if config.name not in DIRECTIONS:
        raise UserError(f"unknown optimizer {config.name!r}; known: {', '.join(sorted(DIRECTIONS))}")
    for field in ("beta1", "beta2"):
        if not 0 <= config[field] < 1:
            raise UserError(f"optimizer.{field} must lie in [0, 1), got {config[field]}")
    modes_rate = config.get("modes_rate", 1.0)
    for field, value in (
        ("weight_decay", config.weight_decay),
        ("clip_norm", config.clip_norm),
        ("modes_rate", modes_rate),
    ):
        if value < 0:
            raise UserError(f"optimizer.{field} must not be negative, got {value}")
    rate = schedule(config, steps)
    parts = [optax.clip_by_global_norm(config.clip_norm)] if config.clip_norm else []
    parts.append(DIRECTIONS[config.name](config))
    if config.weight_decay:
        parts.append(optax.add_decayed_weights(config.weight_decay, mask=decay_mask))
    parts.append(optax.scale_by_learning_rate(rate))
    if modes_rate != 1:
        parts.append(optax.masked(optax.scale(modes_rate), modes_mask))
    return optax.chain(*parts), rate
