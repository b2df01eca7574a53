"""Every mixer layer against a float64 forward pass on its own parameters: packing, padding, state, gradients, init."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_model
from flax import nnx
from tolerances import assert_close

from linattn_jax.layers import GROWING, LAYERS
from linattn_jax.layers.common import normal_002

D, T = 10, 9
SIZES = {"heads": 4, "key_heads": 2, "key_size": 4, "value_size": 6}
IDS = np.array([[7, 7, -1, 7, 8, 8, 8, 7, 7], [-1, -1, 0, 0, 5, 5, 5, -4, -4]], np.int32)
every_layer = pytest.mark.parametrize("name", LAYERS)


@functools.cache
def build(name, heads=4, key_heads=2, key_size=4, value_size=6, **options):
    """The layer split in structure and parameters, these moved off their initial values (biases of 0, scales of 1)."""
    module = LAYERS[name](D, heads, key_size, value_size, key_heads=key_heads, rngs=nnx.Rngs(0), **options)
    graph, parameters = nnx.split(module)
    rng = np.random.default_rng(1)

    def move(p):
        return p + 0.3 * rng.standard_normal(p.shape).astype(np.float32)

    return graph, jax.tree.map(move, parameters), module


def inputs(seed=0, length=T):
    return np.random.default_rng(seed).standard_normal((2, length, D)).astype(np.float32)


@functools.partial(jax.jit, static_argnums=0)
def forward(graph, parameters, x, state, ids, first):
    return nnx.merge(graph, parameters)(x, state=state, segment_ids=ids, initial_segment_id=first)


@functools.partial(jax.jit, static_argnums=0)
def gradients(graph, parameters, x, state, ids, weights):
    """Of a weighted sum of outputs, by parameters and x."""

    def loss(parameters, x):
        return jnp.sum(weights * nnx.merge(graph, parameters)(x, state=state, segment_ids=ids)[0])

    return jax.grad(loss, argnums=(0, 1))(parameters, x)


def run(name, x, ids=None, state=None, first=None):
    graph, parameters, _ = build(name)
    return forward(graph, parameters, x, state, ids, first)


def empty(name):
    return build(name)[2].init_state(2, T)


def exact(name, x, sizes=SIZES, options=(), **layer_options):
    """The float64 layer on rows x [B, T, D]."""
    p = parameters_of(name, **sizes, **dict(options))
    return np.stack([reference_model.layer(name, p, np.float64(row), **sizes, **layer_options) for row in x])


def parameters_of(name, **options):
    _, parameters, _ = build(name, **options)
    return jax.tree.map(lambda a: np.asarray(a, np.float64), nnx.to_pure_dict(parameters))


@every_layer
def test_values(name):
    """Grouped key heads; the decoder's tests have as many key heads as value heads."""
    x = inputs()
    y, _ = run(name, x, np.zeros((2, T), np.int32), empty(name))
    assert y.dtype == np.float32
    assert_close(y, exact(name, x), 1e-5)


def test_softmax_options():
    options = {"window": 3, "theta": 50.0, "qk_norm": True, "norm_eps": 1e-2}
    graph, parameters, _ = build("softmax", **SIZES, **options)
    x = inputs()
    y, _ = forward(graph, parameters, x, None, None, None)
    assert_close(y, exact("softmax", x, options=options.items(), window=3, theta=50.0, eps=1e-2), 1e-5)


def test_options_of_kla():
    options = {"norm_eps": 0.1, "conv_width": 2, "implementation": "recurrent"}
    graph, parameters, _ = build("kla", **SIZES, **options)
    x = inputs()
    y, _ = forward(graph, parameters, x, None, None, None)
    assert_close(y, exact("kla", x, options=options.items(), eps=0.1), 1e-5)
    assert parameters["convolution"]["weight"].shape == (2, 28 + 12)


@every_layer
def test_packed_rows_equal_separate_rows(name):
    """Padding inside, left and right; a reappearing id is another document; output 0 on padding, whatever is there."""
    x = inputs()
    y, _ = run(name, np.where((IDS < 0)[..., None], np.nan, x).astype(np.float32), IDS, empty(name))
    for b in range(2):
        for positions, _ in reference_model.documents(IDS[b], T):
            assert_close(y[b, positions], exact(name, x[b : b + 1, positions])[0], 1e-5, f"row {b}, {positions}")
    assert not np.any(np.asarray(y)[IDS < 0])


