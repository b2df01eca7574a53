"""Softmax attention, the quadratic baseline."""

from __future__ import annotations

from typing import Any

from linattn_jax.layers.common import Make, MixerLayer, heads, merge_heads, positions, rotary
from linattn_jax.mixers.softmax import KVCache, softmax_attention, softmax_attention_init
from linattn_jax.types import Array


class SoftmaxAttention(MixerLayer):
    """Causal softmax attention with rotary positions, grouped queries and optional RMSNorm of q and k (`qk_norm`).

    `key_heads` is the number of key and value heads. Positions count from the start of each document.
    """

    def build(
        self,
        make: Make,
        *,
        theta: float = 1e4,
        window: int | None = None,
        qk_norm: bool = False,
        rope: bool = True,
    ) -> None:
        if rope:
            self.only_even_keys()
        self.theta, self.window, self.qk_norm, self.rope = theta, window, qk_norm, rope
        self.query = make.linear(self.width, self.num_heads * self.key_size)
        self.key = make.linear(self.width, self.keys)
        self.value = make.linear(self.width, self.key_heads * self.value_size)
        if qk_norm:
            self.query_norm, self.key_norm = make.norm(self.key_size), make.norm(self.key_size)
        self.output = make.linear(self.values, self.width)

    def forward(self, x: Array, state: KVCache | None, packing: dict[str, Any]) -> tuple[Array, KVCache | None]:
        q, k, v = heads(self.query(x), self.num_heads), heads(self.key(x), self.key_heads), self.value(x)
        if self.qk_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        if self.rope:
            position = positions(x, None if state is None else state.length, **packing)
            q, k = rotary(q, position, self.theta), rotary(k, position, self.theta)
        y, state = softmax_attention(
            q,
            k,
            heads(v, self.key_heads),
            window=self.window,
            initial_state=state,
            **packing,
            implementation=self.implementation,
        )
        return self.output(merge_heads(y)), state

    def init_state(self, batch: int, capacity: int | None = None) -> KVCache:
        """An empty cache for `capacity` tokens in the compute dtype."""
        if capacity is None:
            raise ValueError("capacity: None given, wanted the number of tokens that softmax attention must cache.")
        return softmax_attention_init(
            batch, self.key_heads, self.key_size, self.value_size, capacity=capacity, dtype=self.dtype
        )


class SoftmaxWithoutPositions(SoftmaxAttention):
    """The softmax baseline of the VLA paper's code: no rotary positions."""

    def build(  # type: ignore[override]  # without positions there is nothing to say of them
        self, make: Make, *, window: int | None = None, qk_norm: bool = False
    ) -> None:
        super().build(make, window=window, qk_norm=qk_norm, rope=False)
