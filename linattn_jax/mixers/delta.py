"""The delta-rule family: DeltaNet, Gated DeltaNet and KLA (Kaczmarz linear attention).

Per value head, with the state S [K, V] and S~ = e^{log_decay} S:
    S <- S~ + beta k (v - S~^T k)^T,    o = scale S^T q,
each write moving what k reads from the decayed memory toward v. beta ||k||^2 is the step relative to an exact
projection (1 stores v exactly): between 0 and 2 the update contracts, beyond 2 it diverges, in every implementation and
for everybody. Nothing raises on values: a positive log decay grows the state without bound, and a NaN or infinity
(except log_decay = -inf, which forgets everything) spoils the recurrent form from its token to the end of its document,
and the chunkwise form from the start of its chunk to the end of the row, later documents included; see
`linattn_jax.debug`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax

from linattn_jax import debug
from linattn_jax.mixers import chunking, delta_kernel, dispatch
from linattn_jax.mixers.calls import Call, finish_step, prepare, prepare_step
from linattn_jax.mixers.chunking import Segments, repeat_heads
from linattn_jax.mixers.state import MatrixState, matrix_empty, matrix_init
from linattn_jax.types import QKV, Argument, Array

delta_rule_init = gated_delta_rule_init = kaczmarz_init = matrix_init

_PLAIN = QKV | {"beta": Argument("B T H", "gate")}
_GATED = QKV | {"log_decay": Argument("B T H", "gate"), "beta": Argument("B T H", "gate")}
_KACZMARZ = QKV | {"log_decay": Argument("B T H", "gate"), "eta": Argument("B T H", "gate")}


def l2_normalize(x: Array, eps: float = 1e-6) -> Array:
    """x * rsqrt(sum x^2 + eps) over the last axis: eps inside the root keeps gradients of zero rows finite."""
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + eps)


def kaczmarz_scale(k: Array, eps: float) -> Array:
    """r = rsqrt(||k||^2 + eps) over the last axis, and 0 for a zero key at eps = 0, with finite gradients."""
    square = jnp.sum(k * k, axis=-1) + eps
    return jnp.where(square > 0, lax.rsqrt(jnp.where(square > 0, square, 1)), 0)


@dataclass(frozen=True)
class Rule:
    """Which member of the family runs, in its three forms; `eps` is KLA's, None for the others."""

    normalize_q: bool
    normalize_k: bool
    eps: float | None = None

    def queries_keys(self, call: Call, x: dict[str, Array]) -> tuple[Array, Array]:
        q = l2_normalize(x["q"]) if self.normalize_q else x["q"]
        k = l2_normalize(x["k"]) if self.normalize_k else x["k"]
        return call.scale * q, k

    def check_step(self, name: str, call: Call) -> None:
        """States that steps contract, inside `debug.value_checks` only."""
        if self.eps is not None:
            step = call.inputs["eta"]
        else:
            k = call.inputs["k"].astype(call.dtype)
            k = l2_normalize(k) if self.normalize_k else k
            step = call.inputs["beta"].astype(call.dtype) * repeat_heads(jnp.sum(k * k, axis=-1), call.groups, axis=2)
        debug.check_step(name, step, None if call.segments is None else call.segments.valid)

    def token(self, call: Call, state: MatrixState, x: dict[str, Array]) -> tuple[Array, MatrixState]:
        q, k = self.queries_keys(call, x)
        q, k = repeat_heads(q, call.groups), repeat_heads(k, call.groups)
        if self.eps is None:
            beta = x["beta"]
        else:
            square = jnp.sum(k * k, axis=-1) + self.eps
            beta = jnp.where(square > 0, x["eta"] / jnp.where(square > 0, square, 1), 0)
        memory = state.S if "log_decay" not in x else jnp.exp(x["log_decay"])[..., None, None] * state.S
        read = partial(jnp.einsum, "bhk,bhkv->bhv", precision=lax.Precision.HIGHEST)
        error = beta[..., None] * (x["v"] - read(k, memory))
        memory = memory + k[..., :, None] * error[..., None, :]
        return read(q, memory), MatrixState(memory)

    def unit_rate(self, call: Call, k: Array, v: Array, axis: int) -> tuple[Array, Array]:
        """k and v such that the strength alone is the rate of the write: KLA's r k and r v, r = rsqrt(||k||^2 + eps).

        The same recurrence as with rate eta / (||k||^2 + eps), and products of keys stay bounded whatever their size.
        """
        if self.eps is None:
            return k, v
        r = kaczmarz_scale(k, self.eps)
        return r[..., None] * k, repeat_heads(r, call.groups, axis)[..., None] * v

    def chunk(
        self, call: Call, state: MatrixState, x: dict[str, Array], segments: Segments | None
    ) -> tuple[Array, MatrixState]:
        q, k = self.queries_keys(call, x)
        k, v = self.unit_rate(call, k, x["v"], axis=1)
        decay = chunking.scalar_decay(x.get("log_decay"), segments, k.shape[2], k.dtype)
        output, memory = delta_chunk(call, state.S, q, k, k, v, _strength(x), decay)
        return output, MatrixState(memory)

    def whole(
        self, call: Call, state: MatrixState, x: dict[str, Array], segments: Segments | None
    ) -> tuple[Array, MatrixState]:
        q, k = self.queries_keys(call, x)
        k, v = self.unit_rate(call, k, x["v"], axis=2)
        q, k = repeat_heads(q, call.groups, axis=2), repeat_heads(k, call.groups, axis=2)
        decay = jnp.exp(x["log_decay"])[..., None, None] if "log_decay" in x else None
        memory = delta_states(call, state.S, k, _strength(x)[..., None] * k, v, decay, segments)
        read = jnp.einsum("bthk,bthkv->bthv", q, memory, precision=lax.Precision.HIGHEST)
        return read, MatrixState(memory[:, -1])


