"""One contract for every mixer in every implementation: later mixers and kernels only register."""

import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import FAMILIES, call, cut, make_inputs, make_state, sequences, step
from reference import fields, reference
from tolerances import CONDITIONED, PERTURBATION, assert_close, limit, relative_l2

from linattn_jax.mixers.dispatch import MIXERS

FORMS = [(name, form) for name, mixer in sorted(MIXERS.items()) for form in mixer.implementations]


def having(*arguments):
    """Mixers with any of these arguments."""
    return {name for name, mixer in MIXERS.items() if set(arguments) & set(mixer.arguments)}


def each(names=frozenset(MIXERS), quick=("recurrent", "chunkwise"), forms=None):
    """Every form of the mixers named; those that are not `quick` run in the long test alone."""
    pairs = [pair for pair in FORMS if pair[0] in names and (forms is None or pair[1] in forms)]
    marks = {form: () if form in quick else pytest.mark.slow for _, form in FORMS}
    return pytest.mark.parametrize(
        ("name", "form"), [pytest.param(name, form, marks=marks[form]) for name, form in pairs]
    )


def rotated(argument, values, count, names=frozenset(MIXERS)):
    """The recurrent and chunkwise form of every mixer with every value; all but `count` of each in the long test alone.

    Which these are differs from mixer to mixer, so that each of the two forms meets every value on some.
    """
    params = []
    for form in ("recurrent", "chunkwise", "associative"):
        met = set()
        for turn, name in enumerate(sorted(names)):
            chosen = {(turn * count + i) % len(values) for i in range(count)} if form != "associative" else set()
            met |= chosen
            for i, value in enumerate(values):
                marks = () if i in chosen else pytest.mark.slow
                params.append(pytest.param(name, form, value, marks=marks))
        assert form == "associative" or len(met) == len(values), (argument, form)
    return pytest.mark.parametrize(("name", "form", argument), params)


every_form = each()


def families(*forms):
    """These forms of one mixer of each family, for what takes long; the others are in the long test."""
    quick = lambda name, form: name in FAMILIES and form in forms
    params = [pytest.param(*pair, marks=() if quick(*pair) else pytest.mark.slow) for pair in FORMS]
    return pytest.mark.parametrize(("name", "form"), params)


every_family = families("recurrent", "chunkwise")
# What decides the associative forms: one for each way of combining, by matrices, by VLA's penalties, by numbers.
COMBINING = ("gated_delta_rule", "variational", "s4d")
every_form_and_combination = pytest.mark.parametrize(
    ("name", "form"),
    [
        pytest.param(name, form, marks=pytest.mark.slow if form == "associative" and name not in COMBINING else ())
        for name, form in FORMS
    ],
)
DECAYING, DELTA = having("log_decay"), having("beta", "eta")
GROUPED = {name for name, mixer in MIXERS.items() if "v" in mixer.arguments and "Hk" in mixer.arguments["q"].axes}


@functools.partial(jax.jit, static_argnames=("name", "options"))
def run(name, inputs, arrays, options):
    return call(name, inputs, **arrays, **dict(options))


def forward(name, form, inputs, chunk_size=16, normalize=None, **arrays):
    """(output, state) compiled; `normalize` holds static options of the mixer."""
    options = {"implementation": form, "chunk_size": chunk_size, **(normalize or {})}
    return run(name, inputs, arrays, tuple(sorted(options.items())))


def random_like(rng, s):
    """Standard normal numbers, complex where s is."""
    real = rng.standard_normal(s.shape)
    return real + 1j * rng.standard_normal(s.shape) if jnp.issubdtype(s.dtype, jnp.complexfloating) else real


def weights(name, inputs, seed=3):
    """Fixed random cotangents of output and state."""
    rng = np.random.default_rng(seed)
    output, state = jax.eval_shape(lambda: call(name, inputs, implementation="recurrent"))
    return rng.standard_normal(output.shape), [random_like(rng, s) for s in jax.tree.leaves(state)]


