"""Options of KLA and of VLA: the ablations of KLA's paper, and VLA without its penalty directions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_model
from built_layers import IDS, D, T, build, exact, forward, gradients, inputs, parameters_of, sizes
from reference import reference
from tolerances import assert_close

from linattn_jax.mixers.state import MatrixState

ABLATIONS = (
    {"step": "exact", "normalize_q": False},
    {"step": "sigmoid", "normalize_q": False},
    {"step": "learned", "normalize_q": False},
    {"step": "sequence"},
    {"sequence_factor": "1/t"},
    {"sequence_factor": "1/sqrt(t)"},
    {"sequence_factor": "1/log(t+1)"},
    {"single_gate": True},
    {"step": "sigmoid", "normalize_k": True},
    {"step": "learned", "normalize_k": True, "sequence_factor": "1/sqrt(t)", "single_gate": True},
)


def test_options_of_kla():
    options = {"norm_eps": 0.1, "conv_width": 2, "implementation": "recurrent"}
    graph, parameters, _ = build("kla", **options)
    x = inputs()
    y, _ = forward(graph, parameters, x, None, None, None)
    assert_close(y, exact("kla", x, options=options.items(), eps=0.1), 1e-5)
    assert parameters["convolution"]["weight"].shape == (2, 28 + 12)


@pytest.mark.parametrize(
    ("name", "options", "reads"),
    [
        ("ccq_gla", {"decay": "backbone"}, ("decay",)),
        ("ccq_gdn", {"decay": "backbone", "gain": 0.5}, ("decay", "gain")),
        ("ccq_kla", {"normalize_keys": False, "gain": 2.0}, ("normalize_keys", "gain")),
        ("ccq_deltanet", {"gain": 3.0}, ("gain",)),
        ("ccq_mamba2", {"decay": "backbone", "normalize_keys": False}, ("decay", "normalize_keys")),
        ("interdomain", {"mixing": "diagonal", "rope": True}, ("rope",)),
        ("interdomain", {"mixing": "identity", "output_norm": False}, ()),
        ("s4d_interdomain", {"output_norm": False}, ()),
        ("vla", {"penalty": 1.0}, ("penalty",)),
        ("vla", {"directions": "none"}, ()),
        ("mamba2", {"key_heads": 1, "head_dim": 8}, ()),
        *(("kla", options, tuple(options)) for options in ABLATIONS),
    ],
)
def test_options(name, options, reads):
    """In one pass, in two on a carried state, and packed; `reads` are the options that are not in the shapes."""
    graph, parameters, layer = build(name, **options)
    x, empty = inputs(), layer.init_state(2)
    p = parameters_of(name, **options)
    size = sizes(name) | {key: options[key] for key in ("key_heads",) if key in options}
    told = {key: options[key] for key in reads}

    def wanted_of(x):
        return np.stack([reference_model.layer(name, p, np.float64(row), **size, **told) for row in x])

    wanted = wanted_of(x)
    y, _ = forward(graph, parameters, x, empty, np.zeros((2, T), np.int32), None)
    assert_close(y, wanted, 1e-5)
    first = np.where(np.arange(T) < 4, 0, -1)[None].repeat(2, 0).astype(np.int32)
    _, state = forward(graph, parameters, x, empty, first, None)
    y, _ = forward(graph, parameters, x, state, -1 - first, None)
    assert_close(y[:, 4:], wanted[:, 4:], 1e-5, "second half")
    y, _ = forward(graph, parameters, x, empty, first + 1, None)
    assert_close(y[:, 4:], wanted_of(x[:, 4:]), 1e-5, "second document")


def test_vla_without_directions_is_the_delta_rule():
    """beta = 1, unit keys, reads over the sum of keys that were not normalised: whatever the penalty starts from."""
    x = inputs()
    p = parameters_of("vla", directions="none")
    assert "direction" not in p
    project = lambda part: (x @ p[part]["kernel"]).reshape(2, T, 4, -1)
    q, k = (reference_model.elu_plus_one(project(part)) for part in ("query", "key"))
    arrays = {"q": q, "k": reference_model.unit(k), "v": project("value"), "beta": np.ones((2, T, 4))}
    wanted, _ = reference("delta_rule", arrays, scale=1.0)
    wanted = wanted / np.sum(q * np.cumsum(k, 1), -1, keepdims=True)
    wanted = wanted.reshape(2, T, -1)
    wanted = (wanted - wanted.mean(-1, keepdims=True)) / np.sqrt(wanted.var(-1, keepdims=True) + 1e-5)
    wanted = (wanted * p["norm"]["scale"] + p["norm"]["bias"]) @ p["output"]["kernel"]
    for penalty in (0.1, 3.0):
        graph, parameters, layer = build("vla", directions="none", penalty=penalty)
        y, state = forward(graph, parameters, x, layer.init_state(2), None, None)
        assert_close(y, wanted, 1e-5)
        np.testing.assert_array_equal(state.M, layer.init_state(2).M)


@pytest.mark.parametrize("options", [ablation for ablation in ABLATIONS if "sequence" in str(ablation)], ids=str)
def test_kla_counts_tokens_of_its_document(options):
    """Token by token and in blocks on a carried state, over packed documents and padding, as every document alone."""
    graph, parameters, layer = build("kla", **options)
    p, x, state = parameters_of("kla", **options), inputs(), layer.init_state(2)
    np.testing.assert_array_equal(state.memory.length, [0, 0])
    wanted = np.zeros(x.shape)
    for b in range(2):
        for at, _ in reference_model.documents(IDS[b], T):
            wanted[b, at] = reference_model.layer("kla", p, np.float64(x[b, at]), **sizes("kla"), **options)
    whole, last = forward(graph, parameters, x, state, IDS, None)
    assert_close(whole, wanted, 1e-5, "in one pass")
    np.testing.assert_array_equal(last.memory.length, [2, 3])
    for size in (1, 3):
        y, state, before = [], layer.init_state(2), np.array([-1, -1], np.int32)
        for t in range(0, T, size):
            ids = IDS[:, t : t + size]
            part, state = forward(graph, parameters, x[:, t : t + size], state, ids, before)
            real = [row[row >= 0] for row in IDS[:, : t + size]]
            before = np.array([row[-1] if len(row) else -1 for row in real], np.int32)
            y.append(part)
        assert_close(np.concatenate(y, 1), wanted, 1e-5, f"in blocks of {size}")
        np.testing.assert_array_equal(state.memory.length, [2, 3])


@pytest.mark.parametrize("options", [ABLATIONS[3], ABLATIONS[-1]], ids=str)
def test_every_parameter_of_an_ablation_learns(options):
    """None is left that the output does not depend on; padding that comes first spoils nothing."""
    graph, parameters, layer = build("kla", implementation="recurrent", **options)
    weights = np.random.default_rng(2).standard_normal((2, T, D)).astype(np.float32)
    dirty = np.where((IDS < 0)[..., None], np.nan, inputs()).astype(np.float32)
    seen = gradients(graph, parameters, dirty, layer.init_state(2), IDS, weights)
    for path, g in jax.tree.leaves_with_path(seen):
        assert np.all(np.isfinite(g)), jax.tree_util.keystr(path)
        assert np.any(g), jax.tree_util.keystr(path)


def test_parameters_of_ablations():
    """A scale of 1 at first; no projection for a gate that is not there; the state counts only where it must."""
    names = lambda **options: set(parameters_of("kla", **options)) ^ set(parameters_of("kla"))
    assert names(step="learned") == {"square_scale"}
    assert names(step="exact") == names(step="sequence") == {"strength"}
    assert names(single_gate=True) == {"log_decay", "a_log", "dt_bias"}
    assert names(step="exact", single_gate=True) == names(single_gate=True)
    scale = build("kla", step="learned")[2].square_scale[...]
    np.testing.assert_allclose(jax.nn.softplus(scale), np.ones(4), rtol=1e-6)
    for options in ({}, {"step": "learned"}, {"single_gate": True}):
        assert isinstance(build("kla", **options)[2].init_state(2).memory, MatrixState)


def test_single_gate_of_large_logits():
    """1 - eta is 0 in float32 where log(1 - eta) is still a number: a gate that is full has gradients."""
    graph, parameters, layer = build("kla", implementation="recurrent", single_gate=True)
    full = jax.tree.map(lambda p: p, parameters)
    full["strength"]["bias"][...] = jnp.full((4,), 40.0)
    seen = gradients(graph, full, inputs(), layer.init_state(2), IDS, np.ones((2, T, D), np.float32))
    assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(seen))
