"""Chunked cross-entropy against dense float64, its gradients, and its memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linattn_jax.train.loss import chunked_cross_entropy, default_chunk


def _inputs(batch=2, steps=13, width=8, vocab=11, seed=0):
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(batch, steps, width)).astype(np.float32)
    unembedding = rng.normal(size=(width, vocab)).astype(np.float32)
    targets = rng.integers(0, vocab, (batch, steps)).astype(np.int32)
    weights = rng.uniform(0.25, 2, (batch, steps)).astype(np.float32)
    weights[0, 3:6] = 0
    return hidden, unembedding, targets, weights


def _dense64(hidden, unembedding, targets, weights, z_loss=0.0):
    """Value and gradients by hand in float64."""
    h, u, w = (np.asarray(x, np.float64) for x in (hidden, unembedding, weights))
    logits = h @ u
    top = logits.max(-1, keepdims=True)
    log_z = np.log(np.exp(logits - top).sum(-1, keepdims=True)) + top
    hit = np.eye(u.shape[1])[targets]
    nats = (w * (log_z[..., 0] - (logits * hit).sum(-1) + z_loss * log_z[..., 0] ** 2)).sum()
    d_logits = (np.exp(logits - log_z) * (1 + 2 * z_loss * log_z) - hit) * w[..., None]
    return nats, d_logits @ u.T, np.einsum("btd,btv->dv", h, d_logits)


@pytest.mark.parametrize("chunk", [1, 4, 13, 64, None])
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_value_and_gradients_are_those_of_dense_float64(chunk, z_loss):
    args = _inputs()
    want, want_h, want_u = _dense64(*args, z_loss)

    def loss(h, u):
        return 0.5 * chunked_cross_entropy(h, u, *args[2:], chunk=chunk, z_loss=z_loss)[0]

    nats, (d_h, d_u) = jax.jit(jax.value_and_grad(loss, (0, 1)))(*args[:2])
    plain, weight = chunked_cross_entropy(*args, chunk=chunk, z_loss=z_loss)
    np.testing.assert_allclose(plain, want, rtol=2e-6)
    np.testing.assert_allclose(nats, 0.5 * want, rtol=2e-6)
    np.testing.assert_allclose(weight, args[3].sum(), rtol=1e-6)
    np.testing.assert_allclose(d_h, 0.5 * want_h, rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(d_u, 0.5 * want_u, rtol=1e-5, atol=2e-5)
    assert nats.dtype == weight.dtype == jnp.float32


def test_bfloat16_hidden_keeps_float32_sums_and_gradient_dtypes():
    hidden, unembedding, targets, weights = _inputs(steps=64, width=32)
    half = jnp.asarray(hidden, jnp.bfloat16)
    want, want_h, want_u = _dense64(half.astype(jnp.float32), unembedding, targets, weights)
    (nats, _), (d_h, d_u) = jax.value_and_grad(
        lambda h, u: chunked_cross_entropy(h, u, targets, weights, chunk=8), (0, 1), has_aux=True
    )(half, unembedding)
    assert (nats.dtype, d_h.dtype, d_u.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    # The unembedding is rounded to 8 bits for the product: relative errors of 2**-8 per logit term.
    np.testing.assert_allclose(nats, want, rtol=2**-8)
    assert np.linalg.norm(np.asarray(d_h, np.float64) - want_h) < 2**-6 * np.linalg.norm(want_h)
    assert np.linalg.norm(d_u - want_u) < 2**-6 * np.linalg.norm(want_u)


def test_what_padding_holds_does_not_matter():
    hidden, unembedding, targets, weights = _inputs()
    dirty = hidden.copy()
    dirty[0, 3:6] = np.nan

    def gradients(h):
        return jax.value_and_grad(lambda h, u: chunked_cross_entropy(h, u, targets, weights, chunk=4)[0], (0, 1))(
            h, unembedding
        )

    for clean, other in zip(jax.tree.leaves(gradients(hidden)), jax.tree.leaves(gradients(dirty)), strict=True):
        np.testing.assert_array_equal(clean, other)


def test_no_steps_sum_to_zero():
    hidden, unembedding, targets, weights = _inputs()
    nats, weight = chunked_cross_entropy(hidden[:, :0], unembedding, targets[:, :0], weights[:, :0], chunk=4)
    assert (float(nats), float(weight)) == (0.0, 0.0)


def test_memory_holds_chunks_not_all_logits():
    batch, steps, width, vocab, chunk = 2, 512, 16, 2048, 32
    shapes = (
        jax.ShapeDtypeStruct((batch, steps, width), jnp.float32),
        jax.ShapeDtypeStruct((width, vocab), jnp.float32),
        jax.ShapeDtypeStruct((batch, steps), jnp.int32),
        jax.ShapeDtypeStruct((batch, steps), jnp.float32),
    )

    def temporary(chunk):
        grad = jax.grad(lambda h, u, y, w: chunked_cross_entropy(h, u, y, w, chunk=chunk)[0], (0, 1))
        return jax.jit(grad).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    logits = 4 * batch * steps * vocab
    assert temporary(chunk) < logits / 4
    assert temporary(steps) > logits / 2  # the measure sees the logits when they are there


def test_default_chunk_bounds_the_logits():
    assert default_chunk(8, 32000) * 8 * 32000 * 4 <= 128 << 20
    assert default_chunk(10**6, 10**6) == 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h, u, y, w: (h, u[1:], y, w), r"hidden \[B, T, D\] and unembedding \[D, V\] do not fit.*\(7, 11\)"),
        (lambda h, u, y, w: (h, u, y[:, 1:], w), r"targets must have shape \(2, 13\), got \(2, 12\)"),
        (lambda h, u, y, w: (h, u, y, w[:1]), r"weights must have shape \(2, 13\), got \(1, 13\)"),
    ],
)
def test_shapes_that_do_not_fit_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        chunked_cross_entropy(*change(*map(jnp.asarray, _inputs())), chunk=4)
