"""Synthetic tasks that transform a whole sequence: copy, palindrome, and stacks interleaved."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

import jax
import jax.numpy as jnp
from jax import lax

from linattn_jax.data.task import Example, check_flag, check_size, make_example
from linattn_jax.types import Array, UserError


@dataclass(frozen=True)
class Copy:
    """Copy (VLA, Pandey and Singh 2026): a sequence, a separator, and the sequence again.

    The tokens are the first `length` of [x_1 .. x_n SEP x_1 .. x_n] with n = length // 2; SEP is vocab_size - 1 and
    the x are uniform below it. For length 6:

        position       0  1  2  3    4  5
        token          a  b  c  SEP  a  b
        target                  a    b  c     shifted: S = n, positions n .. 2n - 1
        without shift                a  b     S = length - n - 1, positions n + 1 .. length - 1

    The paper's code, at T = 64, does not shift: the target at position i is the token at i itself, an identity task,
    solved without memory, and in the paper by every model. `shifted=False` is that protocol and `leaks` says so; with
    `shifted`, the default, the next token is predicted, which takes n recalls.

    Ours: the shift; that an even T drops the last x, which shifted models need not read; that the first half is not
    scored in either form.

    Raises:
        UserError: a size that is out of range.

    >>> e = Copy(length=6).example(jax.random.key(0))
    >>> int(e.tokens[3]), e.positions.tolist(), e.targets.tolist() == e.tokens[:3].tolist()
    (127, [3, 4, 5], True)
    """

    length: int = 64
    vocab_size: int = 128
    shifted: bool = True

    def __post_init__(self) -> None:
        check_size("copy.length", self.length, 4)
        check_size("copy.vocab_size", self.vocab_size, 2)
        check_flag("copy.shifted", self.shifted)

    @property
    def questions(self) -> int:
        """S: n shifted, else the tokens after the separator."""
        half = self.length // 2
        return half if self.shifted else self.length - half - 1

    @property
    def leaks(self) -> bool:
        """Whether the target of a position is the token that is read there."""
        return not self.shifted

    def example(self, key: Array) -> Example:
        """One example from one PRNG key; all its weights are 1."""
        half = self.length // 2
        symbols = jax.random.randint(key, (half,), 0, self.vocab_size - 1, jnp.int32)
        separator = jnp.full((1,), self.vocab_size - 1, jnp.int32)
        tokens = jnp.concatenate([symbols, separator, symbols])[: self.length]
        positions = jnp.arange(self.questions) + (half if self.shifted else half + 1)
        targets = symbols if self.shifted else tokens[half + 1 :]
        return make_example(tokens, positions, targets, jnp.ones(self.questions))


@dataclass(frozen=True)
class Palindrome:
    """Palindrome (KLA, Zou, Ren and Liu 2026): a sequence, a separator, and the sequence in reverse.

    The sequence is [x_1 .. x_n SEP x_n .. x_1], n = `source`, of 2n + 1 tokens; SEP is vocab_size - 1 (127) and the x
    are uniform below it. Position i predicts token i + 1, so the last token is a target and never read: T = 2n, and
    S = n, at the positions n (SEP, which predicts x_n) .. 2n - 1. For source 3:

        position   0  1  2  3    4  5
        token      a  b  c  SEP  c  b
        target              c    b  a

    The paper counts the sequence with its last token, 2049 for
    source 1024, and its run scores the first reversed token too.

    Ours: that the last token is left out, which changes no causal model's loss.

    Raises:
        UserError: a size that is out of range.

    >>> e = Palindrome(source=3).example(jax.random.key(0))
    >>> int(e.tokens[3]), e.positions.tolist(), e.targets.tolist() == e.tokens[:3].tolist()[::-1]
    (127, [3, 4, 5], True)
    """

    source: int = 1024
    vocab_size: int = 128

    def __post_init__(self) -> None:
        check_size("palindrome.source", self.source, 1)
        check_size("palindrome.vocab_size", self.vocab_size, 2)

    @property
    def length(self) -> int:
        """T = 2 source."""
        return 2 * self.source

    @property
    def questions(self) -> int:
        """S = source."""
        return self.source

    def example(self, key: Array) -> Example:
        """One example from one PRNG key; all its weights are 1."""
        n = self.source
        symbols = jax.random.randint(key, (n,), 0, self.vocab_size - 1, jnp.int32)
        separator = jnp.full((1,), self.vocab_size - 1, jnp.int32)
        tokens = jnp.concatenate([symbols, separator, symbols[:0:-1]])
        return make_example(tokens, n + jnp.arange(n), symbols[::-1], jnp.ones(n))


@dataclass(frozen=True)
class Stack:
    """Stack (KLA, Zou, Ren and Liu 2026): operations on many stacks; what does a pop return?

    An operation is 3 tokens, [PUSH stack value] or [POP stack value], and there are length // 3; PAD fills the 0 to 2
    tokens that are left. The stack is uniform, the operation a push with probability `push`, its value uniform. Ids:

        0 .. values - 1                   values                  0 .. 25
        values .. values + stacks - 1     stacks                  26 .. 89
        values + stacks                   PUSH                    90
        values + stacks + 1               POP                     91
        values + stacks + 2               PAD                     92; those above are not used

    Slot j is operation j, so S = length // 3; it is scored at the stack's token, position 3j + 1, if the operation is
    a pop, and its target is the value popped. For length 10, with stacks s and t and values a and b:

        position   0     1  2  3     4  5  6    7  8  9
        token      PUSH  s  a  PUSH  t  b  POP  s  a  PAD
        target                                  a

    The paper's: 64 stacks, 26 values, vocabulary 128, push 0.6, the triples, and that only a pop's stack token is
    scored.

    Ours: the ids; that the third token of a pop is the value popped (which comes after the question), as a correct
    answer would be when the sequence is generated; that a pop of an empty stack is a push instead, so that pushes are
    more than `push` of the operations while stacks are empty; that stacks are drawn whatever they hold; PAD.

    Raises:
        UserError: a size that is out of range.

    >>> task = Stack(length=10, stacks=2)
    >>> task.questions, task.example(jax.random.key(0)).positions.tolist()
    (3, [1, 4, 7])
    """

    length: int = 1024
    stacks: int = 64
    values: int = 26
    vocab_size: int = 128
    push: float = 0.6

    def __post_init__(self) -> None:
        check_size("stack.length", self.length, 6)
        check_size("stack.stacks", self.stacks, 1)
        check_size("stack.values", self.values, 1)
        check_size("stack.vocab_size", self.vocab_size, self.values + self.stacks + 3)
        if not isinstance(self.push, Real) or isinstance(self.push, bool) or not 0 <= self.push < 1:
            raise UserError(f"stack.push is {self.push!r}, wanted a probability of at least 0 and below 1.")

    @property
    def questions(self) -> int:
        """S, the operations, of which pops are scored."""
        return self.length // 3

    def example(self, key: Array) -> Example:
        """One example from one PRNG key; the weights of pops are 1."""
        operations = self.questions
        key_stack, key_value, key_push = jax.random.split(key, 3)
        stacks = jax.random.randint(key_stack, (operations,), 0, self.stacks, jnp.int32)
        pushed = jax.random.randint(key_value, (operations,), 0, self.values, jnp.int32)
        wants_push = jax.random.bernoulli(key_push, self.push, (operations,))

        # A stack is a list linked through the operations that pushed (-1 at its bottom): O(stacks + operations) of
        # state, where a table of contents takes their product.
        def operate(state: tuple[Array, Array], operation: tuple[Array, Array, Array]):
            top, below = state
            index, stack, wants = operation
            found = top[stack]
            pushes = wants | (found < 0)
            below = below.at[index].set(found)
            top = top.at[stack].set(jnp.where(pushes, index, below[found]))
            return (top, below), (pushes, found)

        empty = jnp.full((self.stacks,), -1, jnp.int32), jnp.full((operations,), -1, jnp.int32)
        index = jnp.arange(operations, dtype=jnp.int32)
        _, (pushes, found) = lax.scan(operate, empty, (index, stacks, wants_push))
        values = jnp.where(pushes, pushed, pushed[found])
        verbs = self.values + self.stacks + jnp.where(pushes, 0, 1)
        triples = jnp.stack([verbs, self.values + stacks, values], axis=1).reshape(-1)
        tokens = jnp.pad(triples, (0, self.length - 3 * operations), constant_values=self.values + self.stacks + 2)
        return make_example(tokens, 3 * index + 1, values, ~pushes)
