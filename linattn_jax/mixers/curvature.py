"""The curvature-conditioned query of CCQ (Le et al. 2026): contracted along dense key directions, then to be read.

Per key head, with the covariance Sigma_t of the keys up to t (weights 1, or decayed):
    q <- q - gate gain Sigma_t q,
after which any linear-attention memory is read with the new q (`ccq`). The write is untouched. Sigma comes from
k / ||k||, so that 0 <= Sigma <= I and the query contracts for gate gain <= 1, unless `normalize_keys=False`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from linattn_jax.mixers import chunking, dispatch
from linattn_jax.mixers.calls import Call, finish_step, prepare, prepare_step
from linattn_jax.mixers.chunking import Segments
from linattn_jax.mixers.delta import l2_normalize
from linattn_jax.mixers.state import serializable
from linattn_jax.types import Argument, Array

_GATE = Argument("B T Hk", "gate")
_QUERY = {"q": Argument("B T Hk K"), "k": Argument("B T Hk K"), "gate": _GATE}


@serializable
class CurvatureState(NamedTuple):
    """Of the keys so far: their weight count [B, Hk], mean [B, Hk, K] and scatter [B, Hk, K, K].

    scatter is sum_j w_j (k_j - mean) (k_j - mean)^T, so that Sigma = scatter / count.
    """

    count: Array  # type: ignore[assignment]
    mean: Array
    scatter: Array


def curvature_query_init(
    batch: int, key_heads: int, key_size: int, *, dtype: DTypeLike = jnp.float32
) -> CurvatureState:
    """No keys yet: zeros."""
    return CurvatureState(
        jnp.zeros((batch, key_heads), dtype),
        jnp.zeros((batch, key_heads, key_size), dtype),
        jnp.zeros((batch, key_heads, key_size, key_size), dtype),
    )


def query_empty(sizes: Mapping[str, int], dtype: DTypeLike) -> CurvatureState:
    """`curvature_query_init` from sizes by axis name."""
    return curvature_query_init(sizes["B"], sizes["Hk"], sizes["K"], dtype=dtype)


def _over(x: Array, count: Array) -> Array:
    """x [..., *] / count [...], 0 where nothing has been counted."""
    count = count.reshape(count.shape + (1,) * (x.ndim - count.ndim))
    return jnp.where(count > 0, x / jnp.where(count > 0, count, 1), 0)


def _merge(first: tuple[Array, CurvatureState], second: tuple[Array, CurvatureState]) -> tuple[Array, CurvatureState]:
    """Two spans of keys, the first decayed by what the second decays: the parallel update of Chan et al. (1979)."""
    (decay1, (n1, mean1, scatter1)), (decay2, (n2, mean2, scatter2)) = first, second
    n1 = decay2 * n1
    count = n1 + n2
    between = mean2 - mean1
    mean = mean1 + _over(n2[..., None] * between, count)
    cross = _over(n1 * n2, count)[..., None, None] * between[..., :, None] * between[..., None, :]
    return decay1 * decay2, CurvatureState(count, mean, decay2[..., None, None] * scatter1 + scatter2 + cross)


@dataclass(frozen=True)
class Contraction:
    """The options of the contraction and its three forms; x holds q, k, gate and perhaps log_decay per key head."""

    normalize_keys: bool
    gain: float

    def keys(self, x: dict[str, Array]) -> Array:
        return l2_normalize(x["k"]) if self.normalize_keys else x["k"]

    def contract(self, x: dict[str, Array], along: Array) -> Array:
        return x["q"] - self.gain * x["gate"][..., None] * along

    def token(self, call: Call, state: CurvatureState, x: dict[str, Array]) -> tuple[Array, CurvatureState]:
        """Welford's update."""
        k, (count, mean, scatter) = self.keys(x), state
        if "log_decay" in x:
            decay = jnp.exp(x["log_decay"])
            count, scatter = decay * count, decay[..., None, None] * scatter
        count = count + 1
        before = k - mean
        mean = mean + before / count[..., None]
        scatter = scatter + before[..., :, None] * (k - mean)[..., None, :]
        along = jnp.einsum("bhij,bhj->bhi", scatter, x["q"], precision=lax.Precision.HIGHEST) / count[..., None]
        return self.contract(x, along), CurvatureState(count, mean, scatter)

    def whole(
        self, call: Call, state: CurvatureState, x: dict[str, Array], segments: Segments | None
    ) -> tuple[Array, CurvatureState]:
        k = self.keys(x)
        one = jnp.ones(k.shape[:-1], k.dtype)
        decay = jnp.exp(x["log_decay"]) if "log_decay" in x else one
        count = one
        if segments is not None:
            valid = segments.valid[..., None]
            decay = jnp.where(segments.reset[..., None], 0, jnp.where(valid, decay, 1))
            count = jnp.where(valid, count, 0)
        tokens = decay, CurvatureState(count, k, jnp.zeros((*k.shape, k.shape[-1]), k.dtype))
        start = jnp.ones_like(state.count), state
        spans = jax.tree.map(lambda s, a: jnp.concatenate([s[:, None], a], axis=1), start, tokens)
        _, states = lax.associative_scan(_merge, spans, axis=1)
        states = jax.tree.map(lambda s: s[:, 1:], states)
        moved = jnp.einsum("bthij,bthj->bthi", states.scatter, x["q"], precision=lax.Precision.HIGHEST)
        return self.contract(x, _over(moved, states.count)), jax.tree.map(lambda s: s[:, -1], states)

    def chunk(
        self, call: Call, state: CurvatureState, x: dict[str, Array], segments: Segments | None
    ) -> tuple[Array, CurvatureState]:
        """One chunk: n Sigma q = sum_j w_j k_j (k_j . q) - n mean (mean . q), all keys less a reference.

        The reference is the mean of the keys before the chunk, or in a new segment its first key. The keys before the
        chunk stand in it as one key of their count at their mean, beside their scatter.
        """
        k, q, (count, mean, scatter) = self.keys(x), x["q"], state
        length, product = k.shape[2], partial(jnp.einsum, precision=call.precision)
        base, reference = _references(k, state, segments)
        decay = chunking.scalar_decay(x.get("log_decay"), segments, length, k.dtype)
        within = jnp.broadcast_to(decay.within, (*k.shape[:3], length))
        carried = count[..., None] * (jnp.ones(length, k.dtype) if decay.from_start is None else decay.from_start)
        to_end = within[..., -1, :]
        k, before = k - reference, mean - base
        if segments is not None:
            valid = segments.valid[:, None, :]
            within, to_end = within * valid[..., None, :], to_end * valid
            k = jnp.where(valid[..., None], k, 0)
        counts = carried + jnp.sum(within, axis=-1)
        means = _over(product("bhij,bhjk->bhik", within, k) + carried[..., None] * before[:, :, None], counts)
        scores = product("bhik,bhjk->bhij", q, k) * within
        along = product("bhij,bhjk->bhik", scores, k)
        along = along + chunking.weigh(product("bhik,bhlk->bhil", q, scatter), decay.from_start)
        along = along + (carried * product("bhik,bhk->bhi", q, before))[..., None] * before[:, :, None]
        along = _over(along, counts) - jnp.sum(means * q, axis=-1, keepdims=True) * means
        # The new mean lies among the keys: about it the scatter is a sum of what cannot cancel.
        last = means[:, :, -1]
        k, before = k - last[:, :, None], before - last
        scatter = decay.state(scatter) + product("bhik,bhil->bhkl", to_end[..., None] * k, k)
        scatter = scatter + carried[..., -1, None, None] * before[..., :, None] * before[..., None, :]
        mean = jnp.where(counts[..., -1, None] > 0, reference[:, :, -1] + last, 0)
        return self.contract(x, along), CurvatureState(counts[..., -1], mean, scatter)