@functools.partial(jax.jit, static_argnames=("name", "options"))
def run_all(name, inputs, cotangents, arrays, options):
    """Output, state and gradients of the weighted sum of both, in one compiled function."""

    def total(x):
        output, state = call(name, x, **arrays, **dict(options))
        wide = jnp.promote_types(output.dtype, jnp.float32)
        weighted = jnp.sum(output.astype(wide) * jnp.asarray(cotangents[0], wide))
        for s, w in zip(jax.tree.leaves(state), cotangents[1], strict=True):
            weighted += jnp.sum(jnp.real(s * jnp.asarray(w, s.dtype)))
        return weighted, (output, state)

    gradients, (output, state) = jax.grad(total, has_aux=True)(inputs)
    return output, state, gradients


def backward(name, form, inputs, cotangents, chunk_size=16, normalize=None, **arrays):
    """(output, state, gradients) compiled."""
    options = {"implementation": form, "chunk_size": chunk_size, **(normalize or {})}
    return run_all(name, inputs, cotangents, arrays, tuple(sorted(options.items())))


def widen(tree):
    """Every array of a tree in float64 or complex128."""
    wide = lambda a: np.asarray(a, np.complex128 if np.iscomplexobj(np.asarray(a)) else np.float64)
    return jax.tree.map(lambda a: jnp.asarray(wide(a)), tree)


def exact_gradients(name, inputs, cotangents, **options):
    """Gradients in float64 by the recurrent form, whose values the NumPy loop checks."""
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, backward(name, "recurrent", widen(inputs), cotangents, 64, options)[2])


def check_values(name, form, inputs, dtype="float32", normalize=None, **arrays):
    output, state = forward(name, form, inputs, normalize=normalize, **arrays)
    compare(name, inputs, output, state, dtype, normalize, **arrays)


def compare(name, inputs, output, state, dtype="float32", normalize=None, **arrays):
    """Output and state against the NumPy loop."""
    wanted, final = reference(name, inputs, **arrays, **(normalize or {}))
    assert output.dtype == next(iter(inputs.values())).dtype
    assert_close(output, wanted, limit("output", dtype), "output")
    for field, s in fields(state).items():
        assert_close(s, final[field], limit(field, dtype), f"state {field}")


def check_all(name, form, inputs, dtype="float32", normalize=None):
    """Output, state and every gradient, each within its limit."""
    cotangents = weights(name, inputs)
    output, state, seen = backward(name, form, inputs, cotangents, normalize=normalize)
    compare(name, inputs, output, state, dtype, normalize)
    wanted = exact_gradients(name, inputs, cotangents, **(normalize or {}))
    for key, g in seen.items():
        assert g.dtype == inputs[key].dtype
        assert_close(g, wanted[key], limit(key, dtype, gradient=True), f"gradient of {key}")


# Values and gradients -------------------------------------------------------------------------------------------------


@rotated("length", [0, 1, 2, 15, 16, 17, 63, 64, 65, 127], 3)
def test_any_length(name, form, length):
    inputs = make_inputs(name, T=length, K=8, V=8)
    check_values(name, form, inputs, initial_state=make_state(name, K=8, V=8))


@pytest.mark.parametrize("name", sorted(MIXERS))
@pytest.mark.parametrize("length", [0, 1, 17])
def test_some_lengths_of_the_associative_form(name, length):
    test_any_length(name, "associative", length)


@each(forms=("associative", "chunkwise"))
@pytest.mark.parametrize("length", [1000, *(pytest.param(n, marks=pytest.mark.slow) for n in (43884, 65537))])
def test_long_rows(name, form, length):
    inputs = make_inputs(name, B=1, T=length, Hk=1, H=1, K=8, V=8)
    output, state = forward(name, form, inputs, chunk_size=64)
    if length == 1000:
        wanted, final = reference(name, inputs)
    else:
        wanted, final = forward(name, "recurrent", inputs)
        final = fields(final)
    assert_close(output, wanted, limit("output", "float32"), "output")
    for field, s in fields(state).items():
        assert_close(s, final[field], limit(field, "float32"), field)


@pytest.mark.parametrize("name", FAMILIES[:5])
def test_very_long_rows(name):
    test_long_rows(name, "chunkwise", 65537)


