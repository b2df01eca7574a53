"""Facts about the mixers that the papers and the docs rest on, each checked on random inputs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import call, make_inputs, make_state
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import assert_close

from linattn_jax import linear_attention, variational, variational_init, variational_step

FORMS = ("recurrent", "chunkwise")
# Random inputs by the hundred, the same in every run.
seeds = lambda f: settings(max_examples=50, deadline=None, derandomize=True)(given(st.integers(0, 2**31))(f))
jitted = functools.partial(jax.jit, static_argnames=("name", "implementation", "options"))


@jitted
def run(name, inputs, implementation=None, options=(), **arrays):
    return call(name, inputs, implementation=implementation, **dict(options), **arrays)


@pytest.mark.parametrize("form", FORMS)
def test_kaczmarz_is_the_gated_delta_rule_on_unit_keys_and_scaled_values(form):
    x = make_inputs("kaczmarz", T=70)
    norm = np.linalg.norm(x["k"], axis=-1, keepdims=True)
    scaled = {"q": x["q"], "k": x["k"] / norm, "v": x["v"] / norm, "log_decay": x["log_decay"], "beta": x["eta"]}
    output, state = call("kaczmarz", x, eps=0.0, implementation=form)
    wanted, wanted_state = call("gated_delta_rule", scaled, implementation=form)
    assert_close(output, wanted, 1e-6)
    assert_close(state.S, wanted_state.S, 1e-6)


@seeds
def test_a_kaczmarz_step_is_a_projection_and_a_line_search(seed):
    """eta = 1, eps = 0: v is stored exactly, by the least change that does, of the length a line search would take."""
    x = make_inputs("kaczmarz", T=1, seed=seed)
    x["eta"] = np.ones_like(x["eta"])
    before = make_state("kaczmarz", seed=seed)
    _, after = run("kaczmarz", x, options=(("eps", 0.0),), initial_state=before)
    k, v = x["k"][:, 0].astype(np.float64), x["v"][:, 0].astype(np.float64)
    decayed = np.exp(x["log_decay"][:, 0].astype(np.float64))[..., None, None] * np.asarray(before.S, np.float64)
    change = np.asarray(after.S, np.float64) - decayed
    assert_close(np.einsum("bhkv,bhk->bhv", after.S, k), v, 1e-5, "stored")
    residual = v - np.einsum("bhkv,bhk->bhv", decayed, k)
    square = np.sum(k * k, -1)
    least = np.linalg.norm(residual, axis=-1) / np.sqrt(square)  # ||k^+ residual||, the least norm of a solution
    assert_close(np.linalg.norm(change, axis=(-2, -1)), least, 1e-5, "least change")
    # Along the gradient k residual^T, 1/2 ||v - S^T k||^2 is least at the step <residual, G k> / ||G k||^2.
    along = square[..., None] * residual
    step = np.sum(residual * along, -1) / np.sum(along * along, -1)
    assert_close(change, step[..., None, None] * k[..., :, None] * residual[..., None, :], 1e-5, "line search")


@pytest.mark.parametrize("form", FORMS)
def test_special_cases_are_the_simpler_mixers(form):
    gated = make_inputs("gated_delta_rule", T=40)
    still = gated | {"log_decay": np.zeros_like(gated["log_decay"])}
    plain = {name: a for name, a in gated.items() if name != "log_decay"}
    pairs = [
        ("gated_delta_rule", still, "delta_rule", plain),
        (
            "gla",
            {n: gated[n] for n in "qkv"} | {"log_decay": np.repeat(gated["log_decay"][..., None], 16, -1)},
            "simple_gla",
            {n: gated[n] for n in ("q", "k", "v", "log_decay")},
        ),
        (
            "simple_gla",
            {n: still[n] for n in ("q", "k", "v", "log_decay")},
            "linear_attention",
            {n: gated[n] for n in "qkv"},
        ),
    ]
    for name, inputs, simpler, its_inputs in pairs:
        output, state = call(name, inputs, implementation=form)
        wanted, wanted_state = call(simpler, its_inputs, implementation=form)
        assert_close(output, wanted, 2e-6, f"{name} as {simpler}")
        assert_close(state.S, wanted_state.S, 2e-6, f"{name} as {simpler}")


@pytest.mark.parametrize("form", FORMS)
def test_no_strength_is_pure_decay(form):
    x = make_inputs("gated_delta_rule", T=20)
    x["beta"] = np.zeros_like(x["beta"])
    before = make_state("gated_delta_rule")
    _, after = call("gated_delta_rule", x, initial_state=before, implementation=form)
    total = np.exp(np.sum(x["log_decay"].astype(np.float64), axis=1))
    assert_close(after.S, total[..., None, None] * np.asarray(before.S), 1e-5)


# CCQ ------------------------------------------------------------------------------------------------------------------

BACKBONES = {"ccq_gla": "gla", "ccq_gated_delta_rule": "gated_delta_rule", "ccq_kaczmarz": "kaczmarz"}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", BACKBONES)
def test_ccq_without_curvature_is_its_backbone(name, form):
    """With gate 0; and whatever the gate, where all keys are the same, the first token's among them."""
    x = make_inputs(name, T=40)
    plain = {key: a for key, a in x.items() if key != "gate"}
    wanted, state = run(BACKBONES[name], plain, implementation=form)
    output, after = run(name, x | {"gate": 0 * x["gate"]}, implementation=form)
    assert_close(output, wanted, 1e-6, "no gate")
    assert_close(after.memory.S, state.S, 1e-6, "no gate")
    output, after = run(name, x, implementation=form)
    assert_close(output[:, 0], wanted[:, 0], 1e-6, "first token")
    assert_close(after.memory.S, state.S, 1e-6, "the write is untouched")
    same = {"k": np.broadcast_to(x["k"][:, :1], x["k"].shape)}
    output, _ = run(name, x | same, implementation=form)
    assert_close(output, run(BACKBONES[name], plain | same, implementation=form)[0], 1e-6, "equal keys")


