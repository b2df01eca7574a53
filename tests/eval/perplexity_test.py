"""Held-out loss against one pass over each document, with and without a state that can be carried."""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from linattn_jax.data import eval_batches, load_tokenizer, open_corpus
from linattn_jax.eval.perplexity import make_evaluator
from linattn_jax.models.decoder import Decoder
from linattn_jax.models.presets import DecoderConfig
from linattn_jax.sharding import make_mesh
from linattn_jax.train.functional import split


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Five documents of different lengths."""
    folder = tmp_path_factory.mktemp("texts")
    rng = np.random.default_rng(0)
    lengths = (70, 9, 41, 3, 28)
    for i, length in enumerate(lengths):
        (folder / f"{i}.txt").write_bytes(bytes(rng.integers(97, 123, length, dtype=np.uint8)))
    return folder, sum(lengths), len(lengths)


def _model(*mixers):
    config = DecoderConfig(
        vocab_size=257, layers=len(mixers), width=16, heads=1, head_size=16, mlp_width=16, mixers=mixers
    )
    return split(Decoder(config, rngs=nnx.Rngs(0)))


@functools.partial(jax.jit, static_argnums=0)
def _nats(functional, params, inputs, targets, segment_ids):
    """Sum of nats [B] of rows that are read from an empty state, from logits held whole."""
    hidden, _ = functional.apply(params, inputs, segment_ids=segment_ids)
    nats = optax.softmax_cross_entropy_with_integer_labels(hidden @ functional.unembedding(params), targets)
    return jnp.sum(jnp.where(segment_ids >= 0, nats, 0), axis=1)


def _batches(folder, seq_len):
    data = SimpleNamespace(train=str(folder), heldout=str(folder), heldout_percent=0)
    return eval_batches(open_corpus(data, "heldout"), load_tokenizer("bytes"), batch_size=2, seq_len=seq_len)


def test_carried_state_reads_each_document_as_one_pass_does(texts):
    folder, size, documents = texts
    functional, params = _model("kla")
    # One document a row, all of it in one pass.
    rows = np.full((documents, 80), -1, np.int32)
    for row, path in zip(rows, sorted(folder.iterdir()), strict=True):
        ids = [256, *path.read_bytes(), 256]
        row[: len(ids)] = ids
    inputs, targets = np.maximum(rows[:, :-1], 0), rows[:, 1:]
    segment_ids = np.where(targets >= 0, 0, -1)
    want = float(_nats(functional, params, inputs, np.maximum(targets, 0), segment_ids).sum())
    result = make_evaluator(functional, params, make_mesh())(params, _batches(folder, 16))
    assert (result.tokens, result.bytes, result.carried) == (size + documents, size, True)
    np.testing.assert_allclose(result.nats_per_token * result.tokens, want, rtol=1e-5)
    np.testing.assert_allclose(result.bits_per_byte, want / math.log(2) / size, rtol=1e-5)


def test_a_growing_cache_is_not_carried_and_context_ends_with_the_row(texts):
    folder, size, documents = texts
    functional, params = _model("softmax")
    batches = _batches(folder, 16)
    want = sum(float(_nats(functional, params, *batch.values()).sum()) for batch in batches)
    result = make_evaluator(functional, params, make_mesh())(params, batches)
    assert (result.tokens, result.carried) == (size + documents, False)
    np.testing.assert_allclose(result.nats_per_token * result.tokens, want, rtol=1e-5)
