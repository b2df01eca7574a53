"""Trials in a group: each as it would be alone, by a training loop written anew; stopping, diverging, going on."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from ml_collections import ConfigDict
from tolerances import assert_close

from linattn_jax.data.recall import VLAMultiQuery
from linattn_jax.data.task import make_example
from linattn_jax.models.tiny import TinyConfig, TinyLM
from linattn_jax.train.trials import Recipe, Trial, compile_programs, inputs, programs, shapes, train_group
from linattn_jax.types import UserError

VALIDATION, TEST = 3, 4  # what the seed of the sets is folded with
STEPS, WARMUP, DECAY, FINAL, CLIP = 6, 2, 0.1, 0.25, 0.5
OPTIMIZER = {"name": "adamw", "learning_rate": 1.0, "warmup_steps": WARMUP, "final_fraction": FINAL}
OPTIMIZER |= {"weight_decay": DECAY, "beta1": 0.9, "beta2": 0.99, "clip_norm": CLIP}
SGD = OPTIMIZER | {"name": "sgd", "warmup_steps": 0, "final_fraction": 1.0, "weight_decay": 0.0, "clip_norm": 0.0}
SGD |= {"beta1": 0.0}


def trial(seed, rate, **setting):
    return Trial(seed, rate, tuple(sorted(setting.items())))


def followed(recipe, trials, compiled, **options):
    """Outcomes, and by steps made the state after each look, as NumPy arrays."""
    states = {}
    save = lambda done, state: states.update({done: jax.device_get(state)})
    return train_group(recipe, trials, compiled, save=save, **options), states


def row(tree, i):
    return jax.tree.map(lambda x: x[i], tree)


def assert_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def assert_moved_alike(start, wanted, seen):
    """The way of every parameter from `start` is the same to 1e-4.

    Adam divides a gradient by its own size, so an element's way is as uncertain as its gradient, which float32 rounds
    at 1e-7 of the largest; few are below 1e-3 of that.
    """
    for a, b, c in zip(*map(jax.tree.leaves, (start, wanted, seen)), strict=True):
        a, b, c = (np.asarray(x, np.float64) for x in (a, b, c))
        assert_close(c - a, b - a, 1e-4)


# A small real model on the VLA paper's task, sizes of the task traced.

TASK = VLAMultiQuery(2, 8, vocab_size=12)
TINY = TinyConfig("linear", vocab_size=12, layers=1, width=16, heads=1, mlp_width=16, positions=12)
RECALL = Recipe(
    lambda rngs: TinyLM(TINY, rngs=rngs),
    TASK,
    {"n={pairs}": TASK},
    ConfigDict(OPTIMIZER),
    steps=STEPS,
    batch=4,
    eval_every=2,
    validation_examples=16,
    test_examples=10,  # not a multiple of eval_batch
    eval_batch=4,
)
GROUP = (
    trial(0, 3e-2, pairs=2, used=8),
    trial(0, 1e-3, pairs=1, used=7),
    trial(7, 3e-2, pairs=1, used=8),
    trial(1, 1e30, pairs=2, used=8),
)


def examples(task, key, numbers, setting):
    """The examples of these numbers, the sizes of the setting given as Python's integers."""
    one = lambda number: task.example(jax.random.fold_in(key, number), **dict(setting))
    return jax.vmap(one)(jnp.array(numbers, jnp.uint32))


@pytest.fixture(scope="module")
def compiled():
    return compile_programs(RECALL, len(GROUP), ["pairs", "used"])


@pytest.fixture(scope="module")
def recall(compiled):
    return followed(RECALL, GROUP, compiled)


@pytest.fixture(scope="module")
def loop():
    """loop(trial) -> parameters at the start and after each step, then losses, of one trial trained by itself."""

    def loss(params, batch):
        model = TinyLM(TINY, rngs=nnx.Rngs(0))
        nnx.update(model, params)
        logits = model.logits(model(batch.tokens)[0])
        logits = jnp.take_along_axis(logits, batch.positions[..., None], 1)
        nats = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, batch.targets[..., None], -1)[..., 0]
        return jnp.sum(nats * batch.weights) / jnp.sum(batch.weights)

    gradient = jax.jit(jax.value_and_grad(loss))

    def run(one):
        def rate(step):
            if step < WARMUP:
                return one.learning_rate * (step + 1) / WARMUP
            turn = math.pi * (step - WARMUP) / (STEPS - WARMUP)
            return one.learning_rate * (FINAL + (1 - FINAL) * (1 + math.cos(turn)) / 2)

        key = jax.random.key(one.seed)
        start = params = nnx.to_pure_dict(nnx.state(TinyLM(TINY, rngs=nnx.Rngs(jax.random.fold_in(key, 1))), nnx.Param))
        matrices = jax.tree_util.tree_map_with_path(
            lambda path, x: x.ndim == 2 and "positions" not in str(path), params
        )
        data = jax.random.fold_in(jax.random.fold_in(key, 2), 0)
        moments, after, losses = optax.scale_by_adam(0.9, 0.99).init(params), [], []
        for step in range(STEPS):
            value, grads = gradient(params, examples(TASK, data, range(4 * step, 4 * step + 4), one.setting))
            size = math.sqrt(sum(float(jnp.sum(g.astype(jnp.float32) ** 2)) for g in jax.tree.leaves(grads)))
            grads = jax.tree.map(lambda g: g * min(1.0, CLIP / size), grads)
            direction, moments = optax.scale_by_adam(0.9, 0.99).update(grads, moments)
            update = lambda p, d, decays: p - rate(step) * (d + DECAY * p * decays)
            params = jax.tree.map(update, params, direction, matrices)
            after.append(params)
            losses.append(float(value))
        return start, *after, losses

    return run


