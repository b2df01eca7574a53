"""Pallas kernels behind the mixers, usable without Flax; a folder for each operation.

Kernels run where their hardware is. On a CPU they run interpreted, for tests, and only inside `interpret()`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_interpreted: ContextVar[bool] = ContextVar("interpreted", default=False)


@contextmanager
def interpret() -> Iterator[None]:
    """Kernels traced inside run interpreted on the CPU, for checking values and, where JAX raises on them, races."""
    token = _interpreted.set(True)
    try:
        yield
    finally:
        _interpreted.reset(token)


def interpreting() -> bool:
    """Whether the caller is inside `interpret()`."""
    return _interpreted.get()
