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

import jax.numpy as jnp
from jax import lax

from linattn_jax import debug
from linattn_jax.mixers import chunking, dispatch
from linattn_jax.mixers.calls import Call, finish_step, prepare, prepare_step
from linattn_jax.mixers.chunking import repeat_heads
from linattn_jax.mixers.state import MatrixState, matrix_init
from linattn_jax.types import Array

delta_rule_init = gated_delta_rule_init = kaczmarz_init = matrix_init


def l2_normalize(x: Array, eps: float = 1e-6) -> Array:
    """x * rsqrt(sum x^2 + eps) over the last axis: eps inside the root keeps gradients of zero rows finite."""
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + eps)


def kaczmarz_scale(k: Array, eps: float) -> Array:
    """r = rsqrt(||k||^2 + eps) over the last axis, and 0 for a zero key at eps = 0, with finite gradients."""
    square = jnp.sum(k * k, axis=-1) + eps
    return jnp.where(square > 0, lax.rsqrt(jnp.where(square > 0, square, 1)), 0)


@dataclass(frozen=True)
class _Rule:
    """Which member of the family runs; `eps` is KLA's, None for the others."""

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
            step = call.inputs["beta"] * repeat_heads(jnp.sum(k * k, axis=-1), call.groups, axis=2)
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

    def chunk(
        self, call: Call, state: MatrixState, x: dict[str, Array], reset: Array | None
    ) -> tuple[Array, MatrixState]:
        """One chunk in matrix form (WY representation, Yang et al. 2024, with the decay inside).

        With L_ij = e^{G_i - G_j} and A = strict_tril(diag(beta) (K K^T o L)), the errors that the tokens write are
        E = (I + A)^{-1} diag(beta) (V - e^G K S_0). KLA runs through it with keys r k, values r v and strength eta,
        where r = rsqrt(||k||^2 + eps): the same recurrence, and A stays bounded whatever the size of the keys.
        """
        q, k = self.queries_keys(call, x)
        v, strength = x["v"], x.get("beta", x.get("eta"))
        assert strength is not None
        if self.eps is not None:
            r = kaczmarz_scale(k, self.eps)
            k, v = r[..., None] * k, repeat_heads(r, call.groups)[..., None] * v
        length = k.shape[2]
        decay = chunking.scalar_decay(x.get("log_decay"), reset, length, k.dtype)
        product = partial(jnp.einsum, precision=call.precision)
        # Scores are per key head; what follows is per value head.
        keys_keys = repeat_heads(product("bhik,bhjk->bhij", k, k), call.groups)
        queries_keys = repeat_heads(product("bhik,bhjk->bhij", q, k), call.groups)
        q, k = repeat_heads(q, call.groups), repeat_heads(k, call.groups)
        inverse = chunking.unit_lower_inverse(jnp.tril(strength[..., None] * keys_keys * decay.within, -1))
        expected = chunking.weigh(product("bhik,bhkv->bhiv", k, state.S), decay.from_start)
        errors = product("bhij,bhjv->bhiv", inverse, strength[..., None] * (v - expected))
        output = chunking.weigh(product("bhik,bhkv->bhiv", q, state.S), decay.from_start)
        output = output + product("bhij,bhjv->bhiv", queries_keys * decay.within, errors)
        written = product("bhik,bhiv->bhkv", chunking.weigh(k, decay.to_end), errors)
        return output, MatrixState(decay.state(state.S) + written)


