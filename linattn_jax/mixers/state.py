"""The states that mixers carry: small NamedTuples, the same for every implementation of a mixer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jax import export
from jax.typing import DTypeLike

from linattn_jax.types import Array


def serializable[State](state: type[State]) -> type[State]:
    """A state that programs exported by `jax.export` may take and return, and yet be serialised."""
    return export.register_namedtuple_serialization(state, serialized_name=f"linattn_jax.{state.__name__}")


@serializable
class MatrixState(NamedTuple):
    """The memory of a matrix-valued recurrence: S [B, H, K, V], rows are key channels."""

    S: Array


@serializable
class NormalizedState(NamedTuple):
    """A memory S [B, H, K, V] and the sum of its keys z [B, Hk, K], which normalises reads."""

    S: Array
    z: Array


def matrix_init(
    batch: int,
    heads: int,
    key_size: int,
    value_size: int,
    *,
    key_heads: int | None = None,
    dtype: DTypeLike = jnp.float32,
) -> MatrixState:
    """The empty memory, zeros; `key_heads` is accepted because every mixer's init takes it."""
    del key_heads
    return MatrixState(jnp.zeros((batch, heads, key_size, value_size), dtype))


def normalized_init(
    batch: int,
    heads: int,
    key_size: int,
    value_size: int,
    *,
    key_heads: int | None = None,
    dtype: DTypeLike = jnp.float32,
) -> NormalizedState:
    """The empty memory and key sum, zeros; `key_heads` defaults to `heads`."""
    return NormalizedState(
        jnp.zeros((batch, heads, key_size, value_size), dtype), jnp.zeros((batch, key_heads or heads, key_size), dtype)
    )


def matrix_empty(sizes: Mapping[str, int], dtype: DTypeLike) -> MatrixState:
    """`matrix_init` from sizes by axis name."""
    return matrix_init(sizes["B"], sizes["H"], sizes["K"], sizes["V"], dtype=dtype)


def normalized_empty(sizes: Mapping[str, int], dtype: DTypeLike) -> NormalizedState:
    """`normalized_init` from sizes by axis name."""
    return normalized_init(sizes["B"], sizes["H"], sizes["K"], sizes["V"], key_heads=sizes["Hk"], dtype=dtype)
