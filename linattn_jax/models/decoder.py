"""A pre-norm decoder over any mixers: scanned layers, SwiGLU, RMSNorm, one state for training and decoding."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from linattn_jax.layers import EXPANSION, GROWING, LAYERS
from linattn_jax.layers.common import INITIALIZERS, RMSNorm, linear, mask_padding, normal_002
from linattn_jax.models.presets import DecoderConfig
from linattn_jax.types import Array, check_integer

POLICIES = {"dots": jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims, "full": None}


class SwiGLU(nnx.Module):
    """W_down (SiLU(W_gate x) * W_up x).

    With KLA's initialisation, fan_in_uniform, the last kernel starts divided by sqrt(2 layers), as in KLA's models.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        init = INITIALIZERS[config.init]
        project = partial(linear, rngs=rngs, dtype=jnp.dtype(config.dtype), init=init)
        self.gate = project(config.width, config.mlp_channels)
        self.up = project(config.width, config.mlp_channels)

        def smaller(*args: Any) -> Array:
            return init(*args) / ((2 * config.layers) ** 0.5 if config.init == "fan_in_uniform" else 1.0)

        self.down = project(config.mlp_channels, config.width, init=smaller)

    def __call__(self, x: Array) -> Array:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """x += mixer(norm(x)); x += SwiGLU(norm(x))."""

    def __init__(self, config: DecoderConfig, mixer: str, *, rngs: nnx.Rngs):
        # In a hybrid a name is for the mixers that know it: softmax attention has implementations of its own.
        softmax_only = config.implementation in ("xla", "cudnn")
        own = config.implementation if softmax_only == (mixer in GROWING) else None
        expand_key, expand_value = EXPANSION.get(mixer, (1.0, 1.0))
        self.mixer_norm = RMSNorm(config.width, eps=config.norm_eps)
        self.mixer = LAYERS[mixer](
            config.width,
            config.heads,
            int(config.head_size * expand_key),
            int((config.value_size or config.head_size) * expand_value),
            key_heads=config.key_heads or None,
            norm_eps=config.norm_eps,
            init=INITIALIZERS[config.init],
            dtype=jnp.dtype(config.dtype),
            implementation=own,
            chunk_size=config.chunk_size,
            rngs=rngs,
            **config.options.get(mixer, {}),
        )  # type: ignore[call-arg]
        self.mlp_norm = RMSNorm(config.width, eps=config.norm_eps)
        self.mlp = SwiGLU(config, rngs=rngs)

    def __call__(self, x: Array, state: Any, packing: dict[str, Array | None]) -> tuple[Array, Any]:
        y, state = self.mixer(self.mixer_norm(x), state=state, **packing)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), state


class Period(nnx.Module):
    """The shortest run of layers whose repetition is the whole stack: what the scan over layers scans."""

    def __init__(self, config: DecoderConfig, mixers: tuple[str, ...], *, rngs: nnx.Rngs):
        self.blocks = nnx.List([Block(config, mixer, rngs=rngs) for mixer in mixers])

    def __call__(self, x: Array, states: Any, packing: dict[str, Array | None]) -> tuple[Array, Any]:
        new = []
        for i, block in enumerate(self.blocks):
            x, state = block(x, None if states is None else states[i], packing)
            new.append(state)
        return x, tuple(new)