def _strength(x: dict[str, Array]) -> Array:
    return x["eta"] if "eta" in x else x["beta"]


def delta_chunk(
    call: Call, memory: Array, q: Array, erase: Array, write: Array, v: Array, strength: Array, decay: chunking.Decay
) -> tuple[Array, Array]:
    """One chunk of S <- S~ + beta w (v - S~^T k)^T in matrix form, erase vectors k and write vectors w [B, Hk, C, K].

    The WY representation of Yang et al. 2024 with the decay inside: with L_ij = e^{G_i - G_j} and
    A = strict_tril(diag(beta) (K W^T o L)), the errors that the tokens write are
    E = (I + A)^{-1} diag(beta) (V - e^G K S_0). Returns the output [B, H, C, V] and the memory after the chunk.
    """
    product = partial(jnp.einsum, precision=call.precision)
    # Scores are per key head; what follows is per value head.
    overlap = repeat_heads(product("bhik,bhjk->bhij", erase, write), call.groups)
    scores = repeat_heads(product("bhik,bhjk->bhij", q, write), call.groups)
    q, erase, write = (repeat_heads(a, call.groups) for a in (q, erase, write))
    inverse = chunking.unit_lower_inverse(jnp.tril(strength[..., None] * overlap * decay.within, -1))
    expected = chunking.weigh(product("bhik,bhkv->bhiv", erase, memory), decay.from_start)
    errors = product("bhij,bhjv->bhiv", inverse, strength[..., None] * (v - expected))
    output = chunking.weigh(product("bhik,bhkv->bhiv", q, memory), decay.from_start)
    output = output + product("bhij,bhjv->bhiv", scores * decay.within, errors)
    written = product("bhik,bhiv->bhkv", chunking.weigh(write, decay.to_end), errors)
    return output, decay.state(memory) + written


def delta_states(
    call: Call, memory: Array, erase: Array, write: Array, v: Array, decay: Array | None, segments: Segments | None
) -> Array:
    """The memories [B, T, H, K, V] after every token, by a scan of affine maps S <- e^g (I - w k^T) S + w v^T.

    erase k, write w (which holds the strength): [B, T, H, K]; decay e^g: [B, T, H, 1, 1]. The maps take T K^2.
    """
    identity = jnp.eye(erase.shape[-1], dtype=erase.dtype)
    transition = identity - write[..., :, None] * erase[..., None, :]
    transition = transition if decay is None else decay * transition
    offset = write[..., :, None] * v[..., None, :]
    return chunking.scan_affine(chunking.MATRIX, transition, offset, memory, call.empty.S, segments)


def _run(name: str, rule: Rule, call: Call, implementation: str | None, chunk_size: int | None):
    rule.check_step(name, call)
    forms: dict[str, Any] = {
        "recurrent": call.recurrent(partial(rule.token, call)),
        "associative": call.associative(partial(rule.whole, call)),
        "chunkwise": call.chunkwise(partial(rule.chunk, call), chunk_size),
    }
    if implementation in (None, "mosaic_gpu"):
        forms["mosaic_gpu"] = delta_kernel.mosaic_gpu(rule, call, implementation, chunk_size)
    return call.run(name, forms, implementation)


