"""One checked call of a mixer: sizes, dtypes, segments and state, and the plain forms run on them."""

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
    Argument,
    Array,
    accumulator_dtype,
    check_arguments,
    check_scale,
    check_state,
    complex_dtype,
    matmul_precision,
)

Pytree = Any
Empty = Callable[[Mapping[str, int], Any], Pytree]


@dataclass(frozen=True)
class Call:
    """What the forms of a mixer need of one call.

    inputs: the sequences by name, [B, T, heads, ...]; `parameters`: the other arrays, float32 or wider, complex or not.
    state, empty: what the first token finds, and what the first token of every further segment finds.
    sizes: by axis name; `groups` is value heads per key head.
    scale: a number where one is known, else an array of `dtype`.
    fresh: whether no state was given, so that `state` is the empty one.
    dtype: of states and accumulators; `output_dtype`: of the output; `precision`: of products of inputs.
    """

    inputs: dict[str, Array]
    parameters: dict[str, Array]
    state: Pytree
    empty: Pytree
    segments: chunking.Segments | None
    sizes: Mapping[str, int]
    scale: float | Array
    dtype: jnp.dtype
    output_dtype: jnp.dtype
    precision: lax.Precision | None
    fresh: bool

    @property
    def groups(self) -> int:
        return self.sizes["H"] // self.sizes["Hk"] if "Hk" in self.sizes else 1

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arrays of the call, in the order in which the forms take them."""
        return self.inputs, self.state, self.segments

    def run(self, name: str, forms: Mapping[str, Any], implementation: str | None) -> Any:
        """Output and final state by the implementation asked for, after the value checks, where they are on."""
        debug.check_inputs(name, self.inputs, None if self.segments is None else self.segments.valid)
        debug.check_inputs(name, {"initial_state": jax.tree.leaves(self.state)}, None)
        if self.sizes["T"] == 0 and implementation == "associative":
            forms = {**forms, "associative": forms["recurrent"]}  # there is nothing to combine
        values = self.inputs.get("v", next(reversed(self.inputs.values())))
        return dispatch.run(name, forms, implementation, self.arguments, self.sizes["T"], values)

    def chunk(self, chunk_size: int | None) -> int:
        """Rows per chunk of this call."""
        key_size = self.sizes.get("K", self.sizes.get("N", 1))
        return dispatch.choose_chunk(chunk_size, self.sizes["T"], key_size, self.sizes.get("V", key_size))

    def recurrent(self, token: Callable[..., Any]) -> Callable[..., Any]:
        """The form that scans `token(state, x)`; x holds [B, heads, ...] in the accumulator dtype."""

        def form(inputs: dict[str, Array], state: Pytree, segments: chunking.Segments | None) -> tuple[Array, Pytree]:
            return chunking.scan_tokens(self.cast_output(token), state, self.empty, inputs, segments, self.dtype)

        return form

    def chunkwise(
        self, chunk: Callable[..., Any], chunk_size: int | None, *, inert_zeros: bool = True, counted: bool = False
    ) -> Callable[..., Any]:
        """The form that scans `chunk(state, x, segments)`; x holds [B, heads, C, ...] in the accumulator dtype.

        A token of zeros must not change the state, or else: with `inert_zeros=False`, `segments` names also the rows
        that fill the last chunk; with `counted`, `chunk` is also given how many rows of it are not such, a number.
        """

        def form(inputs: dict[str, Array], state: Pytree, segments: chunking.Segments | None) -> tuple[Array, Pytree]:
            rows, length = self.chunk(chunk_size), self.sizes["T"]
            if not inert_zeros and segments is None and length % rows:
                everywhere = jnp.ones((1, length), bool)
                segments = chunking.Segments(everywhere, ~everywhere)
            own = [jnp.clip(length - jnp.arange(0, length, rows), 0, rows)] if counted else []
            return chunking.scan_chunks(self.cast_output(chunk), state, inputs, segments, rows, self.dtype, *own)

        return form

    def associative(self, whole: Callable[..., Any]) -> Callable[..., Any]:
        """The form that computes `whole(state, x, segments)` at once; x holds [B, T, heads, ...], padding zeroed."""

        def form(inputs: dict[str, Array], state: Pytree, segments: chunking.Segments | None) -> tuple[Array, Pytree]:
            if segments is not None:
                inputs = {name: chunking.masked(segments.valid, a) for name, a in inputs.items()}
            x = {name: a.astype(self.dtype) for name, a in inputs.items()}
            output, state = self.cast_output(whole)(state, x, segments)
            return output if segments is None else chunking.masked(segments.valid, output), state

        return form

    def cast_output(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` with its output in the output dtype: casting inside a scan keeps the stacked outputs narrow."""

        def cast(*arguments: Any) -> tuple[Array, Pytree]:
            output, state = function(*arguments)
            return output.astype(self.output_dtype), state

        return cast


