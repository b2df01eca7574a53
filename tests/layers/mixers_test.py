"""Every mixer layer against a float64 forward pass on its own parameters: packing, padding, state, gradients, init."""

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_model
from built_layers import (
    IDS,
    UNGROUPED,
    D,
    T,
    build,
    empty,
    exact,
    forward,
    gradients,
    inputs,
    parameters_of,
    run,
    sizes,
)
from flax import nnx
from tolerances import assert_close

from linattn_jax.layers import GROWING, LAYERS
from linattn_jax.layers.common import document_length, normal_002, positions

every_layer = pytest.mark.parametrize("name", LAYERS)
# Rows that take long, on layers that differ in kind; the others are in the long test.
KINDS = (
    "kla",
    "deltanet_vla",
    "gla",
    "linear",
    "retention",
    "mamba2",
    "softmax",
    "vla",
    "ccq_gdn",
    "interdomain",
    "s4d",
    "longhorn",
)
every_kind = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in KINDS else pytest.mark.slow) for name in LAYERS]
)


@every_layer
def test_values(name):
    """Grouped key heads; the decoder's tests have as many key heads as value heads."""
    x = inputs()
    y, _ = run(name, x, np.zeros((2, T), np.int32), empty(name))
    assert y.dtype == np.float32
    assert_close(y, exact(name, x), 1e-5)


def test_softmax_options():
    options = {"window": 3, "theta": 50.0, "qk_norm": True, "norm_eps": 1e-2}
    graph, parameters, _ = build("softmax", **options)
    x = inputs()
    y, _ = forward(graph, parameters, x, None, None, None)
    assert_close(y, exact("softmax", x, options=options.items(), window=3, theta=50.0, eps=1e-2), 1e-5)


def test_contraction_starts_near_the_backbone():
    """lambda = sigmoid(-2) whatever the query, or the sigmoid of `gate_bias`."""
    q = np.random.default_rng(0).standard_normal((2, T, 4, 4))
    for name in (name for name in LAYERS if name.startswith("ccq")):
        for options, wanted in (({}, -2.0), ({"gate_bias": 1.0}, 1.0)):
            layer = LAYERS[name](D, 4, 4, 6, key_heads=4, rngs=nnx.Rngs(0), **options)
            np.testing.assert_allclose(layer.contraction.gate(q), 1 / (1 + np.exp(-wanted)), rtol=1e-6)


@every_layer
def test_packed_rows_equal_separate_rows(name):
    """Padding inside, left and right; a reappearing id is another document; output 0 on padding, whatever is there."""
    x = inputs()
    y, _ = run(name, np.where((IDS < 0)[..., None], np.nan, x).astype(np.float32), IDS, empty(name))
    for b in range(2):
        for at, _ in reference_model.documents(IDS[b], T):
            assert_close(y[b, at], exact(name, x[b : b + 1, at])[0], 1e-5, f"row {b}, {at}")
    assert not np.any(np.asarray(y)[IDS < 0])


@every_kind
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


@every_kind
def test_gradients_are_derivatives(name):
    """Of each parameter and of x, against central differences of the float64 layer along a random direction."""
    graph, parameters, _ = build(name)
    x, rng = inputs(), np.random.default_rng(3)
    ids = np.zeros((2, T), np.int32)
    weights = rng.standard_normal((2, T, D)).astype(np.float32)
    by_parameter, by_x = gradients(graph, parameters, x, empty(name), ids, weights)
    p = parameters_of(name)

    def value(p, x):
        rows = [reference_model.layer(name, p, row, **sizes(name)) for row in x]
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


@every_kind
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


@every_kind
def test_blocks_of_tokens(name):
    """Several tokens onto a carried state, which is dropped where the row's document is another."""
    x = inputs()
    wanted, state = exact(name, x), empty(name)
    for t in range(4):
        _, state = run(name, x[:, t : t + 1], None, state)
    y, _ = run(name, x[:, 4:], np.full((2, 5), 3, np.int32), state, np.array([3, 2], np.int32))
    assert_close(y[0], wanted[0, 4:], 1e-5, "the same document")
    assert_close(y[1], exact(name, x[1:, 4:])[0], 1e-5, "another document")


@every_kind
def test_no_tokens(name):
    layer = build(name)[2]
    for state in (None, empty(name)):
        y, after = layer(jnp.zeros((2, 0, D)), state=state, segment_ids=jnp.zeros((2, 0), jnp.int32))
        assert y.shape == (2, 0, D)
        if state is not None:
            jax.tree.map(np.testing.assert_array_equal, after, state)


