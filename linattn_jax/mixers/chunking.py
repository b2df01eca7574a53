"""What the mixer families share: segments, scans over tokens and chunks, decay matrices, triangular inverses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from linattn_jax.types import Array, check_integer, check_shape

Pytree = Any


class Segments(NamedTuple):
    """Where documents begin in packed rows.

    valid: bool [B, T], False on padding (negative ids), which must leave no trace.
    reset: bool [B, T], True on the tokens whose predecessor's state must not reach them.
    """

    valid: Array
    reset: Array


def find_segments(
    segment_ids: Array | None, initial_segment_id: Array | None, batch: int, length: int
) -> Segments | None:
    """Segments of int32 `segment_ids [B, T]`; None for unpacked rows.

    Padding is skipped when neighbours are compared. The first real token resets only where `initial_segment_id [B]` is
    given and differs.
    """
    if segment_ids is None:
        if initial_segment_id is not None:
            raise ValueError("initial_segment_id: given without segment_ids, wanted both or neither.")
        return None
    sizes = {"B": batch, "T": length}
    check_integer("segment_ids", segment_ids)
    check_shape("segment_ids", segment_ids, "B T", sizes)
    if initial_segment_id is not None:
        check_integer("initial_segment_id", initial_segment_id)
        check_shape("initial_segment_id", initial_segment_id, "B", sizes)
    valid = segment_ids >= 0
    if length == 0:
        return Segments(valid, valid)
    newest = lax.cummax(jnp.where(valid, jnp.arange(length, dtype=jnp.int32), -1), axis=1)
    before = jnp.pad(newest[:, :-1], [(0, 0), (1, 0)], constant_values=-1)
    before_id = jnp.take_along_axis(segment_ids, jnp.maximum(before, 0), axis=1)
    if initial_segment_id is None:
        first_differs = jnp.zeros_like(valid)
    else:
        first_differs = segment_ids != initial_segment_id[:, None]
    return Segments(valid, valid & jnp.where(before < 0, first_differs, segment_ids != before_id))


def repeat_heads(x: Array, groups: int, axis: int = 1) -> Array:
    """Every head of `axis` repeated `groups` times, so that value head h gets key head h // groups."""
    return x if groups == 1 else jnp.repeat(x, groups, axis=axis)


def masked(mask: Array, x: Array) -> Array:
    """`x` where `mask` (which names the leading axes of x) holds, zeros elsewhere, whatever x contains there."""
    return jnp.where(mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim)), x, jnp.zeros((), x.dtype))


def select(mask: Array, x: Pytree, y: Pytree) -> Pytree:
    """Leaves of x where `mask` (which names their leading axes) holds, of y elsewhere."""
    return jax.tree.map(lambda a, b: jnp.where(mask.reshape(mask.shape + (1,) * (a.ndim - mask.ndim)), a, b), x, y)


def scan_tokens(
    step: Callable[[Pytree, dict[str, Array]], tuple[Array, Pytree]],
    state: Pytree,
    empty: Pytree,
    inputs: dict[str, Array],
    segments: Segments | None,
    dtype: jnp.dtype,
) -> tuple[Array, Pytree]:
    """Runs `step` over axis 1 of `inputs`, one token at a time: the definition that every other form is tested against.

    `step(state, x)` sees `[B, heads, ...]` arrays of `dtype` and returns (output, state). Segments start from `empty`;
    padding is not seen. Returns outputs `[B, T, ...]` and the state.
    """

    def body(carry: Pytree, token: tuple[dict[str, Array], Segments | None]) -> tuple[Pytree, Array]:
        x, at = token
        if at is not None:
            x = {name: masked(at.valid, a) for name, a in x.items()}
            carry = select(at.reset, empty, carry)
        output, new = step(carry, {name: a.astype(dtype) for name, a in x.items()})
        if at is not None:
            output, new = masked(at.valid, output), select(at.valid, new, carry)
        return new, output

    tokens = jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), (inputs, segments))
    state, outputs = lax.scan(body, state, tokens)
    return jnp.moveaxis(outputs, 0, 1), state


