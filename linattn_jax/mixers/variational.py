"""VLA, variational linear attention (Pandey and Singh 2026): writes steered by an inverted penalty matrix.

Per head, with the penalty M [K, K], its inverse A, the memory S [K, V], the key sum z and k^ = k rsqrt(||k||^2 + 1e-6):
    M <- M + u u^T,  A = M^{-1},  a^ = A k^ / ||A k^||  (0 for a zero key),
    S <- S + a^ (v - S^T k^)^T,  z <- z + k,  o = S^T q / max(q . z, eps).
An empty memory has M = penalty I. The transition I - a^ k^T has spectral radius 1, but spectral norm
(1 + sqrt(5 - 4 a^ . k^)) / 2, up to 1.618: the paper's Proposition 2, which says 1, holds for a^ = k^ alone.
A is what M says: every form but the single step begins by deriving A from M, so gradients reach an initial state
through M, and that of A is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from linattn_jax.mixers import chunking, dispatch
from linattn_jax.mixers.calls import Call, finish_step, prepare, prepare_step
from linattn_jax.mixers.chunking import Segments, positive_inverse
from linattn_jax.mixers.delta import delta_chunk, delta_states, l2_normalize
from linattn_jax.mixers.state import serializable
from linattn_jax.types import Argument, Array

# Tokens between two derivations of A from M. Chunks are no longer than that either: what their rows take from A at the
# chunk's start cancels, the more the more rows there are.
REFRESH = 64

_ARGUMENTS = {
    "q": Argument("B T H K"),
    "k": Argument("B T H K"),
    "v": Argument("B T H V"),
    "penalty_direction": Argument("B T H K"),
}


@serializable
class VariationalState(NamedTuple):
    """Penalty M and its inverse A [B, H, K, K], memory S [B, H, K, V], sum of keys z [B, H, K]."""

    M: Array
    A: Array
    S: Array
    z: Array


def variational_init(
    batch: int,
    heads: int,
    key_size: int,
    value_size: int,
    *,
    key_heads: int | None = None,
    penalty: float = 0.1,
    dtype: DTypeLike = jnp.float32,
) -> VariationalState:
    """The empty state: M = penalty I, A = I / penalty, S and z zeros. There are as many key heads as value heads."""
    if key_heads not in (None, heads):
        raise ValueError(f"key_heads: {key_heads} given, wanted {heads}, the number of value heads.")
    if not penalty > 0:
        raise ValueError(f"penalty: {penalty} given, wanted a positive number.")
    eye = jnp.broadcast_to(jnp.eye(key_size, dtype=dtype), (batch, heads, key_size, key_size))
    return VariationalState(
        penalty * eye,
        eye / penalty,
        jnp.zeros((batch, heads, key_size, value_size), dtype),
        jnp.zeros((batch, heads, key_size), dtype),
    )


def _empty(sizes: Mapping[str, int], dtype: DTypeLike, penalty: float = 0.1) -> VariationalState:
    return variational_init(sizes["B"], sizes["H"], sizes["K"], sizes["V"], penalty=penalty, dtype=dtype)


def variational_refresh(state: VariationalState) -> VariationalState:
    """The state with A derived from M: do so at every 64th call or so of `variational_step`.

    A is kept where M has been rounded to a matrix that is not positive, which takes very many equal directions.

    >>> import jax.numpy as jnp
    >>> state = variational_init(1, 1, 2, 2)._replace(A=jnp.zeros((1, 1, 2, 2)))      # M = 0.1 I, an A far from 10 I
    >>> round(float(variational_refresh(state).A[0, 0, 0, 0]), 3)
    10.0
    """
    usable = jnp.all(jnp.isfinite(lax.linalg.cholesky(lax.stop_gradient(state.M))), axis=(-2, -1), keepdims=True)
    identity = jnp.eye(state.M.shape[-1], dtype=state.M.dtype)
    return state._replace(A=jnp.where(usable, positive_inverse(jnp.where(usable, state.M, identity)), state.A))


@dataclass(frozen=True)
class _Rule:
    """The options of a call, and its forms."""

    penalty: float
    normalize_write: bool
    normalize_output: bool
    eps: float

    def direction(self, write: Array) -> Array:
        """a^ from A k^ [..., K]."""
        if not self.normalize_write:
            return write
        square = jnp.sum(write * write, axis=-1, keepdims=True)
        return write * jnp.where(square > 0, lax.rsqrt(jnp.where(square > 0, square, 1)), 0)

    def read(self, output: Array, mass: Array) -> Array:
        return output / jnp.maximum(mass, self.eps)[..., None] if self.normalize_output else output

    def token(self, call: Call, state: VariationalState, x: dict[str, Array]) -> tuple[Array, VariationalState]:
        product = partial(jnp.einsum, precision=lax.Precision.HIGHEST)
        q, k, u, (M, A, S, z) = call.scale * x["q"], x["k"], x["penalty_direction"], state
        M = M + u[..., :, None] * u[..., None, :]
        moved = product("bhij,bhj->bhi", A, u)
        A = A - moved[..., :, None] * moved[..., None, :] / (1 + jnp.sum(u * moved, axis=-1))[..., None, None]
        unit = l2_normalize(k)
        write = self.direction(product("bhij,bhj->bhi", A, unit))
        error = x["v"] - product("bhk,bhkv->bhv", unit, S)
        S, z = S + write[..., :, None] * error[..., None, :], z + k
        output = self.read(product("bhk,bhkv->bhv", q, S), jnp.sum(q * z, axis=-1))
        return output, VariationalState(M, A, S, z)

    def recurrent(self, call: Call) -> Callable[..., Any]:
        """Tokens one at a time, in spans before which A is derived from M.

        M is the sum of the spans' own sums, compensated after Kahan: one direction repeated is rounded the same way
        each time, and 1e5 such errors would outweigh the penalty.
        """

        def span(
            carry: tuple[VariationalState, Array], x: dict[str, Array], segments: Segments | None
        ) -> tuple[Array, tuple[VariationalState, Array]]:
            (state, low), x = carry, {name: jnp.moveaxis(a, 1, 2) for name, a in x.items()}
            state = variational_refresh(state)
            start = state._replace(M=jnp.zeros_like(state.M))
            output, end = chunking.scan_tokens(partial(self.token, call), start, call.empty, x, segments, call.dtype)
            added = end.M + low
            total = state.M + added
            low = added - (total - state.M)
            if segments is not None:
                fresh = jnp.any(segments.reset, axis=-1)[:, None, None, None]
                total, low = jnp.where(fresh, end.M, total), jnp.where(fresh, 0, low)
            return jnp.moveaxis(output, 1, 2), (end._replace(M=total), low)

        def form(
            inputs: dict[str, Array], state: VariationalState, segments: Segments | None
        ) -> tuple[Array, VariationalState]:
            scan = call.chunkwise(span, REFRESH)
            output, (state, _) = scan(inputs, (state, jnp.zeros_like(state.M)), segments)
            return output, state

        return form

    def whole(
        self, call: Call, state: VariationalState, x: dict[str, Array], segments: Segments | None
    ) -> tuple[Array, VariationalState]:
        """The paper's parallel form: a scan of affine maps. All A_t [B, T, H, K, K] come from the sums M_t at once."""
        q, k, u = call.scale * x["q"], x["k"], x["penalty_direction"]
        one = jnp.ones((*k.shape[:2], 1, 1), k.dtype)
        affine = partial(chunking.scan_affine, chunking.DIAGONAL)
        M = affine(one[..., None], u[..., :, None] * u[..., None, :], state.M, call.empty.M, segments)
        z = affine(one, k, state.z, call.empty.z, segments)
        A, unit = positive_inverse(M), l2_normalize(k)
        write = self.direction(jnp.einsum("bthij,bthj->bthi", A, unit, precision=lax.Precision.HIGHEST))
        S = delta_states(call, state.S, unit, write, x["v"], None, segments)
        output = jnp.einsum("bthk,bthkv->bthv", q, S, precision=lax.Precision.HIGHEST)
        last = VariationalState(*(s[:, -1] for s in (M, A, S, z)))
        return self.read(output, jnp.sum(q * z, axis=-1)), last

    def chunk(
        self,
        call: Call,
        state: tuple[Array, Array],
        x: dict[str, Array],
        segments: Segments | None,
        inverse: Array,
    ) -> tuple[Array, tuple[Array, Array]]:
        """One chunk, from S and z and the A [B, H, K, K] before it.

        With I + U A U^T = L L^T and Z = L^{-1} U A, whose row t is z_t: A_t = A - sum_{s <= t} z_s z_s^T. Rows after a
        reset start from I / penalty, and products between segments are left out, so that L has a block for each.
        """
        product = partial(jnp.einsum, precision=lax.Precision.HIGHEST)  # A is ill conditioned: what it meets is exact
        (S, z), q, k, u = state, call.scale * x["q"], x["k"], x["penalty_direction"]
        unit = l2_normalize(k)
        decay = chunking.scalar_decay(None, segments, k.shape[2], k.dtype)
        steered, write = product("bhik,bhkl->bhil", u, inverse), product("bhik,bhkl->bhil", unit, inverse)
        together = jnp.ones((), k.dtype)
        if segments is not None:
            number = jnp.cumsum(segments.reset.astype(jnp.int32), axis=-1)
            carried = (number == 0)[:, None, :, None]
            steered, write = (jnp.where(carried, a, b / self.penalty) for a, b in ((steered, u), (write, unit)))
            together = (number[:, None, :, None] == number[:, None, None, :]).astype(k.dtype)
        gram = together * product("bhik,bhjk->bhij", steered, u) + jnp.eye(k.shape[2], dtype=k.dtype)
        factor = product("bhij,bhjk->bhik", chunking.cholesky_inverse(gram), steered)
        seen = product("bhik,bhjk->bhij", unit, factor) * decay.within
        write = self.direction(write - product("bhij,bhjk->bhik", seen, factor))
        output, S = delta_chunk(call, S, q, unit, write, x["v"], jnp.ones(k.shape[:3], k.dtype), decay)
        mass = jnp.sum(product("bhik,bhjk->bhij", q, k) * decay.within, axis=-1)
        mass = mass + chunking.weigh(product("bhik,bhk->bhi", q, z)[..., None], decay.from_start)[..., 0]
        z = decay.state(z) + jnp.sum(chunking.weigh(k, decay.to_end), axis=2)
        return self.read(output, mass), (S, z)

    def chunkwise(self, call: Call, chunk_size: int | None) -> Callable[..., Any]:
        def form(
            inputs: dict[str, Array], state: VariationalState, segments: Segments | None
        ) -> tuple[Array, VariationalState]:
            if call.sizes["T"] == 0:
                return self.recurrent(call)(inputs, state, segments)
            rows = min(call.chunk(chunk_size), REFRESH)
            before, M = self.penalties(call, inputs["penalty_direction"], state.M, segments, rows)
            chunk = call.cast_output(partial(self.chunk, call))
            memory = state.S, state.z
            output, memory = chunking.scan_chunks(
                chunk, memory, inputs, segments, rows, call.dtype, positive_inverse(before)
            )
            return output, VariationalState(M, positive_inverse(M), *memory)

        return form

    def penalties(
        self, call: Call, direction: Array, M: Array, segments: Segments | None, rows: int
    ) -> tuple[Array, Array]:
        """M before every chunk [N, B, H, K, K] and at the end, by one prefix sum over chunks."""
        empty, at = call.empty.M, None
        u = chunking.split_rows(direction, rows)
        transition = jnp.ones((u.shape[1], u.shape[0], 1, 1, 1), call.dtype)
        if segments is not None:
            at = jax.tree.map(lambda a: chunking.split_rows(a, rows), segments)
            number = jnp.cumsum(at.reset.astype(jnp.int32), axis=-1)
            u = chunking.masked(at.valid & (number == number[..., -1:]), u)  # the rows that outlive the chunk
            fresh = jnp.moveaxis(number[..., -1] > 0, 0, 1)
            transition = jnp.where(fresh[..., None, None, None], 0, transition)
        u = u.astype(call.dtype)
        offset = jnp.einsum("nbchk,nbchl->bnhkl", u, u, precision=lax.Precision.HIGHEST)
        if segments is not None:
            offset = offset + chunking.masked(fresh, jnp.broadcast_to(empty[:, None], offset.shape))
        after = jnp.moveaxis(chunking.scan_affine(chunking.DIAGONAL, transition, offset, M, empty, None), 1, 0)
        return jnp.concatenate([M[None], after[:-1]]), after[-1]


