"""Schedules, masks and directions against values worked out by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from ml_collections import ConfigDict

from linattn_jax.models import Decoder, DecoderConfig
from linattn_jax.train.optimizer import (
    DIRECTIONS,
    MUON_RMS,
    decay_mask,
    make_optimizer,
    modes_mask,
    muon_mask,
    schedule,
)
from linattn_jax.types import UserError


def _config(**changes):
    base = {
        "name": "adamw",
        "learning_rate": 0.1,
        "warmup_steps": 4,
        "final_fraction": 0.1,
        "weight_decay": 0.0,
        "beta1": 0.9,
        "beta2": 0.95,
        "clip_norm": 0.0,
    }
    return ConfigDict(base | changes)


def _params(seed=0):
    rng = np.random.default_rng(seed)

    def array(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    return {
        "embed": array(11, 8),
        "layers": {
            "mixer": {
                "q_proj": {"kernel": array(3, 8, 16)},
                "b_proj": {"kernel": array(3, 8, 2), "bias": array(3, 2)},
                "o_proj": {"kernel": array(3, 16, 8)},
                "q_conv": {"kernel": array(3, 4, 16)},
                "A_log": array(3, 2),
                "dt_bias": array(3, 2),
                "out_norm": {"scale": array(3, 8)},
            },
            "mlp": {"down": {"kernel": array(3, 32, 8)}},
            "norm": {"scale": array(3, 8)},
        },
        "unembed": array(8, 11),
    }


def _update(optimizer, grads, params):
    return jax.jit(lambda g, p: optimizer.update(g, optimizer.init(p), p)[0])(grads, params)


def _names(mask):
    return {
        jax.tree_util.keystr(p, simple=True, separator="/") for p, on in jax.tree_util.tree_leaves_with_path(mask) if on
    }


def test_schedule_warms_up_linearly_then_falls_as_a_cosine():
    rate = schedule(_config(), steps=14)
    np.testing.assert_allclose([rate(i) for i in range(5)], [0.025, 0.05, 0.075, 0.1, 0.1], rtol=1e-6)
    np.testing.assert_allclose(rate(9), 0.1 * (0.1 + 0.9 * 0.5), rtol=1e-6)
    np.testing.assert_allclose(rate(14), 0.01, rtol=1e-6)
    np.testing.assert_allclose(rate(99), 0.01, rtol=1e-6)


def test_no_decay_on_vectors_and_convolutions_under_a_stack():
    matrices = {f"layers/mixer/{name}_proj/kernel" for name in "qbo"} | {"layers/mlp/down/kernel"}
    assert _names(decay_mask(_params())) == matrices | {"embed", "unembed"}
    assert _names(muon_mask(_params())) == matrices


def test_no_decay_on_what_modes_and_gates_are_made_of():
    """Steps, modes and read-outs of state-space models, whatever their axes, and every bias; CCQ's gate decays."""
    modes = ["a_log", "a_imag", "log_dt", "mix_real", "mix_imag", "c_real", "c_imag"]
    mixer = {name: jnp.ones((3, 8, 16)) for name in [*modes, "skip", "dt_bias", "key_bias", "value_bias", "bias"]}
    mixer["contraction"] = {"weight": jnp.ones((3, 2, 8)), "bias": jnp.ones((3, 2))}
    params = {"layers": {"mixer": mixer}}
    assert _names(decay_mask(params)) == {"layers/mixer/contraction/weight"}
    assert not _names(muon_mask(params))


@pytest.mark.parametrize("name", sorted(DIRECTIONS))
def test_decay_is_the_rate_times_the_weight_and_only_on_matrices(name):
    params = _params()
    grads = jax.tree.map(lambda p: jnp.sin(3 * p), params)
    updates = {}
    for decay in (0.0, 0.5):
        optimizer, rate = make_optimizer(_config(name=name, weight_decay=decay), steps=14)
        updates[decay] = _update(optimizer, grads, params)
    mask = decay_mask(params)
    want = jax.tree.map(lambda u, p, on: u - (0.5 * rate(0) * p if on else 0), updates[0.0], params, mask)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-7), updates[0.5], want)


def test_adamw_equals_optax_adamw():
    params = _params()
    optimizer, rate = make_optimizer(_config(weight_decay=0.1), steps=14)
    reference = optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.1, mask=decay_mask)
    finals = []
    for chain in (optimizer, reference):

        @jax.jit
        def step(current, state, index, chain=chain):
            grads = jax.tree.map(lambda p: jnp.cos(p * (index + 1)), current)
            updates, state = chain.update(grads, state, current)
            return optax.apply_updates(current, updates), state

        current, state = params, chain.init(params)
        for index in range(3):
            current, state = step(current, state, index)
        finals.append(current)
    jax.tree.map(np.testing.assert_array_equal, *finals)


