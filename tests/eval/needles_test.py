"""Scores of models whose answers are known: one that copies, one that knows nothing, and small decoders."""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest
from flax import nnx

from linattn_jax.data import load_tokenizer, train_bpe
from linattn_jax.data.needles import KINDS, Needle, draw
from linattn_jax.data.sources import open_source
from linattn_jax.eval.needles import _answer, _cut, _read_and_answer, evaluate_needles, needles_for
from linattn_jax.eval.runs import TrainedRun
from linattn_jax.models.decoder import Decoder
from linattn_jax.models.presets import DecoderConfig
from linattn_jax.sharding import make_mesh
from linattn_jax.train.functional import split
from linattn_jax.types import UserError

BYTES = load_tokenizer("bytes")
EOT = BYTES.eot


class Copier:
    """Says what followed the last ten tokens where they stood before, else the token 0.

    It says instead[token] for a token that is in it: a model that goes wrong at one of them.
    """

    suffix = 10

    def __init__(self, instead=()):
        self.instead = dict(instead)

    def init_state(self, params, batch, capacity=None):
        return jnp.full((batch, capacity), -1, jnp.int32), jnp.zeros((batch,), jnp.int32)

    def unembedding(self, params):
        return 40 * jnp.eye(257)

    def apply(self, params, tokens, *, state, segment_ids=None, initial_segment_id=None):
        def row(held, length, tokens, ids):
            def step(carry, now):
                held, length = carry
                token, real = now
                held = jnp.where(real, held.at[length].set(token, mode="drop"), held)
                length = length + real
                back = jnp.arange(self.suffix)
                same = held[jnp.arange(len(held))[:, None] - back] == held[length - 1 - back]
                place = jnp.arange(len(held))
                found = jnp.all(same, axis=1) & (place >= self.suffix - 1) & (place < length - 1)
                latest = jnp.max(jnp.where(found, place, -1))
                said = copied = jnp.where(latest >= 0, held[latest + 1], 0)
                for old, new in self.instead.items():
                    said = jnp.where(copied == old, new, said)
                return (held, length), said

            return jax.lax.scan(step, (held, length), (tokens, ids >= 0))

        (held, length), said = jax.vmap(row)(*state, tokens, segment_ids)
        return jax.nn.one_hot(said, 257), (held, length)


class Ignorant:
    """Finds all tokens equally likely and remembers nothing."""

    def init_state(self, params, batch, capacity=None):
        return ()

    def unembedding(self, params):
        return jnp.zeros((4, 257))

    def apply(self, params, tokens, *, state, segment_ids=None, initial_segment_id=None):
        return jnp.ones((*tokens.shape, 4)), state


class Reciter:
    """Says a script after so many tokens, whatever they are."""

    def __init__(self, after, script):
        self.after, self.script = after, jnp.asarray(script)

    def init_state(self, params, batch, capacity=None):
        return jnp.zeros((batch,), jnp.int32)

    def unembedding(self, params):
        return 40 * jnp.eye(257)

    def apply(self, params, tokens, *, state, segment_ids=None, initial_segment_id=None):
        read = state[:, None] + jnp.cumsum(segment_ids >= 0, axis=1)
        said = self.script[jnp.clip(read - self.after, 0, len(self.script) - 1)]
        return jax.nn.one_hot(said, 257), read[:, -1]


def run_of(functional, params=None, tokenizer=BYTES):
    return TrainedRun(SimpleNamespace(), tokenizer, functional, params, make_mesh(), 0)


@pytest.fixture(scope="module")
def essays(tmp_path_factory):
    root = tmp_path_factory.mktemp("essays")
    for i in range(9):
        (root / f"{i}.txt").write_text("".join(f"On day {i} we saw {j} ships from the hill. " for j in range(80)))
    return open_source(str(root))


@functools.cache
def decoder(*mixers):
    config = DecoderConfig(
        vocab_size=257, layers=len(mixers), width=32, heads=1, head_size=32, mlp_width=32, mixers=mixers
    )
    return split(Decoder(config, rngs=nnx.Rngs(0)))


COPIER = Copier()


