"""Variational linear attention's layer."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx

from linattn_jax.layers.common import Make, MixerLayer, elu_feature, heads, merge_heads
from linattn_jax.mixers.delta import l2_normalize
from linattn_jax.mixers.variational import VariationalState, variational, variational_init
from linattn_jax.types import Array


class VLA(MixerLayer):
    """Variational linear attention (Pandey and Singh 2026) as its authors' code has it.

    q and k are ELU + 1 features; the penalty direction is W_u applied to the raw keys of all heads, L2-normalised per
    head and divided by sqrt(K); reads are divided by q . z; a LayerNorm over all heads stands before W_o, without which
    outputs would shrink as 1 / t.

    penalty: what the penalty matrix starts from, times I. directions: "learned" as above, or "none", an ablation not
    in the paper: u = 0, so that the penalty stays as it starts, writes go along the key itself, and the memory is
    the delta rule's with unit keys and beta = 1.
    """

    def build(self, make: Make, *, penalty: float = 0.1, directions: str = "learned") -> None:
        self.only_value_heads()
        if directions not in ("learned", "none"):
            raise ValueError(f"directions: {directions!r} given, wanted 'learned' or 'none'.")
        self.penalty = penalty
        self.build_projections(make)
        self.direction = make.linear(self.keys, self.keys) if directions == "learned" else None
        self.norm = nnx.LayerNorm(
            self.values, epsilon=make.norm_eps, dtype=make.dtype, param_dtype=jnp.float32, rngs=make.rngs
        )
        self.output = make.linear(self.values, self.width)

    def forward(
        self, x: Array, state: VariationalState | None, packing: dict[str, Any]
    ) -> tuple[Array, VariationalState]:
        raw = self.key(x)
        direction = jnp.zeros_like(heads(raw, self.num_heads))
        if self.direction is not None:
            direction = l2_normalize(heads(self.direction(raw), self.num_heads)) * self.key_size**-0.5
        y, state = variational(
            elu_feature(heads(self.query(x), self.num_heads)),
            elu_feature(heads(raw, self.num_heads)),
            heads(self.value(x), self.num_heads),
            direction,
            penalty=self.penalty,
            initial_state=state,
            **packing,
            **self.options,
        )
        return self.output(self.norm(merge_heads(y))), state

    def init_state(self, batch: int, capacity: int | None = None) -> VariationalState:
        """The empty state; it does not grow, so `capacity` is not used."""
        del capacity
        return variational_init(batch, self.num_heads, self.key_size, self.value_size, penalty=self.penalty)
