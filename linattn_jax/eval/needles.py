"""How well a trained run finds the needles of `data.needles`: greedy answers, and the answer's tokens one by one.

A prompt is read in pieces from which only the state goes on, so a mixer whose state has a fixed size reads any length
in the same memory, far past the length it was trained on. Softmax layers cache every token: their memory grows with the
length, and a cache above `max_cache_bytes` is refused rather than cut, which would lose needles silently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from linattn_jax.data.needles import Needle, Retrieval, answers, draw
from linattn_jax.data.sources import open_source, open_splits
from linattn_jax.eval.perplexity import placed
from linattn_jax.eval.runs import TrainedRun
from linattn_jax.sharding import replicated
from linattn_jax.train.functional import Functional, Params, has_fixed_size
from linattn_jax.types import Array, UserError

# Tokens of a piece. The scores of softmax attention are [rows, heads, piece, capacity], so its pieces are short.
PIECE = 2048
GROWING_PIECE = 256
_MULTIPLE = 64


class Score(NamedTuple):
    """Means over some examples."""

    examples: int
    exact: float  # share of examples whose greedy continuation begins with the value
    token_accuracy: float  # share of answer tokens that are the likeliest after those before them
    nats_per_token: float  # of the answer, each token given those before it


class NeedleScores(NamedTuple):
    """What a run retrieves of one kind at one length."""

    kind: str
    length: int
    all: Score
    by_depth: dict[float, Score]  # by the middle of each bin; bins without an example are left out
    state_bytes: int  # that a row carries from the text to the question
    fixed_state: bool  # whether that is the same at every length

    def record(self) -> dict[str, Any]:
        """The scores as JSON can hold them."""
        by_depth = [{"depth": depth, **score._asdict()} for depth, score in self.by_depth.items()]
        return self._asdict() | {"all": self.all._asdict(), "by_depth": by_depth}

    def __str__(self) -> str:
        score = self.all
        depths = "  ".join(f"{depth:.2f}: {part.exact:.0%}" for depth, part in self.by_depth.items())
        found = f"{score.exact:6.1%} right  tokens {score.token_accuracy:6.1%}, {score.nats_per_token:.3f} nats"
        return f"{found}  by depth {depths}"


def needles_for(
    run: TrainedRun, kinds: Sequence[str], lengths: Sequence[int], *, data: str = "", grid: int = 0, seed: int = 0
) -> list[Needle]:
    """Needles of each kind and each length for a run, in its held-out documents or in all documents of source `data`.

    Raises:
        UserError: the run holds nothing out, `data` has no text, a kind is unknown, or a length has no room for it.
    """
    essays = None
    if set(kinds) != {"passkey"}:
        config = run.config.data
        options = {"text_field": config.text_field, "data_dir": config.get("data_dir", "")}
        essays = open_source(data, **options) if data else open_splits(config)[1]
        if not len(essays):
            raise UserError("the run holds no documents out: name a source of essays with --data")
    return [Needle(kind, n, run.tokenizer, essays, grid, seed) for kind in kinds for n in lengths]


def evaluate_needles(
    run: TrainedRun,
    needle: Needle,
    *,
    examples: int = 32,
    rows: int = 0,
    bins: int = 5,
    max_cache_bytes: int = 4 << 30,
    progress: Callable[[], Any] | None = None,
) -> NeedleScores:
    """Scores of a run on the first `examples` of `needle`; one program is compiled for a length and an answer's room.

    Args:
        run: as `open_run` gives it.
        needle: its tokenizer is the run's.
        examples: how many to draw.
        rows: rows of a batch over all devices; 0 takes 8, or as many as there are examples or devices.
        bins: of depth, around 0, 1 / (bins - 1), ... 1: the depths of a needle whose `grid` is `bins`.
        max_cache_bytes: of the caches that softmax layers may hold for a batch.
        progress: called after each batch.

    Raises:
        UserError: a count is out of range, the tokenizer is another one, the caches would be too large, or what `draw`
            raises.
    """
    rows = rows or -(-min(8, max(examples, 1)) // run.mesh.size) * run.mesh.size
    for name, value in (("examples", examples), ("rows", rows), ("bins", bins)):
        if value < 1:
            raise UserError(f"{name} must be at least 1, got {value}")
    if rows % run.mesh.size:
        raise UserError(f"rows={rows} must be a multiple of the {run.mesh.size} devices")
    if needle.tokenizer.fingerprint != run.tokenizer.fingerprint:
        raise UserError(f"the needle's tokenizer {needle.tokenizer.name} is not the run's, {run.tokenizer.name}")
    fixed = has_fixed_size(run.functional, run.params)
    pieces, piece = _cut(needle.length - needle.room, PIECE if fixed else GROWING_PIECE)
    capacity = max(needle.length, piece)
    state = jax.eval_shape(lambda params: run.functional.init_state(params, 1, capacity), run.params)
    state_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    if not fixed and rows * state_bytes > max_cache_bytes:
        raise UserError(
            f"softmax layers cache {capacity:,} tokens for each of {rows} rows, {rows * state_bytes / 2**30:.2f} GiB "
            f"of the {max_cache_bytes / 2**30:.2f} GiB allowed: lower the rows or the length"
        )
    each = []
    for start in range(0, examples, rows):
        batch = [draw(needle, index) for index in range(start, start + rows)]
        drawn, nats, hits = _answer(run, batch, pieces, piece, needle.room, capacity)
        for row, example in enumerate(batch[: examples - start]):
            ended = np.flatnonzero(drawn[row] == run.tokenizer.eot)
            text = run.tokenizer.decode(drawn[row, : ended[0]] if len(ended) else drawn[row])
            right = answers(example.value, text)
            each.append((round(example.depth * (bins - 1)), right, hits[row], nats[row], len(example.answer)))
        if progress is not None:
            progress()
    table = np.array(each, np.float64)
    by_depth = {float(bin / max(bins - 1, 1)): _score(table[table[:, 0] == bin, 1:]) for bin in np.unique(table[:, 0])}
    return NeedleScores(needle.kind, needle.length, _score(table[:, 1:]), by_depth, state_bytes, fixed)


def _score(table: np.ndarray) -> Score:
    """Means of rows (right, hits, nats, tokens)."""
    right, hits, nats, tokens = table.sum(axis=0)
    return Score(len(table), float(right / len(table)), float(hits / tokens), float(nats / tokens))


def _cut(length: int, most: int) -> tuple[int, int]:
    """Number and size of equal pieces that hold `length` tokens, each of at most `most`."""
    pieces = -(-length // most)
    return pieces, min(-(-length // pieces // _MULTIPLE) * _MULTIPLE, most)


def _answer(
    run: TrainedRun, batch: list[Retrieval], pieces: int, piece: int, room: int, capacity: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens drawn [B, room], and nats [B] and hits [B] of the answers' tokens, for the whole batch on every process.

    Prompts are filled up on the left, so that all end together; the mixers skip what is negative.
    """
    prompts = np.full((len(batch), pieces * piece), -1, np.int32)
    wanted = np.full((len(batch), room), -1, np.int32)
    for row, example in enumerate(batch):
        prompts[row, prompts.shape[1] - len(example.prompt) :] = example.prompt
        wanted[row, : len(example.answer)] = example.answer
    share = len(batch) // jax.process_count()
    mine = slice(jax.process_index() * share, (jax.process_index() + 1) * share)
    (arrays,) = placed([{"prompts": prompts[mine], "wanted": wanted[mine]}], run.mesh)
    found = _read_and_answer(
        run.functional, run.mesh, pieces, capacity, run.params, arrays["prompts"], arrays["wanted"]
    )
    return jax.tree.map(np.asarray, found)


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _read_and_answer(
    functional: Functional, mesh: Mesh, pieces: int, capacity: int, params: Params, prompts: Array, wanted: Array
) -> tuple[Array, Array, Array]:
    rows, room = wanted.shape

    def read(state: Any, tokens: Array) -> tuple[Any, Array]:
        """The state after tokens [B, T], of which negative ones are none, and hidden states [B, T, D]."""
        ids = jnp.where(tokens >= 0, 0, -1)
        hidden, after = functional.apply(params, jnp.maximum(tokens, 0), state=state, segment_ids=ids)
        return jax.tree.map(lambda x, like: x.astype(like.dtype), after, state), hidden

    def logits(hidden: Array) -> Array:
        matrix = functional.unembedding(params).astype(hidden.dtype)
        return jnp.matmul(hidden, matrix, preferred_element_type=jnp.float32)

    def read_piece(state: Any, tokens: Array) -> tuple[Any, Array]:
        state, hidden = read(state, tokens)
        return state, hidden[:, -1]

    cut = jnp.moveaxis(prompts.reshape(rows, pieces, -1), 1, 0)
    state, hidden = lax.scan(read_piece, functional.init_state(params, rows, capacity), cut)
    asked = hidden[-1]

    _, hidden = read(state, wanted[:, :-1])
    given = logits(jnp.concatenate([asked[:, None], hidden], axis=1))
    counts = wanted >= 0
    nats = -jnp.take_along_axis(jax.nn.log_softmax(given), jnp.maximum(wanted, 0)[..., None], axis=-1)[..., 0]
    hits = jnp.argmax(given, axis=-1) == wanted  # never where wanted is filling, -1

    def step(carry: tuple[Any, Array], _: None) -> tuple[tuple[Any, Array], Array]:
        state, hidden = carry
        token = jnp.argmax(logits(hidden), axis=-1).astype(jnp.int32)
        state, hidden = read(state, token[:, None])
        return (state, hidden[:, 0]), token

    _, drawn = lax.scan(step, (state, asked), length=room)
    sums = (drawn.T, jnp.sum(jnp.where(counts, nats, 0), axis=1), jnp.sum(hits, axis=1))
    return lax.with_sharding_constraint(sums, replicated(mesh))