@rotated("counts", [(2, 6), (1, 2), (1, 1), (1, 4), (1, 8)], 1, GROUPED)
def test_grouped_heads_and_gradients(name, form, counts):
    key_heads, heads = counts
    check_all(name, form, make_inputs(name, T=21, Hk=key_heads, H=heads, K=8, V=12))


@rotated("sizes", [(24, 40), (48, 64), (80, 96), (128, 192), (256, 512), (1, 1)], 2)
def test_sizes(name, form, sizes):
    K, V = sizes
    check_values(name, form, make_inputs(name, B=2, T=19, Hk=1, H=2, K=K, V=V))


@rotated("dtype", ["float64", "bfloat16", "float32", "float16"], 1)
def test_dtypes(name, form, dtype):
    with jax.enable_x64(dtype == "float64"):
        inputs = make_inputs(name, T=50, dtype=dtype)
        check_all(name, form, inputs, dtype)
        _, state, _ = backward(name, form, inputs, weights(name, inputs))
        wide = {"float64", "complex128"} if dtype == "float64" else {"float32", "complex64"}
        assert {str(s.dtype) for s in jax.tree.leaves(state)} <= wide


@pytest.mark.parametrize("name", sorted(MIXERS))
def test_oracle_gradient_is_a_derivative(name):
    """The float64 gradient that the others are held to agrees with central differences of the NumPy loop."""
    inputs = make_inputs(name, T=9, Hk=1, H=2, K=4, V=3, dtype="float64")
    cotangents = weights(name, inputs)
    exact = exact_gradients(name, inputs, cotangents)
    with jax.enable_x64(True):
        names = list(fields(jax.eval_shape(lambda: call(name, inputs, implementation="recurrent"))[1]))

    def value(x):
        output, final = reference(name, x)
        of_state = sum(np.sum(np.real(final[field] * w)) for field, w in zip(names, cotangents[1], strict=True))
        return np.sum(output * cotangents[0]) + of_state

    rng = np.random.default_rng(0)
    for key in inputs:
        direction = random_like(rng, inputs[key])
        h = 1e-6
        ahead, behind = (value(inputs | {key: inputs[key] + d * direction}) for d in (h, -h))
        wanted = np.sum(np.real(exact[key] * direction))
        rounding = 20 * np.finfo(float).eps * abs(ahead) / h
        assert abs((ahead - behind) / (2 * h) - wanted) <= 1e-7 * abs(wanted) + rounding, key


OPTIONS = {
    "linear_attention": [{"normalize_output": True, "scale": 0.7}],
    "curvature_query": [{"normalize_keys": False, "gain": 0.5}],
    "variational": [
        {"normalize_write": False, "penalty": 2.0, "scale": 0.7},
        {"normalize_output": False, "eps": 1e-2},
    ],
    "s4d": [{}],
    "longhorn": [{}],
    "ccq_gla": [{"decay": "backbone", "gain": 0.5, "scale": 0.7}, {"normalize_keys": False}],
    "ccq_gated_delta_rule": [{"decay": "backbone", "normalize_q": True, "normalize_k": True}],
    "ccq_kaczmarz": [{"decay": "backbone", "normalize_q": True, "gain": 0.5, "scale": 0.7}],
} | {
    name: [{"normalize_q": True, "normalize_k": True, "scale": 0.7}]
    for name in DELTA
    if "gate" not in MIXERS[name].arguments
}


@each(quick=("chunkwise",))
def test_options_of_the_mixer(name, form):
    """Normalised queries, keys and outputs, an explicit scale, and zero rows under normalisation."""
    for options in OPTIONS.get(name, [{"scale": 0.7}]):
        inputs = make_inputs(name, T=40, keys="random" if name == "s4d" else "zero")
        if name == "linear_attention":
            inputs = inputs | {"q": np.abs(inputs["q"]), "k": np.abs(inputs["k"])}
        check_all(name, form, inputs, normalize=options)


# Decay ----------------------------------------------------------------------------------------------------------------


