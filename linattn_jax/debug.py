"""Checks of values, which compiled code cannot raise on by itself: off by default, on inside `value_checks`.

>>> import jax.numpy as jnp
>>> from linattn_jax import simple_gla
>>> ones = jnp.ones((1, 3, 1, 2))
>>> checked(simple_gla)(ones, ones, ones, jnp.full((1, 3, 1), 0.5))
Traceback (most recent call last):
    ...
ValueError: simple_gla: log_decay is positive somewhere, wanted natural logs in [-inf, 0].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import checkify

from linattn_jax.types import Array

# JAX's caches know of it: what was compiled with the checks off is traced anew where they are on, and the other way.
_ON = jax.make_user_context(False)


def value_checks(on: bool = True) -> AbstractContextManager[None]:
    """Mixers traced inside state what their values must be, for `jax.experimental.checkify` to find where they are not.

    What is traced inside must run under `checkify.checkify`; `checked` does both.
    """
    return _ON(on)


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, compiled with value checks, raising ValueError with the first that fails.

    Arguments must be arrays or pytrees of arrays; bind options first, with functools.partial. Checks are of the inputs
    and initial states of every mixer and short convolution called inside, not of single steps of mixers: NaN and
    infinities among real tokens, a positive log_decay, a step beta ||k||^2 or eta outside [0, 2]. Check the forward
    pass: of a scan that is differentiated, such as the decoder's layers, JAX loses checks.
    """
    compiled = jax.jit(checkify.checkify(function, errors=checkify.user_checks))

    @wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        with value_checks():
            error, result = compiled(*arguments, **keywords)
        message = error.get()
        if message is not None:
            raise ValueError(message.split(" (`check` failed)")[0])
        return result

    return call


def check_inputs(name: str, inputs: Mapping[str, Array | list[Array]], valid: Array | None) -> None:
    """States what the inputs [B, T, ...] of a mixer must be at its real tokens (`valid` [B, T], None for all).

    A list holds the arrays of a state.
    """
    if not _ON.value:
        return

    def every(ok: Array) -> Array:
        if valid is not None:
            ok = ok | ~valid.reshape(valid.shape + (1,) * (ok.ndim - valid.ndim))
        return jnp.all(ok)

    for key, x in inputs.items():
        if isinstance(x, list):
            finite = jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in x]).all()
            checkify.check(finite, f"{name}: {key} is NaN or infinite somewhere.")
        elif key == "log_decay":
            checkify.check(every(~jnp.isnan(x) & ~jnp.isposinf(x)), f"{name}: {key} is NaN or inf somewhere.")
            checkify.check(every(x <= 0), f"{name}: {key} is positive somewhere, wanted natural logs in [-inf, 0].")
        else:
            checkify.check(every(jnp.isfinite(x)), f"{name}: {key} is NaN or infinite somewhere.")


def check_step(name: str, step: Array, valid: Array | None) -> None:
    """States that the delta rule's step [B, T, H], relative to an exact projection, is in [0, 2] at real tokens."""
    if not _ON.value:
        return
    ok = (step >= 0) & (step <= 2 + 1e-3)  # the rounding of keys in bfloat16 is not the user's doing
    if valid is not None:
        ok = ok | ~valid[..., None]
    checkify.check(jnp.all(ok), f"{name}: a step beta ||k||^2 (or eta) is outside [0, 2], where the rule diverges.")
