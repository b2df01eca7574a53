"""The train step: exact accumulation, carried state, skipped steps."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from linattn_jax.sharding import make_mesh
from linattn_jax.train.functional import batch_axes, has_fixed_size, initialise, split
from linattn_jax.train.step import check_rows, init_state, last_segment, make_train_step
from linattn_jax.types import UserError


def _rate(count):
    return 0.1 * (count + 1)


@pytest.fixture(scope="module")
def setup(build_decoder):
    """setup(accumulate, carry_state) -> (functional, a fresh state, step), compiled once for each pair."""
    mesh = make_mesh()
    optimizer = optax.sgd(_rate)
    functional, params = initialise(build_decoder, mesh)

    @functools.cache
    def make(accumulate, carry_state):
        state = init_state(functional, params, optimizer, mesh, rows=4, accumulate=accumulate, carry_state=carry_state)
        return state, make_train_step(functional, optimizer, _rate, mesh, accumulate=accumulate)

    def fresh(accumulate=1, carry_state=False):
        state, step = make(accumulate, carry_state)
        return functional, jax.tree.map(jnp.copy, state), step

    return fresh


@functools.partial(jax.jit, static_argnums=0)
def _loss(functional, params, batch, state=None, initial_segment_id=None):
    hidden, state = functional.apply(
        params,
        batch["inputs"],
        state=state,
        segment_ids=batch["segment_ids"],
        initial_segment_id=initial_segment_id,
    )
    logits = hidden @ functional.unembedding(params)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    weights = batch["segment_ids"] >= 0
    return jnp.sum(nats * weights) / jnp.sum(weights), state


@pytest.mark.core
def test_a_step_is_the_gradient_of_the_mean_loss(setup, make_batch):
    functional, state, step = setup()
    batch = make_batch()
    params = jax.device_get(state.params)
    (loss, _), grads = jax.value_and_grad(_loss, 1, has_aux=True)(functional, params, batch)
    new, metrics = step(state, batch)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(grads), rtol=1e-5)
    np.testing.assert_allclose(metrics["nats"], loss * metrics["tokens"], rtol=1e-5)
    assert int(metrics["tokens"]) == 4 * 12 - (0 + 1 + 2 + 3)
    assert int(new.step) == 1
    np.testing.assert_allclose(metrics["learning_rate"], 0.1)
    jax.tree.map(lambda a, p, g: np.testing.assert_allclose(a, p - 0.1 * g, atol=1e-6), new.params, params, grads)


def test_a_step_returns_what_it_takes_so_it_compiles_once(setup, make_batch):
    _, state, step = setup(1, True)
    kinds = [jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding, x.weak_type), state)]
    for _ in range(2):
        state, _ = step(state, make_batch())
        kinds.append(jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding, x.weak_type), state))
    assert kinds[0] == kinds[1] == kinds[2]


@pytest.mark.parametrize("accumulate", [2])
def test_accumulation_equals_the_whole_batch(setup, make_batch, accumulate):
    batch = make_batch()
    batch["segment_ids"][1] = -1  # microbatches of very different token counts, one row of none
    _, whole, step = setup()
    _, parts, step_parts = setup(accumulate)
    for _ in range(2):
        whole, one = step(whole, batch)
        parts, many = step_parts(parts, batch)
        for name in ("loss", "grad_norm", "tokens"):
            np.testing.assert_allclose(one[name], many[name], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), whole.params, parts.params)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_carried_state_continues_every_row_and_passes_no_gradient(setup, make_batch, accumulate):
    functional, state, step = setup(accumulate, True)
    long = make_batch(steps=24)
    long["segment_ids"][:] = 5  # one document over both halves
    long["segment_ids"][1, 12:] = 6  # but row 1 begins another at the cut
    halves = [{k: v[:, i : i + 12] for k, v in long.items()} for i in (0, 12)]
    _, carried = _loss(functional, state.params, halves[0])
    state, _ = step(state, halves[0])
    np.testing.assert_array_equal(state.carry.segment_id, np.full((accumulate, 4 // accumulate), 5))
    params = jax.device_get(state.params)
    (want, _), grads = jax.value_and_grad(_loss, 1, has_aux=True)(
        functional, params, halves[1], carried, jnp.full((4,), 5)
    )
    state, metrics = step(state, halves[1])
    np.testing.assert_allclose(metrics["loss"], want, rtol=1e-5)
    without, _ = _loss(functional, params, halves[1])
    assert abs(without - want) > 1e-3  # the state mattered
    jax.tree.map(lambda a, p, g: np.testing.assert_allclose(a, p - 0.2 * g, atol=2e-6), state.params, params, grads)
    # Row r of the batch is row r // A of microbatch r % A.
    assert int(state.carry.segment_id[1 % accumulate, 1 // accumulate]) == 6


def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(setup, make_batch):
    _, state, step = setup(1, True)
    good = make_batch()
    state, _ = step(state, good)
    before = jax.tree.map(np.asarray, state)
    bad = good | {"inputs": np.full_like(good["inputs"], 10**6)}
    for count in (1, 2):
        state, metrics = step(state, bad)
        assert not np.isfinite(metrics["loss"])
        assert (int(metrics["bad"]), int(metrics["skipped"]), int(metrics["bad_in_row"])) == (1, count, count)
    for name in ("params", "opt_state", "carry"):
        jax.tree.map(np.testing.assert_array_equal, getattr(state, name), getattr(before, name))
    assert int(state.step) == 3
    np.testing.assert_allclose(metrics["learning_rate"], 0.2)  # what the next good step will use
    state, metrics = step(state, good)
    assert (int(metrics["bad"]), int(metrics["skipped"]), int(metrics["bad_in_row"])) == (0, 2, 0)
    assert not np.array_equal(state.params["embed"], before.params["embed"])


def test_an_infinite_gradient_of_a_finite_loss_is_skipped(build_decoder, make_batch, monkeypatch):
    monkeypatch.setattr(optax.tree, "norm", lambda tree: jnp.float32(jnp.inf))
    mesh = make_mesh()
    functional, params = split(build_decoder())
    state = init_state(functional, params, optax.sgd(0.1), mesh, rows=4)
    before = np.asarray(state.params["embed"])
    state, metrics = make_train_step(functional, optax.sgd(0.1), _rate, mesh)(state, make_batch())
    assert np.isfinite(metrics["loss"])
    assert int(metrics["bad"]) == 1
    np.testing.assert_array_equal(state.params["embed"], before)


def test_a_batch_of_padding_is_no_step_towards_nan(setup, make_batch):
    _, state, step = setup()
    batch = make_batch()
    batch["segment_ids"][:] = -1
    before = np.asarray(state.params["embed"])
    state, metrics = step(state, batch)
    assert (float(metrics["loss"]), int(metrics["tokens"]), int(metrics["bad"])) == (0.0, 0, 0)
    np.testing.assert_array_equal(state.params["embed"], before)


def test_last_segment_skips_padding_and_keeps_the_one_before():
    ids = jnp.array([[0, 1, 1], [2, 3, -1], [-1, -1, -1], [-1, 4, -1]])
    np.testing.assert_array_equal(last_segment(ids, jnp.array([9, 9, 9, 9])), [1, 3, 9, 4])


def test_initialise_equals_building(build_decoder):
    _, params = initialise(build_decoder, make_mesh())
    _, built = split(build_decoder())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), params, built)


def test_row_axes_and_fixed_size_are_found(build_decoder):
    functional, params = split(build_decoder())
    assert batch_axes(functional, jax.eval_shape(lambda: params)) == {"h": 1}
    assert has_fixed_size(functional, params)
    with pytest.raises(ValueError, match="no single row axis"):
        batch_axes(SimpleNamespace(init_state=lambda params, rows: jnp.zeros((4,))), params)


@pytest.mark.parametrize(
    ("rows", "accumulate", "message"),
    [
        (4, 3, "batch_size=4 must be a positive multiple of accumulate x devices = 3 x 1"),
        (0, 1, "batch_size=0 must be"),
        (4, 0, "accumulate must be at least 1, got 0"),
    ],
)
def test_rows_that_do_not_divide_are_refused(rows, accumulate, message):
    with pytest.raises(UserError, match=message):
        check_rows(rows, accumulate, make_mesh())
