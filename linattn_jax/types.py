"""The axis legend, array aliases and argument checks that every room shares.

Axes, named as they appear in shapes:
    B batch, T time, H value heads, K key size, V value size, D model width,
    Hk key heads (H is a multiple of Hk; value head h reads key head h // (H // Hk)),
    G value heads per key head (H // Hk), C rows of a chunk,
    N modes of a state-space model (elsewhere the number of chunks), M its basis functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

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


def check_complex(name: str, x: ArrayLike) -> None:
    """Raises TypeError unless `x` is a complex array."""
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        raise TypeError(f"{name}: {type(x).__name__} given, wanted a complex array.")
    if not jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise TypeError(f"{name}: dtype {x.dtype} given, wanted complex64 or complex128.")


def check_shape(name: str, x: ArrayLike, axes: str, sizes: Mapping[str, int]) -> None:
    """Raises ValueError unless the shape of `x` is that of `axes` (names separated by blanks) under `sizes`."""
    wanted = tuple(sizes[axis] for axis in axes.split())
    if tuple(x.shape) != wanted:
        raise ValueError(f"{name}: shape {tuple(x.shape)} given, wanted [{', '.join(axes.split())}] = {wanted}.")


class Argument(NamedTuple):
    """What a mixer says of one of its array arguments.

    axes: names of its axes, separated by blanks. "B T" in front makes it a sequence; without, it is a parameter.
    kind: "feature" has the dtype of the first argument, "gate" any float, "complex" complex64 or complex128.
    """

    axes: str
    kind: str = "feature"

    @property
    def sequence(self) -> bool:
        return self.axes.startswith("B T")

    @property
    def of_token(self) -> Argument:
        """The argument of a `_step`, which has no time."""
        return Argument(self.axes.replace("B T", "B", 1), self.kind)


QKV = {
    "q": Argument("B T Hk K"),
    "k": Argument("B T Hk K"),
    "v": Argument("B T H V"),
}


def check_arguments(arrays: Mapping[str, ArrayLike], arguments: Mapping[str, Argument]) -> dict[str, int]:
    """Checks types, ranks and shapes of `arrays` against `arguments` and each other; returns sizes by axis name.

    An axis has the size that the first argument with it gives it. Every axis but B and T must be at least 1, and H a
    multiple of Hk.
    """
    sizes: dict[str, int] = {}
    first = next(iter(arrays))
    for name, x in arrays.items():
        axes, kind = arguments[name]
        if kind == "complex":
            check_complex(name, x)
        else:
            check_float(name, x)
        wanted = axes.split()
        if len(x.shape) != len(wanted):
            raise ValueError(
                f"{name}: rank {len(x.shape)} (shape {tuple(x.shape)}) given, "
                f"wanted rank {len(wanted)}, [{', '.join(wanted)}]."
            )
        if kind == "feature" and x.dtype != arrays[first].dtype:
            raise TypeError(f"{name}: dtype {x.dtype} given, wanted that of {first}, {arrays[first].dtype}.")
        for axis, size in zip(wanted, x.shape, strict=True):
            sizes.setdefault(axis, size)
        check_shape(name, x, axes, sizes)
        if min((sizes[axis] for axis in wanted if axis not in ("B", "T")), default=1) < 1:
            raise ValueError(f"{name}: shape {tuple(x.shape)} given, wanted heads and sizes >= 1.")
        if "H" in wanted and sizes["H"] % sizes.get("Hk", 1):
            raise ValueError(
                f"{name}: {sizes['H']} value heads given, wanted a multiple of the {sizes['Hk']} key heads of {first}."
            )
    return sizes


def check_state(state: Any, like: Any, name: str = "initial_state") -> None:
    """Checks that `state` is a NamedTuple of the fields, shapes and dtypes of `like`."""
    if not isinstance(state, tuple) or not hasattr(state, "_fields") or state._fields != like._fields:
        raise TypeError(f"{name}: {type(state).__name__} given, wanted {type(like).__name__}{like._fields}.")
    for field, x, wanted in zip(like._fields, state, like, strict=True):
        if isinstance(wanted, tuple):
            check_state(x, wanted, f"{name}.{field}")
            continue
        check = check_float
        if jnp.issubdtype(wanted.dtype, jnp.integer):
            check = check_integer
        elif jnp.issubdtype(wanted.dtype, jnp.complexfloating):
            check = check_complex
        check(f"{name}.{field}", x)
        if tuple(x.shape) != tuple(wanted.shape):
            raise ValueError(f"{name}.{field}: shape {tuple(x.shape)} given, wanted {tuple(wanted.shape)}.")


def check_scale(scale: Any) -> None:
    """Raises TypeError or ValueError unless `scale` is one real number: Python's, NumPy's or an array of rank 0."""
    if hasattr(scale, "dtype") and hasattr(scale, "shape"):
        check_float("scale", scale)
        if tuple(scale.shape):
            raise ValueError(f"scale: shape {tuple(scale.shape)} given, wanted one number, shape ().")
    elif isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"scale: {type(scale).__name__} given, wanted a real number or None.")


def accumulator_dtype(*arrays: ArrayLike) -> jnp.dtype:
    """float64 where a feature is float64, else float32: the type of states, decay sums and accumulators."""
    return jnp.dtype("float64" if any(x.dtype == jnp.float64 for x in arrays) else "float32")


def complex_dtype(dtype: DTypeLike) -> jnp.dtype:
    """complex128 for float64, else complex64."""
    return jnp.dtype("complex128" if jnp.dtype(dtype) == jnp.float64 else "complex64")


def matmul_precision(x: ArrayLike) -> jax.lax.Precision | None:
    """Full precision for float32 and float64 inputs; the device's fast float32 mode for narrower ones.

    bfloat16 and float16 inputs are widened to float32 first, so the fast mode (TF32 on NVIDIA GPUs, one bfloat16 pass
    on TPUs) rounds operands no further than the inputs were, and float16 cannot overflow in an intermediate.
    """
    return jax.lax.Precision.HIGHEST if x.dtype in (jnp.float32, jnp.float64) else None
