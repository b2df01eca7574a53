"""Many small models trained at once: every trial of a group is a row of one batched program on one accelerator."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from linattn_jax.train.functional import strong_types
from linattn_jax.train.optimizer import make_optimizer
from linattn_jax.types import UserError

Params = Any
# What a seed's key is folded with for each use. No two are equal, as a trial's seed may be that of the sets, which are
# for validation and test and those of every trial; below TRAIN, the examples and which of them make a batch.
PARAMETERS, TRAIN, VALIDATION, TEST = 1, 2, 3, 4
EXAMPLES, DRAWS = 0, 1


@dataclasses.dataclass(frozen=True)
class Trial:
    """What tells one trial of a group from another: seed of parameters and examples, rate, sizes of the task."""

    seed: int
    learning_rate: float
    setting: tuple[tuple[str, int], ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Recipe:
    """What the trials of a group share.

    model: makes the module from nnx.Rngs; it maps tokens int32 [B, T] to (hidden [B, T, D], _) and has logits(hidden).
    task: has example(key, **setting) -> Example, as in `data.recall`; `evaluations` maps a column to its task.
    optimizer: fields of `make_optimizer` but for learning_rate, which is the trial's.
    train_examples: size of the set that batches are drawn from, with replacement; 0 makes every example anew.
    eval_every: steps between looks at the validation set, a divisor of steps.
    patience: looks without gain after which a trial stops; 0 for none.
    solved: a trial also stops when two looks in a row reach this accuracy; above 1 for never.
    """

    model: Callable[[nnx.Rngs], Any]
    task: Any
    evaluations: Mapping[str, Any]
    optimizer: Any
    steps: int
    batch: int
    eval_every: int
    train_examples: int = 0
    validation_examples: int = 512
    test_examples: int = 512
    eval_batch: int = 64
    patience: int = 0
    solved: float = 2.0
    data_seed: int = 42

    def __post_init__(self) -> None:
        if self.eval_every < 1 or self.steps % self.eval_every:
            raise UserError(f"eval_every is {self.eval_every}, wanted a divisor of steps = {self.steps}.")


class Inputs(NamedTuple):
    """A group's trials as arrays with a leading axis of trials."""

    seed: jax.Array  # uint32
    learning_rate: jax.Array  # float32
    setting: dict[str, jax.Array]  # int32


class Progress(NamedTuple):
    """All that training changes, each leaf with a leading axis of trials."""

    params: Params
    opt_state: Any
    best: Params  # parameters at the best look so far, the latest among equals
    best_accuracy: jax.Array  # float32, -1 before the first look
    accuracy: jax.Array  # float32, at the latest look
    loss: jax.Array  # float32, nats per question, mean of the latest segment
    idle: jax.Array  # int32, looks without gain
    good: jax.Array  # int32, looks in a row at or above `solved`
    active: jax.Array  # bool
    finite: jax.Array  # bool, False once a loss or a gradient was not
    steps: jax.Array  # int32, updates made


def inputs(trials: Sequence[Trial]) -> Inputs:
    """The arrays of `trials`, whose settings name the same sizes."""
    names = [name for name, _ in trials[0].setting]
    setting = {name: jnp.array([dict(trial.setting)[name] for trial in trials], jnp.int32) for name in names}
    seeds = jnp.array([trial.seed for trial in trials], jnp.uint32)
    return Inputs(seeds, jnp.array([trial.learning_rate for trial in trials], jnp.float32), setting)


def shapes(count: int, names: Sequence[str]) -> Inputs:
    """Shapes and dtypes of the inputs of `count` trials, to compile for."""
    one: Any = lambda dtype: jax.ShapeDtypeStruct((count,), dtype)
    return Inputs(one(jnp.uint32), one(jnp.float32), {name: one(jnp.int32) for name in names})


class Programs(NamedTuple):
    """The programs of a group, all batched over trials."""

    init: Callable[[Inputs], Progress]
    segment: Callable[[Progress, Inputs, jax.Array], Progress]
    tests: Mapping[str, Callable[[Progress, Inputs], jax.Array]]  # accuracy of the best parameters, float32 [trials]