def _run(name: str, rule: _Rule, call: Call, implementation: str | None, chunk_size: int | None):
    call.check_values(name)
    rule.check_step(name, call)
    forms = {
        "recurrent": call.recurrent(partial(rule.token, call)),
        "chunkwise": call.chunkwise(partial(rule.chunk, call), call.chunk(chunk_size)),
    }
    return dispatch.run(name, forms, implementation, call.arguments, call.length, call.values)


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
    """DeltaNet's mixer (Schlag et al. 2021; chunkwise form after Yang et al. 2024): no decay.

    Args:
        q, k: [B, T, Hk, K]; float16, bfloat16, float32 or float64.
        v: [B, T, H, V], dtype of q; H a multiple of Hk, value head h reads key head h // (H // Hk).
        beta: [B, T, H], write strength in [0, 2 / ||k||^2].
        scale: multiplies q; default K ** -0.5.
        initial_state: memory that the row's first segment starts from; default empty.
        segment_ids: int32 [B, T]; the state starts empty where the id changes. Negative ids are padding: output 0, and
            nothing of what stands there is read or written.
        initial_segment_id: int32 [B]; rows whose first id differs drop their initial state.
        implementation: "recurrent", "chunkwise" or None (the fastest that serves the platform).
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
        q, k, v, {"beta": (beta, "B T H")}, scale, matrix_init, initial_state, segment_ids, initial_segment_id
    )
    return _run("delta_rule", _Rule(normalize_q, normalize_k), call, implementation, chunk_size)


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
    """Gated DeltaNet's mixer (Yang, Kautz and Hatamizadeh 2024, eq. 10): the delta rule on a decayed memory.

    As `delta_rule`, with log_decay [B, T, H], the natural log of the decay, in [-inf, 0].

    >>> import jax.numpy as jnp
    >>> k = jnp.ones((1, 3, 1, 1))
    >>> log_decay = jnp.log(jnp.array([1.0, 0.5, 0.5]))[None, :, None]
    >>> beta = jnp.array([1.0, 0.0, 0.0])[None, :, None]
    >>> output, _ = gated_delta_rule(k, k, 8.0 * k, log_decay, beta, scale=1.0)
    >>> [round(x, 3) for x in output[0, :, 0, 0].tolist()]
    [8.0, 4.0, 2.0]
    """
    gates = {"log_decay": (log_decay, "B T H"), "beta": (beta, "B T H")}
    call = prepare(q, k, v, gates, scale, matrix_init, initial_state, segment_ids, initial_segment_id)
    return _run("gated_delta_rule", _Rule(normalize_q, normalize_k), call, implementation, chunk_size)


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
    """KLA's mixer (Zou, Ren and Liu 2026, arXiv 2605.08587): the gated delta rule with beta = eta / (||k||^2 + eps).

    As `gated_delta_rule`, with eta [B, T, H] in [0, 2], a step relative to Kaczmarz's projection: at eta = 1 and eps =
    0 the write stores v at k exactly and changes the memory by the least Frobenius norm that does. Keys keep their
    norm; a zero key writes nothing.

    >>> import jax.numpy as jnp
    >>> k = jnp.array([3.0, 4.0]).reshape(1, 1, 1, 2)
    >>> v = jnp.array([7.0]).reshape(1, 1, 1, 1)
    >>> zero, one = jnp.zeros((1, 1, 1)), jnp.ones((1, 1, 1))
    >>> output, state = kaczmarz(k, k, v, zero, one, eps=0.0, scale=1.0)
    >>> float(output[0, 0, 0, 0])
    7.0
    """
    gates = {"log_decay": (log_decay, "B T H"), "eta": (eta, "B T H")}
    call = prepare(q, k, v, gates, scale, matrix_init, initial_state, segment_ids, initial_segment_id)
    return _run("kaczmarz", _Rule(normalize_q, normalize_k, float(eps)), call, implementation, chunk_size)


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
    call = prepare_step(state, q, k, v, {"beta": (beta, "B H")}, scale, matrix_init)
    return finish_step(call, _Rule(normalize_q, normalize_k).token)


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
    gates = {"log_decay": (log_decay, "B H"), "beta": (beta, "B H")}
    call = prepare_step(state, q, k, v, gates, scale, matrix_init)
    return finish_step(call, _Rule(normalize_q, normalize_k).token)


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
    gates = {"log_decay": (log_decay, "B H"), "eta": (eta, "B H")}
    call = prepare_step(state, q, k, v, gates, scale, matrix_init)
    return finish_step(call, _Rule(normalize_q, normalize_k, float(eps)).token)


_FORMS = ("recurrent", "chunkwise")
dispatch.register(dispatch.Mixer("delta_rule", delta_rule, delta_rule_step, matrix_init, ("beta",), _FORMS))
dispatch.register(
    dispatch.Mixer(
        "gated_delta_rule", gated_delta_rule, gated_delta_rule_step, matrix_init, ("log_decay", "beta"), _FORMS
    )
)
dispatch.register(dispatch.Mixer("kaczmarz", kaczmarz, kaczmarz_step, matrix_init, ("log_decay", "eta"), _FORMS))
