"""Softmax attention against a float64 loop: documents, windows, caches, gradients, errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_model
from tolerances import assert_close, limit

from linattn_jax import softmax_attention, softmax_attention_init, softmax_attention_step

OPTIONS = ("scale", "window", "implementation")


def make(B=2, T=9, H=4, Hk=2, K=6, V=5, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32).astype(dtype)

    return {"q": normal(B, T, H, K), "k": normal(B, T, Hk, K), "v": normal(B, T, Hk, V)}


@functools.partial(jax.jit, static_argnames=OPTIONS)
def run(x, **options):
    return softmax_attention(x["q"], x["k"], x["v"], **options)


@jax.jit
def step(state, q, k, v):
    return softmax_attention_step(state, q, k, v)


@functools.partial(jax.jit, static_argnames=OPTIONS)
def gradients(x, weights, **options):
    def loss(x):
        output, _ = softmax_attention(x["q"], x["k"], x["v"], **options)
        return jnp.sum(output.astype(jnp.float32) * weights)

    return jax.grad(loss)(x)


def part(x, a, b):
    return {key: y[:, a:b] for key, y in x.items()}


def check_cache(cache, held, bound=1e-6):
    """A cache holds exactly the keys and values of `held`, row by row."""
    assert [int(n) for n in cache.length] == [len(k) for k, _ in held]
    for b, (k, v) in enumerate(held):
        assert_close(cache.k[b, : len(k)], k, bound, "cache.k")
        assert_close(cache.v[b, : len(v)], v, bound, "cache.v")


IDS = np.array([[1, 1, 1, 2, 2, 1, 1, 1, 1], [4, 5, 5, 5, 5, 5, 4, 4, 4]], np.int32)
PADDED = np.array([[-1, 3, 3, -1, 3, -9, 2, 2, -1], [0, -1, -1, 0, 0, 6, 6, 6, 0]], np.int32)


@pytest.mark.parametrize(
    ("options", "H", "Hk", "K", "V"),
    [
        ({}, 4, 2, 6, 5),
        ({}, 2, 2, 4, 4),
        ({"window": 1}, 4, 2, 6, 5),
        ({"window": 3}, 3, 1, 4, 8),
        ({"scale": 0.3}, 3, 1, 4, 8),
        ({"window": 50, "scale": 2.0}, 4, 2, 6, 5),
    ],
)
def test_values(options, H, Hk, K, V):
    x = make(H=H, Hk=Hk, K=K, V=V)
    output, cache = run(x, **options)
    wanted, _ = reference_model.attention(**x, **options)
    assert cache is None
    assert output.dtype == np.float32
    assert_close(output, wanted, limit("output", "float32"))


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("ids", [IDS, PADDED])
def test_segments(ids, window):
    """A document reads itself alone, also where its id has been seen before."""
    x = make()
    output, _ = run(x, segment_ids=ids, window=window)
    wanted, _ = reference_model.attention(**x, segment_ids=ids, window=window)
    assert_close(output, wanted, limit("output", "float32"))
    assert not np.any(np.asarray(output)[ids < 0])


def test_gradients_of_documents():
    """None across a boundary; ids 1, 2, 1 are three documents."""
    x = make(B=1)
    ids, weights = IDS[:1], np.random.default_rng(1).standard_normal((1, 9, 4, 5)).astype(np.float32)
    for positions in ([0, 1, 2], [3, 4], [5, 6, 7, 8]):
        masked = np.zeros_like(weights)
        masked[:, positions] = weights[:, positions]
        g = gradients(x, masked, segment_ids=ids)
        for key in x:
            assert np.any(np.asarray(g[key])[:, positions]), key
            assert not np.any(np.delete(np.asarray(g[key]), positions, axis=1)), key


@pytest.mark.parametrize("options", [{}, {"window": 2}, {"segment_ids": PADDED}, {"segment_ids": IDS, "window": 3}])
def test_gradients_are_derivatives(options):
    """Against central differences of the float64 loop, along random directions."""
    x, rng = make(), np.random.default_rng(2)
    weights = rng.standard_normal((2, 9, 4, 5))
    g = gradients(x, weights.astype(np.float32), **options)
    for key in x:
        direction = rng.standard_normal(x[key].shape)
        ends = [reference_model.attention(**(x | {key: x[key] + h * direction}), **options)[0] for h in (1e-4, -1e-4)]
        wanted = np.sum((ends[0] - ends[1]) * weights) / 2e-4
        assert_close(np.sum(np.asarray(g[key], np.float64) * direction), wanted, 1e-4, key)


def test_padding_leaves_no_trace():
    """NaN under negative ids: the same output, cache and gradients as with anything else there."""
    x = make()
    dirty = {key: np.where((PADDED < 0)[..., None, None], np.nan, y).astype(np.float32) for key, y in x.items()}
    empty = softmax_attention_init(2, 2, 6, 5, capacity=9)
    output, cache = run(dirty, segment_ids=PADDED, initial_state=empty)
    wanted, held = reference_model.attention(**x, segment_ids=PADDED)
    assert_close(output, wanted, limit("output", "float32"))
    check_cache(cache, held)
    assert np.all(np.isfinite(cache.k))
    weights = np.random.default_rng(1).standard_normal((2, 9, 4, 5)).astype(np.float32)
    for options in ({}, {"initial_state": empty}):
        g, clean = (gradients(y, weights, segment_ids=PADDED, **options) for y in (dirty, x))
        for key in x:
            np.testing.assert_array_equal(g[key], clean[key])
            assert not np.any(np.asarray(g[key])[PADDED < 0]), key


def test_rows_of_padding_only():
    x = make(T=3)
    _, cache = run(x, initial_state=softmax_attention_init(2, 2, 6, 5, capacity=8))
    output, after = run(x, segment_ids=np.full((2, 3), -1, np.int32), initial_state=cache)
    assert not np.any(output)
    for a, b in zip(after, cache, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("window", "splits"), [(None, range(8)), (3, (0, 5))])
def test_prefill_and_decode(window, splits):
    """Prefill, then one token at a time, equals one pass at every split."""
    x = make(T=8)
    wanted, held = reference_model.attention(**x, window=window)
    empty = softmax_attention_init(2, 2, 6, 5, capacity=12)
    for split in splits:
        outputs, cache = [], empty
        if split:
            output, cache = run(part(x, 0, split), initial_state=cache, window=window)
            outputs.append(output)
        for t in range(split, 8):
            if window is None:
                output, cache = step(cache, *(x[key][:, t] for key in "qkv"))
                output = output[:, None]
            else:
                output, cache = run(part(x, t, t + 1), initial_state=cache, window=window)
            outputs.append(output)
        assert_close(np.concatenate(outputs, 1), wanted, limit("output", "float32"), f"split {split}")
        check_cache(cache, held)


@pytest.mark.parametrize("blocks", [(2, 3, 7), (8, 4)])
def test_blocks_onto_a_cache(blocks):
    x = make(T=12)
    wanted, held = reference_model.attention(**x)
    outputs, cache, start = [], softmax_attention_init(2, 2, 6, 5, capacity=12), 0
    for block in blocks:
        output, cache = run(part(x, start, start + block), initial_state=cache)
        outputs.append(output)
        start += block
    assert_close(np.concatenate(outputs, 1), wanted, limit("output", "float32"))
    check_cache(cache, held)


@pytest.mark.parametrize("initial_segment_id", [None, np.array([1, 9], np.int32)])
@pytest.mark.parametrize("ids", [IDS, PADDED, np.array([[1] * 9, [5] * 8 + [-1]], np.int32)])
def test_segments_with_a_cache(ids, initial_segment_id):
    """A document may end inside the call, the cache then holds the last one; a differing first id drops the cache."""
    x, before = make(), make(T=4, seed=5)
    _, cache = run(before, initial_state=softmax_attention_init(2, 2, 6, 5, capacity=13))
    _, held = reference_model.attention(**before)
    output, after = run(x, segment_ids=ids, initial_segment_id=initial_segment_id, initial_state=cache, window=None)
    wanted, held = reference_model.attention(**x, segment_ids=ids, initial_segment_id=initial_segment_id, cache=held)
    assert_close(output, wanted, limit("output", "float32"))
    check_cache(after, held)


def test_stale_cache_entries_are_not_read():
    """What lies beyond a cache's length, NaN included, changes nothing."""
    x, before = make(T=2), make(T=3, seed=5)
    _, cache = run(before, initial_state=softmax_attention_init(2, 2, 6, 5, capacity=6))
    output, _ = run(x, initial_state=cache)
    spoilt = cache._replace(k=cache.k.at[:, 3:].set(np.nan), v=cache.v.at[:, 3:].set(np.nan))
    seen, after = run(x, initial_state=spoilt)
    np.testing.assert_array_equal(seen, output)
    assert np.all(np.isfinite(after.k[:, :5]))
    assert [*after.length] == [5, 5]
    weights = np.random.default_rng(1).standard_normal((2, 2, 4, 5)).astype(np.float32)
    clean, dirty = (gradients(x, weights, initial_state=c) for c in (cache, spoilt))
    for key in x:
        np.testing.assert_array_equal(dirty[key], clean[key])