def split_rows(x: Array, chunk_size: int) -> Array:
    """x [B, T, ...] as chunks [N, B, chunk_size, ...], with zeros behind the end."""
    chunks = -(-x.shape[1] // chunk_size)
    x = jnp.pad(x, [(0, 0), (0, chunks * chunk_size - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(x.shape[0], chunks, chunk_size, *x.shape[2:]), 1, 0)


def scan_chunks(
    chunk: Callable[..., tuple[Array, Pytree]],
    state: Pytree,
    inputs: dict[str, Array],
    segments: Segments | None,
    chunk_size: int,
    dtype: jnp.dtype,
    *per_chunk: Array,
) -> tuple[Array, Pytree]:
    """Runs `chunk` over spans of `chunk_size` tokens of axis 1 of `inputs` (`[B, T, heads, ...]`).

    `chunk(state, x, segments, *own)` sees `[B, heads, C, ...]` arrays of `dtype`, with zeros on padding and behind the
    row's end, the segments [B, C] of its rows or None, and its entries of the arrays `per_chunk` [N, ...]; it returns
    (output [B, H, C, ...], state). Nothing inside a chunk is kept for the backward pass, which recomputes it from the
    state at the chunk's start, so memory is the inputs plus one state per chunk.
    """
    length = next(iter(inputs.values())).shape[1]

    def body(carry: Pytree, xs: tuple[Any, ...]) -> tuple[Pytree, Array]:
        x, at, *own = xs
        if at is not None:
            x = {name: masked(at.valid, a) for name, a in x.items()}
        heads_first = {name: jnp.moveaxis(a, 2, 1).astype(dtype) for name, a in x.items()}
        output, carry = chunk(carry, heads_first, at, *own)
        output = jnp.moveaxis(output, 1, 2)
        return carry, output if at is None else masked(at.valid, output)

    xs = jax.tree.map(lambda x: split_rows(x, chunk_size), (inputs, segments))
    # The backward pass of a scan cannot merge the recomputation with the first computation: no barrier is needed.
    state, outputs = lax.scan(jax.checkpoint(body, prevent_cse=False), state, (*xs, *per_chunk))
    outputs = jnp.moveaxis(outputs, 0, 1)
    outputs = outputs.reshape(outputs.shape[0], outputs.shape[1] * chunk_size, *outputs.shape[3:])
    return outputs[:, :length], state


class Affine(NamedTuple):
    """A kind of transition of S <- F S + G.

    apply: F S, of F and S. compose: a later transition after an earlier one. identity: what changes nothing, shaped as
    a given transition. forget: an entry of what forgets everything.
    """

    apply: Callable[[Array, Array], Array]
    compose: Callable[[Array, Array], Array]
    identity: Callable[[Array], Array]
    forget: float = 0.0


def _matrix_product(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


DIAGONAL = Affine(jnp.multiply, jnp.multiply, jnp.ones_like)
MATRIX = Affine(
    _matrix_product, _matrix_product, lambda a: jnp.broadcast_to(jnp.eye(a.shape[-1], dtype=a.dtype), a.shape)
)


def scan_affine(
    kind: Affine, transition: Pytree, offset: Pytree, state: Pytree, empty: Pytree, segments: Segments | None
) -> Pytree:
    """The states after every token of S <- F S + G, in log depth, by `lax.associative_scan`.

    transition, offset: pytrees like `state`, with leaves [B, T, ...]: F, which may broadcast against the state, and G.
    Holds every token's state (and transition) at once, which the other forms exist to avoid.
    """
    if segments is not None:
        at = lambda mask, a: mask.reshape(mask.shape + (1,) * (a.ndim - 2))
        start = jax.tree.map(lambda f, e: kind.apply(f, e[:, None]), transition, empty)
        offset = jax.tree.map(lambda g, s: jnp.where(at(segments.reset, g), g + s, g), offset, start)
        transition = jax.tree.map(lambda f: jnp.where(at(segments.reset, f), kind.forget, f), transition)
        transition = jax.tree.map(lambda f: jnp.where(at(segments.valid, f), f, kind.identity(f)), transition)
        offset = jax.tree.map(lambda g: masked(segments.valid, g), offset)
    offset = jax.tree.map(lambda f, g, s: g.at[:, 0].add(kind.apply(f[:, 0], s)), transition, offset, state)

    def combine(first: tuple[Pytree, Pytree], second: tuple[Pytree, Pytree]) -> tuple[Pytree, Pytree]:
        (f1, g1), (f2, g2) = first, second
        return jax.tree.map(kind.compose, f2, f1), jax.tree.map(lambda f, a, b: kind.apply(f, a) + b, f2, g1, g2)

    return lax.associative_scan(combine, (transition, offset), axis=1)[1]


class Decay(NamedTuple):
    """What a scalar decay does inside a chunk, with G the sum of log decays from the chunk's start; all in [0, 1].

    within: [B, H, C, C], e^{G_i - G_j} where i >= j, else 0.
    from_start: [B, H, C], e^{G_i}, the weight of the state at the chunk's start in row i; None if everywhere 1.
    to_end: [B, H, C], e^{G_C - G_j}, the weight of row j's write in the state at the chunk's end; None if 1.
    """

    within: Array
    from_start: Array | None
    to_end: Array | None

    def state(self, state: Array) -> Array:
        """The state [B, H, K, ...] decayed over the whole chunk."""
        if self.from_start is None:
            return state
        total = self.from_start[..., -1]
        return total.reshape(total.shape + (1,) * (state.ndim - 2)) * state


def weigh(x: Array, weight: Array | None) -> Array:
    """Rows of x [..., C, d] times weight [..., C]."""
    return x if weight is None else weight[..., None] * x


def scalar_decay(log_decay: Array | None, segments: Segments | None, length: int, dtype: jnp.dtype) -> Decay:
    """Decay terms of one chunk, from log_decay [B, H, C] (natural log, <= 0, -inf legal) and the segments [B, C].

    G_i - G_j is summed over its own span (a matrix product with a triangle of ones), never taken as a difference of two
    prefix sums: that would lose the digits of small decays behind a large one, and give NaN between two -inf. Tokens
    that forget everything (-inf, resets) are counted instead of summed; spans that hold one weigh 0.
    """
    low = jnp.tril(jnp.ones((length, length), bool))
    reset = None if segments is None else segments.reset
    if log_decay is None and reset is None:
        return Decay(low.astype(dtype), None, None)
    if log_decay is None:
        assert reset is not None
        log_decay = jnp.zeros((reset.shape[0], 1, length), dtype)
    forget = jnp.isneginf(log_decay)
    if reset is not None:
        forget = forget | reset[:, None, :]
    finite = jnp.where(forget, 0, log_decay)
    forgotten = jnp.cumsum(forget.astype(jnp.int32), axis=-1)
    ones = low.astype(dtype)
    after_j = jnp.tril(ones, -1)  # [s, j], 1 where token s comes after token j
    span = jnp.einsum("is,bhsj->bhij", ones, finite[..., None] * after_j, precision=lax.Precision.HIGHEST)
    kept = low & (forgotten[..., :, None] == forgotten[..., None, :])
    within = jnp.where(kept, jnp.exp(jnp.where(kept, span, 0)), 0)
    prefix = jnp.einsum("is,bhs->bhi", ones, finite, precision=lax.Precision.HIGHEST)
    alive = forgotten == 0
    from_start = jnp.where(alive, jnp.exp(jnp.where(alive, prefix, 0)), 0)
    return Decay(within, from_start, within[..., -1, :])


def join_blocks(first: Array, cross: Array, second: Array) -> Array:
    """[[first, 0], [cross, second]] for square blocks [..., s, s]."""
    top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([cross, second], axis=-1)], axis=-2)


def _tiles(a: Array, size: int, row: int, column: int, stride: int) -> Array:
    """The tiles of `size` at (row + stride i, column + stride i) in tiles of a [..., C, C]: [..., n, size, size]."""
    count = a.shape[-1] // size
    a = a.reshape(*a.shape[:-2], count, size, count, size)
    return jnp.stack([a[..., row + i, :, column + i, :] for i in range(0, count, stride)], axis=-3)


@jax.custom_jvp
def unit_lower_inverse(a: Array) -> Array:
    """(I + a)^{-1} for strictly lower triangular a [..., C, C], C a power of two.

    By doubling: the inverses of the diagonal blocks of size s give those of size 2s, log2(C) rounds of batched matrix
    products, as stable as forward substitution (no power of `a` is formed) and without its C sequential rows. Inside
    tiles of 16 a round is X <- X - X (a o mask) X on whole tiles: more arithmetic than it needs, but far fewer
    operations.
    """
    length = a.shape[-1]
    size = min(length, 16)
    tiles = _tiles(a, size, 0, 0, 1)
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=a.dtype), tiles.shape)
    row, column = jnp.arange(size)[:, None], jnp.arange(size)[None, :]
    for bit in range(size.bit_length() - 1):
        neighbours = (row >> bit) == (column >> bit) + 1
        cross = tiles * (neighbours & ((row >> bit) % 2 == 1))
        inverse = inverse - (cross if bit == 0 else _full(_full(inverse, cross), inverse))
    while size < length:
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        inverse = join_blocks(first, -_full(_full(second, _tiles(a, size, 1, 0, 2)), first), second)
        size *= 2
    return inverse[..., 0, :, :]