@pytest.mark.parametrize("kind", KINDS)
def test_who_copies_finds_every_needle(kind, essays):
    needle = Needle(kind, 400, BYTES, essays, grid=3)
    calls = []
    scores = evaluate_needles(run_of(COPIER), needle, examples=7, rows=2, bins=3, progress=lambda: calls.append(0))
    assert (scores.kind, scores.length, scores.fixed_state) == (kind, 400, False)
    assert (scores.all.examples, scores.all.exact, scores.all.token_accuracy) == (7, 1.0, 1.0)
    assert scores.all.nats_per_token < 1e-6
    assert {depth: score.examples for depth, score in scores.by_depth.items()} == {0.0: 3, 0.5: 2, 1.0: 2}
    assert all(score.exact == 1.0 for score in scores.by_depth.values())
    assert len(calls) == 4


def test_who_knows_nothing_finds_none(essays):
    scores = evaluate_needles(run_of(Ignorant()), Needle("passkey", 400, BYTES), examples=8)
    assert (scores.all.exact, scores.all.token_accuracy) == (0.0, 0.0)
    assert scores.all.nats_per_token == pytest.approx(math.log(257), rel=1e-6)
    assert (scores.state_bytes, scores.fixed_state) == (0, True)


def test_shares_are_of_examples_and_of_tokens():
    """A copier that says 8 for 7 is wrong at each 7 of the value, and right about values without one."""
    needle = Needle("passkey", 300, BYTES, grid=3)
    scores = evaluate_needles(run_of(Copier(instead={ord("7"): ord("8")})), needle, examples=20, rows=8, bins=3)
    values = [draw(needle, index).value for index in range(20)]
    right = [index for index, value in enumerate(values) if "7" not in value]
    assert 0 < len(right) < 20
    assert scores.all.exact == len(right) / 20
    sevens = sum(value.count("7") for value in values)
    assert scores.all.token_accuracy == pytest.approx(1 - sevens / (20 * 8))
    assert scores.all.nats_per_token == pytest.approx(40 * sevens / (20 * 8), rel=1e-4)
    for depth, score in scores.by_depth.items():
        mine = [index for index in range(20) if index % 3 == 2 * depth]
        assert score.examples == len(mine)
        assert score.exact == pytest.approx(len(set(mine) & set(right)) / len(mine))


@pytest.mark.parametrize(
    ("said", "exact"),
    [
        (" {value}.", 1.0),
        ("\n{value}7", 1.0),
        ("{value}<end>7", 1.0),
        (" {head}<end>{rest}", 0.0),
        (" {head}", 0.0),
        ("x{value}", 0.0),
    ],
)
def test_what_counts_as_the_value(said, exact):
    needle = Needle("passkey", 300, BYTES)
    example = draw(needle, 0)
    value = example.value
    text = said.format(value=value, head=value[:3], rest=value[3:])
    script = np.concatenate([[*BYTES.encode(part), EOT] for part in text.split("<end>")])[: needle.room]
    script = np.pad(script, (0, needle.room - len(script)), constant_values=EOT)
    scores = evaluate_needles(run_of(Reciter(len(example.prompt), script)), needle, examples=1, rows=1)
    assert scores.all.exact == exact


def test_a_decoder_reads_in_pieces_as_in_one_pass(essays):
    """Nats and hits are those of one pass over prompt and answer, greedy answers its likeliest tokens."""
    functional, params = decoder("gdn", "softmax")
    needle = Needle("number", 400, BYTES, essays)
    batch = [draw(needle, index) for index in range(2)]
    assert len(batch[0].prompt) != len(batch[1].prompt)
    pieces, piece = _cut(391, 192)
    assert (pieces, piece) == (3, 192)
    drawn, nats, hits = _answer(run_of(functional, params), batch, pieces, piece, needle.room, 400)
    model = functional.module(params)
    apply = jax.jit(lambda tokens: model.logits(model(tokens)[0]))
    for row, (prompt, answer, *_) in enumerate(batch):
        n = len(prompt)

        def one_pass(after):
            """Log probabilities where tokens `after` the prompt are said."""
            whole = np.zeros((1, 400), np.int32)
            whole[0, : n + len(after)] = np.concatenate([prompt, after])
            return np.asarray(jax.nn.log_softmax(apply(whole)))[0, n - 1 : n + len(after) - 1]

        given = one_pass(answer)
        assert nats[row] == pytest.approx(-np.sum(given[np.arange(len(answer)), answer]), rel=1e-4)
        assert hits[row] == np.sum(np.argmax(given, axis=-1) == answer)
        np.testing.assert_array_equal(drawn[row], np.argmax(one_pass(drawn[row]), axis=-1))


