"""S4D (Gu et al. 2022): a diagonal complex state-space model per channel, and what its chunkwise forms share.

Per channel, with N modes h: h <- e^{log_a} h + b x,  y = 2 Re(c . h) + d x.
Inside a chunk every power of a is taken over its own span, as e^{tau log_a} with tau >= 0, by halving as in `gla`: it
is exact for any decay, where a^i times a^{-j} would overflow. No form multiplies by a rounded to float32, which would
lose the slow modes (`powers`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from linattn_jax.mixers import chunking, dispatch
from linattn_jax.mixers.calls import Call, finish_step, prepare, prepare_step
from linattn_jax.mixers.chunking import Segments
from linattn_jax.mixers.powers import Modes, Transition, counted, split_modes
from linattn_jax.mixers.state import serializable
from linattn_jax.types import Argument, Array, complex_dtype

_MODES = Argument("H N", "complex")
_ARGUMENTS = {"x": Argument("B T H"), "log_a": _MODES, "b": _MODES, "c": _MODES, "d": Argument("H", "gate")}


@serializable
class ModeState(NamedTuple):
    """The modes of every channel: h [B, H, N], complex64 (complex128 for float64 inputs)."""

    h: Array


def s4d_init(batch: int, heads: int, modes: int, *, dtype: DTypeLike = jnp.float32) -> ModeState:
    """The empty state, zeros, of `heads` channels; `dtype` is that of its real parts."""
    return ModeState(jnp.zeros((batch, heads, modes), complex_dtype(dtype)))


def _empty(sizes: Mapping[str, int], dtype: DTypeLike) -> ModeState:
    return s4d_init(sizes["B"], sizes["H"], sizes["N"], dtype=dtype)


class ModeTable(NamedTuple):
    """Powers of the modes that all chunks of a call of C rows share.

    powers: a^0 to a^C, [H, C + 1, N].
    whole, last: a over the C rows of a chunk and over the rows of the last, [H, N].
    """

    modes: Modes
    powers: Array
    whole: Transition
    last: Transition


class Span(NamedTuple):
    """The rows of a chunk under the modes of a table.

    position: [B or 1, C], real tokens of the chunk up to and with each row, as floats.
    number: [B or 1, C], resets up to and with each row.
    total: [B or 1], real tokens of the chunk.
    packed: whether there are segments.
    """

    table: ModeTable
    position: Array
    number: Array
    total: Array
    packed: bool

    def power(self, exponent: Array, largest: int) -> Array:
        """a^exponent [B or 1, H, ..., N] for whole exponents [B or 1, ...] from 0 to `largest`.

        A product with ones and zeros: exact, and its gradient is a product too, where that of an index is a scatter.
        """
        chosen = (exponent[..., None] == jnp.arange(largest + 1)).astype(exponent.dtype)
        powers = self.table.powers[:, : largest + 1]
        parts = jnp.concatenate([powers.real, powers.imag], axis=-1)
        parts = jnp.einsum("b...l,hln->bh...n", chosen, parts, precision=lax.Precision.HIGHEST)
        return lax.complex(*jnp.split(parts, 2, axis=-1))

    def from_start(self) -> Array:
        """a to each row's position [B or 1, H, C, N], 0 behind a reset: the weight in it of the modes before."""
        if not self.packed:
            return self.table.powers[None, :, 1:]
        first = (self.number == 0)[:, None, :, None]
        return jnp.where(first, self.power(self.position, self.position.shape[1]), 0)

    def to_end(self) -> Array:
        """a to the real tokens after each row [B or 1, H, C, N], 0 before the last reset."""
        length = self.position.shape[1]
        if self.packed:
            last = (self.number == self.number[:, -1:])[:, None, :, None]
            return jnp.where(last, self.power(self.total[:, None] - self.position, length), 0)
        powers = self.table.powers
        falling = powers[None, :, length - 1 :: -1] if length > 1 else powers[None, :, :1]
        behind = jnp.zeros_like(falling)  # the rows there are zeros
        start = length - self.total[0].astype(jnp.int32)
        return lax.dynamic_slice_in_dim(jnp.concatenate([falling, behind], axis=2), start, length, axis=2)

    def over(self) -> Transition:
        """a to the real tokens of the chunk [B or 1, H, N], 0 where there is a reset: what is left of the modes."""
        if self.packed:
            exponent = jnp.where(self.number[:, -1] == 0, self.total, jnp.inf)
            return self.table.modes.raised(exponent[:, None, None]).transition()
        whole = self.total[0] == self.position.shape[1]
        return jax.tree.map(lambda a, b: jnp.where(whole, a, b)[None], self.table.whole, self.table.last)

    def halves(self, size: int) -> tuple[Array, Array, Array | None]:
        """For blocks of two halves of `size` rows: a to the distance from the boundary, of later rows and of earlier.

        Both [B or 1, H, C / 2 size or 1, size, N]. Also where a pair of a later row and an earlier lies in one segment,
        [B, 1, C / 2 size, size, size], or None where all do.
        """
        if not self.packed:
            later, earlier = self.table.powers[:, 1 : size + 1], self.table.powers[:, :size]
            return later[None, :, None], earlier[None, :, None, ::-1], None
        blocks = self.number.shape[1] // (2 * size)
        position, number = (x.reshape(x.shape[0], blocks, 2, size) for x in (self.position, self.number))
        boundary = position[:, :, 0, -1:]
        together = number[:, :, 1, :, None] == number[:, :, 0, None, :]
        later, earlier = self.power(position[:, :, 1] - boundary, size), self.power(boundary - position[:, :, 0], size)
        return later, earlier, together[:, None]