@every_layer
def test_bfloat16_dtypes(name):
    """Parameters stay float32, outputs are bfloat16, and the state has the dtypes of the empty one."""
    graph, parameters, layer = build(name, dtype=jnp.bfloat16)
    assert {str(p.dtype) for p in jax.tree.leaves(parameters)} == {"float32"}
    x, state = jax.ShapeDtypeStruct((2, T, D), jnp.bfloat16), jax.eval_shape(lambda: layer.init_state(2, T))
    y, after = jax.eval_shape(lambda p, x, s: nnx.merge(graph, p)(x, state=s), parameters, x, state)
    assert y.dtype == jnp.bfloat16
    assert [s.dtype for s in jax.tree.leaves(after)] == [s.dtype for s in jax.tree.leaves(state)]


@pytest.mark.parametrize("name", ["kla", "linear", "softmax", "mamba2", "interdomain"])
def test_bfloat16_compute(name):
    """Near the float32 layer's outputs."""
    graph, parameters, _ = build(name, dtype=jnp.bfloat16)
    x = inputs()
    y, _ = forward(graph, parameters, jnp.asarray(x, jnp.bfloat16), None, None, None)
    assert_close(np.asarray(y, np.float32), exact(name, x), 5e-2)


def test_positions_start_with_each_document():
    """Rotary scores are relative, so that only the positions themselves can show where counting starts."""
    x, before = inputs(), jnp.array([3, 4], jnp.int32)
    seen = np.asarray(positions(x, before, IDS, None))
    np.testing.assert_array_equal(seen[0, IDS[0] >= 0], [3, 4, 5, 0, 1, 2, 0, 1])
    np.testing.assert_array_equal(seen[1, IDS[1] >= 0], [4, 5, 0, 1, 2])
    np.testing.assert_array_equal(document_length(seen, before, IDS), [2, 3])
    dropped = np.asarray(positions(x, before, IDS, np.array([7, 3], np.int32)))
    np.testing.assert_array_equal(dropped[1, IDS[1] >= 0], [0, 1, 0, 1, 2])
    np.testing.assert_array_equal(positions(x, before, None, None), [np.arange(3, 3 + T), np.arange(4, 4 + T)])
    np.testing.assert_array_equal(document_length(seen, before, -np.ones_like(IDS)), before)


@pytest.mark.parametrize("name", ["retention", "gla_kla"])
def test_carried_positions(name):
    """The state counts the last document's real tokens: one that reappears, and one onto what was carried."""
    np.testing.assert_array_equal(empty(name).length, [0, 0])
    _, state = run(name, inputs(), IDS, empty(name))
    np.testing.assert_array_equal(state.length, [2, 3])
    _, state = run(name, inputs(), np.where(np.arange(T) < 3, 7, -1).repeat(2).reshape(T, 2).T.astype(np.int32), state)
    np.testing.assert_array_equal(state.length, [5, 6])


def test_state_of_softmax_needs_a_capacity():
    assert frozenset(LAYERS) >= GROWING == {"softmax", "softmax_vla"}
    for name in GROWING:
        with pytest.raises(ValueError, match="capacity: None given, wanted the number of tokens"):
            build(name)[2].init_state(1)


class Odd(NamedTuple):
    odd: np.ndarray


def test_bad_input_is_named():
    x = inputs()
    for name in LAYERS:
        with pytest.raises(ValueError, match=r"segment_ids: shape \(2, 5\) given, wanted \[B, T\] = \(2, 9\)"):
            build(name)[2](x, segment_ids=IDS[:, :5])
        with pytest.raises(TypeError, match=r"segment_ids: dtype float32"):
            build(name)[2](x, segment_ids=IDS.astype(np.float32))
        narrow = jax.tree.map(lambda s: jnp.zeros(s.shape, np.int8), empty(name))
        for error, match, arguments in (
            (TypeError, "x: dtype int8 given", {"x": x.astype(np.int8)}),
            (TypeError, "x: list given", {"x": [1.0]}),
            (ValueError, r"x: shape \(2, 9, 5\) given, wanted \[B, T, D\] with D = 10", {"x": x[..., :5]}),
            (ValueError, r"x: shape \(9, 10\) given, wanted \[B, T, D\]", {"x": x[0]}),
            (TypeError, r"state: tuple given, wanted \w+\('\w+'", {"state": (x, x)}),
            (TypeError, r"state: Odd given, wanted", {"state": Odd(x)}),
            (ValueError, r"state\.[\w.]+: shape \(2,.* given, wanted \(1,", {"x": x[:1], "state": empty(name)}),
            (TypeError, r"state\.[\w.]+: dtype int8", {"state": narrow}),
        ):
            with pytest.raises(error, match=match):
                build(name)[2](**({"x": x} | arguments))
    with pytest.raises(TypeError, match=r"state\.memory: ndarray given, wanted MatrixState"):
        build("kla")[2](x, state=empty("kla")._replace(memory=x))