@rotated("decay", [-1.0, -20.0, "zero", -6.0, -100.0, "sometimes"], 2, DECAYING)
def test_decays(name, form, decay):
    inputs = make_inputs(name, T=50, decay=decay)
    check_all(name, form, inputs)


@rotated("spike", [(-np.inf, 21), (-1000.0, 16), (-np.inf, 16), (-1000.0, 21)], 1, DECAYING)
def test_one_token_forgets(name, form, spike):
    value, position = spike
    inputs = make_inputs(name, T=50, decay=("spike", value, position))
    check_all(name, form, inputs)


# Keys -----------------------------------------------------------------------------------------------------------------


def check_keys(name, form, keys, chunk_size):
    """Within a multiple of what a 1e-7 relative perturbation of the inputs does to the float64 loop."""
    inputs = make_inputs(name, B=1, T=300, Hk=1, H=1, K=32, V=16, keys=keys)
    if "eta" in inputs:
        inputs["eta"] = np.asarray(2 * inputs["eta"] / np.max(inputs["eta"]), np.float32)
    output, state = forward(name, form, inputs, chunk_size=chunk_size)
    compare_conditioned(name, inputs, output, state)


@rotated("keys", ["parallel", "long", "tiny", "zero"], 2, having("k"))
def test_hard_keys(name, form, keys):
    check_keys(name, form, keys, 64)


@pytest.mark.parametrize("name", sorted(having("k")))
@pytest.mark.parametrize(
    "keys", ["parallel", "long", *(pytest.param(k, marks=pytest.mark.slow) for k in ("tiny", "zero"))]
)
@pytest.mark.parametrize("chunk_size", [pytest.param(128, marks=pytest.mark.slow), 256])
def test_hard_keys_in_long_chunks(name, keys, chunk_size):
    check_keys(name, "chunkwise", keys, chunk_size)


def compare_conditioned(name, inputs, output, state):
    """Output and state against the loop, within what a perturbation of the inputs does to the loop."""
    wanted, final = reference(name, inputs)
    rng = np.random.default_rng(1)
    nearby = {key: a * (1 + PERTURBATION * rng.standard_normal(a.shape)) for key, a in inputs.items()}
    moved, moved_final = reference(name, nearby)
    pairs = {"output": (output, wanted, moved)}
    pairs |= {field: (s, final[field], moved_final[field]) for field, s in fields(state).items()}
    for what, (seen, exact, near) in pairs.items():
        assert_close(seen, exact, max(limit(what, "float32"), CONDITIONED * relative_l2(near, exact)), what)


# Causality ------------------------------------------------------------------------------------------------------------


@rotated("position", [23, 16, 37], 1)
def test_causal_bit_for_bit(name, form, position):
    inputs = make_inputs(name, T=50)
    other = make_inputs(name, T=50, seed=9)
    changed = dict(inputs)
    for key in sequences(name):
        later = 10 * other[key][:, position:]
        if MIXERS[name].arguments[key].kind == "gate":
            later = np.clip(later, -50, 0.1)
        changed[key] = np.concatenate([inputs[key][:, :position], later], 1)
    output, state = weights(name, inputs)
    output[:, position:] = 0
    cotangents = output, [0 * w for w in state]
    before, after = (backward(name, form, x, cotangents) for x in (inputs, changed))
    np.testing.assert_array_equal(before[0][:, :position], after[0][:, :position])
    for key in inputs:
        if key in sequences(name):
            np.testing.assert_array_equal(before[2][key][:, :position], after[2][key][:, :position], err_msg=key)
            assert not np.any(after[2][key][:, position:]), key
        else:
            np.testing.assert_array_equal(before[2][key], after[2][key], err_msg=key)


# Packing --------------------------------------------------------------------------------------------------------------


def packed_row(name, lengths, **sizes):
    """One row of several documents, and the documents as rows of their own."""
    documents = [make_inputs(name, B=1, T=n, seed=i, **sizes) for i, n in enumerate(lengths)]
    row = dict(documents[0])
    documents = [row | {key: d[key] for key in sequences(name)} for d in documents]
    row |= {key: np.concatenate([d[key] for d in documents], 1) for key in sequences(name)}
    ids = np.concatenate([np.full((1, n), 5 - i, np.int32) for i, n in enumerate(lengths)], 1)
    return row, ids, documents