def mode_table(log_a: Array, rows: int, length: int) -> ModeTable:
    """The table of log_a [H, N] for chunks of `rows` of a call of `length`."""
    modes = split_modes(log_a)
    powers = jax.tree.map(lambda x: x[:, None], modes).raised(jnp.arange(rows + 1, dtype=log_a.real.dtype)[:, None])
    whole, last = (modes.raised(jnp.asarray(n, log_a.real.dtype)) for n in (rows, (length - 1) % rows + 1))
    return ModeTable(modes, powers.value(), whole.transition(), last.transition())


def make_span(table: ModeTable, segments: Segments | None, length: int, rows: Array | int) -> Span:
    """The span of `length` rows with these segments; without, the first `rows` of them are real."""
    real = table.powers.real.dtype
    if segments is None:
        position = jnp.arange(1, length + 1, dtype=real)[None]
        return Span(table, position, jnp.zeros((1, length), jnp.int32), jnp.asarray(rows, real)[None], False)
    position = jnp.cumsum(segments.valid.astype(real), axis=-1)
    return Span(table, position, jnp.cumsum(segments.reset.astype(jnp.int32), axis=-1), position[:, -1], True)


def real_product(a: Array, b: Array, precision: lax.Precision | None) -> Array:
    """Re(a b^T) of complex a [..., i, N] and b [..., j, N], as one product of real matrices."""
    parts = lambda x, sign: jnp.concatenate([x.real, sign * x.imag], axis=-1)
    return jnp.einsum("...in,...jn->...ij", parts(a, 1), parts(b, -1), precision=precision)


def mixed_product(a: Array, b: Array, precision: lax.Precision | None) -> Array:
    """a b of real a [..., i, j] and complex b [..., j, N], as one product of real matrices."""
    parts = jnp.einsum("...ij,...jn->...in", a, jnp.concatenate([b.real, b.imag], axis=-1), precision=precision)
    return lax.complex(*jnp.split(parts, 2, axis=-1))