@dispatch.on_any_mesh
def delta_rule(
    q: Array,
    k: Array,
    v: Array,
    beta: Array,
    *,
    scale: float | Array | None = None,
    initial_state: MatrixState | None = None,
    segment_ids: Array | None = None,
    initial_segment_id: Array | None = None,
    implementation: str | None = None,
    chunk_size: int | None = None,
    normalize_q: bool = False,
    normalize_k: bool = False,
) -> tuple[Array, MatrixState]:
    """DeltaNet (Schlag et al. 2021; chunkwise form after Yang et al. 2024): S <- S + beta k (v - S^T k)^T.

    Ours: nothing in the recurrence; the inverse of the chunkwise form's triangular system, by doubling blocks.

    Args:
        q, k: [B, T, Hk, K]; float16, bfloat16, float32 or float64.
        v: [B, T, H, V], dtype of q; H a multiple of Hk, value head h reads key head h // (H // Hk).
        beta: [B, T, H], write strength in [0, 2 / ||k||^2].
        scale: multiplies q; default K ** -0.5.
        initial_state: memory that the row's first segment starts from; default empty.
        segment_ids: int32 [B, T]; the state starts empty where the id changes. Negative ids are padding: output 0, and
            nothing of what stands there is read or written.
        initial_segment_id: int32 [B]; rows whose first id differs drop their initial state.
        implementation: "recurrent", "associative", "chunkwise", "mosaic_gpu" or None (the fastest that serves the
            platform). "mosaic_gpu" serves NVIDIA Hopper: q, k and v of 16 bits, K up to 256, no other
            `chunk_size` than 64; it differentiates once, in reverse. None takes it where all GPUs that JAX sees are
            such; a program lowered for one elsewhere has to name it.
        chunk_size: rows per chunk, a power of two; default 64, on a CPU 32 where K V <= 4096. Only speed and memory
            depend on it.
        normalize_q, normalize_k: L2-normalise q or k first, x * rsqrt(sum x^2 + 1e-6).

    Returns:
        Output [B, T, H, V] in v.dtype and the state after the last real token, float32 (float64 for float64 inputs).

    Raises:
        ValueError or TypeError naming the argument, for shapes, ranks, dtypes and names that do not fit;
        NotImplementedError for a named implementation that does not serve the call.

    >>> import jax.numpy as jnp
    >>> k = jnp.eye(4)[None, :, None, :]                       # four tokens, four orthogonal keys
    >>> v = jnp.arange(8.0).reshape(1, 4, 1, 2)
    >>> output, state = delta_rule(k, k, v, jnp.ones((1, 4, 1)), scale=1.0)
    >>> bool(jnp.all(output == v)), state.S.shape              # every read finds what was just stored
    (True, (1, 1, 4, 2))
    """
    call = prepare(
        {"q": q, "k": k, "v": v, "beta": beta},
        _PLAIN,
        matrix_empty,
        scale=scale,
        initial_state=initial_state,
        segment_ids=segment_ids,
        initial_segment_id=initial_segment_id,
    )
    return _run("delta_rule", Rule(normalize_q, normalize_k), call, implementation, chunk_size)


@dispatch.on_any_mesh
def gated_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    beta: Array,
    *,
    scale: float | Array | None = None,
    initial_state: MatrixState | None = None,
    segment_ids: Array | None = None,
    initial_segment_id: Array | None = None,
    implementation: str | None = None,
    chunk_size: int | None = None,
    normalize_q: bool = False,
    normalize_k: bool = False,
) -> tuple[Array, MatrixState]:
    """Gated DeltaNet (Yang, Kautz and Hatamizadeh 2024, eq. 10): S <- S~ + beta k (v - S~^T k)^T, S~ = e^{log_decay} S.

    The other arguments, results and errors are those of `delta_rule`.

    Ours: nothing in the recurrence; log decays are summed over their own span, so -inf, which forgets all, is exact.

    Args:
        log_decay: [B, T, H], natural log of the decay, in [-inf, 0].

    >>> import jax.numpy as jnp
    >>> k = jnp.ones((1, 3, 1, 1))
    >>> log_decay = jnp.log(jnp.array([1.0, 0.5, 0.5]))[None, :, None]
    >>> beta = jnp.array([1.0, 0.0, 0.0])[None, :, None]
    >>> output, _ = gated_delta_rule(k, k, 8.0 * k, log_decay, beta, scale=1.0)
    >>> [round(x, 3) for x in output[0, :, 0, 0].tolist()]
    [8.0, 4.0, 2.0]
    """
    call = prepare(
        {"q": q, "k": k, "v": v, "log_decay": log_decay, "beta": beta},
        _GATED,
        matrix_empty,
        scale=scale,
        initial_state=initial_state,
        segment_ids=segment_ids,
        initial_segment_id=initial_segment_id,
    )
    return _run("gated_delta_rule", Rule(normalize_q, normalize_k), call, implementation, chunk_size)