@every_form_and_combination
def test_packed_rows_equal_separate_rows(name, form):
    row, ids, documents = packed_row(name, (5, 1, 20, 11))
    initial = make_state(name, B=1)
    # The loss is on the third document: its gradients must not reach the others.
    output, state = weights(name, row)
    output[:, :6], output[:, 26:] = 0, 0
    cotangents = output, [0 * w for w in state]
    output, state, g = backward(name, form, row, cotangents, segment_ids=ids, initial_state=initial)
    start = 0
    for i, length in enumerate((5, 1, 20, 11)):
        wanted, final = reference(name, documents[i], initial_state=initial if i == 0 else None)
        assert_close(output[:, start : start + length], wanted, limit("output", "float32"), f"document {i}")
        start += length
    for field, s in fields(state).items():
        assert_close(s, final[field], limit(field, "float32"), field)
    alone = exact_gradients(name, documents[2], (cotangents[0][:, 6:26], cotangents[1]))
    for key in row:
        seen = np.asarray(g[key])
        if key in sequences(name):
            assert not np.any(np.delete(seen, np.s_[6:26], axis=1)), key
            seen = seen[:, 6:26]
        assert_close(seen, alone[key], limit(key, "float32", gradient=True), key)


@every_form_and_combination
def test_initial_segment_id(name, form):
    inputs = make_inputs(name, T=12)
    ids = np.full((2, 12), 3, np.int32)
    initial = make_state(name)
    first = np.array([3, 4], np.int32)
    arrays = {"segment_ids": ids, "initial_segment_id": first, "initial_state": initial}
    check_values(name, form, inputs, **arrays)
    kept, _ = forward(name, form, inputs, initial_state=initial)
    dropped, _ = forward(name, form, inputs)
    output, _ = forward(name, form, inputs, **arrays)
    assert_close(output[0], kept[0], 1e-6)
    assert_close(output[1], dropped[1], 1e-6)
    broken = jax.tree.map(lambda s: s.at[1].set(np.nan), initial)  # what is dropped may hold anything
    again, _ = forward(name, form, inputs, **arrays | {"initial_state": broken})
    np.testing.assert_array_equal(again, output)


@every_form_and_combination
def test_padding_leaves_no_trace(name, form):
    """Negative ids at the left, right and inside, over NaN, in values, the final state and gradients."""
    inputs = make_inputs(name, B=1, T=37)
    real = np.r_[4:11, 13:25]
    ids = np.full((1, 37), -1, np.int32)
    ids[:, 4:18], ids[:, 18:25] = 7, 8
    ids[:, 11:13] = -5
    dirty, clean = dict(inputs), dict(inputs)
    for key in sequences(name):
        dirty[key] = np.full_like(inputs[key], np.nan)
        dirty[key][:, real] = inputs[key][:, real]
        clean[key] = inputs[key][:, real]
    initial = make_state(name, B=1)
    cotangents = weights(name, inputs)
    output, state, g = backward(name, form, dirty, cotangents, segment_ids=ids, initial_state=initial)
    wanted, final = reference(name, clean, segment_ids=ids[:, real], initial_state=initial)
    assert_close(output[:, real], wanted, limit("output", "float32"), "output")
    assert not np.any(np.delete(np.asarray(output), real, axis=1))
    for field, s in fields(state).items():
        assert_close(s, final[field], limit(field, "float32"), field)
    cotangents = cotangents[0][:, real], cotangents[1]
    arrays = {"segment_ids": ids[:, real], "initial_state": initial}
    _, _, alone = backward(name, "recurrent", clean, cotangents, **arrays)
    for key in inputs:
        seen = np.asarray(g[key])
        if key in sequences(name):
            assert not np.any(np.delete(seen, real, axis=1)), key
            seen = seen[:, real]
        assert_close(seen, alone[key], limit(key, "float32", gradient=True), key)