def _varying_like(state: Pytree, arrays: Mapping[str, Array]) -> Pytree:
    """`state` typed as differing over the mesh axes that some input differs over: shard_map demands it of scans."""

    def varying(x: Array) -> frozenset[str]:
        return getattr(getattr(jax.typeof(x), "manual_axis_type", None), "varying", frozenset())

    axes = frozenset().union(*map(varying, arrays.values()))

    def cast(s: Array) -> Array:
        missing = tuple(sorted(axes - varying(s)))
        return lax.pcast(s, missing, to="varying") if missing else s

    return jax.tree.map(cast, state) if axes else state


def _prepare(
    arrays: Mapping[str, Array],
    arguments: Mapping[str, Argument],
    scale: float | Array | None,
    empty: Empty,
    initial_state: Pytree,
    state_name: str,
) -> dict[str, Any]:
    sizes = check_arguments(arrays, arguments)
    arrays = {name: jnp.asarray(x) for name, x in arrays.items()}
    features = [x for name, x in arrays.items() if arguments[name].kind == "feature"]
    dtype = accumulator_dtype(*features)
    if scale is None:
        scale = sizes["K"] ** -0.5 if "K" in sizes else 1.0
    else:
        check_scale(scale)
        scale = jnp.asarray(scale, dtype) if isinstance(scale, jax.Array) else float(scale)
    nothing = _varying_like(empty(sizes, dtype), arrays)
    if initial_state is None:
        # XLA's CPU compiler (JAX 0.11.2 and 0.12.0) reads beyond a constant that it broadcasts into a product of a
        # single chunk, and fills a column of the output with what lies there: it must not see that these are zeros.
        state = lax.optimization_barrier(nothing)
    else:
        check_state(initial_state, nothing, state_name)
        state = jax.tree.map(lambda s, wanted: jnp.asarray(s, wanted.dtype), initial_state, nothing)
        state = _varying_like(state, arrays)
    parameter_dtype = {"complex": complex_dtype(dtype)}
    return {
        "inputs": {name: x for name, x in arrays.items() if arguments[name].axes.startswith("B")},
        "parameters": {
            name: jnp.asarray(x, parameter_dtype.get(arguments[name].kind, dtype))
            for name, x in arrays.items()
            if not arguments[name].axes.startswith("B")
        },
        "state": state,
        "empty": nothing,
        "sizes": sizes,
        "scale": scale,
        "dtype": dtype,
        "output_dtype": features[0].dtype,
        "precision": matmul_precision(features[0]),
        "fresh": initial_state is None,
    }


def prepare(
    arrays: Mapping[str, Array],
    arguments: Mapping[str, Argument],
    empty: Empty,
    *,
    scale: float | Array | None = None,
    initial_state: Pytree = None,
    segment_ids: Array | None = None,
    initial_segment_id: Array | None = None,
) -> Call:
    """Checks the array arguments of a mixer, by name, against their declarations; `empty` makes its empty state."""
    parts = _prepare(arrays, arguments, scale, empty, initial_state, "initial_state")
    segments = chunking.find_segments(segment_ids, initial_segment_id, parts["sizes"]["B"], parts["sizes"]["T"])
    if segments is not None and not (initial_state is None or initial_segment_id is None) and parts["sizes"]["T"]:
        # Put aside here, a state that is dropped reaches nothing, whatever it holds.
        first = jnp.argmax(segments.valid, axis=1)[:, None]
        dropped = jnp.take_along_axis(segments.reset, first, axis=1)[:, 0]
        parts["state"] = chunking.select(dropped, parts["empty"], parts["state"])
    return Call(segments=segments, **parts)


def prepare_step(
    state: Pytree,
    arrays: Mapping[str, Array],
    arguments: Mapping[str, Argument],
    empty: Empty,
    *,
    scale: float | Array | None = None,
) -> Call:
    """As `prepare` for one token: arrays without the time axis."""
    of_token = {name: argument.of_token for name, argument in arguments.items()}
    if state is None:
        raise TypeError("state: None given, wanted the mixer's state; its `_init` makes an empty one.")
    parts = _prepare(arrays, of_token, scale, empty, state, "state")
    parts["sizes"]["T"] = 1
    return Call(segments=None, **parts)


def finish_step(call: Call, token: Callable[..., Any]) -> tuple[Array, Pytree]:
    """Runs `token(call, state, x)` once."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        output, state = token(call, call.state, {name: x.astype(call.dtype) for name, x in call.inputs.items()})
    return output.astype(call.output_dtype), state