def mode_scores(w: Array, b: Array, span: Span, precision: lax.Precision | None) -> Array:
    """2 Re sum_n w_in b_n a_n^{tau(i, j)} for rows j <= i of one segment, else 0: [B or 1, H, C, C].

    w: [B or 1, H, C, N], b: [H, N], both complex; tau counts real tokens from j to i.
    """
    length, size = w.shape[2], 1
    scores = 2 * jnp.sum(w * b[:, None], axis=-1).real[..., None, None]
    while size < length:
        later_power, earlier_power, together = span.halves(size)
        later = w.reshape(*w.shape[:2], length // (2 * size), 2, size, w.shape[3])[:, :, :, 1] * later_power
        cross = 2 * real_product(later, b[:, None, None] * earlier_power, precision)
        cross = cross if together is None else cross * together
        pairs = scores.reshape(*scores.shape[:2], length // (2 * size), 2, size, size)
        shape = (*cross.shape[:3], size, size)
        first, second = (jnp.broadcast_to(pairs[:, :, :, i], shape) for i in (0, 1))
        scores = chunking.join_blocks(first, cross, second)
        size *= 2
    return scores[:, :, 0]


def write_modes(x: Array, b: Array, y: Array, span: Span, precision: lax.Precision | None) -> Array:
    """The modes x [B, H, N, D] after the chunk's rows y [B, H, C, D] have been written."""
    written = mixed_product(jnp.swapaxes(y, -1, -2), b[:, None] * span.to_end(), precision)
    return span.over().expanded().advance(x, jnp.swapaxes(written, -1, -2))


def one_token(token: Callable[..., Any]) -> Callable[..., Any]:
    """`token(call, a, state, x)`, with a the modes' transition, as a function of (call, state, x)."""
    return lambda call, *rest: token(call, split_modes(call.parameters["log_a"]).transition(), *rest)


def recurrent(call: Call, token: Callable[..., Any]) -> Callable[..., Any]:
    """The form that scans `token(call, a, state, x)`."""

    def form(inputs: dict[str, Array], state: Any, segments: Segments | None) -> tuple[Array, Any]:
        a = split_modes(call.parameters["log_a"]).transition()
        return call.recurrent(partial(token, call, a))(inputs, state, segments)

    return form


def _token(call: Call, a: Transition, state: ModeState, x: dict[str, Array]) -> tuple[Array, ModeState]:
    p = call.parameters
    h = a.advance(state.h, p["b"] * x["x"][..., None])
    return 2 * jnp.sum((p["c"] * h).real, axis=-1) + p["d"] * x["x"], ModeState(h)


def _whole(call: Call, state: ModeState, x: dict[str, Array], segments: Segments | None) -> tuple[Array, ModeState]:
    p = call.parameters
    offset = p["b"] * x["x"][..., None]
    ones = jnp.ones((1, offset.shape[1]), call.dtype)
    h = chunking.scan_affine(counted(split_modes(p["log_a"])), ones, offset, state.h, call.empty.h, segments)
    return 2 * jnp.sum((p["c"] * h).real, axis=-1) + p["d"] * x["x"], ModeState(h[:, -1])


def _kernel(call: Call, span: Span) -> Array:
    """2 Re sum_n c_n b_n a_n^{tau(i, j)}: [B or 1, H, C, C]."""
    c = call.parameters["c"][None, :, None]
    weights = jnp.broadcast_to(c, (1, c.shape[1], span.position.shape[1], c.shape[3]))
    return mode_scores(weights, call.parameters["b"], span, call.precision)


def _chunk(
    call: Call,
    table: ModeTable,
    kernel: Array | None,
    state: ModeState,
    x: dict[str, Array],
    segments: Segments | None,
    rows: Array,
) -> tuple[Array, ModeState]:
    p, u = call.parameters, x["x"]
    span = make_span(table, segments, u.shape[2], rows)
    kernel, axes = (_kernel(call, span), "bhij") if kernel is None else (kernel, "hij")
    carried = 2 * real_product(span.from_start(), (p["c"] * state.h)[:, :, None], call.precision)[..., 0]
    y = carried + jnp.einsum(f"{axes},bhj->bhi", kernel, u, precision=call.precision) + p["d"][:, None] * u
    h = write_modes(state.h[..., None], p["b"], u[..., None], span, call.precision)[..., 0]
    return y, ModeState(h)


def _chunkwise(call: Call, chunk_size: int | None) -> Callable[..., Any]:
    """The chunkwise form; unpacked rows have one kernel for all chunks."""

    def form(inputs: dict[str, Array], state: ModeState, segments: Segments | None) -> tuple[Array, ModeState]:
        rows = call.chunk(chunk_size)
        table = mode_table(call.parameters["log_a"], rows, call.sizes["T"])
        kernel = _kernel(call, make_span(table, None, rows, rows))[0] if segments is None else None
        return call.chunkwise(partial(_chunk, call, table, kernel), chunk_size, counted=True)(inputs, state, segments)

    return form


@dispatch.on_any_mesh
def s4d(
    x: Array,
    log_a: Array,
    b: Array,
    c: Array,
    d: Array,
    *,
    initial_state: ModeState | None = None,
    segment_ids: Array | None = None,
    initial_segment_id: Array | None = None,
    implementation: str | None = None,
    chunk_size: int | None = None,
) -> tuple[Array, ModeState]:
    """S4D (Gu et al. 2022), discretised: h <- e^{log_a} h + b x, y = 2 Re(c . h) + d x, with N modes per channel.

    Ours: nothing in the recurrence; the chunkwise form's powers of a, by halving, exact for any decay.

    Args:
        x: [B, T, H]; float16, bfloat16, float32 or float64. H counts channels.
        log_a, b, c: [H, N], complex64 or complex128, for every token the same; Re log_a <= 0. With zero-order hold of
            a continuous A by steps dt, log_a = dt A and b = (e^{dt A} - 1) / A.
        d: [H], the weight of x itself; any float.
        initial_state, segment_ids, initial_segment_id, implementation, chunk_size: as for `delta_rule`.

    Returns:
        Output [B, T, H] in x.dtype, and ModeState(h [B, H, N]), complex64 (complex128 for float64 inputs).

    Raises:
        ValueError, TypeError: naming the argument, what was seen and what was wanted.

    >>> import jax.numpy as jnp
    >>> one = jnp.ones((1, 1), jnp.complex64)
    >>> y, _ = s4d(jnp.ones((1, 3, 1)), jnp.log(0.5) * one, 0.5 * one, one, jnp.zeros(1))     # halves what it holds
    >>> [round(value, 3) for value in y[0, :, 0].tolist()]
    [1.0, 1.5, 1.75]
    """
    call = prepare(
        {"x": x, "log_a": log_a, "b": b, "c": c, "d": d},
        _ARGUMENTS,
        _empty,
        initial_state=initial_state,
        segment_ids=segment_ids,
        initial_segment_id=initial_segment_id,
    )
    forms = {
        "recurrent": recurrent(call, _token),
        "associative": call.associative(partial(_whole, call)),
        "chunkwise": _chunkwise(call, chunk_size),
    }
    return call.run("s4d", forms, implementation)


@dispatch.on_any_mesh
def s4d_step(state: ModeState, x: Array, log_a: Array, b: Array, c: Array, d: Array) -> tuple[Array, ModeState]:
    """One token of `s4d`: x [B, H]; returns y [B, H] and the new state."""
    arrays = {"x": x, "log_a": log_a, "b": b, "c": c, "d": d}
    return finish_step(prepare_step(state, arrays, _ARGUMENTS, _empty), one_token(_token))


_FORMS = ("recurrent", "associative", "chunkwise")
dispatch.register(dispatch.Mixer("s4d", s4d, s4d_step, _empty, _ARGUMENTS, _FORMS, output="B T H"))