@unit_lower_inverse.defjvp
def _unit_lower_inverse_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    inverse = unit_lower_inverse(*primals)
    return inverse, -_full(_full(inverse, jnp.tril(tangents[0], -1)), inverse)


def _full(a: Array, b: Array) -> Array:
    """Batched matrix product in the full precision of its inputs: errors of a triangular solve compound."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


@jax.custom_jvp
def cholesky_inverse(a: Array) -> Array:
    """L^{-1} for the Cholesky factor L of a symmetric positive definite a [..., C, C], C a power of two."""
    lower = lax.linalg.cholesky(a, symmetrize_input=False)
    diagonal = jnp.diagonal(lower, axis1=-2, axis2=-1)
    return unit_lower_inverse(jnp.tril(lower, -1) / diagonal[..., None, :]) / diagonal[..., :, None]


@cholesky_inverse.defjvp
def _cholesky_inverse_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    inverse = cholesky_inverse(*primals)
    moved = _full(_full(inverse, tangents[0]), jnp.swapaxes(inverse, -1, -2))
    half = 0.5 * jnp.eye(moved.shape[-1], dtype=moved.dtype) * moved
    return inverse, -_full(jnp.tril(moved, -1) + half, inverse)


@jax.custom_jvp
def positive_inverse(a: Array) -> Array:
    """The inverse of a symmetric positive definite a [..., K, K], by Cholesky; its gradient is symmetric too."""
    lower = lax.linalg.cholesky(a, symmetrize_input=False)
    identity = jnp.broadcast_to(jnp.eye(a.shape[-1], dtype=a.dtype), a.shape)
    half = lax.linalg.triangular_solve(lower, identity, left_side=True, lower=True)
    return _full(jnp.swapaxes(half, -1, -2), half)


@positive_inverse.defjvp
def _positive_inverse_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    inverse = positive_inverse(*primals)
    symmetric = (tangents[0] + jnp.swapaxes(tangents[0], -1, -2)) / 2
    return inverse, -_full(_full(inverse, symmetric), inverse)
