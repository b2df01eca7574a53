"""The small language model of the VLA paper's synthetic tasks: LayerNorm, GELU, learned positions, over any mixer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from linattn_jax.layers import EXPANSION, LAYERS
from linattn_jax.layers.common import linear, normal_002
from linattn_jax.types import Array, UserError, check_integer


@dataclasses.dataclass(frozen=True)
class TinyConfig:
    """What a TinyLM is made of; the defaults are those of the VLA paper's code.

    options: of the mixer's layer. positions: rows of the learned embedding of positions, the longest text.
    """

    mixer: str
    vocab_size: int = 128
    layers: int = 2
    width: int = 128
    heads: int = 4
    mlp_width: int = 256
    positions: int = 4096
    norm_eps: float = 1e-5
    dtype: str = "float32"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.mixer not in LAYERS:
            raise UserError(f"mixer {self.mixer!r} is not known; known are {', '.join(sorted(LAYERS))}.")
        if self.width % self.heads:
            raise UserError(f"width {self.width} is not a multiple of heads {self.heads}.")


class TinyBlock(nnx.Module):
    """x += mixer(norm(x)); x += W_down GELU(W_up norm(x))."""

    def __init__(self, config: TinyConfig, *, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.dtype)
        size = config.width // config.heads
        expand_key, expand_value = EXPANSION.get(config.mixer, (1.0, 1.0))
        norm = lambda: nnx.LayerNorm(
            config.width, epsilon=config.norm_eps, dtype=dtype, param_dtype=jnp.float32, rngs=rngs
        )
        make: dict[str, Any] = {"rngs": rngs, "dtype": dtype, "init": normal_002}
        self.mixer_norm, self.mlp_norm = norm(), norm()
        self.mixer = LAYERS[config.mixer](
            config.width,
            config.heads,
            int(size * expand_key),
            int(size * expand_value),
            norm_eps=config.norm_eps,
            **make,
            **config.options,
        )  # type: ignore[call-arg]
        self.up = linear(config.width, config.mlp_width, bias=True, **make)
        self.down = linear(config.mlp_width, config.width, bias=True, **make)

    def __call__(self, x: Array) -> Array:
        x = x + self.mixer(self.mixer_norm(x))[0]
        return x + self.down(jax.nn.gelu(self.up(self.mlp_norm(x)), approximate=False))


class TinyLM(nnx.Module):
    """Embeddings of tokens and positions, pre-norm blocks, final LayerNorm, tied unembedding; reads whole texts only.

    Kernels and embeddings start N(0, 0.02^2), biases 0. For text that goes on from a state, see `Decoder`.

    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> from linattn_jax.models.tiny import TinyConfig, TinyLM
    >>> model = TinyLM(TinyConfig("vla"), rngs=nnx.Rngs(0))
    >>> model(jnp.zeros((1, 5), jnp.int32))[0].shape
    (1, 5, 128)
    """

    def __init__(self, config: TinyConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embedding = nnx.Param(normal_002(rngs.params(), (config.vocab_size, config.width)))
        self.positions = nnx.Param(normal_002(rngs.params(), (config.positions, config.width)))
        self.blocks = nnx.List([TinyBlock(config, rngs=rngs) for _ in range(config.layers)])
        self.norm = nnx.LayerNorm(
            config.width,
            epsilon=config.norm_eps,
            dtype=jnp.dtype(config.dtype),
            param_dtype=jnp.float32,
            rngs=rngs,
        )

    def __call__(self, tokens: Array) -> tuple[Array, None]:
        """Hidden states [B, T, D] after the final norm for tokens int32 [B, T], and None for the state."""
        check_integer("tokens", tokens)
        if tokens.ndim != 2 or tokens.shape[1] > self.config.positions:
            raise ValueError(
                f"tokens: shape {tuple(tokens.shape)} given, wanted [B, T] with T at most {self.config.positions}."
            )
        x = self.embedding[...][tokens] + self.positions[: tokens.shape[1]]
        x = x.astype(jnp.dtype(self.config.dtype))
        for block in self.blocks:
            x = block(x)
        return self.norm(x), None

    def logits(self, hidden: Array) -> Array:
        """float32 [..., vocab_size] of hidden states [..., D]."""
        return jnp.matmul(hidden, self.embedding[...].T.astype(hidden.dtype), preferred_element_type=jnp.float32)