@pytest.mark.parametrize(
    ("name", "arguments", "match"),
    [
        ("softmax", {"key_size": 5}, "key_size: 5 given, wanted an even number"),
        ("retention", {"key_size": 5}, "key_size: 5 given, wanted an even number"),
        ("gla_kla", {"key_size": 5}, "key_size: 5 given, wanted an even number"),
        ("interdomain", {"key_size": 5, "rope": True}, "key_size: 5 given, wanted an even number"),
        ("interdomain", {"key_heads": 2}, "key_heads: 2 given, wanted 4, as Interdomain has no grouped heads"),
        ("vla", {"key_heads": 2}, "key_heads: 2 given, wanted 4, as VLA has no grouped heads"),
        ("mamba2", {"key_heads": 3}, "key_heads: 3 given, wanted a divisor of the 4 heads of 6 channels"),
        ("vla", {"directions": "some"}, "directions: 'some' given, wanted 'learned' or 'none'"),
        ("kla", {"step": "half"}, "step: 'half' given, wanted one of relaxed, exact, sigmoid, learned, sequence"),
        ("kla", {"sequence_factor": "t"}, r"sequence_factor: 't' given, wanted None or one of 1/t, 1/sqrt\(t\), 1/log"),
        ("interdomain", {"mixing": "none"}, "mixing: 'none' given, wanted 'dense', 'diagonal' or 'identity'"),
        ("interdomain", {"basis": 5}, "basis: 5 given, wanted an even number of functions"),
    ],
)
def test_bad_sizes_are_named(name, arguments, match):
    with pytest.raises(ValueError, match=match):
        build(name, **arguments)


def test_odd_keys_without_positions():
    for name in ("softmax_vla", "interdomain"):
        assert build(name, key_size=5)[2].key_size == 5


# Parameters -----------------------------------------------------------------------------------------------------------


PARAMETERS = {
    "query": (64, 24),
    "key": (64, 24),
    "value": (64, 96),
    "output": (96, 64),
}
GATE = {"gate": (64, 96), "norm": (16,)}
MAMBA_DECAY = {"log_decay": (64, 6), "a_log": (6,), "dt_bias": (6,)}
DELTA = PARAMETERS | {"strength": (64, 6), "convolution": (4, 24 + 24 + 96), "norm": (16,)}
GLA = PARAMETERS | GATE | {"decay_down": (64, 16), "decay_up": (16, 24), "decay_up/bias": (24,)}
MAMBA = PARAMETERS | {"gate": (64, 96), "norm": (96,), "convolution": (4, 144), "convolution/bias": (144,)}
MAMBA |= {"step": (64, 6), "a_log": (6,), "dt_bias": (6,), "skip": (6,)}
CONTRACTION = {"contraction": (3, 8), "contraction/bias": (3,)}
NEW_KEYS = PARAMETERS | {"query": (64, 48), "key": (64, 48)}
MODES = {"modes/log_dt": (6,), "modes/a_log": (6, 32), "modes/a_imag": (6, 32)}
SOFTMAX = PARAMETERS | {"query": (64, 48), "value": (64, 48)}
SHAPES = {
    "softmax": SOFTMAX,
    "softmax_vla": SOFTMAX,
    "linear": PARAMETERS,
    "retention": PARAMETERS | GATE,
    "mamba2": MAMBA,
    "gla": GLA,
    "gla_kla": PARAMETERS | {"log_decay": (64, 6)},
    "deltanet": DELTA,
    "deltanet_kla": DELTA | GATE | {"strength/bias": (6,), "log_decay": (64, 6), "log_decay/bias": (6,)},
    "deltanet_vla": PARAMETERS | {"gate": (64, 96)},
    "gdn": DELTA | GATE | MAMBA_DECAY,
    "kla": DELTA | GATE | MAMBA_DECAY | {"strength/bias": (6,)},
    "longhorn_kla": DELTA | GATE | MAMBA_DECAY | {"strength/bias": (6,)},
    "vla": NEW_KEYS | {"direction": (48, 48), "norm": (96,), "norm/bias": (96,)},
    "ccq_gla": GLA | CONTRACTION,
    "ccq_gdn": DELTA | GATE | MAMBA_DECAY | CONTRACTION,
    "ccq_kla": DELTA | GATE | MAMBA_DECAY | {"strength/bias": (6,)} | CONTRACTION,
    "ccq_deltanet": DELTA | CONTRACTION,
    "ccq_mamba2": MAMBA | CONTRACTION,
    "interdomain": NEW_KEYS
    | {"convolution": (4, 96), "key_norm": (8,), "value_norm": (16,), "key_bias": (6, 8), "value_bias": (6, 16)}
    | MODES
    | {"mix_real": (6, 64, 32), "mix_imag": (6, 64, 32), "output_norm": (16,)},
    "s4d": {"modes/log_dt": (64,), "modes/a_log": (64, 32), "modes/a_imag": (64, 32), "c_real": (64, 32)}
    | {"c_imag": (64, 32), "skip": (64,), "output": (64, 128), "output/bias": (128,)},
    "s4d_interdomain": {"value": (64, 96), "value_norm": (16,), "value_bias": (6, 16), "modes/log_dt": (6,)}
    | {"modes/a_log": (6, 48), "modes/a_imag": (6, 48), "c_real": (96, 48), "c_imag": (96, 48)}
    | {"output_norm": (16,), "output": (96, 64)},
    "longhorn": {"value": (64, 96), "gate": (64, 96), "convolution": (4, 96), "convolution/bias": (96,)}
    | {"key": (96, 16), "query": (96, 16), "step_down": (96, 4), "step_up": (4, 96), "step_up/bias": (96,)}
    | {"skip": (96,), "output": (96, 64)},
}
COMPLEX = {"interdomain": 32**-0.5, "s4d_interdomain": 48**-0.5, "s4d": 1.0}  # root mean square of c


