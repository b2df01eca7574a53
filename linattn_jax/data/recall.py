"""Associative recall with many queries, as three papers generate it, and every synthetic task by name."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from linattn_jax.data.sequences import Copy, Palindrome, Stack
from linattn_jax.data.task import Example, Task, check_exponent, check_flag, check_size, make_example
from linattn_jax.types import Array, UserError

__all__ = [
    "TASKS",
    "Copy",
    "Example",
    "KLAMultiQuery",
    "Palindrome",
    "Stack",
    "Task",
    "VLAMultiQuery",
    "ZoologyMultiQuery",
    "make_task",
    "needle",
]


def power_law(size: int, alpha: float) -> np.ndarray:
    """p(g) ~ g^(alpha - 1) over g = 1 .. size, float64 [size]; alpha 1 is uniform, smaller prefers small g."""
    weights = np.arange(1, size + 1, dtype=np.float64) ** (alpha - 1)
    return weights / weights.sum()


def _draw(key: Array, probabilities: np.ndarray, count: int) -> Array:
    """Independent indices into `probabilities`, int32 [count], by the inverse distribution function."""
    # Cuts of 32 random bits: a float32 uniform has 24, too coarse for the tail over thousands of positions.
    cuts = np.rint(np.cumsum(probabilities)[:-1] * 2.0**32)
    cuts = np.minimum(cuts, 2.0**32 - 1).astype(np.uint32)
    bits = jax.random.bits(key, (count,), jnp.uint32)
    return jnp.searchsorted(jnp.asarray(cuts), bits, side="right").astype(jnp.int32)


def _interleave(keys: Array, values: Array) -> Array:
    return jnp.stack([keys, values], axis=1).reshape(-1)


@dataclass(frozen=True)
class VLAMultiQuery:
    """Multi-query recall of VLA (Pandey and Singh 2026): pairs, a separator, then nothing but queries.

    [k_1 v_1 .. k_n v_n SEP q_1 q_2 ..]. SEP is vocab_size - 1 (127); keys are distinct, uniform over the ids below it;
    values are uniform over the same ids, with replacement; every position after SEP is a query, one of the n keys
    with replacement, and the target at the query's own position is that key's value, which is not shown again. For 2
    pairs and length 8, of which 7 used:

        position   0  1  2  3  4    5  6  7
        token      7  3  9  7  SEP  9  7  SEP
        target                      7  3
        weight                      1  1  0

    The paper's settings: capacity, n in {4, 8, 12, 16, 24} at T = 3n + 1; length, n = 8 at T in {49, 64, 128, 256,
    512}. All of them fit one compiled program: `example` takes n and the used length, which may be traced.

    Slot j is position 2n + 1 + j. S = length - 3, the questions of n = 1, because n may be traced; slots at or beyond
    the used length have weight 0, and a position that would lie outside is length - 1.

    Ours: the padding, which is SEP and harmless to a causal model; the slots.

    max_pairs: the largest n, at most vocab_size - 1.
    length: T, at least 2 max_pairs + 2.

    Raises:
        UserError: a size that is out of range.

    >>> e = VLAMultiQuery(max_pairs=2, length=8).example(jax.random.key(0), used=7)
    >>> e.positions.tolist(), e.weights.tolist()
    ([5, 6, 7, 7, 7], [1.0, 1.0, 0.0, 0.0, 0.0])
    >>> e.tokens[jnp.array([4, 7])].tolist()
    [127, 127]
    """

    max_pairs: int
    length: int
    vocab_size: int = 128

    def __post_init__(self) -> None:
        check_size("vla_mqar.vocab_size", self.vocab_size, 2)
        check_size("vla_mqar.max_pairs", self.max_pairs, 1, self.vocab_size - 1)
        check_size("vla_mqar.length", self.length, 2 * self.max_pairs + 2)

    @property
    def questions(self) -> int:
        """S = length - 3, the most that may be asked."""
        return self.length - 3

    def example(self, key: Array, pairs: int | Array | None = None, used: int | Array | None = None) -> Example:
        """One example from one PRNG key.

        Args:
            key: a PRNG key.
            pairs: n, 1 to max_pairs, default max_pairs; an integer or an integer array of shape ().
            used: tokens before the padding, 2n + 2 to length, default length; likewise.

        Raises:
            UserError: a setting that is out of range; one that is an array is not checked.
        """
        pairs = self.max_pairs if pairs is None else pairs
        used = self.length if used is None else used
        if not isinstance(pairs, jax.Array):
            check_size("pairs", pairs, 1, self.max_pairs)
        if not isinstance(used, jax.Array):
            check_size("used", used, 2 * pairs + 2 if isinstance(pairs, Integral) else 4, self.length)

        key_keys, key_values, key_queries = jax.random.split(key, 3)
        separator = self.vocab_size - 1
        keys = jax.random.permutation(key_keys, separator)[: self.max_pairs]
        values = jax.random.randint(key_values, (self.max_pairs,), 0, separator, jnp.int32)
        asked = jax.random.randint(key_queries, (self.questions,), 0, pairs, jnp.int32)

        front = jnp.pad(_interleave(keys, values), (0, self.length - 2 * self.max_pairs))
        position = jnp.arange(self.length, dtype=jnp.int32)
        first = 2 * jnp.asarray(pairs, jnp.int32) + 1
        queries = keys[asked[jnp.clip(position - first, 0, self.questions - 1)]]
        tokens = jnp.where(position < first - 1, front, jnp.where(position < first, separator, queries))
        tokens = jnp.where(position < used, tokens, separator)
        positions = first + jnp.arange(self.questions, dtype=jnp.int32)
        return make_example(tokens, jnp.minimum(positions, self.length - 1), values[asked], positions < used)


@dataclass(frozen=True)
class KLAMultiQuery:
    """Multi-query recall of KLA (Zou, Ren and Liu 2026): pairs in front, a query for each among random tokens.

    [k_1 v_1 .. k_n v_n, length - 2n tokens]. Keys are uniform over the lower half of the vocabulary, values over the
    upper half, both with replacement. The remainder is uniform over the full vocabulary, so it may hold keys and
    values by chance. Each pair then writes its key over the remainder at a position of its own, the g-th with
    probability ~ g^(alpha - 1), g = 1 .. length - 2n; pairs may meet, and the last one stays. The target at a query's
    own position is the value, which is not shown again. For 2 pairs, length 8 and vocabulary 10:

        position   0  1  2  3  4  5  6  7
        token      1  7  4  5  8  4  1  2
        target                    5  7

    Slot j is pair j, so S = pairs; its weight is 0 where another pair stands at its position.

    The paper's: 32 pairs at length 256, trained and read to 8 times that; vocabulary 8192, alpha 0.1; one pair at
    length 1024 is its needle in a haystack, see `needle`.

    Ours, where our notes of the generator are silent: g counts from the end of the pairs, as Zoology's does, for every
    pair alike; of pairs that meet, the last stays; a key drawn twice has the value of its last pair, at every query
    of it, as a memory that overwrites would answer (31/4096 of the queries have such a key, so an evaluation
    that keeps each pair's own value differs by less than 1%).

    Raises:
        UserError: a size that is out of range.

    >>> task = KLAMultiQuery(length=8, pairs=2, vocab_size=10)
    >>> e = task.example(jax.random.key(0))
    >>> bool((e.tokens[:4:2] < 5).all()), bool((e.tokens[1:4:2] >= 5).all()), bool((e.positions >= 4).all())
    (True, True, True)
    """

    length: int = 256
    pairs: int = 32
    vocab_size: int = 8192
    alpha: float = 0.1

    def __post_init__(self) -> None:
        check_size("kla_mqar.pairs", self.pairs, 1)
        check_size("kla_mqar.length", self.length, 2 * self.pairs + 1)
        check_size("kla_mqar.vocab_size", self.vocab_size, 2)
        check_exponent("kla_mqar.alpha", self.alpha)

    @property
    def questions(self) -> int:
        """S = pairs."""
        return self.pairs

    def example(self, key: Array) -> Example:
        """One example from one PRNG key; its weights are 0 where a later pair took the position."""
        n, half = self.pairs, self.vocab_size // 2
        key_keys, key_values, key_gaps, key_filler = jax.random.split(key, 4)
        keys = jax.random.randint(key_keys, (n,), 0, half, jnp.int32)
        values = jax.random.randint(key_values, (n,), half, self.vocab_size, jnp.int32)
        positions = 2 * n + _draw(key_gaps, power_law(self.length - 2 * n, self.alpha), n)
        filler = jax.random.randint(key_filler, (self.length,), 0, self.vocab_size, jnp.int32)

        pair = jnp.arange(n, dtype=jnp.int32)
        last = jnp.max(jnp.where(keys[:, None] == keys[None, :], pair, 0), axis=1)
        # A scatter of duplicates picks no certain winner; the maximum does, on every device.
        winner = jnp.full((self.length,), -1, jnp.int32).at[positions].max(pair)
        tokens = jnp.where(winner >= 0, keys[winner], filler).at[: 2 * n].set(_interleave(keys, values))
        return make_example(tokens, positions, values[last], winner[positions] == pair)


def needle(length: int = 1024, vocab_size: int = 8192, alpha: float = 0.1) -> KLAMultiQuery:
    """KLA's single needle (Zou, Ren and Liu 2026): their recall task with one pair. A proxy, not RULER's S-NIAH.

    Raises:
        UserError: a size that is out of range.

    >>> needle().questions
    1
    """
    return KLAMultiQuery(length=length, pairs=1, vocab_size=vocab_size, alpha=alpha)


@dataclass(frozen=True)
class ZoologyMultiQuery:
    """Multi-query recall of Zoology (Arora, Eyuboglu et al. 2023): distinct keys, queries at even steps behind them.

    [k_1 v_1 .. k_n v_n, length - 2n tokens]. Keys are distinct, from 1 .. vocab_size // 2 - 1; values are distinct,
    from vocab_size // 2 .. vocab_size - 1. The query of each pair is at position 2n + 2 (g - 1), with its gap g
    from 1 .. (length - 2n) // 2, drawn pair by pair with probability ~ g^(alpha - 1) among the gaps that no
    earlier pair has. The target at a query's own position is its value. All other tokens are filler. For 2 pairs,
    length 8 and vocabulary 10:

        position   0  1  2  3  4  5  6  7
        token      1  7  4  5  4  9  1  0
        target                 5     7

    Slot j is pair j, so S = pairs, and all weights are 1.

    random_filler: as in the published generator (zoology/data/multiquery_ar.py, `random_non_queries`, on by default),
        filler is uniform over the full vocabulary, so it may hold keys and values by chance; without, it is token 0,
        which is no key.

    The published generator also repeats the pairs in several passes if asked to, which is not offered, and wants an
    even length and a vocabulary larger than it, which nothing here needs.

    Raises:
        UserError: a size that is out of range.

    >>> task = ZoologyMultiQuery(length=8, pairs=2, vocab_size=10, random_filler=False)
    >>> e = task.example(jax.random.key(0))
    >>> sorted(e.positions.tolist()), e.tokens[jnp.array([5, 7])].tolist()
    ([4, 6], [0, 0])
    """

    length: int
    pairs: int
    vocab_size: int = 8192
    alpha: float = 0.01
    random_filler: bool = True

    def __post_init__(self) -> None:
        check_size("zoology_mqar.vocab_size", self.vocab_size, 4)
        check_size("zoology_mqar.pairs", self.pairs, 1, self.vocab_size // 2 - 1)
        check_size("zoology_mqar.length", self.length, 4 * self.pairs)
        check_exponent("zoology_mqar.alpha", self.alpha)
        check_flag("zoology_mqar.random_filler", self.random_filler)

    @property
    def questions(self) -> int:
        """S = pairs."""
        return self.pairs

    def example(self, key: Array) -> Example:
        """One example from one PRNG key; all its weights are 1."""
        n, half = self.pairs, self.vocab_size // 2
        key_keys, key_values, key_gaps, key_filler = jax.random.split(key, 4)
        keys = 1 + jax.random.permutation(key_keys, half - 1)[:n]
        values = half + jax.random.permutation(key_values, self.vocab_size - half)[:n]
        # The largest of log p + Gumbel noise, in order, are draws one after the other without replacement.
        log_probabilities = jnp.asarray(np.log(power_law((self.length - 2 * n) // 2, self.alpha)), jnp.float32)
        noise = jax.random.gumbel(key_gaps, log_probabilities.shape, jnp.float32)
        positions = 2 * n + 2 * lax.top_k(log_probabilities + noise, n)[1]

        filler = jnp.zeros((self.length,), jnp.int32)
        if self.random_filler:
            filler = jax.random.randint(key_filler, (self.length,), 0, self.vocab_size, jnp.int32)
        tokens = filler.at[: 2 * n].set(_interleave(keys, values)).at[positions].set(keys)
        return make_example(tokens, positions, values, jnp.ones(n))


TASKS: dict[str, type[Any]] = {
    "vla_mqar": VLAMultiQuery,
    "kla_mqar": KLAMultiQuery,
    "zoology_mqar": ZoologyMultiQuery,
    "copy": Copy,
    "stack": Stack,
    "palindrome": Palindrome,
}


def make_task(name: str, **sizes: Any) -> Task:
    """The task of that name in `TASKS`, with the fields of its class.

    Raises:
        UserError: a name or field that is not known, a field that is missing, or a size that is out of range.

    >>> make_task("copy", length=32)
    Copy(length=32, vocab_size=128, shifted=True)
    """
    if name not in TASKS:
        raise UserError(f"task {name!r} is not known; known are {', '.join(TASKS)}.")
    fields = dataclasses.fields(TASKS[name])
    names = [field.name for field in fields]
    for size in sizes:
        if size not in names:
            raise UserError(f"task {name!r} has no {size!r}; it has {', '.join(names)}.")
    for field in fields:
        if field.default is dataclasses.MISSING and field.name not in sizes:
            raise UserError(f"task {name!r} needs {field.name}; it has {', '.join(names)}.")
    return TASKS[name](**sizes)
