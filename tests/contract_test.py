"""One contract for every mixer in every implementation: later mixers and kernels only register."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import call, make_inputs, make_state
from reference import reference
from tolerances import CONDITIONED, GATES, PERTURBATION, assert_close, limit, relative_l2

from linattn_jax.mixers.dispatch import MIXERS

FORMS = [(name, form) for name, mixer in sorted(MIXERS.items()) for form in mixer.implementations]
DECAYING = [pair for pair in FORMS if "log_decay" in MIXERS[pair[0]].gates]
DELTA = [pair for pair in FORMS if "beta" in MIXERS[pair[0]].gates or "eta" in MIXERS[pair[0]].gates]
every_form = pytest.mark.parametrize(("name", "form"), FORMS)


@functools.partial(jax.jit, static_argnames=("name", "options"))
def run(name, inputs, arrays, options):
    return call(name, inputs, **arrays, **dict(options))


def forward(name, form, inputs, chunk_size=16, normalize=None, **arrays):
    """(output, state) compiled; `normalize` holds static options of the mixer."""
    options = {"implementation": form, "chunk_size": chunk_size, **(normalize or {})}
    return run(name, inputs, arrays, tuple(sorted(options.items())))


def weights(name, inputs, seed=3):
    """Fixed random cotangents: a smooth loss of output and state."""
    rng = np.random.default_rng(seed)
    B, T, H, V = inputs["v"].shape
    state = jax.eval_shape(lambda: MIXERS[name].init(B, H, inputs["q"].shape[3], V, key_heads=inputs["q"].shape[2]))
    return rng.standard_normal((B, T, H, V)), [rng.standard_normal(s.shape) for s in state]


@functools.partial(jax.jit, static_argnames=("name", "options"))
def run_all(name, inputs, cotangents, arrays, options):
    """Output, state and gradients of the weighted sum of both, in one compiled function."""

    def total(x):
        output, state = call(name, x, **arrays, **dict(options))
        wide = jnp.promote_types(output.dtype, jnp.float32)
        weighted = jnp.sum(output.astype(wide) * jnp.asarray(cotangents[0], wide))
        weighted += sum(jnp.sum(s * jnp.asarray(w, s.dtype)) for s, w in zip(state, cotangents[1], strict=True))
        return weighted, (output, state)

    gradients, (output, state) = jax.grad(total, has_aux=True)(inputs)
    return output, state, gradients


def backward(name, form, inputs, cotangents, chunk_size=16, normalize=None, **arrays):
    """(output, state, gradients) compiled."""
    options = {"implementation": form, "chunk_size": chunk_size, **(normalize or {})}
    return run_all(name, inputs, cotangents, arrays, tuple(sorted(options.items())))


def exact_gradients(name, inputs, cotangents, **options):
    """Gradients in float64 by the recurrent form, whose values the NumPy loop checks."""
    with jax.enable_x64(True):
        wide = {key: jnp.asarray(np.asarray(a, np.float64)) for key, a in inputs.items()}
        return jax.tree.map(np.asarray, backward(name, "recurrent", wide, cotangents, 64, options)[2])


def check_values(name, form, inputs, dtype="float32", normalize=None, **arrays):
    output, state = forward(name, form, inputs, normalize=normalize, **arrays)
    compare(name, inputs, output, state, dtype, normalize, **arrays)


def compare(name, inputs, output, state, dtype="float32", normalize=None, **arrays):
    """Output and state against the NumPy loop."""
    wanted, final = reference(name, inputs, **arrays, **(normalize or {}))
    assert output.dtype == inputs["v"].dtype
    assert_close(output, wanted, limit("output", dtype), "output")
    for field, s in state._asdict().items():
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


@every_form
@pytest.mark.parametrize("length", [0, 1, 2, 15, 16, 17, 63, 64, 65, 127])
def test_any_length(name, form, length):
    inputs = make_inputs(name, T=length, K=8, V=8)
    initial = make_state(name, K=8, V=8)
    output, state = forward(name, form, inputs, initial_state=initial)
    wanted, final = reference(name, inputs, initial_state=initial)
    assert_close(output, wanted, limit("output", "float32"), "output")
    for field, s in state._asdict().items():
        assert_close(s, final[field], limit(field, "float32"), field)


@pytest.mark.parametrize(("name", "form"), [pair for pair in FORMS if pair[1] != "recurrent"])
@pytest.mark.parametrize("length", [1000, 43884, 65537])
def test_long_rows(name, form, length):
    inputs = make_inputs(name, B=1, T=length, Hk=1, H=1, K=8, V=8)
    output, state = forward(name, form, inputs, chunk_size=64)
    wanted, final = forward(name, "recurrent", inputs)
    if length == 1000:
        wanted, final = reference(name, inputs)
        final = type(state)(**{field: final[field] for field in state._fields})
    assert_close(output, wanted, limit("output", "float32"), "output")
    for s, w in zip(state, final, strict=True):
        assert_close(s, w, limit("S", "float32"), "state")


@every_form
@pytest.mark.parametrize(("key_heads", "heads"), [(1, 1), (1, 2), (2, 6), (1, 4), (1, 8)])
def test_grouped_heads_and_gradients(name, form, key_heads, heads):
    inputs = make_inputs(name, T=21, Hk=key_heads, H=heads, K=8, V=12)
    check_all(name, form, inputs)


@every_form
@pytest.mark.parametrize(("K", "V"), [(24, 40), (48, 64), (80, 96), (128, 192), (256, 512), (1, 1)])
def test_sizes(name, form, K, V):
    check_values(name, form, make_inputs(name, B=2, T=19, Hk=1, H=2, K=K, V=V))


@every_form
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_dtypes(name, form, dtype):
    with jax.enable_x64(dtype == "float64"):
        inputs = make_inputs(name, T=70, K=32, V=32, dtype=dtype)
        check_all(name, form, inputs, dtype)
        _, state, _ = backward(name, form, inputs, weights(name, inputs))
        assert {str(s.dtype) for s in state} == {"float64" if dtype == "float64" else "float32"}


@pytest.mark.parametrize("name", sorted(MIXERS))
def test_oracle_gradient_is_a_derivative(name):
    """The float64 gradient that the others are held to agrees with central differences of the NumPy loop."""
    inputs = make_inputs(name, T=9, Hk=1, H=2, K=4, V=3, dtype="float64")
    cotangents = weights(name, inputs)
    exact = exact_gradients(name, inputs, cotangents)
    fields = MIXERS[name].init(1, 2, 4, 3, key_heads=1)._fields

    def value(x):
        output, final = reference(name, x)
        return np.sum(output * cotangents[0]) + sum(
            np.sum(final[field] * w) for field, w in zip(fields, cotangents[1], strict=True)
        )

    rng = np.random.default_rng(0)
    for key in inputs:
        direction = rng.standard_normal(inputs[key].shape)
        h = 1e-6
        difference = value(inputs | {key: inputs[key] + h * direction}) - value(
            inputs | {key: inputs[key] - h * direction}
        )
        assert_close(difference / (2 * h), np.sum(exact[key] * direction), 1e-7, key)


@every_form
def test_options_of_the_mixer(name, form):
    """Normalised queries, keys and outputs, an explicit scale, and zero rows under normalisation."""
    if "beta" in MIXERS[name].gates or "eta" in MIXERS[name].gates:
        normalize = {"normalize_q": True, "normalize_k": True}
    elif name == "linear_attention":
        normalize = {"normalize_output": True}
    else:
        normalize = {}
    inputs = make_inputs(name, T=40, keys="zero")
    if name == "linear_attention":
        inputs = inputs | {"q": np.abs(inputs["q"]), "k": np.abs(inputs["k"])}
    check_all(name, form, inputs, normalize={**normalize, "scale": 0.7})


# Decay ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "form"), DECAYING)
@pytest.mark.parametrize("decay", [-1.0, -6.0, -20.0, -100.0, "zero", "sometimes"])
def test_decays(name, form, decay):
    inputs = make_inputs(name, T=50, decay=decay)
    check_all(name, form, inputs)


@pytest.mark.parametrize(("name", "form"), DECAYING)
@pytest.mark.parametrize("position", [16, 21])
@pytest.mark.parametrize("value", [-1000.0, -np.inf])
def test_one_token_forgets(name, form, value, position):
    inputs = make_inputs(name, T=50, decay=("spike", value, position))
    check_all(name, form, inputs)


# The delta rule -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "form"), DELTA)
@pytest.mark.parametrize("keys", ["parallel", "long", "tiny", "zero"])
@pytest.mark.parametrize("chunk_size", [64, 128, 256])
def test_hard_keys(name, form, keys, chunk_size):
    """Within a multiple of what a 1e-7 relative perturbation of the inputs does to the float64 loop."""
    if form == "recurrent" and chunk_size > 64:
        pytest.skip("the recurrent form has no chunks")
    inputs = make_inputs(name, B=1, T=300, Hk=1, H=1, K=32, V=16, keys=keys)
    if name == "kaczmarz":
        inputs["eta"] = np.asarray(2 * inputs["eta"] / np.max(inputs["eta"]), np.float32)
    wanted, final = reference(name, inputs)
    rng = np.random.default_rng(1)
    nearby = {key: a * (1 + PERTURBATION * rng.standard_normal(a.shape)) for key, a in inputs.items()}
    moved, moved_final = reference(name, nearby)
    output, state = forward(name, form, inputs, chunk_size=chunk_size)
    for seen, exact, near in ((output, wanted, moved), (state.S, final["S"], moved_final["S"])):
        assert_close(seen, exact, max(limit("output", "float32"), CONDITIONED * relative_l2(near, exact)), keys)


# Causality ------------------------------------------------------------------------------------------------------------


@every_form
@pytest.mark.parametrize("cut", [16, 23, 37])
def test_causal_bit_for_bit(name, form, cut):
    inputs = make_inputs(name, T=40)
    other = make_inputs(name, T=40, seed=9)
    changed = {key: np.concatenate([a[:, :cut], 10 * other[key][:, cut:]], 1) for key, a in inputs.items()}
    for gate in GATES:
        if gate in changed:
            changed[gate][:, cut:] = np.clip(changed[gate][:, cut:], -50, 0.1)
    early = np.zeros((*inputs["v"].shape[:2], 1, 1))
    early[:, :cut] = 1
    cotangents = weights(name, inputs)
    cotangents = cotangents[0] * early, [0 * w for w in cotangents[1]]
    before, after = (backward(name, form, x, cotangents) for x in (inputs, changed))
    np.testing.assert_array_equal(before[0][:, :cut], after[0][:, :cut])
    for key in inputs:
        np.testing.assert_array_equal(before[2][key][:, :cut], after[2][key][:, :cut], err_msg=key)
        np.testing.assert_array_equal(after[2][key][:, cut:], np.zeros_like(after[2][key][:, cut:]), err_msg=key)


# Packing --------------------------------------------------------------------------------------------------------------


def packed_row(name, lengths, **sizes):
    """One row of several documents, and the documents as rows of their own."""
    documents = [make_inputs(name, B=1, T=n, seed=i, **sizes) for i, n in enumerate(lengths)]
    row = {key: np.concatenate([d[key] for d in documents], 1) for key in documents[0]}
    ids = np.concatenate([np.full((1, n), 5 - i, np.int32) for i, n in enumerate(lengths)], 1)
    return row, ids, documents


@every_form
def test_packed_rows_equal_separate_rows(name, form):
    row, ids, documents = packed_row(name, (5, 1, 20, 11))
    initial = make_state(name, B=1)
    # The loss is on the third document: its gradients must not reach the others.
    mask = np.zeros((1, 37, 1, 1))
    mask[:, 6:26] = 1
    cotangents = weights(name, row)
    cotangents = cotangents[0] * mask, [0 * w for w in cotangents[1]]
    output, state, g = backward(name, form, row, cotangents, segment_ids=ids, initial_state=initial)
    start = 0
    for i, document in enumerate(documents):
        n = document["v"].shape[1]
        wanted, final = reference(name, document, initial_state=initial if i == 0 else None)
        assert_close(output[:, start : start + n], wanted, limit("output", "float32"), f"document {i}")
        start += n
    for field, s in state._asdict().items():
        assert_close(s, final[field], limit(field, "float32"), field)
    alone = exact_gradients(name, documents[2], (cotangents[0][:, 6:26], cotangents[1]))
    for key in row:
        assert not np.any(np.delete(np.asarray(g[key]), np.s_[6:26], axis=1)), key
        assert_close(g[key][:, 6:26], alone[key], limit(key, "float32", gradient=True), key)


@every_form
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


@every_form
def test_padding_leaves_no_trace(name, form):
    """Negative ids at the left, right and inside, over NaN, in values, the final state and gradients."""
    inputs = make_inputs(name, B=1, T=30)
    real = np.r_[4:11, 13:25]
    ids = np.full((1, 30), -1, np.int32)
    ids[:, 4:18], ids[:, 18:25] = 7, 8
    ids[:, 11:13] = -5
    dirty = {key: np.full_like(a, np.nan) for key, a in inputs.items()}
    for key in dirty:
        dirty[key][:, real] = inputs[key][:, real]
    clean = {key: a[:, real] for key, a in inputs.items()}
    initial = make_state(name, B=1)
    cotangents = weights(name, inputs)
    output, state, g = backward(name, form, dirty, cotangents, segment_ids=ids, initial_state=initial)
    wanted, final = reference(name, clean, segment_ids=ids[:, real], initial_state=initial)
    assert_close(output[:, real], wanted, limit("output", "float32"), "output")
    assert not np.any(np.delete(np.asarray(output), real, axis=1))
    for field, s in state._asdict().items():
        assert_close(s, final[field], limit(field, "float32"), field)
    _, _, alone = backward(
        name,
        "recurrent",
        clean,
        (cotangents[0][:, real], cotangents[1]),
        segment_ids=ids[:, real],
        initial_state=initial,
    )
    for key in inputs:
        assert_close(g[key][:, real], alone[key], limit(key, "float32", gradient=True), key)
        assert not np.any(np.delete(np.asarray(g[key]), real, axis=1)), key


@every_form
def test_rows_of_padding_only(name, form):
    inputs = make_inputs(name, T=5)
    initial = make_state(name)
    output, state = forward(name, form, inputs, segment_ids=np.full((2, 5), -1, np.int32), initial_state=initial)
    assert not np.any(output)
    for s, wanted in zip(state, initial, strict=True):
        np.testing.assert_array_equal(s, wanted)


@every_form
def test_no_rows(name, form):
    inputs = make_inputs(name, B=0, T=20)
    output, state, seen = backward(name, form, inputs, weights(name, inputs))
    assert output.shape == inputs["v"].shape
    assert state.S.shape == (0, 2, 16, 24)
    assert {key: g.shape for key, g in seen.items()} == {key: a.shape for key, a in inputs.items()}


@every_form
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


@every_form
def test_thousands_of_one_token_documents(name, form):
    inputs = make_inputs(name, B=1, T=3000, Hk=1, H=1, K=4, V=4)
    ids = np.arange(3000, dtype=np.int32)[None]
    output, _ = forward(name, form, inputs, chunk_size=64, segment_ids=ids)
    alone = {key: np.moveaxis(a, 1, 0) for key, a in inputs.items()}
    wanted, _ = reference(name, alone)
    assert_close(output[0], wanted[:, 0], limit("output", "float32"))


# State ----------------------------------------------------------------------------------------------------------------


@every_form
def test_split_anywhere(name, form):
    """Any split into calls with carried state equals one call; so do token steps and blocks of 2 to 8 tokens."""
    inputs = make_inputs(name, T=24)
    whole, last = forward(name, form, inputs)
    mixer = MIXERS[name]
    part = lambda a, b: {key: x[:, a:b] for key, x in inputs.items()}
    for cut in (8, 16, 23):
        first, state = forward(name, form, part(0, cut))
        rest, state = forward(name, form, part(cut, 24), initial_state=state)
        assert_close(np.concatenate([first, rest], 1), whole, limit("output", "float32"), f"cut {cut}")
        for s, w in zip(state, last, strict=True):
            assert_close(s, w, limit("S", "float32"), f"cut {cut}")
    output, state = forward(name, form, part(0, 8))
    outputs, start = [output], 8
    for block in (1, 2, 3, 1):
        output, state = forward(name, form, part(start, start + block), initial_state=state)
        outputs.append(output)
        start += block
    for t in range(start, 24):
        token = (inputs[key][:, t] for key in ("q", "k", "v", *mixer.gates))
        output, state = mixer.step(state, *token)
        outputs.append(output[:, None])
    assert_close(np.concatenate(outputs, 1), whole, limit("output", "float32"), "blocks and steps")
    for s, w in zip(state, last, strict=True):
        assert_close(s, w, limit("S", "float32"), "state after steps")


@every_form
def test_gradients_through_states(name, form):
    """Through the initial state, and chained over four segments, equal to one float64 pass."""
    inputs = make_inputs(name, T=22)
    initial = make_state(name)
    mixer = MIXERS[name]

    def total(x, state, implementation, cuts):
        outputs = []
        for a, b in itertools.pairwise(cuts):
            out, state = call(
                name,
                {key: y[:, a:b] for key, y in x.items()},
                initial_state=state,
                implementation=implementation,
                chunk_size=8,
            )
            outputs.append(out)
        return jnp.sum(jnp.sin(jnp.concatenate(outputs, 1))) + sum(jnp.sum(jnp.sin(s)) for s in state)

    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: jnp.asarray(np.asarray(a, np.float64)), (inputs, initial))
        wanted = jax.jit(jax.grad(total, argnums=(0, 1)), static_argnums=(2, 3))(*wide, "recurrent", (0, 22))
    seen = jax.jit(jax.grad(total, argnums=(0, 1)), static_argnums=(2, 3))(inputs, initial, form, (0, 3, 11, 12, 22))
    for key in inputs:
        assert_close(seen[0][key], wanted[0][key], limit(key, "float32", gradient=True), key)
    for field, s, w in zip(mixer.init(1, 1, 1, 1)._fields, seen[1], wanted[1], strict=True):
        assert_close(s, w, limit(field, "float32", gradient=True), field)


# Transformations ------------------------------------------------------------------------------------------------------


@every_form
def test_transformations_agree(name, form):
    inputs = make_inputs(name, B=3, T=18)
    options = {"implementation": form, "chunk_size": 8}
    plain = lambda x: call(name, x, **options)[0]
    eager = plain(inputs)
    jitted = jax.jit(plain)(inputs)
    assert_close(jitted, eager, 1e-6, "jit")
    rows = {key: a[:, None] for key, a in inputs.items()}
    assert_close(jax.jit(jax.vmap(plain))(rows)[:, 0], jitted, 1e-6, "vmap")
    gradient = lambda f: jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(f(x)))))(inputs)
    wanted = gradient(plain)
    for what, f in (
        ("checkpoint", jax.checkpoint(plain)),
        ("vmap", lambda x: jax.vmap(plain)({key: a[:, None] for key, a in x.items()})[:, 0]),
    ):
        for key, g in gradient(f).items():
            assert_close(g, wanted[key], 5e-6, f"{what} {key}")
    stacked = {key: np.stack([a, 0.5 * a]) for key, a in inputs.items()}
    _, layers = jax.jit(lambda xs: jax.lax.scan(lambda c, x: (c, plain(x)), 0.0, xs))(stacked)
    assert_close(layers[0], jitted, 1e-6, "scan over layers")
    tangents = {key: np.random.default_rng(4).standard_normal(a.shape).astype(a.dtype) for key, a in inputs.items()}
    _, forward_mode = jax.jit(lambda x, t: jax.jvp(lambda y: jnp.sum(jnp.sin(plain(y))), (x,), (t,)))(inputs, tangents)
    inner = sum(np.sum(np.asarray(wanted[key], np.float64) * tangents[key]) for key in inputs)
    assert_close(forward_mode, inner, 1e-4, "jvp")


@every_form
def test_matmul_precision_settings(name, form):
    inputs = make_inputs(name, T=18)
    wanted, _ = reference(name, inputs)
    for setting in ("highest", "default"):
        with jax.default_matmul_precision(setting):
            output, _ = jax.jit(lambda x: call(name, x, implementation=form, chunk_size=8))(inputs)
        assert_close(output, wanted, limit("output", "float32"), setting)


@every_form
def test_same_bits_twice(name, form):
    inputs = make_inputs(name, T=40, decay="sometimes")
    first, second = (backward(name, form, inputs, weights(name, inputs)) for _ in range(2))
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(a, b)


# Bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(MIXERS))
def test_bad_input_is_named(name):
    good = make_inputs(name, T=6)
    mixer = MIXERS[name]

    def refused(error, match, implementation=None, **changes):
        keywords = {key: a for key, a in changes.items() if key not in good}
        arrays = good | {key: a for key, a in changes.items() if key in good}
        with pytest.raises(error, match=match):
            call(name, arrays, implementation=implementation, **keywords)

    refused(ValueError, r"k: shape \(2, 5, 2, 16\) given, wanted \[B, T, Hk, K\]", k=good["k"][:, :5])
    refused(ValueError, r"v: rank 3 .* wanted rank 4", v=good["v"][..., 0])
    refused(ValueError, r"v: 3 value heads given, wanted a multiple of the 2", v=np.zeros((2, 6, 3, 24), np.float32))
    refused(TypeError, r"q: dtype int32", q=np.zeros((2, 6, 2, 16), np.int32))
    refused(TypeError, r"v: dtype float16 given, wanted that of q, float32", v=good["v"].astype(np.float16))
    refused(TypeError, r"q: list given", q=[1.0])
    refused(ValueError, r"implementation: 'cuda' given", implementation="cuda")
    refused(NotImplementedError, rf"{name} has no implementation 'triton'", implementation="triton")
    refused(ValueError, r"chunk_size: 48 given, wanted a power of two", chunk_size=48)
    refused(ValueError, r"segment_ids: shape \(2, 5\)", segment_ids=np.zeros((2, 5), np.int32))
    refused(TypeError, r"segment_ids: dtype float32", segment_ids=np.zeros((2, 6), np.float32))
    refused(ValueError, r"initial_segment_id: given without", initial_segment_id=np.zeros((2,), np.int32))
    refused(ValueError, r"initial_state.S: shape", initial_state=make_state(name, V=8))
    refused(TypeError, r"initial_state: dict given", initial_state={})
    for gate in mixer.gates:
        refused(ValueError, rf"{gate}: shape", **{gate: good[gate][:, :3]})
        refused(TypeError, rf"{gate}: dtype int", **{gate: np.zeros(good[gate].shape, np.int32)})
    with pytest.raises(ValueError, match="q: rank 4"):
        mixer.step(make_state(name), *(good[key] for key in ("q", "k", "v", *mixer.gates)))