def test_a_full_cache_drops_what_does_not_fit():
    x = make(T=3)
    _, cache = run(x, initial_state=softmax_attention_init(2, 2, 6, 5, capacity=5))
    _, after = run(make(T=3, seed=5), initial_state=cache)
    assert [*after.length] == [5, 5]
    np.testing.assert_array_equal(after.k[:, :3], x["k"])
    np.testing.assert_array_equal(after.k[:, 3:], make(T=3, seed=5)["k"][:, :2])


def test_gradients_reach_the_cache():
    x, before = make(T=3), make(T=4, seed=5)
    _, cache = run(before, initial_state=softmax_attention_init(2, 2, 6, 5, capacity=7))
    both = {key: np.concatenate([before[key], x[key]], 1) for key in x}
    weights = np.random.default_rng(1).standard_normal((2, 7, 4, 5)).astype(np.float32)
    weights[:, :4] = 0
    wanted = gradients(both, weights)

    def loss(k, v):
        output, _ = softmax_attention(x["q"], x["k"], x["v"], initial_state=cache._replace(k=k, v=v))
        return jnp.sum(output * weights[:, 4:])

    for key, g in zip("kv", jax.jit(jax.grad(loss, argnums=(0, 1)))(cache.k, cache.v), strict=True):
        assert_close(g[:, :4], wanted[key][:, :4], limit(key, "float32", gradient=True), key)
        assert not np.any(g[:, 4:])