@every_form
def test_rows_of_padding_only(name, form):
    inputs = make_inputs(name, T=5)
    initial = make_state(name)
    output, state = forward(name, form, inputs, segment_ids=np.full((2, 5), -1, np.int32), initial_state=initial)
    assert not np.any(output)
    for field, s in fields(state).items():
        if field == "A":  # derived anew from M
            assert_close(s, initial.A, 1e-5)
        else:
            np.testing.assert_array_equal(s, fields(initial)[field], err_msg=field)


@every_form
def test_no_rows(name, form):
    inputs = make_inputs(name, B=0, T=20)
    output, state, seen = backward(name, form, inputs, weights(name, inputs))
    assert output.shape == (0, *make_shape(name, inputs)[1:])
    assert {s.shape[0] for s in jax.tree.leaves(state)} == {0}
    assert {key: g.shape for key, g in seen.items()} == {key: a.shape for key, a in inputs.items()}


def make_shape(name, inputs):
    """Shape of the output."""
    arguments = MIXERS[name].arguments
    sizes = {axis: n for key, a in inputs.items() for axis, n in zip(arguments[key].axes.split(), a.shape, strict=True)}
    return tuple(sizes[axis] for axis in MIXERS[name].output.split())


@every_family
def test_boundaries_do_not_recompile(name, form):
    inputs = make_inputs(name, B=1, T=8, K=4, V=4)
    traces = []

    @jax.jit
    def f(x, ids):
        traces.append(1)
        return call(name, x, segment_ids=ids, implementation=form)[0]

    for row in ([0] * 8, [0, 1, 2, 3, 4, 5, 6, 7], [0, 0, -1, -1, 1, 1, 1, 2]):
        f(inputs, np.array([row], np.int32))
    assert len(traces) == 1


@every_family
def test_thousands_of_one_token_documents(name, form):
    inputs = make_inputs(name, B=1, T=3000, Hk=1, H=1, K=4, V=4)
    ids = np.arange(3000, dtype=np.int32)[None]
    output, _ = forward(name, form, inputs, chunk_size=64, segment_ids=ids)
    alone = inputs | {key: np.moveaxis(inputs[key], 1, 0) for key in sequences(name)}
    wanted, _ = reference(name, alone)
    assert_close(output[0], wanted[:, 0], limit("output", "float32"))


# State ----------------------------------------------------------------------------------------------------------------


@pytest.mark.core
@every_family
def test_split_anywhere(name, form):
    """Any split into calls with carried state equals one call; so do token steps and blocks of 2 to 8 tokens."""
    inputs = make_inputs(name, T=24)
    whole, last = forward(name, form, inputs)

    def same_state(state, what):
        for (field, s), w in zip(fields(state).items(), jax.tree.leaves(last), strict=True):
            assert_close(s, w, limit(field, "float32"), f"{what} {field}")

    for position in (8, 16, 23):
        first, state = forward(name, form, cut(name, inputs, 0, position))
        rest, state = forward(name, form, cut(name, inputs, position, 24), initial_state=state)
        assert_close(np.concatenate([first, rest], 1), whole, limit("output", "float32"), f"cut {position}")
        same_state(state, f"cut {position}")
    output, state = forward(name, form, cut(name, inputs, 0, 8))
    outputs, start = [output], 8
    for block in (1, 2, 3, 1):
        output, state = forward(name, form, cut(name, inputs, start, start + block), initial_state=state)
        outputs.append(output)
        start += block
    for t in range(start, 24):
        output, state = step(name, state, inputs, t)
        outputs.append(output[:, None])
    assert_close(np.concatenate(outputs, 1), whole, limit("output", "float32"), "blocks and steps")
    same_state(state, "steps")


