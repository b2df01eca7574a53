"""The short convolution against a float64 loop: documents, padding, carried state, gradients, transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_model
from tolerances import assert_close, limit

from linattn_jax.mixers.convolution import short_convolution, short_convolution_init, short_convolution_step

run = jax.jit(short_convolution)
step = jax.jit(short_convolution_step)


def make(B=2, T=11, D=3, W=4, seed=0):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    return {"x": normal(B, T, D), "weight": normal(W, D), "bias": normal(D), "initial_state": normal(B, W - 1, D)}


IDS = np.array([[1, 1, 1, 2, 2, 1, 1, 1, 1, 1, 3], [4, 5, 5, 5, 5, 5, 4, 4, 4, 4, 4]], np.int32)
INSIDE = np.array([[-1, 3, 3, -1, 3, -9, 2, 2, -1, 2, 2], [0, -1, -1, 0, 0, 6, 6, 6, 0, 0, -1]], np.int32)
LEFT = np.where(np.arange(11) < 4, -1, IDS)
RIGHT = np.where(np.arange(11) > 6, -3, IDS)
LAYOUTS = {"documents": IDS, "inside": INSIDE, "left": LEFT, "right": RIGHT, "only": np.full((2, 11), -1, np.int32)}
FIRST = np.array([1, 7], np.int32)


@jax.jit
def gradients(arguments, cotangents, ids, first):
    def loss(a):
        y, history = short_convolution(**a, segment_ids=ids, initial_segment_id=first)
        return jnp.sum(y * cotangents[0]) + jnp.sum(history * cotangents[1])

    return jax.grad(loss)(arguments)


def check(arguments, **packing):
    y, history = run(**arguments, **packing)
    wanted, last = reference_model.convolution(**arguments, **packing)
    assert_close(y, wanted, limit("output", "float32"), "output")
    assert_close(history, last, 1e-6, "history")
    assert history.dtype == np.float32


@pytest.mark.parametrize("W", [1, 2, 4])
@pytest.mark.parametrize("T", [0, 1, 2, 11])
def test_values(T, W):
    """Rows shorter than the filter included."""
    arguments = make(T=T, W=W)
    check(arguments)
    check({key: arguments[key] for key in ("x", "weight")})
    check(arguments, segment_ids=IDS[:, :T])


@pytest.mark.parametrize("first", [None, FIRST])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_documents_and_padding(layout, first):
    """Padding over NaN is skipped wherever it stands; ids 1, 2, 1 are three documents."""
    ids, arguments = LAYOUTS[layout], make()
    packing = {"segment_ids": ids, "initial_segment_id": first}
    check(arguments, **packing)
    dirty = arguments | {"x": np.where((ids < 0)[..., None], np.nan, arguments["x"]).astype(np.float32)}
    y, history = run(**dirty, **packing)
    clean = run(**arguments, **packing)
    np.testing.assert_array_equal(y, clean[0])
    np.testing.assert_array_equal(history, clean[1])
    assert not np.any(np.asarray(y)[ids < 0])


@pytest.mark.parametrize("first", [None, FIRST])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients(layout, first):
    ids, arguments = LAYOUTS[layout], make()
    rng = np.random.default_rng(3)
    cotangents = [rng.standard_normal((2, 11, 3)), rng.standard_normal((2, 3, 3))]
    packing = {"segment_ids": ids, "initial_segment_id": first}
    _, _, wanted = reference_model.convolution(**arguments, **packing, cotangents=cotangents)
    cotangents = [c.astype(np.float32) for c in cotangents]
    dirty = arguments | {"x": np.where((ids < 0)[..., None], np.nan, arguments["x"]).astype(np.float32)}
    for what, a in (("clean", arguments), ("dirty", dirty)):
        for key, g in gradients(a, cotangents, ids, first).items():
            assert_close(g, wanted[key], limit(key, "float32", gradient=True), f"{key}, {what} padding")


@pytest.mark.parametrize(("ids", "cuts"), [(None, (0, 1, 5)), (INSIDE[:, :6], range(7))])
def test_split_anywhere(ids, cuts):
    """Calls with carried state equal one call at every split, also with the document named across the split."""
    arguments = make(T=6)
    wanted, last = reference_model.convolution(**arguments, segment_ids=ids)
    filters = {key: arguments[key] for key in ("weight", "bias")}

    def part(state, at, newest):
        packing = {} if ids is None else {"segment_ids": ids[:, at], "initial_segment_id": newest}
        return run(arguments["x"][:, at], initial_state=state, **filters, **packing)

    for cut in cuts:
        y, history = part(arguments["initial_state"], np.s_[:cut], np.array([3, 0], np.int32))
        newest = None
        if ids is not None:  # the rows' first names are 3 and 0
            names = [[first, *row[row >= 0]] for first, row in zip((3, 0), ids[:, :cut], strict=True)]
            newest = np.array([row[-1] for row in names], np.int32)
        more, history = part(history, np.s_[cut:], newest)
        assert_close(np.concatenate([y, more], 1), wanted, 1e-6, f"cut {cut}")
        assert_close(history, last, 1e-6, f"history, cut {cut}")


def test_steps():
    arguments = make()
    whole, last = run(**arguments)
    state = arguments["initial_state"]
    for t in range(11):
        y, state = step(state, arguments["x"][:, t], arguments["weight"], arguments["bias"])
        assert_close(y, whole[:, t], 1e-6, f"token {t}")
    assert_close(state, last, 1e-6)
    empty = short_convolution_init(2, 3, 4)
    y, _ = step(empty, arguments["x"][:, 0], arguments["weight"])
    assert_close(y, arguments["weight"][-1] * arguments["x"][:, 0], 1e-6)


def test_narrow_and_wide_inputs():
    arguments = make()
    narrow = jnp.asarray(arguments["x"], jnp.bfloat16)
    y, history = run(narrow, arguments["weight"], initial_state=arguments["initial_state"])
    assert y.dtype == jnp.bfloat16
    assert history.dtype == np.float32
    exact = arguments | {"x": np.asarray(narrow, np.float32), "bias": None}
    assert_close(np.asarray(y, np.float32), reference_model.convolution(**exact)[0], limit("output", "bfloat16"))
    with jax.enable_x64(True):
        y, history = short_convolution(**{key: a.astype(np.float64) for key, a in arguments.items()})
        assert y.dtype == history.dtype == np.float64
        assert_close(y, reference_model.convolution(**arguments)[0], limit("output", "float64"))


def test_vmap():
    arguments = make()

    def f(x, ids):
        return short_convolution(x, arguments["weight"], segment_ids=ids)[0]

    rows = jax.jit(jax.vmap(f))(arguments["x"][:, None], INSIDE[:, None])[:, 0]
    assert_close(rows, run(arguments["x"], arguments["weight"], segment_ids=INSIDE)[0], 1e-6)


@pytest.mark.parametrize("layout", ["documents", "inside"])
def test_forward_mode(layout):
    """jvp agrees with the inner product of the gradient and the tangent."""
    arguments, ids = make(), LAYOUTS[layout]
    rng = np.random.default_rng(4)
    tangents = {key: rng.standard_normal(a.shape).astype(np.float32) for key, a in arguments.items()}
    cotangents = [rng.standard_normal(s).astype(np.float32) for s in ((2, 11, 3), (2, 3, 3))]
    _, moved = jax.jit(lambda a, t: jax.jvp(lambda b: short_convolution(**b, segment_ids=ids), (a,), (t,)))(
        arguments, tangents
    )
    seen = sum(np.sum(np.asarray(m, np.float64) * c) for m, c in zip(moved, cotangents, strict=True))
    _, _, g = reference_model.convolution(**arguments, segment_ids=ids, cotangents=cotangents)
    assert_close(seen, sum(np.sum(g[key] * tangents[key]) for key in g), 1e-5)


def test_same_bits_twice():
    arguments = make()
    cotangents = [np.ones((2, 11, 3), np.float32), np.ones((2, 3, 3), np.float32)]
    first, second = (gradients(arguments, cotangents, INSIDE, FIRST) for _ in range(2))
    for key in arguments:
        np.testing.assert_array_equal(first[key], second[key])


@pytest.mark.parametrize("layout", ["documents", "inside"])
def test_causality(layout):
    arguments, ids, cut = make(), LAYOUTS[layout], 6
    changed = arguments | {"x": np.concatenate([arguments["x"][:, :cut], 1 - arguments["x"][:, cut:]], 1)}
    np.testing.assert_array_equal(
        run(**arguments, segment_ids=ids)[0][:, :cut], run(**changed, segment_ids=ids)[0][:, :cut]
    )
    cotangents = [np.ones((2, 11, 3), np.float32), np.zeros((2, 3, 3), np.float32)]
    cotangents[0][:, cut:] = 0
    before, after = (gradients(a, cotangents, ids, FIRST) for a in (arguments, changed))
    for key in arguments:
        np.testing.assert_array_equal(before[key], after[key])
    assert not np.any(after["x"][:, cut:])


def test_boundaries_do_not_recompile():
    arguments, traces = make(), []

    @jax.jit
    def f(ids):
        traces.append(1)
        return short_convolution(**arguments, segment_ids=ids)[0]

    for ids in LAYOUTS.values():
        f(ids)
    assert len(traces) == 1


def test_bad_input_is_named():
    good = make()

    def refused(error, match, **changes):
        with pytest.raises(error, match=match):
            short_convolution(**(good | changes))

    refused(ValueError, r"x, weight: ranks 2 and 2 given, wanted 3", x=good["x"][0])
    refused(TypeError, r"x: dtype int32", x=np.zeros((2, 11, 3), np.int32))
    refused(TypeError, r"weight: list given", weight=[1.0])
    refused(ValueError, r"weight: shape \(4, 2\) given, wanted \[W, D\] with D = 3", weight=good["weight"][:, :2])
    refused(ValueError, r"weight: shape \(0, 3\) given, wanted \[W, D\] with W >= 1", weight=good["weight"][:0])
    refused(TypeError, r"bias: list given", bias=[1.0])
    refused(TypeError, r"bias: dtype int32", bias=np.zeros(3, np.int32))
    refused(ValueError, r"bias: shape \(2,\) given, wanted \[D\] = \(3,\)", bias=good["bias"][:2])
    refused(ValueError, r"initial_state: shape \(2, 2, 3\) given, wanted", initial_state=good["initial_state"][:, :2])
    refused(ValueError, r"segment_ids: shape \(2, 5\)", segment_ids=IDS[:, :5])
    refused(ValueError, r"initial_segment_id: given without segment_ids", initial_segment_id=FIRST)
