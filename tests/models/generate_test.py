"""Generation: greedy equals the forward pass, sampling keeps its promises, text streams whole characters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from linattn_jax.data import load_tokenizer
from linattn_jax.models import Decoder, DecoderConfig
from linattn_jax.models import generate as generation
from linattn_jax.models.generate import TextStream, generate, sample
from linattn_jax.types import UserError


@functools.cache
def small(mixers=("kla",), vocab=40):
    config = DecoderConfig(vocab_size=vocab, layers=2, width=16, heads=2, head_size=8, mlp_width=16, mixers=mixers)
    return Decoder(config, rngs=nnx.Rngs(0))


def collect(*args, **options):
    return np.concatenate(list(generate(*args, **options)), axis=1)


@pytest.mark.core
@pytest.mark.parametrize("mixers", [("kla",), ("gdn", "softmax")])
def test_greedy_is_the_argmax_of_one_forward_pass(mixers, monkeypatch):
    """Also where the prompt is read in several pieces, the last of them padded."""
    monkeypatch.setattr(generation, "PREFILL", 8)
    model = small(mixers)
    prompt = np.random.default_rng(0).integers(0, 40, (2, 13))
    drawn = collect(model, prompt, 10, temperature=0.0, block=4)
    assert drawn.shape == (2, 10)
    text = np.concatenate([prompt, drawn], axis=1)
    hidden, _ = jax.jit(lambda t: model(t))(jnp.asarray(text))
    np.testing.assert_array_equal(np.argmax(model.logits(hidden), -1)[:, 12:-1], drawn)


def test_one_program_serves_any_length():
    model = small()
    before = generation._decode._cache_size()
    for length in (3, 30, 300):
        list(generate(model, np.zeros(length, int), 8, block=8))
    assert generation._decode._cache_size() == before + 1
    sizes = {sum(x.size for x in jax.tree.leaves(jax.eval_shape(lambda c=c: model.init_state(1, c)))) for c in (8, 800)}
    assert len(sizes) == 1


def test_seed_decides_the_draw():
    model, prompt = small(), np.zeros(3, int)
    first = collect(model, prompt, 20, seed=1)
    np.testing.assert_array_equal(first, collect(model, prompt, 20, seed=1))
    assert np.any(first != collect(model, prompt, 20, seed=2))


def test_stop_fills_the_row_and_ends():
    model, prompt = small(), np.zeros((3, 2), int)
    free = collect(model, prompt, 64, seed=3, block=8)
    stop = int(free[0, 5])
    blocks = list(generate(model, prompt, 64, seed=3, block=8, stop=stop))
    drawn = np.concatenate(blocks, 1)
    for row, other in zip(drawn, free, strict=True):
        ends = np.flatnonzero(other == stop)
        end = ends[0] if len(ends) else len(other)
        n = min(end, len(row))
        np.testing.assert_array_equal(row[:n], other[:n])
        assert np.all(row[end:] == stop)


def test_sample_keeps_to_top_k_and_top_p():
    logits = jnp.log(jnp.array([[0.5, 0.25, 0.15, 0.1]]))
    draw = lambda **options: np.asarray(
        jax.vmap(lambda key: sample(key, logits, **options)[0])(jax.random.split(jax.random.key(0), 4000))
    )
    share = np.bincount(draw(), minlength=4) / 4000
    np.testing.assert_allclose(share, [0.5, 0.25, 0.15, 0.1], atol=0.03)
    assert set(draw(top_k=2)) == {0, 1}
    assert set(draw(top_p=0.6)) == {0, 1}
    assert set(draw(top_p=0.49)) == {0}
    np.testing.assert_allclose(np.bincount(draw(top_k=2), minlength=2) / 4000, [2 / 3, 1 / 3], atol=0.03)
    np.testing.assert_allclose(np.mean(draw(temperature=0.5) == 0), 0.25 / (0.25 + 0.0625 + 0.0225 + 0.01), atol=0.03)
    assert set(draw(temperature=0.0)) == {0}


@pytest.mark.parametrize(
    ("options", "match"),
    [({"temperature": -1.0}, "temperature -1"), ({"top_p": 0.0}, "top_p 0.0"), ({"top_k": -1}, "top_k -1")],
)
def test_bad_options_are_named(options, match):
    with pytest.raises(UserError, match=match):
        list(generate(small(), np.zeros(2, int), 4, **options))


def test_bad_prompts_are_named():
    with pytest.raises(UserError, match="prompt is empty"):
        next(generate(small(), np.zeros((1, 0), int), 4))
    with pytest.raises(UserError, match="token 99, but the model knows 40"):
        next(generate(small(), np.array([99]), 4))


def test_text_streams_whole_characters():
    tokenizer = load_tokenizer("bytes")
    text = "naïve — 日本語 🎉 end" * 40
    ids = tokenizer.encode(text)
    stream = TextStream(tokenizer)
    parts = [stream.push(ids[i : i + 1]) for i in range(len(ids))]
    assert "".join(parts) + stream.close() == text
    assert not any("\ufffd" in part for part in parts)
    broken = TextStream(tokenizer)
    assert broken.push(np.array([65, 0xE6])) == "A"
    assert broken.close() == "\ufffd"