@seeds
def test_queries_along_an_eigenvector_of_the_covariance_shrink(seed):
    """By 1 - gate s, s the eigenvalue; and the covariance of unit keys lies between 0 and I."""
    x = make_inputs("curvature_query", B=1, Hk=1, T=32, seed=seed)
    k = x["k"][0, :, 0].astype(np.float64)
    k = k / np.sqrt(np.sum(k * k, -1, keepdims=True) + 1e-6)
    values, vectors = np.linalg.eigh(np.cov(k.T, bias=True))
    assert values[0] > -1e-12
    assert values[-1] <= 1
    which = seed % len(values)
    x["q"][0, -1, 0] = vectors[:, which]
    q, _ = run("curvature_query", x, implementation="chunkwise")
    assert_close(q[0, -1, 0], (1 - x["gate"][0, -1, 0] * values[which]) * vectors[:, which], 2e-6)


@pytest.mark.parametrize("form", ["recurrent", "associative", "chunkwise"])
def test_covariance_of_keys_with_a_large_mean(form):
    """A mean of 100 with deviations of 1/4 costs few digits: float32 keys hold 5e-6 of a deviation."""
    x = make_inputs("curvature_query", T=100, keys="offset")
    with jax.enable_x64(True):
        wide = {key: a.astype(np.float64) for key, a in x.items()}
        wanted, exact = call("curvature_query", wide, implementation="recurrent", normalize_keys=False)
        wanted, exact = np.asarray(wanted), jax.tree.map(np.asarray, exact)
    options = (("normalize_keys", False), ("chunk_size", 16))
    output, state = run("curvature_query", x, implementation=form, options=options)
    # The other forms update a mean of 100 at every token, each time rounded by up to 4e-6.
    bound = 1e-5 if form == "chunkwise" else 2e-4
    assert_close(output, wanted, bound, form)
    assert_close(state.scatter, exact.scatter, bound, form)


def test_decayed_keys_weigh_less():
    """With a log decay, n Sigma q is a decayed sum: the keys before log_decay = -inf do not count."""
    x = make_inputs("curvature_query", T=40)
    decay = np.zeros((2, 40, 2), np.float32)
    decay[:, 25] = -np.inf
    late = {key: a[:, 25:] for key, a in x.items()}
    for form in FORMS:
        output, state = run("curvature_query", x, log_decay=decay, implementation=form)
        wanted, last = run("curvature_query", late, implementation=form)
        assert_close(output[:, 25:], wanted, 1e-6, form)
        assert_close(state.count, last.count, 1e-6, form)
        assert_close(state.scatter, last.scatter, 1e-5, form)


# VLA ------------------------------------------------------------------------------------------------------------------