def _references(k: Array, state: CurvatureState, segments: Segments | None) -> tuple[Array, Array]:
    """What is taken from the carried mean [B, Hk, K], and from each key [B, Hk, C or 1, K].

    Keys are picked by a product with ones and zeros: the gradient of a gather would be a scatter, which adds up in an
    order of its own on a GPU.
    """
    pick = partial(jnp.einsum, "bij,bhjk->bhik", precision=lax.Precision.HIGHEST)
    rows = jnp.arange(k.shape[2])
    if segments is None:
        first = k[:, :, :1]
    else:
        first = pick((rows == jnp.argmax(segments.valid, axis=-1)[:, None])[:, None].astype(k.dtype), k)
    base = jnp.where(state.count[..., None] > 0, state.mean, first[:, :, 0])
    if segments is None:
        return base, base[:, :, None]
    start = lax.cummax(jnp.where(segments.reset, rows, -1), axis=1)
    starts = pick((rows == start[..., None]).astype(k.dtype), k)
    return base, jnp.where((start < 0)[:, None, :, None], base[:, :, None], starts)


def run_forms(name: str, parts: Any, call: Call, implementation: str | None, chunk_size: int | None) -> Any:
    """Output and state by the form asked for, of `parts` that have token, whole and chunk."""
    forms = {
        "recurrent": call.recurrent(partial(parts.token, call)),
        "associative": call.associative(partial(parts.whole, call)),
        "chunkwise": call.chunkwise(partial(parts.chunk, call), chunk_size, inert_zeros=False),
    }
    return call.run(name, forms, implementation)