@every_layer
def test_padding_and_gradients(name):
    """NaN on padding reaches no parameter; every parameter has a gradient; none crosses documents."""
    graph, parameters, _ = build(name)
    x = inputs()
    weights = np.random.default_rng(2).standard_normal((2, T, D)).astype(np.float32)
    dirty = np.where((IDS < 0)[..., None], np.nan, x).astype(np.float32)
    clean = gradients(graph, parameters, x, empty(name), IDS, weights)
    seen = gradients(graph, parameters, dirty, empty(name), IDS, weights)
    for (path, g), wanted in zip(jax.tree.leaves_with_path(seen), jax.tree.leaves(clean), strict=True):
        where = jax.tree_util.keystr(path)
        np.testing.assert_array_equal(g, wanted, err_msg=where)
        assert np.all(np.isfinite(g)), where
        assert np.any(g), where
    assert not np.any(np.asarray(seen[1])[IDS < 0])
    first_row = np.array([1, 0])[:, None, None]
    one = np.where(np.arange(T)[:, None] // 3 == 1, weights, 0) * first_row  # tokens 3 to 5
    _, g = gradients(graph, parameters, x, empty(name), IDS, np.float32(one))
    assert np.all(np.any(g[0, [0, 1, 3, 4, 5]], axis=-1))
    assert not np.any(g[0, 6:])
    assert not np.any(g[1])
    two = np.where(np.arange(T)[:, None] // 2 == 2, weights, 0) * first_row  # tokens 4 and 5
    _, g = gradients(graph, parameters, x, empty(name), IDS, np.float32(two))
    assert not np.any(g[0, :4])


@every_layer
def test_gradients_are_derivatives(name):
    """Of each parameter and of x, against central differences of the float64 layer along a random direction."""
    graph, parameters, _ = build(name)
    x, rng = inputs(), np.random.default_rng(3)
    ids = np.zeros((2, T), np.int32)
    weights = rng.standard_normal((2, T, D)).astype(np.float32)
    by_parameter, by_x = gradients(graph, parameters, x, empty(name), ids, weights)
    p = parameters_of(name, **SIZES)

    def value(p, x):
        rows = [reference_model.layer(name, p, row, **SIZES) for row in x]
        return np.sum(weights * np.stack(rows))

    def difference(move, h=1e-6):
        return (move(h) - move(-h)) / (2 * h)

    direction = rng.standard_normal(x.shape)
    wanted = difference(lambda h: value(p, x + h * direction))
    assert_close(np.sum(np.asarray(by_x, np.float64) * direction), wanted, 2e-4, "x")
    leaves, tree = jax.tree.flatten(p)
    gradient_leaves = jax.tree.leaves(nnx.to_pure_dict(by_parameter))
    for i, (path, leaf) in enumerate(jax.tree.leaves_with_path(p)):
        direction = rng.standard_normal(leaf.shape)

        def moved(h):
            return value(tree.unflatten([*leaves[:i], leaf + h * direction, *leaves[i + 1 :]]), x)

        seen = np.sum(np.asarray(gradient_leaves[i], np.float64) * direction)
        bound = 2e-4 * max(1.0, np.linalg.norm(gradient_leaves[i]) / max(abs(seen), 1e-9))
        assert_close(seen, difference(moved), bound, jax.tree_util.keystr(path))


@every_layer
def test_prefill_and_decode(name):
    """Prefill, with what does not fit padded away, then one token at a time, equals one pass at every split."""
    x = inputs()
    wanted = exact(name, x)
    for split in range(T):
        ids = np.where(np.arange(T) < split, 0, -1)[None].repeat(2, 0).astype(np.int32)
        y, state = run(name, x, ids, empty(name))
        outputs = [y[:, :split]]
        for t in range(split, T):
            y, state = run(name, x[:, t : t + 1], None, state)
            outputs.append(y)
        assert_close(np.concatenate(outputs, 1), wanted, 1e-5, f"split {split}")


@every_layer
def test_blocks_of_tokens(name):
    """Several tokens onto a carried state, which is dropped where the row's document is another."""
    x = inputs()
    wanted, state = exact(name, x), empty(name)
    for t in range(4):
        _, state = run(name, x[:, t : t + 1], None, state)
    y, _ = run(name, x[:, 4:], np.full((2, 5), 3, np.int32), state, np.array([3, 2], np.int32))
    assert_close(y[0], wanted[0, 4:], 1e-5, "the same document")
    assert_close(y[1], exact(name, x[1:, 4:])[0], 1e-5, "another document")


@every_layer
def test_no_tokens(name):
    layer = build(name)[2]
    for state in (None, empty(name)):
        y, after = layer(jnp.zeros((2, 0, D)), state=state, segment_ids=jnp.zeros((2, 0), jnp.int32))
        assert y.shape == (2, 0, D)
        if state is not None:
            jax.tree.map(np.testing.assert_array_equal, after, state)


@pytest.mark.parametrize("name", ["kla", "linear", "softmax"])
def test_bfloat16_compute(name):
    """Parameters stay float32, outputs are bfloat16 and near the float32 layer's."""
    graph, parameters, _ = build(name, **SIZES, dtype=jnp.bfloat16)
    assert {str(p.dtype) for p in jax.tree.leaves(parameters)} == {"float32"}
    x = inputs()
    y, _ = forward(graph, parameters, jnp.asarray(x, jnp.bfloat16), None, None, None)
    assert y.dtype == jnp.bfloat16
    assert_close(np.asarray(y, np.float32), exact(name, x), 5e-2)


def test_positions_start_with_each_document():
    """Rotary scores are relative, so that only the positions themselves can show where counting starts."""
    layer, cache = build("softmax")[2], empty("softmax")
    cache = cache._replace(length=jnp.array([3, 4], jnp.int32))
    seen = np.asarray(layer._positions(2, T, cache, IDS, None))
    np.testing.assert_array_equal(seen[0, IDS[0] >= 0], [3, 4, 5, 0, 1, 2, 0, 1])
    np.testing.assert_array_equal(seen[1, IDS[1] >= 0], [4, 5, 0, 1, 2])
    dropped = np.asarray(layer._positions(2, T, cache, IDS, np.array([7, 3], np.int32)))
    np.testing.assert_array_equal(dropped[1, IDS[1] >= 0], [0, 1, 0, 1, 2])


def test_state_of_softmax_needs_a_capacity():
    assert frozenset(LAYERS) >= GROWING == {"softmax"}
    with pytest.raises(ValueError, match="capacity: None given, wanted the number of tokens"):
        build("softmax")[2].init_state(1)


class Odd(NamedTuple):
    odd: np.ndarray


def test_bad_input_is_named():
    x = inputs()
    for name in LAYERS:
        with pytest.raises(ValueError, match=r"segment_ids: shape \(2, 5\) given, wanted \[B, T\] = \(2, 9\)"):
            build(name)[2](x, segment_ids=IDS[:, :5])
        with pytest.raises(TypeError, match=r"segment_ids: dtype float32"):
            build(name)[2](x, segment_ids=IDS.astype(np.float32))
        narrow = jax.tree.map(lambda s: s.astype(np.int8), empty(name))
        for error, match, arguments in (
            (TypeError, "x: dtype int8 given", {"x": x.astype(np.int8)}),
            (TypeError, "x: list given", {"x": [1.0]}),
            (ValueError, r"x: shape \(2, 9, 5\) given, wanted \[B, T, D\] with D = 10", {"x": x[..., :5]}),
            (ValueError, r"x: shape \(9, 10\) given, wanted \[B, T, D\]", {"x": x[0]}),
            (TypeError, r"state: tuple given, wanted \w+\('\w+'", {"state": (x, x)}),
            (TypeError, r"state: Odd given, wanted", {"state": Odd(x)}),
            (ValueError, r"state\.[\w.]+: shape \(2, .* given, wanted \(1, ", {"x": x[:1], "state": empty(name)}),
            (TypeError, r"state\.[\w.]+: dtype int8", {"state": narrow}),
        ):
            with pytest.raises(error, match=match):
                build(name)[2](**({"x": x} | arguments))
    with pytest.raises(TypeError, match=r"state\.memory: ndarray given, wanted MatrixState"):
        build("kla")[2](x, state=empty("kla")._replace(memory=x))
    with pytest.raises(ValueError, match="key_size: 5 given, wanted an even number"):
        LAYERS["softmax"](D, 2, 5, 4, rngs=nnx.Rngs(0))


# Parameters -----------------------------------------------------------------------------------------------------------


WIDE = {"heads": 6, "key_heads": 3, "key_size": 8, "value_size": 16}
KEYS, VALUES, WIDTH = 24, 96, 64
PROJECTIONS = {
    "query": (WIDTH, KEYS),
    "key": (WIDTH, KEYS),
    "value": (WIDTH, VALUES),
    "output": (VALUES, WIDTH),
}
DELTA = PROJECTIONS | {"strength": (WIDTH, 6), "convolution": (4, 2 * KEYS + VALUES), "norm": (16,)}
GATED = DELTA | {"gate": (WIDTH, VALUES), "log_decay": (WIDTH, 6), "a_log": (6,), "dt_bias": (6,)}
SHAPES = {
    "kla": GATED,
    "gdn": GATED,
    "deltanet": DELTA,
    "gla": PROJECTIONS | {"gate": (WIDTH, VALUES), "norm": (16,), "decay_down": (WIDTH, 16), "decay_up": (16, KEYS)},
    "linear": PROJECTIONS,
    "softmax": {"query": (WIDTH, 48), "key": (WIDTH, KEYS), "value": (WIDTH, 48), "output": (VALUES, WIDTH)},
}
BIASES = {"kla": {"strength": (6,)}, "gla": {"decay_up": (KEYS,)}}


@pytest.mark.parametrize(
    ("name", "init"), [(name, "fan_in_uniform") for name in LAYERS] + [("kla", "normal_002"), ("gla", "normal_002")]
)
def test_parameters(name, init):
    """Shapes, which projections have a bias, and initial ranges, as the papers say."""
    options = {"init": normal_002} if init == "normal_002" else {}
    module = LAYERS[name](WIDTH, 6, 8, 16, key_heads=3, rngs=nnx.Rngs(0), **options)
    p = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    weights = {part: a if not isinstance(a, dict) else next(iter(a.values())) for part, a in p.items()}
    weights |= {part: a["kernel"] for part, a in p.items() if isinstance(a, dict) and "kernel" in a}
    assert {part: a.shape for part, a in weights.items()} == SHAPES[name]
    biases = {part: a["bias"] for part, a in p.items() if isinstance(a, dict) and "bias" in a}
    assert {part: a.shape for part, a in biases.items()} == BIASES.get(name, {})
    assert not any(np.any(a) for a in biases.values())
    assert {a.dtype for a in jax.tree.leaves(p)} == {np.dtype("float32")}
    for part, a in weights.items():
        if part == "norm":
            assert np.all(a == 1)
        elif part == "a_log":
            assert np.log(1e-3) <= a.min() <= a.max() <= np.log(16)
        elif part == "dt_bias":
            dt = np.log1p(np.exp(np.float64(a)))
            assert 0.99e-3 <= dt.min() <= dt.max() <= 0.1001
        elif init == "normal_002":
            assert 0.015 < np.std(a) < 0.025, part
        else:  # PyTorch's default; the depthwise convolution's fan-in is its width
            bound = a.shape[0] ** -0.5
            assert 0.95 * bound < np.max(np.abs(a)) <= bound, part
            assert abs(np.std(a) * np.sqrt(3) / bound - 1) < 0.1, part


@every_layer
def test_rngs_draw_different_parameters(name):
    kernels = [np.asarray(a) for a in jax.tree.leaves(nnx.state(build(name)[2], nnx.Param)) if a.ndim == 2]
    kernels = [a.ravel()[:8] for a in kernels]
    assert len({a.tobytes() for a in kernels}) == len(kernels)