step = jax.jit(variational_step, static_argnames=("normalize_write", "penalty"))


@seeds
def test_vla_transition_norm(seed):
    """J = I - a^ k^T: eigenvalues 1 and 1 - c, radius 1, norm (1 + sqrt(5 - 4c)) / 2, where c = a^ . k^ is in [0, 1].

    So the paper's Proposition 2, which says that the norm is exactly 1, holds for a^ = k^ alone.
    """
    size = 8
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    # A penalty as steep as the seed says, and S = I, which a write of v = 0 turns into J.
    root = draw(size, size) * np.exp(3 * draw(size, 1))
    M = 0.1 * np.eye(size, dtype=np.float32) + root.T @ root
    state = variational_init(1, 1, size, size)._replace(
        M=M[None, None],
        A=np.linalg.inv(M.astype(np.float64)).astype(np.float32)[None, None],
        S=np.eye(size)[None, None],
    )
    state = jax.tree.map(lambda s: jnp.asarray(s, jnp.float32), state)
    k, zero = np.abs(draw(1, 1, size)), np.zeros((1, 1, size), np.float32)
    _, after = step(state, k, k, zero, zero)
    J = np.asarray(after.S[0, 0], np.float64)
    unit = k[0, 0] / np.linalg.norm(k)
    write = np.asarray(state.A[0, 0], np.float64) @ unit
    c = float(write @ unit / np.linalg.norm(write))
    assert -1e-6 <= c <= 1 + 1e-6
    eigenvalues = np.sort(np.abs(np.linalg.eigvals(J)))
    np.testing.assert_allclose(eigenvalues, np.sort([1 - c] + [1.0] * (size - 1)), atol=3e-3)
    norm = np.linalg.norm(J, 2)
    np.testing.assert_allclose(norm, (1 + np.sqrt(5 - 4 * c)) / 2, atol=1e-4)
    assert 1 - 1e-5 <= norm <= 1.6181


def test_vla_norm_without_normalised_writes_grows_with_size_over_penalty():
    """At the first token J = I - A k^ k^T with A = I / penalty: norm max(1, 1 / penalty - 1)."""
    k = np.zeros((1, 1, 4), np.float32)
    k[..., 0] = 1
    for penalty in (0.1, 0.01):
        state = variational_init(1, 1, 4, 4, penalty=penalty)._replace(S=jnp.eye(4)[None, None])
        _, after = step(state, k, k, 0 * k, 0 * k, normalize_write=False, penalty=penalty)
        np.testing.assert_allclose(np.linalg.norm(after.S[0, 0], 2), 1 / penalty - 1, rtol=1e-4)


def test_vla_without_directions_is_the_delta_rule_on_unit_keys():
    """A = I / penalty for ever: a^ = k^, beta = 1."""
    x = make_inputs("variational", T=40)
    x["penalty_direction"] = 0 * x["penalty_direction"]
    beta = np.ones(x["v"].shape[:3], np.float32)
    plain = {"q": x["q"], "k": x["k"], "v": x["v"], "beta": beta}
    for form in FORMS:
        output, state = run("variational", x, implementation=form, options=(("normalize_output", False),))
        wanted, exact = run("delta_rule", plain, implementation=form, options=(("normalize_k", True), ("scale", 1.0)))
        assert_close(output, wanted, 1e-5, form)
        assert_close(state.S, exact.S, 1e-5, form)