def test_no_tokens():
    x = make(T=0)
    output, cache = run(x)
    assert output.shape == (2, 0, 4, 5)
    assert cache is None
    empty = softmax_attention_init(2, 2, 6, 5, capacity=3)
    output, cache = run(x, initial_state=empty, segment_ids=np.zeros((2, 0), np.int32))
    assert output.shape == (2, 0, 4, 5)
    np.testing.assert_array_equal(cache.length, [0, 0])


@pytest.mark.parametrize("options", [{}, {"segment_ids": np.zeros((2, 9), np.int32)}])
def test_bfloat16(options):
    """Rounded where its operands are: within the bfloat16 limits of the exact result for the rounded inputs."""
    x = make(dtype=jnp.bfloat16)
    output, _ = run(x, **options)
    assert output.dtype == jnp.bfloat16
    wanted, _ = reference_model.attention(**x)
    assert_close(np.asarray(output, np.float32), wanted, limit("output", "bfloat16"))


@pytest.mark.parametrize("options", [{}, {"segment_ids": IDS}])
def test_causality(options):
    """Tokens from P on change nothing before P, in values and in gradients, to the last bit."""
    x, other = make(), make(seed=8)
    cut = 5
    mixed = {key: np.concatenate([x[key][:, :cut], 3 * other[key][:, cut:]], 1) for key in x}
    np.testing.assert_array_equal(run(x, **options)[0][:, :cut], run(mixed, **options)[0][:, :cut])
    weights = np.random.default_rng(1).standard_normal((2, 9, 4, 5)).astype(np.float32)
    weights[:, cut:] = 0
    before, after = gradients(x, weights, **options), gradients(mixed, weights, **options)
    for key in x:
        np.testing.assert_array_equal(before[key][:, :cut], after[key][:, :cut])
        assert not np.any(after[key][:, cut:])


