"""Generation: the prompt is read in parallel, then tokens are drawn one by one from the recurrent state."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from linattn_jax.models.decoder import Decoder
from linattn_jax.types import Array, UserError

# A prompt is read in pieces of at most this many tokens, so memory does not grow with it; shorter ones are padded to a
# power of two (with inert tokens), so few programs are compiled.
PREFILL = 2048


def sample(key: Array, logits: Array, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Array:
    """Draws token ids int32 [B] from logits [B, vocab].

    temperature 0 takes the likeliest. top_k > 0 keeps the k likeliest; top_p < 1 the fewest likeliest whose
    probabilities sum to at least top_p (after temperature and top_k), never none.

    >>> import jax, jax.numpy as jnp
    >>> int(sample(jax.random.key(0), jnp.array([[0.0, 3.0, 1.0]]), temperature=0.0)[0])
    1
    """
    if temperature < 0 or top_k < 0 or not 0 < top_p <= 1:
        raise UserError(
            f"temperature {temperature}, top_k {top_k}, top_p {top_p} given, "
            "wanted temperature >= 0, top_k >= 0 and 0 < top_p <= 1."
        )
    if temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits.astype(jnp.float32) / temperature
    if 0 < top_k < logits.shape[-1]:
        least = lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    if top_p < 1:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        probability = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(probability, axis=-1) - probability
        least = jnp.min(jnp.where(before < top_p, ordered, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)


def _pieces(length: int) -> Iterator[tuple[int, int, int]]:
    """(start, stop, padded length) of the pieces in which a prompt is read."""
    for start in range(0, length, PREFILL):
        stop = min(start + PREFILL, length)
        yield start, stop, 1 << max(stop - start - 1, 0).bit_length()


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def _prefill(graph: Any, parameters: Any, state: Any, tokens: Array, count: Array) -> tuple[Array, Any]:
    """Logits [B, vocab] after the `count` real tokens of tokens [B, T], and the state."""
    model = nnx.merge(graph, parameters)
    ids = jnp.where(jnp.arange(tokens.shape[1]) < count, 0, -1)
    hidden, state = model(tokens, state=state, segment_ids=jnp.broadcast_to(ids, tokens.shape))
    return model.logits(lax.dynamic_index_in_dim(hidden, count - 1, axis=1, keepdims=False)), state


@partial(jax.jit, static_argnums=(0, 5, 6, 7, 8), donate_argnums=2)
def _decode(
    graph: Any,
    parameters: Any,
    state: Any,
    logits: Array,
    key: Array,
    count: int,
    temperature: float,
    top_k: int,
    top_p: float,
) -> tuple[Array, Array, Any]:
    """Draws `count` tokens: ids [B, count], the logits after them, the state."""
    model = nnx.merge(graph, parameters)

    def step(carry: tuple[Array, Any], key: Array) -> tuple[tuple[Array, Any], Array]:
        logits, state = carry
        token = sample(key, logits, temperature=temperature, top_k=top_k, top_p=top_p)
        hidden, state = model(token[:, None], state=state)
        return (model.logits(hidden[:, 0]), state), token

    (logits, state), tokens = lax.scan(step, (logits, state), jax.random.split(key, count))
    return tokens.T, logits, state


def generate(
    model: Decoder,
    prompt: np.ndarray,
    length: int,
    *,
    seed: int = 0,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    stop: int | None = None,
    block: int = 16,
) -> Iterator[np.ndarray]:
    """Continues `prompt` (int [T] or [B, T], T >= 1) by up to `length` tokens.

    Yields int32 arrays [B, n], n <= block, as they are drawn. A row that has drawn `stop` is filled with it, and
    generation ends when all rows have. The draws depend on `seed` and `block`, not on the machine's speed. Memory is
    one state per layer however long the text, save for softmax layers, which cache prompt and continuation.
    """
    prompt = np.atleast_2d(np.asarray(prompt, np.int32))
    if prompt.shape[1] < 1:
        raise UserError("prompt is empty; give at least one token.")
    if length < 0:
        raise UserError(f"length {length} given, wanted at least 0.")
    highest = int(prompt.max())
    if highest >= model.config.vocab_size or int(prompt.min()) < 0:
        raise UserError(f"prompt holds token {highest}, but the model knows {model.config.vocab_size} tokens.")
    graph, parameters = nnx.split(model)
    pieces = list(_pieces(prompt.shape[1]))
    capacity = max([prompt.shape[1] + length] + [padded for *_, padded in pieces])
    state = model.init_state(prompt.shape[0], capacity=capacity)
    logits = None
    for start, end, padded in pieces:
        tokens = np.pad(prompt[:, start:end], [(0, 0), (0, padded - (end - start))])
        logits, state = _prefill(graph, parameters, state, tokens, jnp.int32(end - start))
    ended = np.zeros(prompt.shape[0], bool)
    for index, start in enumerate(range(0, length, block)):
        key = jax.random.fold_in(jax.random.key(seed), index)
        count = min(block, length - start)
        tokens, logits, state = _decode(graph, parameters, state, logits, key, count, temperature, top_k, top_p)
        tokens = np.array(tokens)
        if stop is not None:
            done = np.maximum.accumulate((tokens == stop) | ended[:, None], axis=1)
            tokens = np.where(done, stop, tokens)
            ended = done[:, -1]
        yield tokens
        if stop is not None and ended.all():
            return


class TextStream:
    """Turns tokens into text as they come, holding back what the next token may still change (half a character)."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._sent = 0

    def push(self, ids: np.ndarray) -> str:
        """The text that `ids` [n] complete."""
        self._ids.extend(int(i) for i in ids)
        text = self._tokenizer.decode(self._ids)
        ready = len(text) - min(len(text) - len(text.rstrip("\ufffd")), 3)
        new, self._sent = text[self._sent : ready], max(self._sent, ready)
        if len(self._ids) > 512 and self._sent == len(text):
            # Some tokenizers decode a token by what stands before it, so a little of that stays.
            self._ids = self._ids[-16:]
            self._sent = len(self._tokenizer.decode(self._ids))
        return new

    def close(self) -> str:
        """What was held back."""
        return self._tokenizer.decode(self._ids)[self._sent :]