def test_one_program_serves_all_examples_of_a_length(essays):
    run = run_of(Copier())
    before = _read_and_answer._cache_size()
    for kind in ("passkey", "number"):
        evaluate_needles(run, Needle(kind, 300, BYTES, essays), examples=6, rows=2)
    assert _read_and_answer._cache_size() == before + 1


def test_a_fixed_state_is_the_same_at_any_length_and_a_cache_is_refused_where_it_is_too_large(essays):
    sizes = {}
    for length in (300, 5000):
        sizes[length] = evaluate_needles(run_of(Ignorant()), Needle("passkey", length, BYTES), examples=1).state_bytes
    assert sizes[300] == sizes[5000]
    # One of the two layers caches keys and values of 32 numbers in float32.
    run, needle = run_of(*decoder("gdn", "softmax")), Needle("passkey", 4096, BYTES)
    with pytest.raises(
        UserError, match=r"cache 4,096 tokens for each of 400 rows, 0.39 GiB of the 0.25 GiB allowed: lower the rows"
    ):
        evaluate_needles(run, needle, rows=400, max_cache_bytes=1 << 28)


def test_needles_for_a_run_lie_in_its_held_out_documents_or_in_a_source(tmp_path):
    for name in ("held out", "other", "trained on"):
        (tmp_path / f"{name}.txt").write_text(f"This is {name}. " * 99)
    source = lambda name: str(tmp_path / f"{name}.txt")
    config = ml_collections.ConfigDict()
    config.data = {"train": source("trained on"), "heldout": source("held out"), "text_field": "text"}
    run = run_of(Ignorant())._replace(config=config)
    made = needles_for(run, ["passkey", "uuid"], [300, 400], grid=3, seed=5)
    assert [(n.kind, n.length, n.grid, n.seed) for n in made] == [
        (kind, length, 3, 5) for kind in ("passkey", "uuid") for length in (300, 400)
    ]
    assert "This is held out." in BYTES.decode(draw(made[3], 0).prompt)
    (other,) = needles_for(run, ["number"], [400], data=source("other"))
    assert "This is other." in BYTES.decode(draw(other, 0).prompt)
    with pytest.raises(UserError, match="length 100 is too short"):
        needles_for(run, ["passkey"], [400, 100])
    with pytest.raises(UserError, match="unknown kind 'word'"):
        needles_for(run, ["word"], [400])
    config.data = {"train": source("other"), "heldout": "", "heldout_percent": 0.0, "text_field": "text"}
    assert needles_for(run, ["passkey"], [400])[0].essays is None
    with pytest.raises(UserError, match="holds no documents out: name a source of essays with --data"):
        needles_for(run, ["number"], [400])


def test_mistakes_are_named(tmp_path):
    run, needle = run_of(Ignorant()), Needle("passkey", 300, BYTES)
    with pytest.raises(UserError, match="examples must be at least 1, got 0"):
        evaluate_needles(run, needle, examples=0)
    with pytest.raises(UserError, match="bins must be at least 1, got 0"):
        evaluate_needles(run, needle, bins=0)
    other = train_bpe(["some words"], 260, tmp_path / "bpe.json")
    with pytest.raises(UserError, match=r"tokenizer bpe.json is not the run's, bytes"):
        evaluate_needles(run, Needle("passkey", 300, other))


@pytest.mark.parametrize(("length", "pieces"), [(1, (1, 64)), (391, (3, 192)), (192, (1, 192)), (200, (2, 128))])
def test_pieces_hold_a_prompt(length, pieces):
    assert _cut(length, 192) == pieces