def test_muon_treats_each_layer_of_a_stack_as_one_matrix():
    params = _params()
    grads = _params(seed=1)
    optimizer, rate = make_optimizer(_config(name="muon"), steps=14)
    undecayed, _ = make_optimizer(_config(name="muon", weight_decay=0.0), steps=14)
    updates, directions = (_update(o, grads, params) for o in (optimizer, undecayed))
    for path, (rows, columns) in (("q_proj", (8, 16)), ("o_proj", (16, 8))):
        stacked = np.asarray(updates["layers"]["mixer"][path]["kernel"])
        for layer in range(3):
            alone = {"x": {path: {"kernel": grads["layers"]["mixer"][path]["kernel"][layer]}}}
            single = _update(optimizer, alone, alone)
            np.testing.assert_allclose(stacked[layer], single["x"][path]["kernel"], rtol=1e-4, atol=1e-6)
            # Orthogonal up to Newton-Schulz's slack (singular values 0.5 to 1.5), at AdamW's scale.
            direction = np.asarray(directions["layers"]["mixer"][path]["kernel"][layer])
            singular = np.linalg.svd(direction, compute_uv=False) / (rate(0) * MUON_RMS * max(rows, columns) ** 0.5)
            assert (singular > 0.4).all()
            assert (singular < 1.6).all()
    adam, _ = make_optimizer(_config(), steps=14)
    rest = _update(adam, grads, params)
    for name in ("embed", "unembed"):
        np.testing.assert_allclose(updates[name], rest[name], rtol=1e-6)
    np.testing.assert_allclose(
        updates["layers"]["mixer"]["q_conv"]["kernel"], rest["layers"]["mixer"]["q_conv"]["kernel"]
    )


@pytest.mark.parametrize("name", sorted(DIRECTIONS))
def test_modes_move_by_a_fraction_and_nothing_else_changes(name):
    """At every update; Mamba's a_log is no mode, and clipping sees the whole gradient."""
    rng = np.random.default_rng(0)
    array = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    modes = {"log_dt": array(3, 8), "a_log": array(3, 8, 4), "a_imag": array(3, 8, 4)}
    mixer = {"modes": modes, "a_log": array(3, 2), "c_real": array(3, 8, 4), "query": {"kernel": array(3, 8, 8)}}
    params = {"layers": {"mixer": mixer}}
    updates = {}
    for fraction in (1.0, 0.25):
        config = _config(name=name, clip_norm=1.0, weight_decay=0.1, modes_rate=fraction)
        optimizer, _ = make_optimizer(config, steps=14)
        state, updates[fraction] = optimizer.init(params), []
        for scale in (1.0, -0.5):
            grads = jax.tree.map(lambda p, scale=scale: scale * jnp.sin(3 * p), params)
            update, state = optimizer.update(grads, state, params)
            updates[fraction].append(update["layers"]["mixer"])
    for full, seen in zip(updates[1.0], updates[0.25], strict=True):
        assert all(np.all(u != 0) for u in jax.tree.leaves(full["modes"]))
        wanted = full | {"modes": jax.tree.map(lambda u: 0.25 * u, full["modes"])}
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), seen, wanted)


def test_modes_that_learn_as_the_rest_add_nothing_to_the_state():
    """Checkpoints of runs whose config has no modes_rate fit the optimizer of today."""
    params = _params()
    shapes = [
        jax.tree.structure(make_optimizer(_config(**changes), steps=14)[0].init(params))
        for changes in ({}, {"modes_rate": 1.0}, {"modes_rate": 0.5})
    ]
    assert shapes[0] == shapes[1] != shapes[2]


@pytest.mark.parametrize("mixer", ["interdomain", "s4d", "s4d_interdomain", "mamba2", "longhorn"])
def test_modes_of_the_layers(mixer):
    """Every parameter of a layer's Modes, and of no other."""
    config = DecoderConfig(vocab_size=9, layers=1, width=16, heads=2, head_size=8, mlp_width=8, mixers=(mixer,))
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    found = {name.rpartition("mixer/")[2] for name in _names(modes_mask(nnx.to_pure_dict(nnx.state(model, nnx.Param))))}
    modes = {"modes/log_dt", "modes/a_log", "modes/a_imag"}
    assert found == (set() if mixer in ("mamba2", "longhorn") else modes)


def test_lion_moves_by_the_sign():
    params, grads = _params(), _params(seed=1)
    optimizer, rate = make_optimizer(_config(name="lion"), steps=14)
    updates = _update(optimizer, grads, params)
    jax.tree.map(lambda u, g: np.testing.assert_allclose(u, -rate(0) * jnp.sign(g), rtol=1e-6), updates, grads)


def test_clipping_scales_the_whole_gradient():
    params, grads = _params(), _params(seed=1)
    optimizer, rate = make_optimizer(_config(name="sgd", beta1=0.0, clip_norm=0.5), steps=14)
    updates = _update(optimizer, grads, params)
    np.testing.assert_allclose(optax.tree.norm(updates), 0.5 * rate(0), rtol=1e-5)
    ratio = jax.tree.map(lambda u, g: u / g, updates, grads)
    assert np.ptp(np.concatenate([np.ravel(x) for x in jax.tree.leaves(ratio)])) < 1e-6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "adam"}, "unknown optimizer 'adam'; known: adafactor, adamw, lion, muon, nadamw, sgd"),
        ({"warmup_steps": 15}, r"warmup_steps must lie in \[0, steps=14\], got 15"),
        ({"beta2": 1.0}, r"beta2 must lie in \[0, 1\), got 1.0"),
        ({"clip_norm": -1.0}, "clip_norm must not be negative"),
        ({"weight_decay": -1.0}, "weight_decay must not be negative"),
        ({"modes_rate": -0.1}, "modes_rate must not be negative"),
        ({"final_fraction": 1.5}, "final_fraction must lie"),
        ({"learning_rate": -1.0}, "learning_rate must not be negative"),
    ],
)
def test_bad_settings_are_named(changes, message):
    with pytest.raises(UserError, match=message):
        make_optimizer(_config(**changes), steps=14)