def programs(recipe: Recipe) -> Programs:
    """The group's programs as functions that are not compiled yet."""
    optimizer, _ = make_optimizer(recipe.optimizer, recipe.steps)
    graph: list[Any] = []

    def init(one: Inputs) -> Progress:
        rngs = nnx.Rngs(jax.random.fold_in(jax.random.key(one.seed), PARAMETERS))
        parts: Any = nnx.split(recipe.model(rngs), nnx.Param, ...)
        graph[:] = [parts[0], parts[2]]
        params = strong_types(nnx.to_pure_dict(parts[1]))
        zero, no = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32)
        yes = jnp.ones((), bool)
        return Progress(params, optimizer.init(params), params, zero - 1, zero, zero, no, no, yes, yes, no)

    def module(params: Params) -> Any:
        if not graph:
            jax.eval_shape(init, Inputs(jnp.uint32(0), jnp.float32(0), {}))
        return nnx.merge(graph[0], params, graph[1])

    def answers(params: Params, batch: Any) -> tuple[jax.Array, jax.Array]:
        """float32 logits [B, S, V] at the questions, and the number of questions."""
        model = module(params)
        hidden, _ = model(batch.tokens)
        hidden = jnp.take_along_axis(hidden, batch.positions[..., None], axis=1)
        return model.logits(hidden), jnp.maximum(jnp.sum(batch.weights), 1)

    def loss(params: Params, batch: Any) -> jax.Array:
        logits, count = answers(params, batch)
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
        return jnp.sum(jnp.where(batch.weights > 0, nats * batch.weights, 0)) / count

    def examples(task: Any, key: jax.Array, numbers: jax.Array, setting: Any) -> Any:
        keys = jax.vmap(partial(jax.random.fold_in, key))(numbers)
        return jax.vmap(lambda key: task.example(key, **setting))(keys)

    def accuracy(task: Any, count: int, which: int, params: Params, setting: Any) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(recipe.data_seed), which)
        # As many tokens at a time as in training, whatever the length.
        rows = min(max(recipe.eval_batch * recipe.task.length // task.length, 1), count)

        def body(sums, first):
            batch = examples(task, key, first + jnp.arange(rows), setting)
            logits, _ = answers(params, batch)
            asked = batch.weights * (first + jnp.arange(rows) < count)[:, None]
            right = jnp.sum((jnp.argmax(logits, axis=-1) == batch.targets) * asked)
            return (sums[0] + right, sums[1] + jnp.sum(asked)), None

        zero = jnp.zeros((), jnp.float32)
        (right, asked), _ = jax.lax.scan(body, (zero, zero), jnp.arange(0, count, rows))
        return right / jnp.maximum(asked, 1)

    def step(state: Progress, batch: Any, rate: jax.Array) -> tuple[Progress, jax.Array]:
        value, grads = jax.value_and_grad(loss)(state.params, batch)
        finite = state.finite & jnp.isfinite(value) & jnp.isfinite(optax.tree.norm(grads))
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = jax.tree.map(lambda p, u: p + rate * u, state.params, updates)
        # What has stopped, or met a number that is not one, stays as it is while the others go on.
        go = state.active & finite
        keep = partial(jax.tree.map, lambda new, old: jnp.where(go, new, old))
        params, opt_state = keep((params, opt_state), (state.params, state.opt_state))
        steps = state.steps + go.astype(jnp.int32)
        return state._replace(params=params, opt_state=opt_state, finite=finite, steps=steps), value

    def segment(state: Progress, one: Inputs, first: jax.Array) -> Progress:
        key = jax.random.fold_in(jax.random.key(one.seed), TRAIN)
        numbers = first * recipe.batch + jnp.arange(recipe.eval_every * recipe.batch)
        if recipe.train_examples:
            drawn = jax.vmap(partial(jax.random.fold_in, jax.random.fold_in(key, DRAWS)))(numbers)
            numbers = jax.vmap(lambda key: jax.random.randint(key, (), 0, recipe.train_examples))(drawn)
        batches = examples(recipe.task, jax.random.fold_in(key, EXAMPLES), numbers, one.setting)
        batches = jax.tree.map(lambda x: x.reshape(recipe.eval_every, recipe.batch, *x.shape[1:]), batches)

        new, losses = jax.lax.scan(lambda state, batch: step(state, batch, one.learning_rate), state, batches)
        return look(new, jnp.where(state.active, jnp.mean(losses), state.loss), one)

    def look(state: Progress, value: jax.Array, one: Inputs) -> Progress:
        now = accuracy(recipe.task, recipe.validation_examples, VALIDATION, state.params, one.setting)
        now = jnp.where(state.active, now, state.accuracy)
        live = state.active & state.finite
        better = live & (now >= state.best_accuracy)
        gained = live & (now > state.best_accuracy)
        best = jax.tree.map(lambda new, old: jnp.where(better, new, old), state.params, state.best)
        idle = jnp.where(gained, 0, state.idle + 1)
        good = jnp.where(now >= recipe.solved, state.good + 1, 0)
        # Why a trial stopped is read from these at the end, whose time others of the group decide.
        idle, good = (jnp.where(state.active, new, old) for new, old in ((idle, state.idle), (good, state.good)))
        active = live & (good < 2)
        if recipe.patience:
            active &= idle < recipe.patience
        top = jnp.where(better, now, state.best_accuracy)
        return state._replace(
            best=best, best_accuracy=top, accuracy=now, loss=value, idle=idle, good=good, active=active
        )

    def test(task: Any, state: Progress, one: Inputs) -> jax.Array:
        return accuracy(task, recipe.test_examples, TEST, state.best, one.setting)

    tests = {column: jax.vmap(partial(test, task)) for column, task in recipe.evaluations.items()}
    return Programs(jax.vmap(init), jax.vmap(segment, in_axes=(0, 0, None)), tests)


def compile_programs(recipe: Recipe, count: int, names: Sequence[str]) -> Programs:
    """The programs of a group of `count` trials whose settings have `names`, compiled."""
    plain, like = programs(recipe), shapes(count, names)
    init = jax.jit(plain.init).lower(like).compile()
    state = jax.eval_shape(plain.init, like)
    step = jax.ShapeDtypeStruct((), jnp.int32)
    segment = jax.jit(plain.segment, donate_argnums=0).lower(state, like, step).compile()
    tests = {column: jax.jit(test).lower(state, like).compile() for column, test in plain.tests.items()}
    return Programs(init, segment, tests)


class Outcome(NamedTuple):
    """What became of one trial."""

    status: str  # "done" or "diverged"
    stopped: str  # "steps", "patience", "solved" or "diverged"
    metrics: dict[str, float]
    validation: float
    loss: float | None  # None where it is not finite
    steps: int


def train_group(
    recipe: Recipe,
    trials: Sequence[Trial],
    compiled: Programs,
    *,
    say: Callable[[int, Progress, float], None] = lambda done, state, seconds: None,
    save: Callable[[int, Progress], None] = lambda done, state: None,
    resume: tuple[int, Progress] | None = None,
) -> list[Outcome]:
    """Trains the trials until each has stopped, and tests the best parameters of each.

    Args:
        say: called after each look with the steps made, the state and the seconds of the segment.
        save: called likewise, to keep what `resume` takes.
        resume: (steps made, state) to go on from.
    """
    given = inputs(trials)
    first, state = resume or (0, compiled.init(given))
    while first < recipe.steps:
        started = time.perf_counter()
        state = compiled.segment(state, given, jnp.int32(first))
        first += recipe.eval_every
        active = np.asarray(state.active)  # waits for the device
        say(first, state, time.perf_counter() - started)
        save(first, state)
        if not active.any():
            break
    columns = {column: np.asarray(test(state, given)) for column, test in compiled.tests.items()}
    read = jax.device_get(state._replace(params=None, opt_state=None, best=None))
    outcomes = []
    for i in range(len(trials)):
        looked = bool(read.best_accuracy[i] >= 0)
        status = "done" if read.finite[i] else "diverged"
        if status == "diverged":
            stopped = status
        else:
            stopped = "steps" if read.steps[i] >= recipe.steps else "solved" if read.good[i] >= 2 else "patience"
        metrics = {column: float(values[i]) for column, values in columns.items()} if looked else {}
        loss = float(read.loss[i]) if np.isfinite(read.loss[i]) else None
        outcomes.append(
            Outcome(status, stopped, metrics, float(max(read.best_accuracy[i], 0)), loss, int(read.steps[i]))
        )
    return outcomes
