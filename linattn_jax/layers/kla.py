"""Kaczmarz linear attention's layer, and what its paper ablates of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from linattn_jax import gates
from linattn_jax.layers.common import LayerState, Make, document_length, positions
from linattn_jax.layers.delta import DeltaLayer
from linattn_jax.layers.linear import PositionedState
from linattn_jax.mixers.delta import kaczmarz, l2_normalize
from linattn_jax.types import Array

EPS = 1e-6

# beta (||k||^2 + eps), the step relative to Kaczmarz's own: what the mixer takes, and bounded keys whatever beta is. Of
# eta [B, T, H], square = ||k||^2 [B, T, H], a learned scale [H] and the token's number t [B, T, 1].
STEPS: dict[str, Callable[..., Array]] = {
    "relaxed": lambda eta, square, scale, t: eta,
    "exact": lambda eta, square, scale, t: jnp.ones_like(square),
    "sigmoid": lambda eta, square, scale, t: eta * (square + EPS),
    "learned": lambda eta, square, scale, t: eta * (square + EPS) / (scale * square + EPS),
    "sequence": lambda eta, square, scale, t: (square + EPS) / t,
}
FACTORS: dict[str, Callable[[Array], Array]] = {
    "1/t": lambda t: 1 / t,
    "1/sqrt(t)": lambda t: jax.lax.rsqrt(t),
    "1/log(t+1)": lambda t: jnp.minimum(1 / jnp.log1p(t), 1),
}


class KLA(DeltaLayer):
    """Kaczmarz linear attention (Zou, Ren and Liu 2026), by default in the form that the paper reports.

    q is L2-normalised, k is not; eta = sigmoid(W_b x + b_b), beta = eta / (||k||^2 + eps); Mamba's decay; gated output
    norm. The options are the paper's ablations, t being the number of the token in its document, from 1:

    step: beta is "relaxed", as above; "exact", 1 / (||k||^2 + eps); "sigmoid", eta (the paper's NoNorm); "learned",
        eta / (softplus(s) ||k||^2 + eps) with an s per head, softplus(s) = 1 at first; or "sequence", 1 / t.
    sequence_factor: what multiplies beta: "1/t", "1/sqrt(t)" or "1/log(t+1)", natural and at most 1.
    normalize_q, normalize_k: whether q and k are divided by their norms. The paper's rows of "exact", "sigmoid" and
        "learned" have neither.
    single_gate: decay by 1 - eta, without a projection for the decay.

    Our reading, as the paper leaves it open: where s starts and that each head has one, that "sequence" has no eta, and
    the bound of "1/log(t+1)", which is 1.44 for the first token.
    """

    gated_output = strength_bias = True

    def build(
        self,
        make: Make,
        *,
        step: str = "relaxed",
        sequence_factor: str | None = None,
        normalize_q: bool = True,
        normalize_k: bool = False,
        single_gate: bool = False,
        conv_width: int = 4,
    ) -> None:
        if step not in STEPS:
            raise ValueError(f"step: {step!r} given, wanted one of {', '.join(STEPS)}.")
        if sequence_factor not in (None, *FACTORS):
            raise ValueError(f"sequence_factor: {sequence_factor!r} given, wanted None or one of {', '.join(FACTORS)}.")
        self.step, self.sequence_factor, self.single_gate = step, sequence_factor, single_gate
        self.normalize_q, self.normalize_k = normalize_q, normalize_k
        self.decay = None if single_gate else "mamba"
        self.has_strength = single_gate or step not in ("exact", "sequence")
        super().build(make, conv_width=conv_width)
        if step == "learned":
            self.square_scale = nnx.Param(jnp.full((self.num_heads,), math.log(math.expm1(1)), jnp.float32))

    @property
    def counts(self) -> bool:
        """Whether the layer has to know, and its state to carry, how long the document is."""
        return self.step == "sequence" or self.sequence_factor is not None

    def relative_step(self, k: Array, eta: Any, t: Any) -> Array:
        """beta (||k||^2 + eps), float32 [B, T, H]; eta and t are None where no option reads them."""
        k = k.astype(jnp.float32)
        k = l2_normalize(k) if self.normalize_k else k
        square = jnp.repeat(jnp.sum(k * k, axis=-1), self.num_heads // self.key_heads, axis=2)
        scale = jax.nn.softplus(self.square_scale[...]) if self.step == "learned" else None
        step = STEPS[self.step](eta, square, scale, t)
        return step if self.sequence_factor is None else FACTORS[self.sequence_factor](t) * step

    def mix(self, q: Array, k: Array, v: Array, x: Array, **options: Any) -> tuple[Array, Any]:
        t, length, eta = None, None, None
        if self.counts:
            before, options["initial_state"] = options["initial_state"] or (None, None)
            position = positions(x, before, options["segment_ids"], options["initial_segment_id"])
            length = document_length(position, before, options["segment_ids"])
            t = jnp.maximum(position + 1, 1).astype(jnp.float32)[..., None]  # padding in front has no number
        if self.has_strength:
            logit = self.strength(x).astype(jnp.float32)
            eta = gates.sigmoid_strength(logit)
        log_decay = jax.nn.log_sigmoid(-logit) if self.single_gate else self.decays(x)
        step = self.relative_step(k, eta, t)
        normalize = {"normalize_q": self.normalize_q, "normalize_k": self.normalize_k}
        y, memory = kaczmarz(q, k, v, log_decay, step, eps=EPS, **(options | normalize))
        return y, memory if length is None else PositionedState(length, memory)

    def init_state(self, batch: int, capacity: int | None = None) -> LayerState:
        """The empty state; it does not grow, so `capacity` is not used."""
        state = super().init_state(batch, capacity)
        if not self.counts:
            return state
        return state._replace(memory=PositionedState(jnp.zeros((batch,), jnp.int32), state.memory))