@pytest.mark.parametrize("length", [3000, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("directions", ["random", "repeated"])
def test_vla_inverse_stays_an_inverse(directions, length):
    """||A M - I|| over long rows in float32, against what rounding M alone would leave: eps times its condition."""
    size = 16
    rng = np.random.default_rng(0)
    u = rng.standard_normal((1, length if directions == "random" else 1, 1, size)).astype(np.float32)
    u = np.broadcast_to(u / np.linalg.norm(u, axis=-1, keepdims=True) / size**0.5, (1, length, 1, size))
    k = np.abs(rng.standard_normal((1, length, 1, size))).astype(np.float32)
    for form in FORMS:
        _, state = jax.jit(functools.partial(variational, implementation=form))(k, k, k, u)
        A, M = np.asarray(state.A[0, 0], np.float64), np.asarray(state.M[0, 0], np.float64)
        bound = 10 * np.finfo(np.float32).eps * np.linalg.cond(M)
        assert np.linalg.norm(A @ M - np.eye(size)) <= bound, (form, bound)


def test_vla_state_stays_bounded_where_linear_attention_grows():
    """Random keys, unit values: between 1000 and 4000 tokens the additive memory grows fourfold, VLA's hardly."""
    size, lengths = 16, (1000, 4000)
    rng = np.random.default_rng(0)
    draw = lambda: rng.standard_normal((1, lengths[1], 1, size)).astype(np.float32)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    k, v, u = np.exp(np.minimum(draw(), 0)) + np.maximum(draw(), 0), unit(draw()), unit(draw()) / size**0.5
    norms = []
    for n in lengths:
        part = k[:, :n], k[:, :n], v[:, :n]
        norms.append([np.linalg.norm(state.S) for state in states(*part, u[:, :n])])
    (ours, additive), (ours_later, additive_later) = norms
    assert ours_later < 1.5 * ours
    assert additive_later > 1.9 * additive
    assert additive_later > 5 * ours_later


@jax.jit
def states(k, q, v, u):
    """The states of VLA and of linear attention."""
    return variational(q, k, v, u)[1], linear_attention(q, k, v)[1]


# Interdomain ----------------------------------------------------------------------------------------------------------


@seeds
def test_interdomain_is_homogeneous(seed):
    """Of degree 1 in q and 2 in keys and values together; a zero query reads zero."""
    x = make_inputs("interdomain", T=20, seed=seed)
    factor = 2.0 ** (seed % 5 - 2)  # a power of two: exact in floating point
    wanted, _ = run("interdomain", x, implementation="chunkwise")
    output, _ = run("interdomain", x | {"q": np.float32(factor) * x["q"]}, implementation="chunkwise")
    assert_close(output, factor * np.asarray(wanted), 1e-6, "q")
    scaled = {key: np.float32(factor) * x[key] for key in ("k", "v")}
    output, _ = run("interdomain", x | scaled, implementation="chunkwise")
    assert_close(output, factor**2 * np.asarray(wanted), 1e-6, "k and v")
    output, _ = run("interdomain", x | {"q": 0 * x["q"]}, implementation="chunkwise")
    assert not np.any(output)


@pytest.mark.parametrize("name", ["interdomain", "s4d"])
@pytest.mark.parametrize("form", FORMS)
def test_state_space_mixers_are_time_invariant(name, form):
    """Zero tokens in front, into an empty state, change nothing but the time."""
    x = make_inputs(name, T=30)
    late = {
        key: np.pad(a, [(0, 0), (5, 0)] + [(0, 0)] * (a.ndim - 2)) if a.shape[:2] == (2, 30) else a
        for key, a in x.items()
    }
    output, state = run(name, x, implementation=form)
    delayed, same = run(name, late, implementation=form)
    assert not np.any(delayed[:, :5])
    assert_close(delayed[:, 5:], output, 2e-6)
    assert_close(same[0], state[0], 2e-6)


def test_s4d_is_the_convolution_with_its_kernel():
    """y = K * x + d x with K_l = 2 Re sum c b a^l, by FFT in float64."""
    x = make_inputs("s4d", T=50)
    p = {key: np.asarray(a, np.complex128) for key, a in x.items()}
    powers = np.exp(np.arange(50)[:, None, None] * p["log_a"])
    kernel = 2 * np.real(np.einsum("hn,lhn->lh", p["c"] * p["b"], powers))
    spectrum = np.fft.rfft(kernel, 100, axis=0)[None] * np.fft.rfft(np.real(p["x"]), 100, axis=1)
    wanted = np.fft.irfft(spectrum, 100, axis=1)[:, :50] + np.real(p["d"]) * np.real(p["x"])
    for form in FORMS:
        assert_close(run("s4d", x, implementation=form)[0], wanted, 5e-6, form)


@seeds
def test_a_longhorn_step_contracts(seed):
    """1 - step k^2 lies in (0, 1]: no state grows without input."""
    x = make_inputs("longhorn", T=20, seed=seed)
    before = make_state("longhorn", seed=seed)
    x["x"] = 0 * x["x"]
    _, after = run("longhorn", x, implementation="chunkwise", initial_state=before)
    assert np.all(np.abs(after.h) <= np.abs(before.h))
    assert np.all(np.sign(after.h) == np.sign(before.h))
