"""Linear attention and its scalar-decay form (simple GLA: RetNet's retention, Mamba-2's SSD core).

Per value head, with the state S [K, V]:
    S <- e^{log_decay} S + k v^T,    o = scale S^T q.
Nothing raises on values: a positive log decay grows the state without bound, and NaN does what it does in the delta
rule (see `delta.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from linattn_jax.mixers import chunking, dispatch
from linattn_jax.mixers.calls import Call, finish_step, prepare, prepare_step
from linattn_jax.mixers.chunking import Segments, repeat_heads
from linattn_jax.mixers.state import (
    MatrixState,
    NormalizedState,
    matrix_empty,
    matrix_init,
    normalized_empty,
    normalized_init,
)
from linattn_jax.types import QKV, Argument, Array

linear_attention_init = normalized_init
simple_gla_init = matrix_init

_SIMPLE = QKV | {"log_decay": Argument("B T H", "gate")}


def _decayed_token(call: Call, memory: Array, x: dict[str, Array]) -> tuple[Array, Array]:
    q, k = repeat_heads(x["q"], call.groups), repeat_heads(x["k"], call.groups)
    if "log_decay" in x:
        memory = jnp.exp(x["log_decay"])[..., None, None] * memory
    memory = memory + k[..., :, None] * x["v"][..., None, :]
    output = jnp.einsum("bhk,bhkv->bhv", call.scale * q, memory, precision=lax.Precision.HIGHEST)
    return output, memory


def _decayed_chunk(
    call: Call, memory: Array, x: dict[str, Array], segments: Segments | None
) -> tuple[Array, Array, Array, chunking.Decay]:
    """One chunk: O = e^G Q S_0 + (Q K^T o L) V; also returns the scores [B, H, C, C] and the decay."""
    decay = chunking.scalar_decay(x.get("log_decay"), segments, x["q"].shape[2], memory.dtype)
    product = partial(jnp.einsum, precision=call.precision)
    q = call.scale * x["q"]
    scores = repeat_heads(product("bhik,bhjk->bhij", q, x["k"]), call.groups) * decay.within
    q, k = repeat_heads(q, call.groups), repeat_heads(x["k"], call.groups)
    output = chunking.weigh(product("bhik,bhkv->bhiv", q, memory), decay.from_start)
    output = output + product("bhij,bhjv->bhiv", scores, x["v"])
    written = product("bhik,bhiv->bhkv", chunking.weigh(k, decay.to_end), x["v"])
    return output, decay.state(memory) + written, scores, decay


def _simple_token(call: Call, state: MatrixState, x: dict[str, Array]) -> tuple[Array, MatrixState]:
    output, memory = _decayed_token(call, state.S, x)
    return output, MatrixState(memory)


def _simple_chunk(
    call: Call, state: MatrixState, x: dict[str, Array], segments: Segments | None
) -> tuple[Array, MatrixState]:
    output, memory, _, _ = _decayed_chunk(call, state.S, x, segments)
    return output, MatrixState(memory)


def _linear_token(
    normalize: bool, eps: float, call: Call, state: NormalizedState, x: dict[str, Array]
) -> tuple[Array, NormalizedState]:
    output, memory = _decayed_token(call, state.S, x)
    z = state.z + x["k"]
    if normalize:
        mass = jnp.sum(call.scale * x["q"] * z, axis=-1)
        output = output / jnp.maximum(repeat_heads(mass, call.groups), eps)[..., None]
    return output, NormalizedState(memory, z)


def _linear_chunk(
    normalize: bool, eps: float, call: Call, state: NormalizedState, x: dict[str, Array], segments: Segments | None
) -> tuple[Array, NormalizedState]:
    output, memory, scores, decay = _decayed_chunk(call, state.S, x, segments)
    keys = x["k"] if decay.to_end is None else decay.to_end[..., None] * x["k"]
    if normalize:
        before = jnp.einsum("bhik,bhk->bhi", call.scale * x["q"], state.z, precision=call.precision)
        before = repeat_heads(before if decay.from_start is None else decay.from_start * before, call.groups)
        output = output / jnp.maximum(before + jnp.sum(scores, axis=-1), eps)[..., None]
    return output, NormalizedState(memory, decay.state(state.z) + jnp.sum(keys, axis=2))


def _read(call: Call, q: Array, memory: Array) -> Array:
    return jnp.einsum("bthk,bthkv->bthv", repeat_heads(q, call.groups, axis=2), memory, precision=lax.Precision.HIGHEST)


def _simple_whole(
    call: Call, state: MatrixState, x: dict[str, Array], segments: Segments | None
) -> tuple[Array, MatrixState]:
    k = repeat_heads(x["k"], call.groups, axis=2)
    memory = chunking.scan_affine(
        chunking.DIAGONAL,
        MatrixState(jnp.exp(x["log_decay"])[..., None, None]),
        MatrixState(k[..., :, None] * x["v"][..., None, :]),
        state,
        call.empty,
        segments,
    ).S
    return _read(call, call.scale * x["q"], memory), MatrixState(memory[:, -1])


def _linear_whole(
    normalize: bool, eps: float, call: Call, state: NormalizedState, x: dict[str, Array], segments: Segments | None
) -> tuple[Array, NormalizedState]:
    k = repeat_heads(x["k"], call.groups, axis=2)
    ones = jnp.ones((*k.shape[:2], 1, 1), call.dtype)
    states = chunking.scan_affine(
        chunking.DIAGONAL,
        NormalizedState(ones[..., None], ones),
        NormalizedState(k[..., :, None] * x["v"][..., None, :], x["k"]),
        state,
        call.empty,
        segments,
    )
    q = call.scale * x["q"]
    output = _read(call, q, states.S)
    if normalize:
        mass = repeat_heads(jnp.sum(q * states.z, axis=-1), call.groups, axis=2)
        output = output / jnp.maximum(mass, eps)[..., None]
    return output, jax.tree.map(lambda s: s[:, -1], states)


def _run(family: Iterable[Any], name: str, call: Call, implementation: str | None, chunk_size: int | None) -> Any:
    token, chunk, whole = (partial(form, call) for form in family)
    forms = {
        "recurrent": call.recurrent(token),
        "associative": call.associative(whole),
        "chunkwise": call.chunkwise(chunk, chunk_size),
    }
    return call.run(name, forms, implementation)


@dispatch.on_any_mesh
def linear_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    normalize_output: bool = False,
    eps: float = 1e-6,
    scale: float | Array | None = None,
    initial_state: NormalizedState | None = None,
    segment_ids: Array | None = None,
    initial_segment_id: Array | None = None,
    implementation: str | None = None,
    chunk_size: int | None = None,
) -> tuple[Array, NormalizedState]:
    """Linear attention (Katharopoulos et al. 2020): S <- S + k v^T, z <- z + k.

    The state is `NormalizedState(S [B, H, K, V], z [B, Hk, K])`, whatever the options. The other arguments, results and
    errors are those of `delta_rule`.

    Ours: nothing in the recurrence; the floor eps of the divisor.

    Args:
        normalize_output: divides the read by max(q . z, eps), which makes sense for non-negative features of q and k;
            `scale` then cancels, save in the comparison with eps.
        eps: least divisor of a normalised read.

    >>> import jax.numpy as jnp
    >>> q = k = jnp.ones((1, 3, 1, 2))
    >>> v = jnp.array([1.0, 2.0, 6.0]).reshape(1, 3, 1, 1)
    >>> output, _ = linear_attention(q, k, v, normalize_output=True)   # equal scores: a running mean
    >>> output[0, :, 0, 0].tolist()
    [1.0, 1.5, 3.0]
    """
    call = prepare(
        {"q": q, "k": k, "v": v},
        QKV,
        normalized_empty,
        scale=scale,
        initial_state=initial_state,
        segment_ids=segment_ids,
        initial_segment_id=initial_segment_id,
    )
    family = (partial(form, normalize_output, eps) for form in (_linear_token, _linear_chunk, _linear_whole))
    return _run(family, "linear_attention", call, implementation, chunk_size)


@dispatch.on_any_mesh
def simple_gla(
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    *,
    scale: float | Array | None = None,
    initial_state: MatrixState | None = None,
    segment_ids: Array | None = None,
    initial_segment_id: Array | None = None,
    implementation: str | None = None,
    chunk_size: int | None = None,
) -> tuple[Array, MatrixState]:
    """Linear attention with a decay (Sun et al. 2023, Dao and Gu 2024): S <- e^{log_decay} S + k v^T.

    Mamba-2's SSD (Dao and Gu 2024) is q = C, k = B, v = dt x, log_decay = dt A, scale = 1; retention (Sun et al. 2023)
    a constant log_decay. The other arguments, results and errors are those of `delta_rule`.

    Ours: nothing in the recurrence; log decays are summed over their own span, so -inf, which forgets all, is exact.

    Args:
        log_decay: [B, T, H], natural log of the decay, in [-inf, 0].

    >>> import jax.numpy as jnp
    >>> k = jnp.ones((1, 3, 1, 1))
    >>> output, _ = simple_gla(k, k, k, jnp.full((1, 3, 1), jnp.log(0.5)), scale=1.0)
    >>> [round(x, 3) for x in output[0, :, 0, 0].tolist()]
    [1.0, 1.5, 1.75]
    """
    call = prepare(
        {"q": q, "k": k, "v": v, "log_decay": log_decay},
        _SIMPLE,
        matrix_empty,
        scale=scale,
        initial_state=initial_state,
        segment_ids=segment_ids,
        initial_segment_id=initial_segment_id,
    )
    return _run((_simple_token, _simple_chunk, _simple_whole), "simple_gla", call, implementation, chunk_size)


@dispatch.on_any_mesh
def linear_attention_step(
    state: NormalizedState,
    q: Array,
    k: Array,
    v: Array,
    *,
    normalize_output: bool = False,
    eps: float = 1e-6,
    scale: float | Array | None = None,
) -> tuple[Array, NormalizedState]:
    """One token of `linear_attention`: q, k [B, Hk, K], v [B, H, V]; returns output [B, H, V] and the new state."""
    call = prepare_step(state, {"q": q, "k": k, "v": v}, QKV, normalized_empty, scale=scale)
    return finish_step(call, partial(_linear_token, normalize_output, eps))


@dispatch.on_any_mesh
def simple_gla_step(
    state: MatrixState, q: Array, k: Array, v: Array, log_decay: Array, *, scale: float | Array | None = None
) -> tuple[Array, MatrixState]:
    """One token of `simple_gla`: log_decay [B, H], the rest as `linear_attention_step`."""
    arrays = {"q": q, "k": k, "v": v, "log_decay": log_decay}
    return finish_step(prepare_step(state, arrays, _SIMPLE, matrix_empty, scale=scale), _simple_token)


_FORMS = ("recurrent", "associative", "chunkwise")
dispatch.register(
    dispatch.Mixer("linear_attention", linear_attention, linear_attention_step, normalized_empty, QKV, _FORMS)
)
dispatch.register(dispatch.Mixer("simple_gla", simple_gla, simple_gla_step, matrix_empty, _SIMPLE, _FORMS))
