"""One checked call of a mixer: sizes, dtypes, segments and state, and the two plain forms run on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from linattn_jax import debug
from linattn_jax.mixers import chunking, dispatch
from linattn_jax.types import (
    Array,
    accumulator_dtype,
    check_gate,
    check_qkv,
    check_state,
    matmul_precision,
)

Pytree = Any


@dataclass(frozen=True)
class Call:
    """What the forms of a mixer need of one call; `inputs` maps argument names to [B, T, heads, ...] arrays."""

    inputs: dict[str, Array]
    state: Pytree
    segments: chunking.Segments | None
    length: int
    groups: int
    scale: float | Array
    dtype: jnp.dtype
    precision: lax.Precision | None

    @property
    def values(self) -> Array:
        return self.inputs["v"]

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arrays of the call, in the order in which the forms take them."""
        return self.inputs, self.state, self.segments

    def chunk(self, chunk_size: int | None) -> int:
        """Rows per chunk of this call."""
        return dispatch.choose_chunk(chunk_size, self.length, self.inputs["k"].shape[-1], self.values.shape[-1])

    def check_values(self, name: str) -> None:
        """States what the inputs must be, inside `debug.value_checks` only."""
        debug.check_inputs(name, self.inputs, None if self.segments is None else self.segments.valid)

    def recurrent(self, token: Callable[..., Any]) -> Callable[..., Any]:
        """The form that scans `token(state, x)`; x holds [B, heads, ...] in the accumulator dtype."""

        def form(inputs: dict[str, Array], state: Pytree, segments: chunking.Segments | None) -> tuple[Array, Pytree]:
            return chunking.scan_tokens(_cast_output(token, inputs), state, inputs, segments, self.dtype)

        return form

    def chunkwise(self, chunk: Callable[..., Any], chunk_size: int) -> Callable[..., Any]:
        """The form that scans `chunk(state, x, reset)`; x holds [B, heads, C, ...] in the accumulator dtype."""

        def form(inputs: dict[str, Array], state: Pytree, segments: chunking.Segments | None) -> tuple[Array, Pytree]:
            return chunking.scan_chunks(_cast_output(chunk, inputs), state, inputs, segments, chunk_size, self.dtype)

        return form


def _cast_output(function: Callable[..., Any], inputs: dict[str, Array]) -> Callable[..., Any]:
    """`function` with its output in the dtype of v: casting inside the scan keeps the stacked outputs narrow."""

    def cast(*arguments: Any) -> tuple[Array, Pytree]:
        output, state = function(*arguments)
        return output.astype(inputs["v"].dtype), state

    return cast


def _varying_like(state: Pytree, inputs: dict[str, Array]) -> Pytree:
    """`state` typed as differing over the mesh axes that some input differs over: shard_map demands it of scans."""

    def varying(x: Array) -> frozenset[str]:
        return getattr(getattr(jax.typeof(x), "manual_axis_type", None), "varying", frozenset())

    axes = frozenset().union(*map(varying, inputs.values()))

    def cast(s: Array) -> Array:
        missing = tuple(sorted(axes - varying(s)))
        return lax.pcast(s, missing, to="varying") if missing else s

    return jax.tree.map(cast, state) if axes else state


def _prepare(
    q: Array,
    k: Array,
    v: Array,
    gates: Mapping[str, tuple[Array, str]],
    scale: float | Array | None,
    init: Callable[..., Any],
    initial_state: Pytree,
    axes: str,
) -> tuple[dict[str, int], dict[str, Any]]:
    sizes = check_qkv(q, k, v, axes)
    for name, (gate, gate_axes) in gates.items():
        check_gate(name, gate, gate_axes, sizes)
    dtype = accumulator_dtype(q, k, v)
    like = jax.eval_shape(
        lambda: init(sizes["B"], sizes["H"], sizes["K"], sizes["V"], key_heads=sizes["Hk"], dtype=dtype)
    )
    if initial_state is None:
        state = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), like)
    else:
        check_state(initial_state, like)
        state = jax.tree.map(lambda s, wanted: s.astype(wanted.dtype), initial_state, like)
    inputs = {"q": q, "k": k, "v": v} | {name: gate for name, (gate, _) in gates.items()}
    state = _varying_like(state, inputs)
    return sizes, {
        "inputs": inputs,
        "state": state,
        "groups": sizes["H"] // sizes["Hk"],
        "scale": sizes["K"] ** -0.5 if scale is None else scale,
        "dtype": dtype,
        "precision": matmul_precision(q),
    }


def prepare(
    q: Array,
    k: Array,
    v: Array,
    gates: Mapping[str, tuple[Array, str]],
    scale: float | Array | None,
    init: Callable[..., Any],
    initial_state: Pytree,
    segment_ids: Array | None,
    initial_segment_id: Array | None,
) -> Call:
    """Checks the arguments of a mixer. `gates` maps names to (array, axes); `init` makes the empty state, all zeros."""
    sizes, parts = _prepare(q, k, v, gates, scale, init, initial_state, "B T")
    segments = chunking.find_segments(segment_ids, initial_segment_id, sizes["B"], sizes["T"])
    return Call(segments=segments, length=sizes["T"], **parts)


def prepare_step(
    state: Pytree,
    q: Array,
    k: Array,
    v: Array,
    gates: Mapping[str, tuple[Array, str]],
    scale: float | Array | None,
    init: Callable[..., Any],
) -> Call:
    """As `prepare` for one token: arrays without the time axis."""
    _, parts = _prepare(q, k, v, gates, scale, init, state, "B")
    return Call(segments=None, length=1, **parts)


def finish_step(call: Call, token: Callable[..., Any]) -> tuple[Array, Pytree]:
    """Runs `token(call, state, x)` once."""
    output, state = token(call, call.state, {name: x.astype(call.dtype) for name, x in call.inputs.items()})
    return output.astype(call.values.dtype), state
