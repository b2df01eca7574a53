"""Held-out loss against one pass over each document, with and without a state that can be carried."""

from __future__ import annotations

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from linattn_jax.data import eval_batches, load_tokenizer
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


def _nats(functional, params, ids):
    """Sum of nats of one document read in one pass."""
    hidden, _ = functional.apply(params, ids[None, :-1])
    logits = hidden @ functional.unembedding(params)
    return float(jnp.sum(optax.softmax_cross_entropy_with_integer_labels(logits, ids[None, 1:])))


def _batches(folder, seq_len):
    from linattn_jax.data import open_corpus

    data = SimpleNamespace(train=str(folder), heldout=str(folder), heldout_percent=0)
    return eval_batches(open_corpus(data, "heldout"), load_tokenizer("bytes"), batch_size=2, seq_len=seq_len)


def test_carried_state_reads_each_document_as_one_pass_does(texts):
    folder, size, documents = texts
    functional, params = _model("kla")
    want = sum(
        _nats(functional, params, np.array([256, *path.read_bytes(), 256], np.int32)) for path in folder.iterdir()
    )
    result = make_evaluator(functional, params, make_mesh())(params, _batches(folder, 16))
    assert (result.tokens, result.bytes, result.carried) == (size + documents, size, True)
    np.testing.assert_allclose(result.nats_per_token * result.tokens, want, rtol=1e-5)
    np.testing.assert_allclose(result.bits_per_byte, want / math.log(2) / size, rtol=1e-5)


def test_a_growing_cache_is_not_carried_and_context_ends_with_the_row(texts):
    folder, size, documents = texts
    functional, params = _model("softmax")
    batches = _batches(folder, 16)
    want = 0.0
    for batch in batches:
        for ids, targets, segments in zip(batch["inputs"], batch["targets"], batch["segment_ids"], strict=True):
            for segment in set(segments[segments >= 0].tolist()):
                at = segments == segment
                want += _nats(functional, params, np.append(ids[at], targets[at][-1]))
    result = make_evaluator(functional, params, make_mesh())(params, batches)
    assert (result.tokens, result.carried) == (size + documents, False)
    np.testing.assert_allclose(result.nats_per_token * result.tokens, want, rtol=1e-5)