def measured(params, task, setting, key, count):
    """Right answers of the model over questions asked, one by one."""
    model = TinyLM(TINY, rngs=nnx.Rngs(0))
    nnx.update(model, params)
    batch = jax.device_get(examples(task, key, range(count), setting))
    logits = np.asarray(model.logits(model(batch.tokens)[0]))
    right = []
    for i, j in np.argwhere(batch.weights):
        right.append(logits[i, batch.positions[i, j]].argmax() == batch.targets[i, j])
    return np.mean(right)


@pytest.mark.parametrize("i", [0, 1])
def test_a_trial_is_what_a_plain_loop_makes_of_it(recall, loop, i):
    """The same seed at another rate and size; the rate warms up and falls by the trial's own peak."""
    outcomes, states = recall
    start, *after, losses = loop(GROUP[i])
    for done, state in states.items():
        assert_moved_alike(start, after[done - 1], row(state.params, i))
        np.testing.assert_allclose(state.loss[i], np.mean(losses[done - 2 : done]), rtol=1e-5)
    assert outcomes[i].loss == pytest.approx(np.mean(losses[-2:]), rel=1e-5)
    assert (outcomes[i].status, outcomes[i].stopped, outcomes[i].steps) == ("done", "steps", STEPS)


@pytest.mark.parametrize("i", [0, 1, 2])
def test_accuracy_counts_what_is_scored_of_as_many_examples_as_asked(recall, i):
    """By an example at a time; the sets are those of data_seed for every seed and rate, and of every length."""
    outcomes, states = recall
    setting = dict(GROUP[i].setting)
    sets = jax.random.key(42)
    for state in states.values():
        wanted = measured(row(state.params, i), TASK, setting, jax.random.fold_in(sets, VALIDATION), 16)
        assert state.accuracy[i] == pytest.approx(wanted, abs=1e-6)
    assert outcomes[i].validation == pytest.approx(max(state.accuracy[i] for state in states.values()), abs=0)
    best = row(states[STEPS].best, i)
    for column, task in RECALL.evaluations.items():
        wanted = measured(best, task, setting, jax.random.fold_in(sets, TEST), 10)
        assert outcomes[i].metrics[column] == pytest.approx(wanted, abs=1e-6), column


def test_a_trial_does_not_depend_on_its_group(recall):
    outcomes, states = recall
    alone = compile_programs(RECALL, 1, ["pairs", "used"])
    for i in (0, 2):
        start = row(jax.device_get(alone.init(inputs([GROUP[i]])).params), 0)
        (outcome,), lonely = followed(RECALL, [GROUP[i]], alone)
        for done, state in lonely.items():
            assert_moved_alike(start, row(states[done].params, i), row(state.params, 0))
            np.testing.assert_array_equal(state.accuracy[0], states[done].accuracy[i])
        assert (outcome.metrics, outcome.validation) == (outcomes[i].metrics, outcomes[i].validation)


def test_what_diverges_keeps_its_last_finite_parameters_and_harms_no_other(recall):
    outcomes, states = recall
    diverged = outcomes[3]
    assert (diverged.status, diverged.stopped, diverged.metrics) == ("diverged", "diverged", {})
    assert (diverged.validation, diverged.loss, diverged.steps) == (0.0, None, 1)
    for leaf in jax.tree.leaves(row((states[2].params, states[2].best, states[2].opt_state), 3)):
        assert np.all(np.isfinite(leaf))
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(row(states[2].params, 3))) > 1e29
    assert_equal(row(states[STEPS].params, 3), row(states[2].params, 3))
    assert [outcome.status for outcome in outcomes[:3]] == ["done"] * 3