@dispatch.on_any_mesh
def variational(
    q: Array,
    k: Array,
    v: Array,
    penalty_direction: Array,
    *,
    penalty: float = 0.1,
    normalize_write: bool = True,
    normalize_output: bool = True,
    eps: float = 1e-4,
    scale: float | Array | None = None,
    initial_state: VariationalState | None = None,
    segment_ids: Array | None = None,
    initial_segment_id: Array | None = None,
    implementation: str | None = None,
    chunk_size: int | None = None,
) -> tuple[Array, VariationalState]:
    """VLA (Pandey and Singh 2026): M <- M + u u^T, S <- S + a (v - S^T k)^T with a = M^{-1} k / ||M^{-1} k||.

    Ours: the chunkwise form (one Cholesky factor serves all the A of a chunk), and deriving A anew from M every 64
    tokens, where the authors add 1e-3 I every 20; updates of A alone drift (after 1e5 equal directions in float32 the
    smallest eigenvalue of A is 10 times wrong).

    Args:
        q, k: [B, T, H, K]; float16, bfloat16, float32 or float64. Non-negative features, as reads are normalised.
        v: [B, T, H, V], dtype of q.
        penalty_direction: u [B, T, H, K], dtype of q; each token adds u u^T to the penalty M, which makes later writes
            avoid u.
        penalty: what M starts from, times I; positive.
        normalize_write: write along A k / ||A k||; without, along A k itself, where the transition's norm grows as
            K / penalty and products of them overflow.
        normalize_output: divide reads by max(q . z, eps), with z the sum of keys; z grows with t and the memory does
            not, so reads shrink as 1 / t and want a norm behind them.
        eps: the least divisor of a read.
        scale: multiplies q; default 1. It cancels where reads are normalised, save against eps.
        initial_state, segment_ids, initial_segment_id, implementation, chunk_size: as for `delta_rule`; chunks have at
            most 64 rows. The associative form holds a K x K matrix per token; the chunkwise one, one per chunk.

    Returns:
        Output [B, T, H, V] in v.dtype, and VariationalState(M, A, S, z), float32 (float64 for float64 inputs).

    Raises:
        ValueError, TypeError: naming the argument, what was seen and what was wanted.

    >>> import jax.numpy as jnp
    >>> k = jnp.eye(3)[None, :, None]                                # three keys at right angles, no penalty
    >>> v = jnp.array([1.0, 2.0, 6.0]).reshape(1, 3, 1, 1)
    >>> output, state = variational(k, k, v, jnp.zeros((1, 3, 1, 3)))
    >>> [round(x, 3) for x in output[0, :, 0, 0].tolist()], round(float(state.A[0, 0, 0, 0]), 3)
    ([1.0, 2.0, 6.0], 10.0)
    """
    empty = partial(_empty, penalty=penalty)
    call = prepare(
        {"q": q, "k": k, "v": v, "penalty_direction": penalty_direction},
        _ARGUMENTS,
        empty,
        scale=1.0 if scale is None else scale,
        initial_state=initial_state,
        segment_ids=segment_ids,
        initial_segment_id=initial_segment_id,
    )
    rule = _Rule(penalty, normalize_write, normalize_output, eps)
    forms = {
        "recurrent": rule.recurrent(call),
        "associative": call.associative(partial(rule.whole, call)),
        "chunkwise": rule.chunkwise(call, chunk_size),
    }
    return call.run("variational", forms, implementation)


@dispatch.on_any_mesh
def variational_step(
    state: VariationalState,
    q: Array,
    k: Array,
    v: Array,
    penalty_direction: Array,
    *,
    penalty: float = 0.1,
    normalize_write: bool = True,
    normalize_output: bool = True,
    eps: float = 1e-4,
    scale: float | Array | None = None,
) -> tuple[Array, VariationalState]:
    """One token of `variational`: q, k, penalty_direction [B, H, K], v [B, H, V]; returns output [B, H, V] and state.

    A is updated, not derived: call `variational_refresh` at every 64th token or so.
    """
    arrays = {"q": q, "k": k, "v": v, "penalty_direction": penalty_direction}
    scale = 1.0 if scale is None else scale
    call = prepare_step(state, arrays, _ARGUMENTS, partial(_empty, penalty=penalty), scale=scale)
    return finish_step(call, _Rule(penalty, normalize_write, normalize_output, eps).token)


_FORMS = ("recurrent", "associative", "chunkwise")
dispatch.register(dispatch.Mixer("variational", variational, variational_step, _empty, _ARGUMENTS, _FORMS))
