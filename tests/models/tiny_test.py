"""The VLA paper's small model against its formulas in NumPy; that it looks at no later token, and what it refuses."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from linattn_jax.models.tiny import TinyConfig, TinyLM
from linattn_jax.types import UserError

SIZES = {"vocab_size": 11, "layers": 2, "width": 12, "heads": 2, "mlp_width": 20, "positions": 9}
TOKENS = np.random.default_rng(0).integers(0, 11, (3, 7), dtype=np.int32)


@pytest.fixture(scope="module")
def model():
    """A model whose every parameter differs from what it starts with."""
    made = TinyLM(TinyConfig("linear", **SIZES), rngs=nnx.Rngs(0))
    leaves, tree = jax.tree.flatten(nnx.state(made, nnx.Param))
    keys = jax.random.split(jax.random.key(1), len(leaves))
    moved = [x + 0.3 * jax.random.normal(key, x.shape) for key, x in zip(keys, leaves, strict=True)]
    nnx.update(made, jax.tree.unflatten(tree, moved))
    return made


def norm(x, p):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]


def gelu(x):
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


def linear_attention(x, p, heads):
    """o_t = S_t q_t / (z_t q_t) of each head: S_t = sum v k^T, z_t = sum k over the past, q and k through ELU + 1."""
    feature = lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))
    q, k, v = (x @ p[name]["kernel"] for name in ("query", "key", "value"))
    q, k = feature(q), feature(k)
    y = np.zeros_like(v)
    size = x.shape[-1] // heads
    for b in range(len(x)):
        for h in range(heads):
            part = slice(h * size, (h + 1) * size)
            S, z = np.zeros((size, size)), np.zeros(size)
            for t in range(x.shape[1]):
                S, z = S + np.outer(v[b, t, part], k[b, t, part]), z + k[b, t, part]
                y[b, t, part] = S @ q[b, t, part] / (z @ q[b, t, part])
    return y @ p["output"]["kernel"]


def test_the_formulas(model):
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    x = p["embedding"][TOKENS] + p["positions"][: TOKENS.shape[1]]
    for layer in range(2):
        block = p["blocks"][layer]
        x = x + linear_attention(norm(x, block["mixer_norm"]), block["mixer"], 2)
        up = norm(x, block["mlp_norm"]) @ block["up"]["kernel"] + block["up"]["bias"]
        x = x + gelu(up) @ block["down"]["kernel"] + block["down"]["bias"]
    x = norm(x, p["norm"])
    hidden, state = model(jnp.asarray(TOKENS))
    assert state is None
    np.testing.assert_allclose(hidden, x, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(model.logits(hidden), x @ p["embedding"].T, rtol=2e-5, atol=2e-5)


def test_no_token_is_seen_before_its_time(model):
    changed = TOKENS.copy()
    changed[:, 4] = (changed[:, 4] + 1) % 11
    before, after = (np.asarray(model(jnp.asarray(tokens))[0]) for tokens in (TOKENS, changed))
    np.testing.assert_array_equal(after[:, :4], before[:, :4])
    assert np.abs(after[:, 4:] - before[:, 4:]).max(axis=(0, 2)).min() > 1e-3


def test_how_it_starts():
    """Matrices and tables from N(0, 0.02^2), no biases; what is drawn is told by the seed."""
    make = lambda seed: TinyLM(TinyConfig("linear", **(SIZES | {"width": 64, "mlp_width": 64})), rngs=nnx.Rngs(seed))
    params, again, other = (nnx.to_pure_dict(nnx.state(make(seed), nnx.Param)) for seed in (3, 3, 4))
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if x.ndim == 2:
            assert float(x.std()) == pytest.approx(0.02, rel=0.15), name
        else:
            assert np.all(np.asarray(x) == (1 if name.endswith("scale") else 0)), name
    jax.tree.map(np.testing.assert_array_equal, params, again)
    assert not np.allclose(params["embedding"], other["embedding"])


def test_what_it_refuses(model):
    assert model(jnp.zeros((1, 9), jnp.int32))[0].shape == (1, 9, 12)
    with pytest.raises(ValueError, match=r"tokens: shape \(1, 10\) given, wanted \[B, T\] with T at most 9"):
        model(jnp.zeros((1, 10), jnp.int32))
    with pytest.raises(ValueError, match=r"tokens: shape \(4,\) given"):
        model(jnp.zeros(4, jnp.int32))
    with pytest.raises(TypeError, match="tokens: dtype float32 given"):
        model(jnp.zeros((1, 4)))
    with pytest.raises(UserError, match="mixer 'lineal' is not known; known are "):
        TinyConfig("lineal")
    with pytest.raises(UserError, match="width 12 is not a multiple of heads 5"):
        TinyConfig("linear", width=12, heads=5)


def test_sizes_that_a_paper_expands_and_options_reach_the_layer():
    """GLA halves its keys; the rank of its decay is an option; in bfloat16 parameters stay float32."""
    config = TinyConfig("gla", **SIZES, dtype="bfloat16", options={"decay_rank": 3, "implementation": "recurrent"})
    made = TinyLM(config, rngs=nnx.Rngs(0))
    layer = made.blocks[0].mixer
    assert (layer.key_size, layer.value_size, layer.decay_down.kernel.shape) == (3, 6, (12, 3))
    assert {x.dtype for x in jax.tree.leaves(nnx.state(made, nnx.Param))} == {jnp.dtype("float32")}
    assert made(jnp.asarray(TOKENS))[0].dtype == jnp.bfloat16


def test_its_structure_can_be_a_static_argument():
    config = TinyConfig("gla", **SIZES, options={"decay_rank": 3})
    first, again = (nnx.graphdef(nnx.eval_shape(lambda: TinyLM(config, rngs=nnx.Rngs(0)))) for _ in range(2))
    assert (hash(first), first) == (hash(again), again)
