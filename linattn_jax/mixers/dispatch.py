"""The one place where an implementation of a mixer is chosen, and said."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AxisType, PartitionSpec

from linattn_jax.types import Argument, Array

_log = logging.getLogger("linattn_jax")

IMPLEMENTATIONS = ("recurrent", "associative", "chunkwise", "mosaic_gpu", "mosaic_tpu", "triton")

# What serves a platform, fastest first, where the caller names nothing. The plain forms at the end serve everything.
PREFERENCE: Mapping[str, tuple[str, ...]] = {
    "cpu": ("chunkwise",),
    "cuda": ("mosaic_gpu", "triton", "chunkwise"),
    "rocm": ("chunkwise",),
    "tpu": ("mosaic_tpu", "chunkwise"),
}


def on_any_mesh[**P, R](mixer: Callable[P, R]) -> Callable[P, R]:
    """`mixer`, also where the mesh in use has Explicit axes: there the compiler shards what is inside.

    Outputs and states then lie as the mixer's first sequence does, over batch and heads.
    """
    signature = inspect.signature(mixer)
    stepping = "state" in signature.parameters

    @wraps(mixer)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        mesh = jax.sharding.get_abstract_mesh()
        axes = tuple(n for n, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit)
        if not axes:
            return mixer(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        is_array = lambda x: bool(jax.tree.leaves(x)) and all(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(x))
        arrays = {name: x for name, x in given.items() if is_array(x)}
        static = {name: x for name, x in given.items() if name not in arrays}
        first = next(x for name, x in arrays.items() if name != "state")
        spec = [*jax.typeof(first).sharding.spec, None, None, None]
        time = [] if stepping else [spec[1]]
        rows, heads = spec[0], spec[1 if stepping else 2]
        where = PartitionSpec(rows, *time, heads), PartitionSpec(rows, heads)
        inner = lambda arrays: mixer(**arrays, **static)  # type: ignore[call-arg]
        return jax.sharding.auto_axes(inner, axes=axes, out_sharding=where)(arrays)

    return call


# Below this length a token loop does less work than one chunk.
SHORT = 4


@dataclass(frozen=True)
class Mixer:
    """One entry of the registry: what the layers, the contract test, the benchmark and the docs iterate over.

    call, step: the public functions.
    empty: the empty state, from sizes by axis name and a dtype (float32 or float64).
    arguments: the array arguments of `call` by name, in order.
    implementations: the names that `call` serves everywhere; kernels: those that it serves on some devices.
    output: axes of the output.
    """

    name: str
    call: Callable[..., Any]
    step: Callable[..., Any]
    empty: Callable[[Mapping[str, int], Any], Any]
    arguments: Mapping[str, Argument]
    implementations: tuple[str, ...]
    output: str = "B T H V"
    kernels: tuple[str, ...] = ()


MIXERS: dict[str, Mixer] = {}


def register(mixer: Mixer) -> None:
    """Enters a mixer into the registry; a name can be taken once."""
    if mixer.name in MIXERS:
        raise ValueError(f"mixer {mixer.name!r} is registered already.")
    MIXERS[mixer.name] = mixer


@dataclass(frozen=True)
class Unavailable:
    """Stands where an implementation would, and says why there is none."""

    reason: str


_NONE = Unavailable("there is none for this mixer yet")


@dataclass(frozen=True)
class Kernel:
    """A form that programs lowered for one platform can hold.

    elsewhere: why none for another platform can, up to its name.
    unasked: why it is not chosen where the caller names nothing, or None where it may be.
    """

    form: Callable[..., Any]
    platform: str
    elsewhere: str
    unasked: str | None = None

    def asked(self, name: str, implementation: str, arguments: tuple[Any, ...]) -> Any:
        """Calls the form; lowering for another platform raises NotImplementedError."""

        def refuse(*arguments: Any) -> Any:
            like, tree = jax.tree.flatten(jax.eval_shape(self.form, *arguments))
            said = f"{name} has no implementation {implementation!r} here: {self.elsewhere}"
            out = _refuse_p.bind(like=tuple((s.shape, s.dtype) for s in like), said=said)
            axes: list[frozenset[str]] = [
                getattr(getattr(s, "manual_axis_type", None), "varying", frozenset()) for s in like
            ]
            varying = [jax.lax.pcast(x, tuple(a), to="varying") if a else x for x, a in zip(out, axes, strict=True)]
            return jax.tree.unflatten(tree, varying)

        return jax.lax.platform_dependent(*arguments, default=refuse, **{self.platform: self.form})


_refuse_p = Primitive("refuse")
_refuse_p.multiple_results = True


@_refuse_p.def_impl
def _refuse(*, like: Any, said: str) -> Any:
    raise NotImplementedError(f"{said}, not on {jax.default_backend()}.")


@_refuse_p.def_abstract_eval
def _refuse_types(*, like: Any, said: str) -> Any:
    return [jax.core.ShapedArray(shape, dtype) for shape, dtype in like]


def _refuse_lowering(context: Any, *, like: Any, said: str) -> Any:
    raise NotImplementedError(f"{said}, not on {' and '.join(context.module_context.platforms)}.")


mlir.register_lowering(_refuse_p, _refuse_lowering)


def choose_chunk(chunk_size: int | None, length: int, key_size: int, value_size: int) -> int:
    """Rows per chunk: `chunk_size` or the default, no larger than the power of two that covers the length.

    The default balances products within a chunk, which grow with it, against those with the state, which grow with K V:
    64, but 32 for small states (measured on a CPU: about 12 % less at K = V = 64, forward and backward). It does not
    depend on the device, so that the same call has the same chunks everywhere.
    """
    if chunk_size is None:
        chunk_size = 32 if key_size * value_size <= 64 * 64 else 64
    elif isinstance(chunk_size, bool) or not isinstance(chunk_size, (int, np.integer)):
        raise TypeError(f"chunk_size: {chunk_size!r} given, wanted a power of two.")
    elif chunk_size < 1 or chunk_size & (chunk_size - 1):
        raise ValueError(f"chunk_size: {chunk_size} given, wanted a power of two.")
    return min(int(chunk_size), 1 << max(length - 1, 0).bit_length())


def run(
    name: str,
    forms: Mapping[str, Callable[..., Any] | Kernel | Unavailable],
    implementation: str | None,
    arguments: tuple[Any, ...],
    length: int,
    values: Array,
) -> Any:
    """Calls one of `forms` on `arguments` (a tuple of pytrees of arrays).

    `forms` maps implementation names to functions of those arguments, to kernels, or to the reason why there is none
    for this call. A named implementation is served or raises NotImplementedError. None is decided for the platform that
    the program is lowered for, so lowering for a TPU on a CPU picks the TPU's. The mixers promote ranks and dtypes
    as they mean to, whatever `jax_numpy_rank_promotion` and `jax_numpy_dtype_promotion` say of the caller's own code.
    """
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return _run(name, forms, implementation, arguments, length, values)


def _run(
    name: str,
    forms: Mapping[str, Callable[..., Any] | Kernel | Unavailable],
    implementation: str | None,
    arguments: tuple[Any, ...],
    length: int,
    values: Array,
) -> Any:
    if implementation is not None:
        if implementation not in IMPLEMENTATIONS:
            raise ValueError(f"implementation: {implementation!r} given, wanted None or one of {IMPLEMENTATIONS}.")
        form = forms.get(implementation, _NONE)
        if isinstance(form, Unavailable):
            raise NotImplementedError(f"{name} has no implementation {implementation!r} here: {form.reason}.")
        return form.asked(name, implementation, arguments) if isinstance(form, Kernel) else form(*arguments)
    served: dict[str, Callable[..., Any]] = {}
    why: list[tuple[str, str]] = []
    for candidate in IMPLEMENTATIONS:
        form = forms.get(candidate, _NONE)
        if isinstance(form, Unavailable):
            why.append((candidate, form.reason))
        elif not isinstance(form, Kernel):
            served[candidate] = form
        elif form.unasked is None:
            served[candidate] = form.form
        else:
            why.append((candidate, form.unasked))
    if length <= SHORT:
        return served["recurrent"](*arguments)
    chosen = {platform: next(c for c in order if c in served) for platform, order in PREFERENCE.items()}
    _announce(name, f"{values.dtype}{list(values.shape)}", tuple(sorted(chosen.items())), tuple(why))
    default = chosen["cpu"]
    special = {platform: served[c] for platform, c in chosen.items() if c != default}
    if not special:
        return served[default](*arguments)
    return jax.lax.platform_dependent(*arguments, default=served[default], **special)


@cache
def _announce(name: str, signature: str, chosen: tuple[tuple[str, str], ...], why: tuple[tuple[str, str], ...]) -> None:
    """Logs a choice once per signature."""
    reasons = "; ".join(f"no {form}: {reason}" for form, reason in why)
    _log.info("%s on v %s: %s (%s)", name, signature, ", ".join(f"{p} {f}" for p, f in chosen), reasons)
