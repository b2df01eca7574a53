"""CCQ (Le et al. 2026): a linear-attention memory read with the curvature-conditioned query, in one pass.

The contraction is that of `curvature_query`, the memory that of `gla`, `gated_delta_rule` or `kaczmarz`; here they run
token by token or chunk by chunk together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from linattn_jax.mixers import dispatch, gla
from linattn_jax.mixers.calls import Call, finish_step, prepare, prepare_step
from linattn_jax.mixers.chunking import Segments
from linattn_jax.mixers.curvature import Contraction, CurvatureState, curvature_query_init, query_empty, run_forms
from linattn_jax.mixers.delta import Rule, l2_normalize
from linattn_jax.mixers.state import MatrixState, matrix_empty, matrix_init, serializable
from linattn_jax.types import QKV, Argument, Array

_GATE, _SCALAR = Argument("B T Hk", "gate"), Argument("B T H", "gate")
_GLA = QKV | {"log_decay": Argument("B T Hk K", "gate"), "gate": _GATE}
_GATED = QKV | {"log_decay": _SCALAR, "beta": _SCALAR, "gate": _GATE}
_KACZMARZ = QKV | {"log_decay": _SCALAR, "eta": _SCALAR, "gate": _GATE}


@serializable
class CCQState(NamedTuple):
    """The state of the query's contraction, and the backbone's memory."""

    query: CurvatureState
    memory: MatrixState


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
    query = curvature_query_init(batch, key_heads or heads, key_size, dtype=dtype)
    return CCQState(query, matrix_init(batch, heads, key_size, value_size, dtype=dtype))


ccq_gla_init = ccq_gated_delta_rule_init = ccq_kaczmarz_init = ccq_init


def _ccq_empty(sizes: Mapping[str, int], dtype: DTypeLike) -> CCQState:
    return CCQState(query_empty(sizes, dtype), matrix_empty(sizes, dtype))


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
    return run_forms("ccq_gla", _conditioned(None, decay, normalize_keys, gain), call, implementation, chunk_size)


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
    return run_forms("ccq_gated_delta_rule", parts, call, implementation, chunk_size)


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
    return run_forms("ccq_kaczmarz", _conditioned(rule, decay, normalize_keys, gain), call, implementation, chunk_size)


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
for _name, _call, _step, _arguments in (
    ("ccq_gla", ccq_gla, ccq_gla_step, _GLA),
    ("ccq_gated_delta_rule", ccq_gated_delta_rule, ccq_gated_delta_rule_step, _GATED),
    ("ccq_kaczmarz", ccq_kaczmarz, ccq_kaczmarz_step, _KACZMARZ),
):
    dispatch.register(dispatch.Mixer(_name, _call, _step, _ccq_empty, _arguments, _FORMS))