def shortest_period(names: tuple[str, ...]) -> int:
    """The smallest p dividing len(names) such that names repeats its first p entries."""
    return next(p for p in range(1, len(names) + 1) if len(names) % p == 0 and names == names[:p] * (len(names) // p))


class Decoder(nnx.Module):
    """Embedding, pre-norm blocks, final RMSNorm, unembedding.

    Parameters are float32 and computation is in `config.dtype`; layers are stacked along a leading axis and scanned, so
    compile time does not grow with depth. The embedding is N(0, 0.02^2), its rows padded to a multiple of 128.

    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> from linattn_jax.models import Decoder, DecoderConfig
    >>> model = Decoder(DecoderConfig(vocab_size=257, layers=2, width=32, heads=1, head_size=32), rngs=nnx.Rngs(0))
    >>> hidden, state = model(jnp.zeros((1, 5), jnp.int32))
    >>> model.logits(hidden).shape
    (1, 5, 257)
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        names = config.layer_mixers
        self.period = shortest_period(names)
        self.repeats = len(names) // self.period
        rows = -(-config.vocab_size // 128) * 128
        self.embedding = nnx.Param(normal_002(rngs.params(), (rows, config.width)))

        @nnx.split_rngs(splits=self.repeats)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stack(rngs: nnx.Rngs) -> Period:
            return Period(config, names[: self.period], rngs=rngs)

        self.stack = stack(rngs)
        self.norm = RMSNorm(config.width, eps=config.norm_eps)
        if not config.tie_embeddings:
            self.unembed = nnx.Param(INITIALIZERS[config.init](rngs.params(), (config.width, rows)))

    def __call__(
        self,
        tokens: Array,
        *,
        state: Any = None,
        segment_ids: Array | None = None,
        initial_segment_id: Array | None = None,
    ) -> tuple[Array, Any]:
        """Hidden states [B, T, D] after the final norm, in `config.dtype`, for tokens int32 [B, T], and the new state.

        `state` is what an earlier call or `init_state` returned, None to start empty; softmax layers return a cache
        only if given one. `segment_ids` int32 [B, T] packs documents, negative ids are padding, whose tokens are not
        read; `initial_segment_id` int32 [B] drops a carried state where the first id differs.
        """
        check_integer("tokens", tokens)
        if tokens.ndim != 2:
            raise ValueError(f"tokens: shape {tuple(tokens.shape)} given, wanted [B, T].")
        self._check_state(state)
        x = mask_padding(self.embedding[...][tokens].astype(self.config.dtype), segment_ids)
        packing = {"segment_ids": segment_ids, "initial_segment_id": initial_segment_id}
        graph, parameters = nnx.split(self.stack)

        def body(x: Array, layer: tuple[Any, Any]) -> tuple[Array, Any]:
            return nnx.merge(graph, layer[0])(x, layer[1], packing)

        if self.config.remat != "none":
            body = jax.checkpoint(body, policy=POLICIES[self.config.remat], prevent_cse=False)
        x, state = lax.scan(body, x, (parameters, state))
        return self.norm(x), state

    def _check_state(self, state: Any) -> None:
        """Checks what the layers cannot, who see their own slices only: one state per layer of a period, stacked."""
        if state is None:
            return
        if not isinstance(state, tuple | list) or hasattr(state, "_fields") or len(state) != self.period:
            raise TypeError(f"state: {type(state).__name__} given, wanted {self.period} layer states of init_state.")
        for path, leaf in jax.tree.leaves_with_path(state):
            if jnp.shape(leaf)[:1] != (self.repeats,):
                name = f"state{jax.tree_util.keystr(path)}"
                raise ValueError(f"{name}: shape {jnp.shape(leaf)} given, wanted {self.repeats} layers along axis 0.")

    def unembedding(self) -> Array:
        """float32 [D, vocab_size], the matrix that maps hidden states to logits."""
        matrix = self.embedding[...].T if self.config.tie_embeddings else self.unembed[...]
        return matrix[:, : self.config.vocab_size]

    def logits(self, hidden: Array) -> Array:
        """float32 [..., vocab_size] of hidden states [..., D]."""
        matrix = self.unembedding().astype(hidden.dtype)
        return jnp.matmul(hidden, matrix, preferred_element_type=jnp.float32)

    def init_state(self, batch: int, capacity: int | None = None) -> Any:
        """The empty state for `batch` rows; `capacity` is the number of tokens that softmax layers can cache."""
        blocks = self._first_period().blocks
        period = tuple(
            block.mixer.init_state(batch, capacity)  # type: ignore[attr-defined]
            for block in blocks
        )  # type: ignore[attr-defined]
        return jax.tree.map(lambda s: jnp.broadcast_to(s, (self.repeats, *s.shape)), period)

    def _first_period(self) -> Period:
        graph, parameters = nnx.split(self.stack)
        return nnx.merge(graph, jax.tree.map(lambda p: p[0], parameters))

    @property
    def fixed_state(self) -> bool:
        """Whether the state's size does not depend on how much has been read."""
        return not GROWING & set(self.config.layer_mixers)
