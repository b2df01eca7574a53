"""The axis legend, array aliases and argument checks that every room shares.

Axes, named as they appear in shapes:
    B batch, T time, H value heads, K key size, V value size, D model width,
    Hk key heads (H is a multiple of Hk; value head h reads key head h // (H // Hk)),
    G value heads per key head (H // Hk), C rows of a chunk, N chunks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array
ArrayLike = Any

FLOATS = ("float16", "bfloat16", "float32", "float64")


class UserError(ValueError):
    """A mistake in what the user asked for; the message is one sentence that names it."""


def check_float(name: str, x: ArrayLike) -> None:
    """Raises TypeError unless `x` is an array of a floating type that the mixers serve."""
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        raise TypeError(f"{name}: {type(x).__name__} given, wanted a floating-point array.")
    if str(x.dtype) not in FLOATS:
        raise TypeError(f"{name}: dtype {x.dtype} given, wanted one of {', '.join(FLOATS)}.")


def check_integer(name: str, x: ArrayLike) -> None:
    """Raises TypeError unless `x` is an array of integers."""
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        raise TypeError(f"{name}: {type(x).__name__} given, wanted an int32 array.")
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name}: dtype {x.dtype} given, wanted int32.")


def check_shape(name: str, x: ArrayLike, axes: str, sizes: Mapping[str, int]) -> None:
    """Raises ValueError unless the shape of `x` is that of `axes` (names separated by blanks) under `sizes`."""
    wanted = tuple(sizes[axis] for axis in axes.split())
    if tuple(x.shape) != wanted:
        raise ValueError(f"{name}: shape {tuple(x.shape)} given, wanted [{', '.join(axes.split())}] = {wanted}.")


def check_qkv(q: ArrayLike, k: ArrayLike, v: ArrayLike, axes: str = "B T") -> dict[str, int]:
    """Checks q, k `[*axes, Hk, K]` and v `[*axes, H, V]` against each other; returns the sizes of all axes by name."""
    rank = len(axes.split()) + 2
    for name, x, tail in (("q", q, "Hk, K"), ("k", k, "Hk, K"), ("v", v, "H, V")):
        check_float(name, x)
        if len(x.shape) != rank:
            raise ValueError(
                f"{name}: rank {len(x.shape)} (shape {tuple(x.shape)}) given, "
                f"wanted rank {rank}, [{', '.join(axes.split())}, {tail}]."
            )
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: dtype {x.dtype} given, wanted that of q, {q.dtype}.")
    sizes = dict(zip(axes.split(), q.shape, strict=False))
    sizes |= {"Hk": q.shape[-2], "K": q.shape[-1], "H": v.shape[-2], "V": v.shape[-1]}
    check_shape("k", k, f"{axes} Hk K", sizes)
    check_shape("v", v, f"{axes} H V", sizes)
    if min(sizes["Hk"], sizes["H"], sizes["K"], sizes["V"]) < 1:
        raise ValueError(f"q and v: shapes {tuple(q.shape)} and {tuple(v.shape)} given, wanted heads and sizes >= 1.")
    if sizes["H"] % sizes["Hk"]:
        raise ValueError(
            f"v: {sizes['H']} value heads given, wanted a multiple of the {sizes['Hk']} key heads of q and k."
        )
    return sizes


def check_gate(name: str, x: ArrayLike, axes: str, sizes: Mapping[str, int]) -> None:
    """Checks dtype and shape of a gate."""
    check_float(name, x)
    check_shape(name, x, axes, sizes)


def check_state(state: Any, like: Any, name: str = "initial_state") -> None:
    """Checks that `state` is a NamedTuple of the fields, shapes and dtypes of `like`."""
    if not isinstance(state, tuple) or not hasattr(state, "_fields") or state._fields != like._fields:
        raise TypeError(f"{name}: {type(state).__name__} given, wanted {type(like).__name__}{like._fields}.")
    for field, x, wanted in zip(like._fields, state, like, strict=True):
        check_array = check_integer if jnp.issubdtype(wanted.dtype, jnp.integer) else check_float
        check_array(f"{name}.{field}", x)
        if tuple(x.shape) != tuple(wanted.shape):
            raise ValueError(f"{name}.{field}: shape {tuple(x.shape)} given, wanted {tuple(wanted.shape)}.")


def accumulator_dtype(*arrays: ArrayLike) -> jnp.dtype:
    """float64 where an input is float64, else float32: the type of states, decay sums and accumulators."""
    return jnp.dtype("float64" if any(x.dtype == jnp.float64 for x in arrays if x is not None) else "float32")


def matmul_precision(x: ArrayLike) -> jax.lax.Precision | None:
    """Full precision for float32 and float64 inputs; the device's fast float32 mode for narrower ones.

    bfloat16 and float16 inputs are widened to float32 first, so the fast mode (TF32 on NVIDIA GPUs, one bfloat16 pass
    on TPUs) rounds operands no further than the inputs were, and float16 cannot overflow in an intermediate.
    """
    return jax.lax.Precision.HIGHEST if x.dtype in (jnp.float32, jnp.float64) else None