def test_boundaries_do_not_recompile():
    x, traces = make(), []

    @jax.jit
    def f(x, ids):
        traces.append(1)
        return softmax_attention(x["q"], x["k"], x["v"], segment_ids=ids)[0]

    for ids in (IDS, PADDED, np.zeros((2, 9), np.int32)):
        f(x, ids)
    assert len(traces) == 1


def test_vmap():
    x = make()
    rows = {key: y[:, None] for key, y in x.items()}

    def f(y, ids):
        return softmax_attention(y["q"], y["k"], y["v"], segment_ids=ids)[0]

    assert_close(jax.jit(jax.vmap(f))(rows, PADDED[:, None])[:, 0], run(x, segment_ids=PADDED)[0], 1e-6)


def test_bad_input_is_named():
    x = make()
    empty = softmax_attention_init(2, 2, 6, 5, capacity=9)

    def refused(error, match, **changes):
        with pytest.raises(error, match=match):
            softmax_attention(**(x | changes))

    refused(ValueError, r"k: shape \(2, 8, 2, 6\) given, wanted \[B, T, Hk, K\] = \(2, 9, 2, 6\)", k=x["k"][:, :8])
    refused(ValueError, r"v: shape \(2, 9, 1, 5\) given, wanted \[B, T, Hk, V\]", v=x["v"][:, :, :1])
    refused(ValueError, r"q: rank 3 .* wanted rank 4", q=x["q"][:, :, 0])
    refused(ValueError, r"q: 3 query heads given, wanted a multiple of the 2 heads", q=x["q"][:, :, :3])
    refused(TypeError, r"q: dtype int32", q=np.zeros((2, 9, 4, 6), np.int32))
    refused(TypeError, r"k: dtype float16 given, wanted that of q, float32", k=x["k"].astype(np.float16))
    refused(TypeError, r"v: list given", v=[1.0])
    refused(ValueError, r"window: 0 given, wanted at least 1", window=0)
    refused(ValueError, r"implementation: 'chunkwise' given, wanted None, 'xla' or 'cudnn'", implementation="chunkwise")
    refused(ValueError, r"segment_ids: shape \(2, 8\)", segment_ids=IDS[:, :8])
    refused(TypeError, r"segment_ids: dtype float32", segment_ids=IDS.astype(np.float32))
    refused(ValueError, r"initial_segment_id: given without segment_ids", initial_segment_id=IDS[:, 0])
    refused(TypeError, r"initial_state: tuple given, wanted KVCache", initial_state=(1, 2))
    refused(ValueError, r"initial_state.k: shape", initial_state=empty._replace(k=empty.k[..., :3]))
    refused(ValueError, r"initial_state.v: shape", initial_state=empty._replace(v=empty.v[:, :4]))
    refused(TypeError, r"initial_state.length: dtype float32", initial_state=empty._replace(length=jnp.zeros(2)))
    refused(
        ValueError,
        r"initial_state: capacity 8 given, wanted at least the 9 tokens, padding counted",
        initial_state=softmax_attention_init(2, 2, 6, 5, capacity=8),
    )
    refused(TypeError, r"initial_state.k: dtype int32", initial_state=empty._replace(k=empty.k.astype(np.int32)))
    refused(TypeError, r"initial_state.v: list given", initial_state=empty._replace(v=[1.0]))
    refused(ValueError, r"initial_state.k: rank 3", initial_state=empty._replace(k=empty.k[0]))
    refused(ValueError, r"wanted heads and sizes >= 1", k=x["k"][:, :, :0], v=x["v"][:, :, :0])
    refused(ValueError, r"wanted heads and sizes >= 1", q=x["q"][..., :0], k=x["k"][..., :0])
    for window in (2.5, True, "3", np.float32(2)):
        refused(TypeError, r"window: .* given, wanted an integer of at least 1 or None", window=window)
    for scale in ("1", True, 1j, [1.0]):
        refused(TypeError, r"scale: \w+ given, wanted a real number", scale=scale)
    refused(TypeError, r"scale: dtype int32", scale=jnp.ones((), jnp.int32))
    refused(ValueError, r"scale: shape \(4,\) given, wanted one number", scale=np.ones(4, np.float32))
    refused(NotImplementedError, r"scale is an array", scale=jnp.float32(1), implementation="cudnn")
    with pytest.raises(TypeError, match="state: NoneType given, wanted KVCache"):
        softmax_attention_step(None, *(x[key][:, 0] for key in "qkv"))
    with pytest.raises(TypeError, match="v: list given"):
        softmax_attention_step(empty, x["q"][:, 0], x["k"][:, 0], [1.0])