@pytest.mark.parametrize("done", [2, 4])
def test_going_on_from_a_saved_state_gives_the_same_bits(recall, compiled, done):
    outcomes, states = recall
    said = []
    again, later = followed(
        RECALL, GROUP, compiled, resume=(done, jax.tree.map(jnp.array, states[done])), say=lambda *x: said.append(x[0])
    )
    assert again == outcomes
    assert said == list(later) == [step for step in states if step > done]
    assert_equal(later[STEPS], states[STEPS])


# Two tables of rows: quick to compile, and their accuracy is easily led.


class Table(nnx.Module):
    """The row of a token in one table, compared with those of another."""

    def __init__(self, rngs, *, vocab_size=8):
        draw = lambda: nnx.Param(0.1 * jax.random.normal(rngs.params(), (vocab_size, 4)))
        self.embed, self.answer = draw(), draw()

    def __call__(self, tokens):
        return self.embed[...][tokens], None

    def logits(self, hidden):
        return hidden @ self.answer[...].T


@dataclasses.dataclass(frozen=True)
class Echo:
    """Every token's target is the token itself."""

    length: int = 2
    vocab_size: int = 8

    def example(self, key):
        tokens = jax.random.randint(key, (self.length,), 0, self.vocab_size)
        return make_example(tokens, jnp.arange(self.length), tokens, jnp.ones(self.length))


ECHO = Recipe(
    Table,
    Echo(),
    {"here": Echo(), "longer": Echo(6)},
    ConfigDict(SGD),
    steps=16,
    batch=8,
    eval_every=2,
    validation_examples=32,
    test_examples=32,
    eval_batch=60,  # 20 of the longer examples at a time
    patience=3,
    solved=0.95,
)
# Solved late, never better than at first, fallen back, diverged, solved soon, not done.
LED = (trial(1, 3.0), trial(0, 0.0), trial(0, 1.0), trial(0, 1e30), trial(1, 10.0), trial(0, 0.3))


@pytest.fixture(scope="module")
def compiled_echo():
    return compile_programs(ECHO, len(LED), [])


@pytest.fixture(scope="module")
def echo(compiled_echo):
    return followed(ECHO, LED, compiled_echo)


def test_trials_stop_one_by_one_and_rest(echo):
    """By the rules applied to the accuracies seen; the best parameters are those of the latest best look."""
    outcomes, states = echo
    assert {outcome.stopped for outcome in outcomes} == {"steps", "patience", "solved", "diverged"}
    for i, outcome in enumerate(outcomes):
        best, idle, good, kept, end = -1.0, 0, 0, None, "steps"
        for done, state in states.items():
            stop, now = done, float(state.accuracy[i])
            if not state.finite[i]:
                end = "diverged"
                break
            idle = 0 if now > best else idle + 1
            good = good + 1 if now >= ECHO.solved else 0
            if now >= best:
                best, kept = now, row(state.params, i)
            if good == 2 or idle == ECHO.patience:
                end = "solved" if good == 2 else "patience"
                break
        assert outcome.stopped == end
        assert outcome.steps == (1 if end == "diverged" else stop)
        assert outcome.validation == max(best, 0)
        if kept is not None:
            assert_equal(row(states[ECHO.steps].best, i), kept)
        for later in range(stop, ECHO.steps + 1, ECHO.eval_every):
            assert_equal(row(states[later], i), row(states[stop], i))


def test_the_best_of_a_trial_that_falls_back_is_not_its_last(echo):
    outcomes, states = echo
    assert outcomes[2].stopped == "patience"
    assert outcomes[2].validation > float(states[ECHO.steps].accuracy[2])
    with pytest.raises(AssertionError):
        assert_equal(row(states[ECHO.steps].best, 2), row(states[ECHO.steps].params, 2))


def test_every_column_is_of_its_own_length(echo):
    outcomes, states = echo
    for i, outcome in enumerate(outcomes):
        if outcome.status == "diverged":
            continue
        best = row(states[ECHO.steps].best, i)
        for column, task in ECHO.evaluations.items():
            key = jax.random.fold_in(jax.random.key(42), TEST)
            tokens = np.asarray(examples(task, key, range(32), ()).tokens)
            right = (best["embed"][tokens] @ best["answer"].T).argmax(-1) == tokens
            assert outcome.metrics[column] == pytest.approx(right.mean(), abs=1e-6), column
    assert any(outcome.metrics["here"] != outcome.metrics["longer"] for outcome in outcomes if outcome.metrics)


def test_why_a_trial_stopped_does_not_depend_on_when_the_others_do(echo, compiled_echo):
    """At its last look it is out of patience, and right once: with more looks while it rests it would be solved."""
    _, states = echo
    state = jax.tree.map(np.array, states[2])
    right = np.concatenate([np.eye(4), -np.eye(4)])
    state.params["embed"][1], state.params["answer"][1] = right, right
    state.best_accuracy[1], state.idle[1] = 1.0, ECHO.patience - 1
    outcomes = train_group(ECHO, LED, compiled_echo, resume=(2, jax.tree.map(jnp.array, state)))
    assert (outcomes[1].stopped, outcomes[1].steps, outcomes[1].validation) == ("patience", 4, 1.0)
    assert outcomes[5].steps == ECHO.steps


