"""What every synthetic task shares: the shape of an example, the interface, and the checks of sizes."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp

from linattn_jax.types import Array, ArrayLike, UserError


class Example(NamedTuple):
    """One sequence and what is asked about it.

    A model reads `tokens`; its logits at `positions[s]` are scored against `targets[s]` with `weights[s]`. Positions
    are within the sequence also where the weight is 0, so logits may be gathered without a mask. A batch of examples
    has the same fields with a leading axis.

    tokens: int32 [T].
    positions: int32 [S].
    targets: int32 [S], 0 where the weight is 0.
    weights: float32 [S], 1 where the slot is scored, else 0.
    """

    tokens: Array
    positions: Array
    targets: Array
    weights: Array


class Task(Protocol):
    """A synthetic task: a frozen dataclass of static sizes, so that it can be a static argument of `jax.jit`."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        ...

    @property
    def length(self) -> int:
        """T, the tokens of an example."""
        ...

    @property
    def questions(self) -> int:
        """S, the slots of an example, scored or not."""
        ...

    @property
    def example(self) -> Any:
        """A pure function from one PRNG key (and a setting, where the task has one) to one `Example`."""
        ...


def make_example(tokens: ArrayLike, positions: ArrayLike, targets: ArrayLike, weights: ArrayLike) -> Example:
    """An `Example` in its dtypes, with the targets of slots that are not scored set to 0."""
    weights = jnp.asarray(weights, jnp.float32)
    return Example(
        jnp.asarray(tokens, jnp.int32),
        jnp.asarray(positions, jnp.int32),
        jnp.where(weights > 0, jnp.asarray(targets, jnp.int32), 0),
        weights,
    )


def check_size(name: str, value: Any, least: int, most: int | None = None) -> None:
    """Raises UserError unless `value` is an integer of at least `least` and at most `most`."""
    wanted = f"an integer of at least {least}" + ("" if most is None else f" and at most {most}")
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise UserError(f"{name} is {value!r}, wanted {wanted}.")
    if int(value) < least or (most is not None and int(value) > most):
        raise UserError(f"{name} is {int(value)}, wanted {wanted}.")


def check_flag(name: str, value: Any) -> None:
    """Raises UserError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise UserError(f"{name} is {value!r}, wanted True or False.")


def check_exponent(name: str, value: Any) -> None:
    """Raises UserError unless `value` is a positive finite number."""
    if not isinstance(value, Real) or isinstance(value, bool) or not 0 < float(value) < math.inf:
        raise UserError(f"{name} is {value!r}, wanted a positive number.")