@dispatch.on_any_mesh
def curvature_query(
    q: Array,
    k: Array,
    gate: Array,
    *,
    log_decay: Array | None = None,
    normalize_keys: bool = True,
    gain: float = 1.0,
    initial_state: CurvatureState | None = None,
    segment_ids: Array | None = None,
    initial_segment_id: Array | None = None,
    implementation: str | None = None,
    chunk_size: int | None = None,
) -> tuple[Array, CurvatureState]:
    """The curvature-conditioned query (Le et al. 2026): q <- q - gate gain Sigma q, Sigma the covariance of the keys.

    Ours: the chunkwise form without a K x K matrix per token, and in it the reference key (a covariance does not change
    when a constant is taken from all keys; without that it cancels where keys share a large mean). What the paper
    leaves open is an option; its defaults are our reading.

    Args:
        q, k: [B, T, Hk, K]; float16, bfloat16, float32 or float64.
        gate: [B, T, Hk], in [0, 1]; 0 leaves q as it is.
        log_decay: [B, T, Hk], natural log, <= 0: earlier keys count e^{log_decay} as much; default all count alike.
        normalize_keys: take Sigma of k / ||k||, so that 0 <= Sigma <= I; with raw keys gate gain Sigma may exceed I
            and turn the sign of components.
        gain: multiplies gate; a contraction is sure while gate gain <= 1.
        initial_state, segment_ids, initial_segment_id, implementation, chunk_size: as for `delta_rule`.

    Returns:
        The new q, shaped and typed like q, and the state of the keys seen. It is q itself at the first token of a
        segment and where all keys so far are the same.

    Raises:
        ValueError, TypeError: naming the argument, what was seen and what was wanted.

    >>> import jax.numpy as jnp
    >>> k = jnp.array([[1.0, 0.0], [-1.0, 0.0]]).reshape(1, 2, 1, 2)        # Sigma = diag(1, 0) after two tokens
    >>> q, _ = curvature_query(jnp.ones((1, 2, 1, 2)), k, jnp.full((1, 2, 1), 0.5))
    >>> [[round(float(x), 3) for x in row] for row in q[0, :, 0]]
    [[1.0, 1.0], [0.5, 1.0]]
    """
    arrays = {"q": q, "k": k, "gate": gate}
    arguments = _QUERY
    if log_decay is not None:
        arrays, arguments = arrays | {"log_decay": log_decay}, arguments | {"log_decay": _GATE}
    call = prepare(
        arrays,
        arguments,
        query_empty,
        initial_state=initial_state,
        segment_ids=segment_ids,
        initial_segment_id=initial_segment_id,
    )
    return run_forms("curvature_query", Contraction(normalize_keys, gain), call, implementation, chunk_size)


@dispatch.on_any_mesh
def curvature_query_step(
    state: CurvatureState,
    q: Array,
    k: Array,
    gate: Array,
    *,
    log_decay: Array | None = None,
    normalize_keys: bool = True,
    gain: float = 1.0,
) -> tuple[Array, CurvatureState]:
    """One token of `curvature_query`: q, k [B, Hk, K], gates [B, Hk]; returns the new q and the new state."""
    arrays = {"q": q, "k": k, "gate": gate}
    arguments = _QUERY
    if log_decay is not None:
        arrays, arguments = arrays | {"log_decay": log_decay}, arguments | {"log_decay": _GATE}
    return finish_step(prepare_step(state, arrays, arguments, query_empty), Contraction(normalize_keys, gain).token)


_FORMS = ("recurrent", "associative", "chunkwise")
dispatch.register(
    dispatch.Mixer(
        "curvature_query", curvature_query, curvature_query_step, query_empty, _QUERY, _FORMS, output="B T Hk K"
    )
)
