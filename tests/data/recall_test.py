"""Synthetic tasks: solvers that read the tokens alone recover the targets, and draws follow their distributions."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linattn_jax.data import TASKS, make_task
from linattn_jax.data.recall import (
    Copy,
    KLAMultiQuery,
    Palindrome,
    Stack,
    VLAMultiQuery,
    ZoologyMultiQuery,
    needle,
    power_law,
)
from linattn_jax.types import UserError

SMALL = {
    "vla_mqar": VLAMultiQuery(6, 24),
    "kla_mqar": KLAMultiQuery(length=40, pairs=6, vocab_size=16),
    "zoology_mqar": ZoologyMultiQuery(length=24, pairs=6, vocab_size=14),
    "copy": Copy(length=16, vocab_size=12),
    "stack": Stack(length=122, stacks=4, values=5, vocab_size=12),
    "palindrome": Palindrome(source=9, vocab_size=7),
}


@functools.cache
def keys(count=64):
    return jax.random.split(jax.random.key(0), count)


@functools.partial(jax.jit, static_argnums=0)
def _draws(task, keys, setting):
    return jax.vmap(lambda key: task.example(key, **setting))(keys)


def draws(task, count=64, **setting):
    """That many examples, as NumPy arrays with a leading axis."""
    return jax.tree.map(np.asarray, _draws(task, keys(count), setting))


def examples(task, count=64):
    """The same, one by one."""
    drawn = draws(task, count)
    return [type(drawn)(*fields) for fields in zip(*drawn, strict=True)]


def questions(example):
    """Position to target of what is scored."""
    scored = example.weights == 1
    positions = example.positions[scored].tolist()
    assert len(set(positions)) == len(positions)
    return dict(zip(positions, example.targets[scored].tolist(), strict=True))


def chi_square(indices, probabilities):
    """Standard deviations by which the counts of `indices` miss `probabilities`."""
    expected = probabilities * len(indices)
    assert expected.min() > 5
    counts = np.bincount(indices, minlength=len(expected))
    assert len(counts) == len(expected)
    freedom = len(expected) - 1
    return (((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom)


def independent(x, y, sizes):
    """Standard deviations by which pairs of uniform draws, reduced modulo `sizes`, miss a joint uniform law."""
    joint = x.ravel() % sizes[0] * sizes[1] + y.ravel() % sizes[1]
    return chi_square(joint, np.full(sizes[0] * sizes[1], 1 / (sizes[0] * sizes[1])))


def recalled(tokens, pairs):
    """What a dictionary holds after the pairs in front."""
    memory = {}
    for key, value in tokens[: 2 * pairs].reshape(-1, 2).tolist():
        memory[key] = value
    return memory


def test_the_small_tasks_are_all_tasks():
    assert {name: type(task) for name, task in SMALL.items()} == TASKS


@pytest.mark.parametrize("name", SMALL)
def test_examples_are_within_their_sizes(name):
    task = SMALL[name]
    drawn = draws(task)
    assert [(x.shape, str(x.dtype)) for x in drawn] == [
        ((64, task.length), "int32"),
        ((64, task.questions), "int32"),
        ((64, task.questions), "int32"),
        ((64, task.questions), "float32"),
    ]
    assert 0 <= drawn.tokens.min() <= drawn.tokens.max() < task.vocab_size
    assert 0 <= drawn.positions.min() <= drawn.positions.max() < task.length
    assert 0 <= drawn.targets.min() <= drawn.targets.max() < task.vocab_size
    assert set(np.unique(drawn.weights)) <= {0, 1}
    assert not drawn.targets[drawn.weights == 0].any()
    assert (drawn.weights.sum(1) > 0).all()


@pytest.mark.parametrize("name", SMALL)
def test_examples_are_functions_of_the_key(name):
    task = SMALL[name]
    drawn = draws(task)
    again = draws(dataclasses.replace(task))
    jax.tree.map(np.testing.assert_array_equal, drawn, again)
    assert len({tokens.tobytes() for tokens in drawn.tokens}) == 64
    eager = task.example(keys()[5])
    jax.tree.map(lambda x, wanted: np.testing.assert_array_equal(x, wanted[5]), eager, drawn)


@pytest.mark.parametrize("name", SMALL)
def test_one_compiled_program_serves_equal_tasks(name):
    assert hash(SMALL[name]) == hash(dataclasses.replace(SMALL[name]))
    with pytest.raises(dataclasses.FrozenInstanceError):
        SMALL[name].vocab_size = 3


def test_vla_pairs_then_queries():
    task = VLAMultiQuery(max_pairs=24, length=73)
    for example in examples(task):
        assert len(set(example.tokens[:48:2].tolist())) == 24
        assert example.tokens[:48].max() < 127
        assert example.tokens[48] == 127
        memory = recalled(example.tokens, 24)
        assert questions(example) == {p: memory[example.tokens[p]] for p in range(49, 73)}


def test_vla_keys_fill_the_ids():
    for example in examples(VLAMultiQuery(max_pairs=127, length=256), 4):
        assert sorted(example.tokens[:254:2].tolist()) == list(range(127))


def test_vla_draws_are_uniform():
    drawn = draws(VLAMultiQuery(max_pairs=3, length=40), 2000)
    assert abs(chi_square(drawn.tokens[:, 0], np.full(127, 1 / 127))) < 4
    assert abs(chi_square(drawn.tokens[:, 1:6:2].ravel(), np.full(127, 1 / 127))) < 4
    asked = (drawn.tokens[:, 7:, None] == drawn.tokens[:, None, :6:2]).argmax(2)
    assert abs(chi_square(asked.ravel(), np.full(3, 1 / 3))) < 4
    assert abs(independent(asked[:, 0], asked[:, 1], (3, 3))) < 4
    # Ids below 126 are uniform modulo 3.
    inner = (drawn.tokens[:, :2] < 126).all(1)
    assert abs(independent(drawn.tokens[inner, 0], drawn.tokens[inner, 1], (3, 3))) < 4
    inner = drawn.tokens[:, 1] < 126
    assert abs(independent(asked[inner, 0], drawn.tokens[inner, 1], (3, 3))) < 4


def test_vla_traced_settings_pad():
    task = VLAMultiQuery(max_pairs=8, length=40)
    pairs, used = np.tile(np.stack(np.meshgrid(range(1, 9), range(18, 41))).reshape(2, -1), 3)
    drawn = jax.jit(jax.vmap(task.example))(keys(len(pairs)), jnp.array(pairs), jnp.array(used))
    drawn = jax.tree.map(np.asarray, drawn)
    for n, u, *fields in zip(pairs, used, *drawn, strict=True):
        example = type(drawn)(*fields)
        # What is used is an example of the static task of these sizes.
        memory = recalled(example.tokens, n)
        assert len(memory) == n
        assert example.tokens[: 2 * n].max() < 127 == example.tokens[2 * n]
        assert questions(example) == {p: memory[example.tokens[p]] for p in range(2 * n + 1, u)}
        assert (example.tokens[u:] == 127).all()
        slots = np.arange(task.questions)
        np.testing.assert_array_equal(example.positions, np.minimum(2 * n + 1 + slots, 39))
        np.testing.assert_array_equal(example.weights, slots < u - 2 * n - 1)
    tokens = drawn.tokens[(pairs == 5) & (used > 30)]
    asked = (tokens[:, 11:31, None] == tokens[:, None, :10:2]).argmax(2)
    assert abs(chi_square(asked.ravel(), np.full(5, 1 / 5))) < 4


def test_vla_default_setting():
    task = SMALL["vla_mqar"]
    wanted = draws(task)
    traced = draws(task, pairs=jnp.int32(6), used=jnp.int32(24))
    jax.tree.map(np.testing.assert_array_equal, traced, wanted)
    for field, drawn in zip(task.example(keys()[0], pairs=6, used=24), wanted, strict=True):
        np.testing.assert_array_equal(field, drawn[0])


@pytest.mark.parametrize(
    "task",
    [KLAMultiQuery(), SMALL["kla_mqar"], KLAMultiQuery(length=7, pairs=3)],
)
def test_kla_pairs_then_queries_among_noise(task):
    n, half = task.pairs, task.vocab_size // 2
    repeated = overwritten = 0
    for example in examples(task):
        names, values = example.tokens[: 2 * n : 2], example.tokens[1 : 2 * n : 2]
        assert names.max() < half <= values.min()
        memory = recalled(example.tokens, n)
        asked = questions(example)
        assert min(asked) >= 2 * n
        assert asked == {p: memory[example.tokens[p]] for p in asked}
        # Of pairs at one position the last is asked; every pair's position is asked.
        last = {p: i for i, p in enumerate(example.positions.tolist())}
        assert sorted(last.values()) == np.flatnonzero(example.weights).tolist()
        assert {p: names[i] for p, i in last.items()} == {p: example.tokens[p] for p in last}
        repeated += n - len(memory)
        overwritten += n - len(asked)
    if task is SMALL["kla_mqar"]:
        assert repeated > 50 < overwritten


@pytest.mark.parametrize(("length", "alpha"), [(40, 0.9), (264, 0.1)])
def test_kla_draws_are_uniform_and_positions_follow_the_power_law(length, alpha):
    task = KLAMultiQuery(length=length, pairs=4, vocab_size=16, alpha=alpha)
    # By hand: p(g) = g^(alpha - 1) / sum, g = 1 .. 32 or 256.
    gaps = np.arange(1, length - 7)
    p = gaps ** (alpha - 1.0) / (gaps ** (alpha - 1.0)).sum()
    drawn = draws(task, 4000)
    assert abs(chi_square((drawn.positions - 8).ravel(), p)) < 4
    # Pairs draw for themselves.
    coarse = np.minimum(drawn.positions - 8, 3)
    q = np.array([*p[:3], p[3:].sum()])
    assert abs(chi_square(coarse[:, 0] * 4 + coarse[:, 1], np.outer(q, q).ravel())) < 4

    assert abs(chi_square(drawn.tokens[:, :8:2].ravel(), np.full(8, 1 / 8))) < 4
    assert abs(chi_square(drawn.tokens[:, 1:8:2].ravel() - 8, np.full(8, 1 / 8))) < 4
    assert abs(independent(drawn.tokens[:, :8:2], drawn.tokens[:, 1:8:2], (8, 8))) < 4
    joint = coarse * 8 + drawn.tokens[:, :8:2]
    assert abs(chi_square(joint.ravel(), np.outer(q, np.full(8, 1 / 8)).ravel())) < 4
    noise = drawn.tokens.copy()
    np.put_along_axis(noise, drawn.positions, -1, axis=1)
    noise = noise[:, 8:].ravel()
    assert abs(chi_square(noise[noise >= 0], np.full(16, 1 / 16))) < 4


def test_power_law():
    np.testing.assert_allclose(power_law(3, 1.0), [1 / 3] * 3)
    np.testing.assert_allclose(power_law(3, 1e-9), np.array([6, 3, 2]) / 11, rtol=1e-8)


def test_needle_is_one_pair():
    assert needle() == KLAMultiQuery(length=1024, pairs=1)
    assert needle(8192, vocab_size=64).length == 8192


@pytest.mark.parametrize(
    "task",
    [
        ZoologyMultiQuery(length=64, pairs=8),
        ZoologyMultiQuery(length=64, pairs=8, random_filler=False),
        SMALL["zoology_mqar"],
    ],
)
def test_zoology_distinct_pairs_then_queries(task):
    n, half = task.pairs, task.vocab_size // 2
    for example in examples(task):
        names, values = example.tokens[: 2 * n : 2], example.tokens[1 : 2 * n : 2]
        memory = recalled(example.tokens, n)
        assert len(memory) == len(set(memory.values())) == n
        assert 1 <= names.min() <= names.max() < half <= values.min()
        asked = questions(example)
        assert len(asked) == n
        assert min(asked) >= 2 * n
        assert all(p % 2 == 0 for p in asked)
        assert asked == {p: memory[example.tokens[p]] for p in asked}
        np.testing.assert_array_equal(example.tokens[example.positions], names)
        filler = np.delete(example.tokens, [*range(2 * n), *asked])
        assert task.random_filler == filler.any()


def test_zoology_draws_are_uniform_and_gaps_follow_the_power_law_without_replacement():
    task = ZoologyMultiQuery(length=28, pairs=2, vocab_size=16, alpha=0.25)
    p = np.arange(1, 13) ** -0.75 / (np.arange(1, 13) ** -0.75).sum()
    drawn = draws(task, 10000)
    gaps = (drawn.positions - 4) // 2
    assert abs(chi_square(gaps[:, 0], p)) < 4
    second = np.outer(p, p) / (1 - p)[:, None]
    np.fill_diagonal(second, 0)
    assert abs(chi_square(gaps[:, 1], second.sum(0))) < 4

    assert abs(chi_square(drawn.tokens[:, 0] - 1, np.full(7, 1 / 7))) < 4
    assert abs(chi_square(drawn.tokens[:, 1] - 8, np.full(8, 1 / 8))) < 4
    assert abs(independent(drawn.tokens[:, 0], drawn.tokens[:, 1], (7, 8))) < 4
    joint = gaps[:, 0] * 7 + drawn.tokens[:, 0] - 1
    assert abs(chi_square(joint, np.outer(p, np.full(7, 1 / 7)).ravel())) < 4
    assert abs(chi_square(drawn.tokens[:, 5::2].ravel(), np.full(16, 1 / 16))) < 4


@pytest.mark.parametrize("length", [5, 64])
def test_copy_shifted_recalls_the_first_half(length):
    half = length // 2
    for example in examples(Copy(length=length)):
        assert example.tokens[half] == 127
        assert example.tokens[:half].max() < 127
        np.testing.assert_array_equal(example.tokens[half + 1 :], example.tokens[: length - half - 1])
        assert questions(example) == {half + i: example.tokens[i] for i in range(half)}


@pytest.mark.parametrize("length", [5, 64])
def test_copy_leaks_without_the_shift(length):
    drawn = draws(Copy(length=length, shifted=False))
    assert (drawn.weights == 1).all()
    np.testing.assert_array_equal(drawn.positions[0], np.arange(length // 2 + 1, length))
    identity = np.take_along_axis(drawn.tokens, drawn.positions, axis=1)
    np.testing.assert_array_equal(identity, drawn.targets)

    drawn = draws(Copy(length=length))
    identity = np.take_along_axis(drawn.tokens, drawn.positions, axis=1)
    assert (identity == drawn.targets).mean() < 0.02
    assert Copy(shifted=False).leaks
    assert not Copy().leaks


@pytest.mark.parametrize("source", [1, 33])
def test_palindrome_reverses_the_source(source):
    task = Palindrome(source=source)
    assert (task.length, task.questions) == (2 * source, source)
    for example in examples(task):
        assert example.tokens[source] == 127
        assert example.tokens[:source].max() < 127
        whole = [*example.tokens[:source].tolist(), 127, *example.tokens[:source][::-1].tolist()]
        assert example.tokens.tolist() == whole[:-1]
        assert questions(example) == {p: whole[p + 1] for p in range(source, 2 * source)}


@pytest.mark.parametrize("task", [Copy(length=64), Palindrome(source=33)])
def test_sequences_are_uniform(task):
    assert abs(chi_square(draws(task).tokens[:, :32].ravel(), np.full(127, 1 / 127))) < 4


@pytest.mark.parametrize("task", [Stack(), SMALL["stack"], Stack(length=60, stacks=1, push=0.0)])
def test_stack_pops_what_was_pushed(task):
    verb = task.values + task.stacks
    for example in examples(task):
        stacks = [[] for _ in range(task.stacks)]
        wanted = {}
        for j, (operation, stack, value) in enumerate(example.tokens[: 3 * task.questions].reshape(-1, 3).tolist()):
            assert operation in (verb, verb + 1)
            assert 0 <= value < task.values
            contents = stacks[stack - task.values]
            if operation == verb:
                contents.append(value)
            else:
                wanted[3 * j + 1] = contents.pop()
                assert value == wanted[3 * j + 1]
        assert questions(example) == wanted
        assert (example.tokens[3 * task.questions :] == verb + 2).all()


def test_stack_draws():
    operations = draws(SMALL["stack"]).tokens[:, :120].reshape(64, 40, 3)
    pushes = operations[:, :, 0] == 9
    assert abs(chi_square((operations[:, :, 1] - 5).ravel(), np.full(4, 1 / 4))) < 4
    assert abs(chi_square(operations[pushes][:, 2], np.full(5, 1 / 5))) < 4
    assert abs(independent(operations[pushes][:, 1] - 5, operations[pushes][:, 2], (4, 5))) < 4
    # A stack that is not empty is pushed with probability 0.6, an empty one always.
    free = []
    for tokens, pushed in zip(operations, pushes, strict=True):
        depth = np.zeros(4, int)
        for stack, push in zip(tokens[:, 1] - 5, pushed, strict=True):
            if depth[stack]:
                free.append(push)
            else:
                assert push
            depth[stack] += 1 if push else -1
    assert abs(chi_square(np.array(free, int), np.array([0.4, 0.6]))) < 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_task("mqar"), "task 'mqar' is not known; known are vla_mqar, kla_mqar, zoology_mqar, copy"),
        (lambda: make_task("copy", size=3), "task 'copy' has no 'size'; it has length, vocab_size, shifted"),
        (lambda: make_task("vla_mqar", length=64), "task 'vla_mqar' needs max_pairs; it has max_pairs, length"),
        (lambda: VLAMultiQuery(128, 512), "vla_mqar.max_pairs is 128, wanted an integer of at least 1 and at most 127"),
        (lambda: VLAMultiQuery(8, 17), "vla_mqar.length is 17, wanted an integer of at least 18"),
        (lambda: VLAMultiQuery(2, 8).example(jax.random.key(0), pairs=3), "pairs is 3, wanted .* at most 2"),
        (lambda: VLAMultiQuery(2, 8).example(jax.random.key(0), 1, 3), "used is 3, wanted .* at least 4 and at most 8"),
        (lambda: VLAMultiQuery(2, 8).example(jax.random.key(0), used=9), "used is 9, wanted .* at least 6"),
        (lambda: KLAMultiQuery(length=64), "kla_mqar.length is 64, wanted an integer of at least 65"),
        (lambda: KLAMultiQuery(alpha=0.0), "kla_mqar.alpha is 0.0, wanted a positive number"),
        (lambda: ZoologyMultiQuery(length=31, pairs=8), "zoology_mqar.length is 31, wanted an integer of at least 32"),
        (lambda: ZoologyMultiQuery(64, 8, vocab_size=16), "zoology_mqar.pairs is 8, wanted .* at most 7"),
        (lambda: ZoologyMultiQuery(64, 8, random_filler=1), "zoology_mqar.random_filler is 1, wanted True or False"),
        (lambda: Copy(length=6.0), "copy.length is 6.0, wanted an integer of at least 4"),
        (lambda: Copy(length=True), "copy.length is True, wanted an integer"),
        (lambda: Stack(vocab_size=92), "stack.vocab_size is 92, wanted an integer of at least 93"),
        (lambda: Stack(push=1.0), "stack.push is 1.0, wanted a probability"),
        (lambda: Palindrome(source=0), "palindrome.source is 0, wanted an integer of at least 1"),
    ],
)
def test_mistakes_are_named(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_tasks_by_name():
    assert make_task("kla_mqar", length=2048) == KLAMultiQuery(length=2048)
    assert make_task("vla_mqar", max_pairs=8, length=25) == VLAMultiQuery(8, 25)
