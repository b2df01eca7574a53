"""CCQ, the curvature-conditioned query (Le et al. 2026): the query contracted along dense key directions, then read.

Per key head, with the covariance Sigma_t of the keys up to t (weights 1, or decayed):
    q <- q - gate gain Sigma_t q,
after which any linear-attention memory is read with the new q. The write is untouched. Sigma comes from k / ||k||
unless `normalize_keys=False`: then 0 <= Sigma <= I, and the query contracts for gate gain <= 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from linattn_jax.mixers import chunking, dispatch, gla
from linattn_jax.mixers.calls import Call, finish_step, prepare, prepare_step
from linattn_jax.mixers.chunking import Segments
from linattn_jax.mixers.delta import Rule, l2_normalize
from linattn_jax.mixers.state import MatrixState, matrix_empty, serializable
from linattn_jax.types import QKV, Argument, Array

_GATE = Argument("B T Hk", "gate")
_QUERY = {"q": Argument("B T Hk K"), "k": Argument("B T Hk K"), "gate": _GATE}
_SCALAR = Argument("B T H", "gate")
_GLA = QKV | {"log_decay": Argument("B T Hk K", "gate"), "gate": _GATE}
_GATED = QKV | {"log_decay": _SCALAR, "beta": _SCALAR, "gate": _GATE}
_KACZMARZ = QKV | {"log_decay": _SCALAR, "eta": _SCALAR, "gate": _GATE}


@serializable
class CurvatureState(NamedTuple):
    """Of the keys so far: their weight count [B, Hk], mean [B, Hk, K] and scatter [B, Hk, K, K].

    scatter is sum_j w_j (k_j - mean) (k_j - mean)^T, so that Sigma = scatter / count.
    """

    count: Array  # type: ignore[assignment]
    mean: Array
    scatter: Array


@serializable
class CCQState(NamedTuple):
    """The state of the query's contraction, and the backbone's memory."""

    query: CurvatureState
    memory: MatrixState


def curvature_query_init(
    batch: int, key_heads: int, key_size: int, *, dtype: DTypeLike = jnp.float32
) -> CurvatureState:
    """No keys yet: zeros."""
    return CurvatureState(
        jnp.zeros((batch, key_heads), dtype),
        jnp.zeros((batch, key_heads, key_size), dtype),
        jnp.zeros((batch, key_heads, key_size, key_size), dtype),
    )


def ccq_init(
    batch: int,
    heads: int,
    key_size: int,
    value_size: int,
    *,
    key_heads: int | None = None,
    dtype: DTypeLike = jnp.float32,
) -> CCQState:
    """The empty state of every `ccq_` mixer, zeros; `key_heads` defaults to `heads`."""
    memory = MatrixState(jnp.zeros((batch, heads, key_size, value_size), dtype))
    return CCQState(curvature_query_init(batch, key_heads or heads, key_size, dtype=dtype), memory)


ccq_gla_init = ccq_gated_delta_rule_init = ccq_kaczmarz_init = ccq_init


def _query_empty(sizes: Mapping[str, int], dtype: DTypeLike) -> CurvatureState:
    return curvature_query_init(sizes["B"], sizes["Hk"], sizes["K"], dtype=dtype)


def _ccq_empty(sizes: Mapping[str, int], dtype: DTypeLike) -> CCQState:
    return CCQState(_query_empty(sizes, dtype), matrix_empty(sizes, dtype))


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


def _head_decay(log_decay: Array, key_heads: int, axis: int, per_channel: bool) -> Array:
    """One log decay per key head: the mean over channels, or over the value heads (`axis`) of each key head."""
    if per_channel:
        return jnp.mean(log_decay, axis=-1)
    shape = (*log_decay.shape[:axis], key_heads, -1, *log_decay.shape[axis + 1 :])
    return jnp.mean(log_decay.reshape(shape), axis=axis + 1)


@dataclass(frozen=True)
class _Conditioned:
    """A backbone read through the contraction, token by token, in a chunk or whole; `rule` is None for GLA."""

    contraction: Contraction
    rule: Rule | None
    decay: str

    def _run(self, part: str, axis: int, call: Call, state: CCQState, x: dict[str, Array], *segments: Any) -> Any:
        q, k = x["q"], x["k"]
        if self.rule is not None:
            q, k = (l2_normalize(a) if on else a for a, on in ((q, self.rule.normalize_q), (k, self.rule.normalize_k)))
        seen = {"q": q, "k": k, "gate": x["gate"]}
        if self.decay == "backbone":
            seen["log_decay"] = _head_decay(x["log_decay"], call.sizes["Hk"], axis, self.rule is None)
        of_query, of_memory = (replace(call, empty=empty) for empty in call.empty)
        q, query = getattr(self.contraction, part)(of_query, state.query, seen, *segments)
        backbone = gla if self.rule is None else replace(self.rule, normalize_q=False, normalize_k=False)
        output, memory = getattr(backbone, part)(of_memory, state.memory, x | {"q": q, "k": k}, *segments)
        return output, CCQState(query, memory)

    def token(self, call: Call, state: CCQState, x: dict[str, Array]) -> tuple[Array, CCQState]:
        return self._run("token", 1, call, state, x)

    def chunk(
        self, call: Call, state: CCQState, x: dict[str, Array], segments: Segments | None
    ) -> tuple[Array, CCQState]:
        return self._run("chunk", 1, call, state, x, segments)

    def whole(
        self, call: Call, state: CCQState, x: dict[str, Array], segments: Segments | None
    ) -> tuple[Array, CCQState]:
        return self._run("whole", 2, call, state, x, segments)


def _run(name: str, parts: Any, call: Call, implementation: str | None, chunk_size: int | None) -> Any:
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
        _query_empty,
        initial_state=initial_state,
        segment_ids=segment_ids,
        initial_segment_id=initial_segment_id,
    )
    return _run("curvature_query", Contraction(normalize_keys, gain), call, implementation, chunk_size)


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
    return finish_step(prepare_step(state, arrays, arguments, _query_empty), Contraction(normalize_keys, gain).token)


def _conditioned(rule: Rule | None, decay: str, normalize_keys: bool, gain: float) -> _Conditioned:
    if decay not in ("none", "backbone"):
        raise ValueError(f"decay: {decay!r} given, wanted 'none' or 'backbone'.")
    return _Conditioned(Contraction(normalize_keys, gain), rule, decay)


@dispatch.on_any_mesh
def ccq_gla(
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    gate: Array,
    *,
    decay: str = "none",
    normalize_keys: bool = True,
    gain: float = 1.0,
    scale: float | Array | None = None,
    initial_state: CCQState | None = None,
    segment_ids: Array | None = None,
    initial_segment_id: Array | None = None,
    implementation: str | None = None,
    chunk_size: int | None = None,
) -> tuple[Array, CCQState]:
    """CCQ on gated linear attention (Le et al. 2026): `gla` read with q - gate gain Sigma q.

    gate [B, T, Hk] in [0, 1]; `decay="none"` weighs all keys alike in Sigma, "backbone" lets them decay by the mean of
    log_decay over channels. `normalize_keys` and `gain` are those of `curvature_query`, the rest is as for `gla`; the
    state is `CCQState(query, memory)`.

    Ours: what is so in `curvature_query`, and the decay "backbone".

    >>> import jax.numpy as jnp
    >>> from linattn_jax import gla
    >>> k, no_decay, no_gate = jnp.ones((1, 3, 1, 2)), jnp.zeros((1, 3, 1, 2)), jnp.zeros((1, 3, 1))
    >>> bool(jnp.all(ccq_gla(k, k, k, no_decay, no_gate)[0] == gla(k, k, k, no_decay)[0]))
    True
    """
    call = prepare(
        {"q": q, "k": k, "v": v, "log_decay": log_decay, "gate": gate},
        _GLA,
        _ccq_empty,
        scale=scale,
        initial_state=initial_state,
        segment_ids=segment_ids,
        initial_segment_id=initial_segment_id,
    )
    return _run("ccq_gla", _conditioned(None, decay, normalize_keys, gain), call, implementation, chunk_size)


@dispatch.on_any_mesh
def ccq_gla_step(
    state: CCQState,
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    gate: Array,
    *,
    decay: str = "none",
    normalize_keys: bool = True,
    gain: float = 1.0,
    scale: float | Array | None = None,
) -> tuple[Array, CCQState]:
    """One token of `ccq_gla`: arrays without T; returns output [B, H, V] and the new state."""
    arrays = {"q": q, "k": k, "v": v, "log_decay": log_decay, "gate": gate}
    call = prepare_step(state, arrays, _GLA, _ccq_empty, scale=scale)
    return finish_step(call, _conditioned(None, decay, normalize_keys, gain).token)


@dispatch.on_any_mesh
def ccq_gated_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    beta: Array,
    gate: Array,
    *,
    decay: str = "none",
    normalize_keys: bool = True,
    gain: float = 1.0,
    scale: float | Array | None = None,
    initial_state: CCQState | None = None,
    segment_ids: Array | None = None,
    initial_segment_id: Array | None = None,
    implementation: str | None = None,
    chunk_size: int | None = None,
    normalize_q: bool = False,
    normalize_k: bool = False,
) -> tuple[Array, CCQState]:
    """CCQ on the gated delta rule (Le et al. 2026): `gated_delta_rule` read with q - gate gain Sigma q.

    gate [B, T, Hk] in [0, 1]; `decay="none"` weighs all keys alike in Sigma, "backbone" lets them decay by the mean of
    log_decay over the value heads of each key head. Queries and keys are normalised first, where asked.
    `normalize_keys` and `gain` are those of `curvature_query`, the rest is as for `gated_delta_rule`; the state is
    `CCQState(query, memory)`.

    Ours: what is so in `curvature_query`, and the decay "backbone".

    >>> import jax.numpy as jnp
    >>> k = jnp.eye(4)[None, :, None]
    >>> v, zero, one = jnp.arange(8.0).reshape(1, 4, 1, 2), jnp.zeros((1, 4, 1)), jnp.ones((1, 4, 1))
    >>> output, state = ccq_gated_delta_rule(k, k, v, zero, one, zero, scale=1.0)      # gate 0: the delta rule's own
    >>> bool(jnp.all(output == v)), int(state.query.count[0, 0])
    (True, 4)
    """
    call = prepare(
        {"q": q, "k": k, "v": v, "log_decay": log_decay, "beta": beta, "gate": gate},
        _GATED,
        _ccq_empty,
        scale=scale,
        initial_state=initial_state,
        segment_ids=segment_ids,
        initial_segment_id=initial_segment_id,
    )
    rule = Rule(normalize_q, normalize_k)
    rule.check_step("ccq_gated_delta_rule", call)
    parts = _conditioned(rule, decay, normalize_keys, gain)
    return _run("ccq_gated_delta_rule", parts, call, implementation, chunk_size)


@dispatch.on_any_mesh
def ccq_gated_delta_rule_step(
    state: CCQState,
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    beta: Array,
    gate: Array,
    *,
    decay: str = "none",
    normalize_keys: bool = True,
    gain: float = 1.0,
    scale: float | Array | None = None,
    normalize_q: bool = False,
    normalize_k: bool = False,
) -> tuple[Array, CCQState]:
    """One token of `ccq_gated_delta_rule`: arrays without T; returns output [B, H, V] and the new state."""
    arrays = {"q": q, "k": k, "v": v, "log_decay": log_decay, "beta": beta, "gate": gate}
    call = prepare_step(state, arrays, _GATED, _ccq_empty, scale=scale)
    return finish_step(call, _conditioned(Rule(normalize_q, normalize_k), decay, normalize_keys, gain).token)


@dispatch.on_any_mesh
def ccq_kaczmarz(
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    eta: Array,
    gate: Array,
    *,
    eps: float = 1e-6,
    decay: str = "none",
    normalize_keys: bool = True,
    gain: float = 1.0,
    scale: float | Array | None = None,
    initial_state: CCQState | None = None,
    segment_ids: Array | None = None,
    initial_segment_id: Array | None = None,
    implementation: str | None = None,
    chunk_size: int | None = None,
    normalize_q: bool = False,
    normalize_k: bool = False,
) -> tuple[Array, CCQState]:
    """CCQ (Le et al. 2026) on Kaczmarz linear attention: `kaczmarz` read with q - gate gain Sigma q.

    Options as for `ccq_gated_delta_rule` and `kaczmarz`; the state is `CCQState(query, memory)`.

    Ours: the combination, and what is so in `ccq_gated_delta_rule`.

    >>> import jax.numpy as jnp
    >>> k = jnp.full((1, 1, 1, 4), 3.0)
    >>> zero, one = jnp.zeros((1, 1, 1)), jnp.ones((1, 1, 1))
    >>> output, _ = ccq_kaczmarz(k, k, jnp.full((1, 1, 1, 1), 7.0), zero, one, one, eps=0.0, scale=1.0)
    >>> round(float(output[0, 0, 0, 0]), 4)                                # one key has no covariance: as stored
    7.0
    """
    call = prepare(
        {"q": q, "k": k, "v": v, "log_decay": log_decay, "eta": eta, "gate": gate},
        _KACZMARZ,
        _ccq_empty,
        scale=scale,
        initial_state=initial_state,
        segment_ids=segment_ids,
        initial_segment_id=initial_segment_id,
    )
    rule = Rule(normalize_q, normalize_k, float(eps))
    rule.check_step("ccq_kaczmarz", call)
    return _run("ccq_kaczmarz", _conditioned(rule, decay, normalize_keys, gain), call, implementation, chunk_size)


@dispatch.on_any_mesh
def ccq_kaczmarz_step(
    state: CCQState,
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    eta: Array,
    gate: Array,
    *,
    eps: float = 1e-6,
    decay: str = "none",
    normalize_keys: bool = True,
    gain: float = 1.0,
    scale: float | Array | None = None,
    normalize_q: bool = False,
    normalize_k: bool = False,
) -> tuple[Array, CCQState]:
    """One token of `ccq_kaczmarz`: arrays without T; returns output [B, H, V] and the new state."""
    arrays = {"q": q, "k": k, "v": v, "log_decay": log_decay, "eta": eta, "gate": gate}
    call = prepare_step(state, arrays, _KACZMARZ, _ccq_empty, scale=scale)
    rule = Rule(normalize_q, normalize_k, float(eps))
    return finish_step(call, _conditioned(rule, decay, normalize_keys, gain).token)


_FORMS = ("recurrent", "associative", "chunkwise")
dispatch.register(
    dispatch.Mixer(
        "curvature_query", curvature_query, curvature_query_step, _query_empty, _QUERY, _FORMS, output="B T Hk K"
    )
)
for _name, _call, _step, _arguments in (
    ("ccq_gla", ccq_gla, ccq_gla_step, _GLA),
    ("ccq_gated_delta_rule", ccq_gated_delta_rule, ccq_gated_delta_rule_step, _GATED),
    ("ccq_kaczmarz", ccq_kaczmarz, ccq_kaczmarz_step, _KACZMARZ),
):
    dispatch.register(dispatch.Mixer(_name, _call, _step, _ccq_empty, _arguments, _FORMS))