def test_no_segment_is_run_for_trials_that_have_all_stopped(echo, compiled_echo):
    _, states = echo
    stopped = states[ECHO.steps]._replace(active=np.zeros(len(LED), bool))
    said = []
    train_group(ECHO, LED, compiled_echo, resume=(2, jax.tree.map(jnp.array, stopped)), say=lambda *x: said.append(x))
    assert [done for done, _, _ in said] == [4]


# Where examples come from.


@pytest.fixture(scope="module")
def drawn():
    """Keys that examples were made from, in training and looking or in testing, and those that parameters were."""
    seen = {"look": [], "test": [], "parameters": []}

    @dataclasses.dataclass(frozen=True)
    class Told(Echo):
        name: str = "look"

        def example(self, key):
            jax.debug.callback(lambda data: seen[self.name].append(tuple(data.tolist())), jax.random.key_data(key))
            return super().example(key)

    class ToldTable(Table):
        def __init__(self, rngs):
            key = jax.random.key_data(rngs.params())
            jax.debug.callback(lambda data: seen["parameters"].append(tuple(data.tolist())), key)
            super().__init__(rngs)

    recipe = dataclasses.replace(
        ECHO,
        model=ToldTable,
        task=Told(),
        evaluations={"here": Told(name="test")},
        steps=8,
        batch=4,
        train_examples=3,
        validation_examples=5,
        test_examples=6,
        eval_batch=6,
        patience=0,
        data_seed=42,
    )
    train_group(recipe, [trial(42, 0.1), trial(0, 0.1)], compile_programs(recipe, 2, []))
    jax.effects_barrier()
    return seen


def keys(*numbers):
    """The key data of a seed folded with numbers, one after another."""
    key = jax.random.key(numbers[0])
    for number in numbers[1:]:
        key = jax.random.fold_in(key, number)
    return tuple(jax.random.key_data(key).tolist())


def test_batches_draw_from_as_many_examples_as_asked_for(drawn):
    looks = {keys(42, VALIDATION, i) for i in range(5)}
    trained = [key for key in drawn["look"] if key not in looks]
    assert len(trained) == 2 * 8 * 4
    for seed in (0, 42):
        pool = [keys(seed, 2, 0, i) for i in range(3)]
        counts = [trained.count(key) for key in pool]
        assert sum(counts) == 8 * 4
        assert min(counts) > 3, "drawn unevenly"


def test_the_sets_are_the_same_for_all_and_shared_with_no_training(drawn):
    """Also for a trial whose seed is that of the sets; nor does a key occur among those that another is split into."""
    assert {keys(42, VALIDATION, i) for i in range(5)} < set(drawn["look"])
    assert set(drawn["test"]) == {keys(42, TEST, i) for i in range(6)}
    every = {*drawn["look"], *drawn["test"], *drawn["parameters"]}
    assert len(every) == 2 * 3 + 5 + 6 + 2 * 1
    parts = jax.vmap(lambda data: jax.random.split(jax.random.wrap_key_data(data), 4))(jnp.array([*every], jnp.uint32))
    every |= {tuple(part) for part in jax.random.key_data(parts).reshape(-1, 2).tolist()}
    assert len(every) == (2 * 3 + 5 + 6 + 2 * 1) * 5


def test_inputs_and_states_have_their_types_whatever_the_default():
    with jax.enable_x64(True):
        given = inputs(GROUP)
        assert jax.tree.map(lambda x: x.dtype, given) == jax.tree.map(lambda x: x.dtype, shapes(4, ["pairs", "used"]))
        assert (given.seed.dtype, given.learning_rate.dtype) == (jnp.uint32, jnp.float32)
        assert {name: x.dtype for name, x in given.setting.items()} == {"pairs": jnp.int32, "used": jnp.int32}
        plain = programs(RECALL)
        state = jax.eval_shape(plain.init, given)
        after = jax.eval_shape(plain.segment, state, given, jnp.int32(0))
        assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
        assert {x.dtype for x in jax.tree.leaves(state)} == {jnp.dtype(t) for t in ("float32", "int32", "bool")}
        assert jax.eval_shape(plain.tests["n={pairs}"], state, given).dtype == jnp.float32


def test_looks_fall_on_the_last_step():
    with pytest.raises(UserError, match="eval_every is 4, wanted a divisor of steps = 6"):
        dataclasses.replace(RECALL, eval_every=4)