@pytest.mark.parametrize(
    ("name", "init"), [(name, "fan_in_uniform") for name in LAYERS] + [("kla", "normal_002"), ("gla", "normal_002")]
)
def test_parameters(name, init):
    """Shapes, which projections have a bias, and initial ranges, as the papers say."""
    options = {"init": normal_002} if init == "normal_002" else {}
    module = LAYERS[name](64, 6, 8, 16, key_heads=6 if name in UNGROUPED else 3, rngs=nnx.Rngs(0), **options)
    paths = jax.tree.leaves_with_path(nnx.to_pure_dict(nnx.state(module, nnx.Param)))
    p = {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(a) for path, a in paths}
    assert {a.dtype for a in p.values()} == {np.dtype("float32")}
    p = {re.sub("/(kernel|weight|scale)$", "", part): a for part, a in p.items()}
    assert {part: a.shape for part, a in p.items()} == SHAPES[name]
    for part, a in p.items():
        if part.endswith("norm"):
            assert np.all(a == 1), part
        elif part == "contraction/bias":
            assert np.all(a == -2)
        elif part == "contraction" or (part.endswith("bias") and part != "dt_bias"):
            assert not np.any(a), part
        elif part == "a_log":
            assert np.log(1.0 if "mamba2" in name else 1e-3) <= a.min() <= a.max() <= np.log(16)
        elif part == "dt_bias":
            dt = np.log1p(np.exp(np.float64(a)))
            assert 0.99e-3 <= dt.min() <= dt.max() <= 0.1001
        elif part == "modes/log_dt":
            assert np.log(0.99e-3) <= a.min() <= a.max() <= np.log(0.1001)
        elif part.startswith("modes/"):
            wanted = np.log(0.5) if part == "modes/a_log" else np.pi * np.arange(a.shape[1])
            np.testing.assert_allclose(a, np.broadcast_to(wanted, a.shape), rtol=1e-6)
        elif part.endswith(("_real", "_imag")):  # half of the mean square each
            assert abs(np.std(a) * 2**0.5 / COMPLEX[name] - 1) < 0.05, part
        elif part == "skip":
            assert 0.7 < np.std(a) < 1.3 if name == "s4d" else np.all(a == 1)
        elif init == "normal_002":
            assert 0.015 < np.std(a) < 0.025, part
        else:  # PyTorch's default; the depthwise convolution's fan-in is its width
            bound = a.shape[0] ** -0.5
            assert 0.95 * bound < np.max(np.abs(a)) <= bound, part
            assert abs(np.std(a) * np.sqrt(3) / bound - 1) < 0.1, part


def test_groups_and_heads_of_mamba2():
    """B and C of one group unless asked otherwise; heads of 64 channels where those divide the inner ones."""
    layer = LAYERS["mamba2"](64, 6, 8, 32, rngs=nnx.Rngs(0))
    assert (layer.key_heads, layer.num_heads, layer.value_size) == (1, 3, 64)
    assert layer.key.kernel.shape == (64, 8)
    assert layer.init_state(2).memory.S.shape == (2, 3, 8, 64)


@pytest.mark.parametrize("sizes", [(4, 8), (8, 8), (8, 16)])
def test_state_of_the_s4d_control_is_as_large_as_interdomain(sizes):
    states = (LAYERS[name](D, 2, *sizes, rngs=nnx.Rngs(0)).init_state(2) for name in ("interdomain", "s4d_interdomain"))
    first, second = (jax.tree.leaves(state)[-1].size for state in states)
    assert first == second


@every_layer
def test_rngs_draw_different_parameters(name):
    """Of what is drawn at all."""
    drawn = [np.asarray(a) for a in jax.tree.leaves(nnx.state(build(name)[2], nnx.Param)) if a.ndim > 1]
    drawn = [a.ravel()[:8] for a in drawn if np.ptp(a)]
    assert len({a.tobytes() for a in drawn}) == len(drawn)
