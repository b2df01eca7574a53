"""The mixers of another package, jax-linear-attention from PyPI, to be timed beside ours where it is installed."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from functools import cache
from typing import Any

from linattn_jax.mixers.chunking import repeat_heads
from linattn_jax.mixers.state import MatrixState
from linattn_jax.types import Array

# Its names of our mixers. It has no undecayed linear attention and no kaczmarz.
_KINDS = {
    "simple_gla": "simple_gla",
    "gla": "gla",
    "delta_rule": "deltanet",
    "gated_delta_rule": "gated_deltanet",
}

try:
    NAME = f"jax-linear-attention {importlib.metadata.version('jax-linear-attention')}"
except importlib.metadata.PackageNotFoundError:
    NAME = "jax-linear-attention"


def _kind(op: str) -> tuple[Callable[..., Any], str] | None:
    """The package's function and its name of our mixer `op`; None without one."""
    try:
        from jla.ops import linear_attention
    except ImportError:
        return None
    return (linear_attention, _KINDS[op]) if op in _KINDS else None


def _renamed(gates: dict[str, Array]) -> dict[str, Array]:
    return {"g" if name == "log_decay" else name: gate for name, gate in gates.items()}


@cache
def find(op: str) -> Callable[..., Any] | None:
    """The package's chunkwise form in plain JAX with the arguments and results of our mixer `op`; None without one.

    It wants as many key heads as value heads.
    """
    if (found := _kind(op)) is None:
        return None
    linear_attention, kind = found

    def call(q: Array, k: Array, v: Array, **gates: Array) -> tuple[Array, MatrixState]:
        output, state = linear_attention(kind, q, k, v, impl="chunked", output_final_state=True, **_renamed(gates))
        return output, MatrixState(state)

    return call


@cache
def kernel(op: str) -> Callable[..., Any] | None:
    """The package's own choice of implementation, its kernel where one serves; arguments as for `find`, no state.

    Shared key heads are repeated inside, as whoever calls it has to.
    """
    if (found := _kind(op)) is None:
        return None
    linear_attention, kind = found

    def call(q: Array, k: Array, v: Array, **gates: Array) -> tuple[Array, None]:
        q, k = (repeat_heads(x, v.shape[2] // x.shape[2], axis=2) for x in (q, k))
        return linear_attention(kind, q, k, v, **_renamed(gates))[0], None

    return call
