"""The delta rule's Pallas kernels as a form of the mixers of `delta`: segments, states and scale as theirs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

import pallas_kernels
from linattn_jax.mixers import chunking, dispatch
from linattn_jax.mixers.calls import Call
from linattn_jax.mixers.chunking import Segments
from linattn_jax.mixers.state import MatrixState
from linattn_jax.types import Array
from pallas_kernels import devices

if TYPE_CHECKING:
    from linattn_jax.mixers.delta import Rule

_CHUNK = 64  # rows of the kernels' chunks


def mosaic_gpu(rule: Rule, call: Call, implementation: str | None, chunk_size: int | None) -> Any:
    """The form that calls the kernels, or the reason why none serves this call.

    What the kernels are written in is imported where they are wanted: by name, or because there are Hopper GPUs.
    """
    interpreted = pallas_kernels.interpreting()
    if chunk_size is not None:
        call.chunk(chunk_size)
        if chunk_size != _CHUNK:
            return dispatch.Unavailable(f"the kernel's chunks have {_CHUNK} rows, not {chunk_size}")
    seen = devices.cuda_devices()
    unasked = f"{devices.HOPPER}, and none is seen" if not seen else None
    if interpreted:
        unasked = "interpreted kernels are for tests that name them"
    else:
        reason = next(filter(None, map(devices.not_hopper, seen)), None)
        if reason is not None:
            return dispatch.Unavailable(reason)
    if implementation is None and unasked is not None:
        return dispatch.Unavailable(unasked)
    try:
        from pallas_kernels.delta_rule import api
    except ImportError as error:
        return dispatch.Unavailable(f"Mosaic GPU cannot be imported ({error})")
    reason = api.supports(*(call.inputs[name] for name in ("q", "k", "v")))
    if reason is not None:
        return dispatch.Unavailable(reason)

    def form(inputs: dict[str, Array], state: MatrixState, segments: Segments | None) -> tuple[Array, MatrixState]:
        x = inputs
        if segments is not None:
            x = {name: chunking.masked(segments.valid, a) for name, a in inputs.items()}
            strength = x["eta"] if "eta" in x else x["beta"]
            log_decay = x.get("log_decay", jnp.zeros(strength.shape, jnp.float32))
            x["log_decay"] = jnp.where(segments.reset[..., None], -jnp.inf, log_decay)
        default = call.sizes["K"] ** -0.5
        scale = call.scale if isinstance(call.scale, float) else None
        output, memory = api.delta_rule(
            x["q"],
            x["k"],
            x["v"],
            x["eta"] if "eta" in x else x["beta"],
            x.get("log_decay"),
            scale=default if scale is None else scale,
            initial_state=None if call.fresh else state.S,
            normalize_q=rule.normalize_q,
            normalize_k=rule.normalize_k,
            eps=rule.eps,
        )
        if scale is None:  # the kernel's is a number: outputs are linear in it
            output = (output.astype(call.dtype) * (call.scale / default)).astype(call.output_dtype)
        return output if segments is None else chunking.masked(segments.valid, output), MatrixState(memory)

    return form if interpreted else dispatch.Kernel(form, "cuda", devices.HOPPER, unasked)
