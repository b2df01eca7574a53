"""Powers of diagonal complex transitions a = e^{log_a} that stay exact over long rows.

A float32 a is rounded by 6e-8, which T tokens multiply by T: half a per cent at 65,536 tokens. Here a is the sum of two
float32 numbers, e^{i 2 pi step / 4096} from a table and what is left, and the angle of a power is n step, exact in
integers, plus n times a rest below 2 pi / 8192. No sum or product needs to be rounded in a certain way, so that no
compiler can undo it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from linattn_jax.mixers.chunking import Affine
from linattn_jax.types import Array

_STEPS = 4096
_circle = np.exp(2j * np.pi * np.arange(_STEPS) / _STEPS)
_COARSE = _circle.astype(np.complex64)
_FINE = (_circle - _COARSE).astype(np.complex64)
# The angle of a step in three parts. The first two have 8 bits: their products with up to 2^16 steps are exact.
_ANGLE = 201 * 2.0**-17, 253 * 2.0**-29, 2 * np.pi / _STEPS - 201 * 2.0**-17 - 253 * 2.0**-29
_LARGEST = 100.0  # angles for which the above holds; beyond, a is that of one float32 number


def _at(table: np.ndarray, index: Array) -> Array:
    return jnp.asarray(table).at[index % _STEPS].get(mode="promise_in_bounds")


class Transition(NamedTuple):
    """The modes' a = coarse + fine, of any one shape; without `coarse` in float64, where one number has the digits."""

    coarse: Array | None
    fine: Array

    def expanded(self) -> Transition:
        """The same with an axis of 1 behind the modes."""
        return Transition(None if self.coarse is None else self.coarse[..., None], self.fine[..., None])

    def advance(self, x: Array, write: Array) -> Array:
        """a x + write."""
        write = self.fine * x + write
        return write if self.coarse is None else self.coarse * x + write


class Modes(NamedTuple):
    """The modes' log_a, any one shape, as rate + i 2 pi step / 4096; `step` is None in float64."""

    rate: Array
    step: Array | None

    def raised(self, exponent: Array) -> Modes:
        """The modes of a^exponent, for whole exponents >= 0 that broadcast against log_a; 0 for infinite ones."""
        finite, some = exponent < jnp.inf, exponent > 0
        factor = jnp.where(finite & some, exponent, 1)  # 0 times -inf is NaN
        decay = jnp.where(finite, jnp.where(some, factor * self.rate.real, 0), -jnp.inf)
        rate = lax.complex(decay, jnp.where(some, factor * self.rate.imag, 0))
        return Modes(rate, None if self.step is None else jnp.where(some, factor.astype(jnp.int32) * self.step, 0))

    def value(self) -> Array:
        """e^{log_a}, as one number."""
        growth = jnp.exp(self.rate)
        return growth if self.step is None else _at(_COARSE, self.step) * growth

    def transition(self) -> Transition:
        """e^{log_a}, with about ten digits where |Re log_a| is small, which is where they count."""
        if self.step is None:
            return Transition(None, self.value())
        slow = self.rate.real > -0.5
        growth = jnp.expm1(jnp.where(slow, self.rate, 0))
        coarse, fine = _at(_COARSE, self.step), _at(_FINE, self.step)
        fine = fine + (coarse + fine) * growth
        return Transition(jnp.where(slow, coarse, 0), jnp.where(slow, fine, self.value()))


def split_modes(log_a: Array) -> Modes:
    """`log_a` (any complex array; -inf is legal) made ready for its powers."""
    if log_a.dtype != jnp.complex64:
        return Modes(log_a, None)
    angle = log_a.imag
    step = jnp.where(jnp.abs(angle) < _LARGEST, jnp.round(angle * (_STEPS / (2 * np.pi))), 0)
    rest = angle
    for part in _ANGLE:
        rest = rest - step * jnp.float32(part)
    return Modes(lax.complex(log_a.real, rest), step.astype(jnp.int32))


def counted(modes: Modes) -> Affine:
    """Transitions [B or 1, T] that are numbers of tokens under `modes` [H, N]; an infinite one forgets everything."""

    def apply(count: Array, x: Array) -> Array:
        power = modes.raised(count[..., None, None]).value()
        return power.reshape(*power.shape, *(1,) * (x.ndim - power.ndim)) * x

    return Affine(apply, jnp.add, jnp.zeros_like, jnp.inf)