@dispatch.on_any_mesh
def kaczmarz(
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    eta: Array,
    *,
    eps: float = 1e-6,
    scale: float | Array | None = None,
    initial_state: MatrixState | None = None,
    segment_ids: Array | None = None,
    initial_segment_id: Array | None = None,
    implementation: str | None = None,
    chunk_size: int | None = None,
    normalize_q: bool = False,
    normalize_k: bool = False,
) -> tuple[Array, MatrixState]:
    """KLA (Zou, Ren and Liu 2026, arXiv 2605.08587): `gated_delta_rule` with beta = eta / (||k||^2 + eps).

    eta is a step relative to Kaczmarz's projection: at eta = 1 and eps = 0 the write stores v at k exactly and changes
    the memory by the least Frobenius norm that does. Keys keep their norm; a zero key writes nothing. The other
    arguments, results and errors are those of `gated_delta_rule`.

    Ours: the chunkwise and associative forms run the gated delta rule on keys r k and values r v with strength eta,
    r = (||k||^2 + eps)^{-1/2}: the same recurrence for every eps, and products of keys stay bounded.

    Args:
        eta: [B, T, H], the step, in [0, 2].
        eps: added to ||k||^2. With 0, zero keys write nothing, and gradients of keys of norm below 1e-10 overflow.

    >>> import jax.numpy as jnp
    >>> k = jnp.array([3.0, 4.0]).reshape(1, 1, 1, 2)
    >>> v = jnp.array([7.0]).reshape(1, 1, 1, 1)
    >>> zero, one = jnp.zeros((1, 1, 1)), jnp.ones((1, 1, 1))
    >>> output, state = kaczmarz(k, k, v, zero, one, eps=0.0, scale=1.0)
    >>> float(output[0, 0, 0, 0])
    7.0
    """
    call = prepare(
        {"q": q, "k": k, "v": v, "log_decay": log_decay, "eta": eta},
        _KACZMARZ,
        matrix_empty,
        scale=scale,
        initial_state=initial_state,
        segment_ids=segment_ids,
        initial_segment_id=initial_segment_id,
    )
    return _run("kaczmarz", Rule(normalize_q, normalize_k, float(eps)), call, implementation, chunk_size)


@dispatch.on_any_mesh
def delta_rule_step(
    state: MatrixState,
    q: Array,
    k: Array,
    v: Array,
    beta: Array,
    *,
    scale: float | Array | None = None,
    normalize_q: bool = False,
    normalize_k: bool = False,
) -> tuple[Array, MatrixState]:
    """One token of `delta_rule`: q, k [B, Hk, K], v [B, H, V], beta [B, H]; returns output [B, H, V] and the state."""
    call = prepare_step(state, {"q": q, "k": k, "v": v, "beta": beta}, _PLAIN, matrix_empty, scale=scale)
    return finish_step(call, Rule(normalize_q, normalize_k).token)


@dispatch.on_any_mesh
def gated_delta_rule_step(
    state: MatrixState,
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    beta: Array,
    *,
    scale: float | Array | None = None,
    normalize_q: bool = False,
    normalize_k: bool = False,
) -> tuple[Array, MatrixState]:
    """One token of `gated_delta_rule`: gates [B, H], the rest as `delta_rule_step`."""
    arrays = {"q": q, "k": k, "v": v, "log_decay": log_decay, "beta": beta}
    call = prepare_step(state, arrays, _GATED, matrix_empty, scale=scale)
    return finish_step(call, Rule(normalize_q, normalize_k).token)


@dispatch.on_any_mesh
def kaczmarz_step(
    state: MatrixState,
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    eta: Array,
    *,
    eps: float = 1e-6,
    scale: float | Array | None = None,
    normalize_q: bool = False,
    normalize_k: bool = False,
) -> tuple[Array, MatrixState]:
    """One token of `kaczmarz`: gates [B, H], the rest as `delta_rule_step`."""
    arrays = {"q": q, "k": k, "v": v, "log_decay": log_decay, "eta": eta}
    call = prepare_step(state, arrays, _KACZMARZ, matrix_empty, scale=scale)
    return finish_step(call, Rule(normalize_q, normalize_k, float(eps)).token)


_FORMS, _KERNELS = ("recurrent", "associative", "chunkwise"), ("mosaic_gpu",)
for _name, _call, _step, _arguments in (
    ("delta_rule", delta_rule, delta_rule_step, _PLAIN),
    ("gated_delta_rule", gated_delta_rule, gated_delta_rule_step, _GATED),
    ("kaczmarz", kaczmarz, kaczmarz_step, _KACZMARZ),
):
    dispatch.register(dispatch.Mixer(_name, _call, _step, matrix_empty, _arguments, _FORMS, kernels=_KERNELS))