@families("chunkwise")
def test_gradients_through_states(name, form):
    """Through the initial state, and chained over four segments, equal to one float64 pass."""
    inputs = make_inputs(name, T=22)
    initial = make_state(name)

    def total(x, state, implementation, cuts):
        outputs = []
        for a, b in itertools.pairwise(cuts):
            part = cut(name, x, a, b)
            out, state = call(name, part, initial_state=state, implementation=implementation, chunk_size=8)
            outputs.append(out)
        # Interdomain's outputs reach 70: the sine of such numbers would itself lose the digits that are to be compared.
        bounded = lambda s: jnp.sum(jnp.sin(0.1 * jnp.real(s)) + jnp.sin(0.1 * jnp.imag(s)))
        return bounded(jnp.concatenate(outputs, 1)) + sum(map(bounded, jax.tree.leaves(state)))

    gradient = jax.jit(jax.grad(total, argnums=(0, 1)), static_argnums=(2, 3))
    with jax.enable_x64(True):
        wanted = gradient(*widen((inputs, initial)), "recurrent", (0, 22))
    seen = gradient(inputs, initial, form, (0, 3, 11, 12, 22))
    for key in inputs:
        assert_close(seen[0][key], wanted[0][key], limit(key, "float32", gradient=True), key)
    for (field, s), w in zip(fields(seen[1]).items(), jax.tree.leaves(wanted[1]), strict=True):
        assert_close(s, w, limit(field, "float32", gradient=True), field)


# Transformations ------------------------------------------------------------------------------------------------------


@families("chunkwise")
def test_transformations_agree(name, form):
    inputs = make_inputs(name, B=3, T=18)
    options = {"implementation": form, "chunk_size": 8}
    plain = lambda x: call(name, x, **options)[0]
    eager = plain(inputs)
    jitted = jax.jit(plain)(inputs)
    assert_close(jitted, eager, 1e-6, "jit")
    rows = lambda x: x | {key: x[key][:, None] for key in sequences(name)}
    batched = lambda x: jax.vmap(plain, in_axes=({key: 0 if key in sequences(name) else None for key in x},))
    mapped = lambda x: batched(x)(rows(x))[:, 0]
    assert_close(jax.jit(mapped)(inputs), jitted, 1e-6, "vmap")
    # Of an output of 100 the sine would lose two digits of what is compared.
    bent = lambda y: jnp.sum(jnp.sin(y / float(np.max(np.abs(eager)))))
    gradient = lambda f: jax.jit(jax.grad(lambda x: bent(f(x))))(inputs)
    wanted = gradient(plain)
    for what, f in (("checkpoint", jax.checkpoint(plain)), ("vmap", mapped)):
        for key, g in gradient(f).items():
            assert_close(g, wanted[key], 5e-6, f"{what} {key}")
    stacked = {key: np.stack([a, 0.5 * a]) for key, a in inputs.items()}
    _, layers = jax.jit(lambda xs: jax.lax.scan(lambda c, x: (c, plain(x)), 0.0, xs))(stacked)
    assert_close(layers[0], jitted, 1e-6, "scan over layers")
    rng = np.random.default_rng(4)
    tangents = {key: random_like(rng, a).astype(a.dtype) for key, a in inputs.items()}
    _, forward_mode = jax.jit(lambda x, t: jax.jvp(lambda y: bent(plain(y)), (x,), (t,)))(inputs, tangents)
    products = {key: np.asarray(widen_numpy(wanted[key]) * tangents[key]) for key in inputs}
    inner = sum(np.sum(np.real(p)) for p in products.values())
    scale = np.sqrt(sum(np.sum(np.abs(p) ** 2) for p in products.values()))
    assert abs(forward_mode - inner) <= 1e-4 * scale, (forward_mode, inner)


def widen_numpy(a):
    """The array in float64 or complex128."""
    return np.asarray(a, np.complex128 if np.iscomplexobj(np.asarray(a)) else np.float64)


@every_family
def test_matmul_precision_settings(name, form):
    inputs = make_inputs(name, T=18)
    wanted, _ = reference(name, inputs)
    for setting in ("highest", "default"):
        with jax.default_matmul_precision(setting):
            output, _ = jax.jit(lambda x: call(name, x, implementation=form, chunk_size=8))(inputs)
        assert_close(output, wanted, limit("output", "float32"), setting)