def test_scale_may_be_traced():
    """And differentiated: against central differences of the float64 loop."""
    x, weights = make(), np.random.default_rng(1).standard_normal((2, 9, 4, 5))

    def loss(scale):
        return jnp.sum(softmax_attention(**x, scale=scale)[0] * weights.astype(np.float32))

    ends = [reference_model.attention(**x, scale=0.3 + h)[0] for h in (1e-4, -1e-4)]
    assert_close(jax.jit(jax.grad(loss))(0.3), np.sum((ends[0] - ends[1]) * weights) / 2e-4, 1e-4)


CUDNN = [
    ({}, {}, True),
    ({}, {"scale": 0.5, "window": 3}, True),
    ({}, {"scale": np.float32(0.5)}, True),
    ({}, {"scale": jnp.float32(0.5)}, False),
    ({"dtype": np.float32}, {}, False),
    ({"V": 12}, {}, False),
    ({"K": 136}, {}, False),
    ({"T": 7}, {}, False),
    ({}, {"segment_ids": np.zeros((2, 8), np.int32)}, True),
    ({"T": 7}, {"segment_ids": np.zeros((2, 7), np.int32)}, False),
    ({}, {"initial_state": softmax_attention_init(2, 2, 8, 8, capacity=9)}, False),
]


@pytest.mark.parametrize(("sizes", "options", "served"), CUDNN)
def test_cudnn_is_chosen_for_what_is_lowered(sizes, options, served, monkeypatch):
    """Whatever machine lowers. A stand-in takes the place of cuDNN's attention, which JAX traces only where it is."""
    ours = jax.nn.dot_product_attention

    def stand_in(*args, implementation, **options):
        output = ours(*args, implementation="xla", **options)
        return jnp.cbrt(output) if implementation == "cudnn" else output

    x = make(**({"T": 8, "K": 8, "V": 8, "dtype": jnp.bfloat16} | sizes))
    with jax.default_device(jax.devices("cpu")[0]):
        wanted = softmax_attention(**x, **options)[0]
        monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
        np.testing.assert_array_equal(softmax_attention(**x, **options)[0], wanted)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for platform in ("cpu", "cuda"):
        program = jax.export.export(jax.jit(lambda x: softmax_attention(**x, **options)), platforms=[platform])(x)
        assert ("cbrt" in str(program.mlir_module())) == (served and platform == "cuda")