@pytest.mark.core
@every_form
def test_strict_promotion_settings(name, form):
    """Mixers run under settings that forbid the caller's own code to promote ranks or dtypes."""
    inputs, state = make_inputs(name, T=18), make_state(name)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        jax.eval_shape(lambda x: call(name, x, implementation=form, chunk_size=8), inputs)
        jax.eval_shape(lambda x, s: step(name, s, x, 0), inputs, state)


@every_family
def test_same_bits_twice(name, form):
    inputs = make_inputs(name, T=50, decay="sometimes")
    first, second = (backward(name, form, inputs, weights(name, inputs)) for _ in range(2))
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(a, b)


# Bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("name", sorted(MIXERS))
def test_bad_input_is_named(name):
    good = make_inputs(name, T=6)
    mixer = MIXERS[name]
    first = next(iter(mixer.arguments))

    def refused(error, match, implementation=None, **changes):
        keywords = {key: a for key, a in changes.items() if key not in good}
        arrays = good | {key: a for key, a in changes.items() if key in good}
        with pytest.raises(error, match=match):
            call(name, arrays, implementation=implementation, **keywords)

    for key, (axes, kind) in mixer.arguments.items():
        array, rank = good[key], len(axes.split())
        refused(ValueError, rf"{key}: rank {rank + 1} .* wanted rank {rank}", **{key: array[..., None]})
        refused(TypeError, rf"{key}: dtype int", **{key: np.zeros(array.shape, np.int32)})
        refused(TypeError, rf"{key}: list given", **{key: [1.0]})
        if key != first and axes.startswith("B T"):
            refused(ValueError, rf"{key}: shape .* given, wanted \[B, T", **{key: array[:, :3]})
        if kind == "feature" and key != first:
            refused(TypeError, rf"{key}: dtype float16 given, wanted that of {first}", **{key: array.astype("float16")})
    if name in GROUPED:
        wrong = np.zeros((2, 6, 3, 24), np.float32)
        refused(ValueError, r"v: 3 value heads given, wanted a multiple of the 2", v=wrong)
    refused(ValueError, r"implementation: 'cuda' given", implementation="cuda")
    refused(NotImplementedError, rf"{name} has no implementation 'triton'", implementation="triton")
    refused(ValueError, r"chunk_size: 48 given, wanted a power of two", chunk_size=48)
    refused(TypeError, r"chunk_size: 8.0 given, wanted a power of two", chunk_size=8.0)
    refused(ValueError, r"segment_ids: shape \(2, 5\)", segment_ids=np.zeros((2, 5), np.int32))
    refused(TypeError, r"segment_ids: dtype float32", segment_ids=np.zeros((2, 6), np.float32))
    refused(ValueError, r"initial_segment_id: given without", initial_segment_id=np.zeros((2,), np.int32))
    refused(ValueError, r"initial_state\..*: shape", initial_state=make_state(name, B=3))
    refused(TypeError, r"initial_state: dict given", initial_state={})
    if takes_scale(name):
        refused(TypeError, r"scale: str given", scale="1")
        refused(ValueError, r"scale: shape \(2,\) given, wanted one number", scale=np.ones(2, np.float32))
    at = [good[key][:, 0] if argument.sequence else good[key] for key, argument in mixer.arguments.items()]
    with pytest.raises(ValueError, match=rf"{first}: rank"):
        mixer.step(make_state(name), good[first], *at[1:])
    with pytest.raises(TypeError, match="state: None given"):
        mixer.step(None, *at)
    with pytest.raises(ValueError, match=r"state\..*: shape"):
        mixer.step(make_state(name, B=3), *at)


def takes_scale(name):
    """Whether the mixer has a scale."""
    return "scale" in inspect.signature(MIXERS[name].call).parameters


@pytest.mark.parametrize("name", sorted(MIXERS))
def test_chunk_size_means_nothing_to_the_other_forms(name):
    inputs = make_inputs(name, T=6)
    trace = lambda **options: jax.eval_shape(lambda x: call(name, x, **options), inputs)
    for form in set(MIXERS[name].implementations) - {"chunkwise"}:
        trace(implementation=form, chunk_size=48)
    trace(implementation="chunkwise", chunk_size=np.int64(4))
