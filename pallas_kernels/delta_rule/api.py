"""The delta rule's kernels as functions of arrays: argument checks, what is served, and the forward pass."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import interpreting
from pallas_kernels.delta_rule import forward, inverse
from pallas_kernels.delta_rule.tiles import TILE_ROWS, Variant
from pallas_kernels.delta_rule.tuning import CHUNK, VALUE_TILE, Config, forward_config

Array = jax.Array

_SIZES = (64, 128)


def _check_arguments(arrays: dict[str, Any], initial_state: Any) -> None:
    """Raises TypeError or ValueError that names the argument, what was given and what was wanted."""
    axes = {"q": "B T Hk K", "k": "B T Hk K", "v": "B T H V", "beta": "B T H", "log_decay": "B T H"}
    sizes: dict[str, int] = {}
    everything = [(name, x, axes[name]) for name, x in arrays.items() if x is not None]
    if initial_state is not None:
        everything.append(("initial_state", initial_state, "B H K V"))
    for name, x, wanted in everything:
        if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{name}: {getattr(x, 'dtype', type(x).__name__)} given, wanted a floating-point array.")
        names = wanted.split()
        if len(x.shape) != len(names):
            raise ValueError(f"{name}: shape {tuple(x.shape)} given, wanted [{', '.join(names)}].")
        shape = tuple(sizes.setdefault(axis, size) for axis, size in zip(names, x.shape, strict=True))
        if shape != tuple(x.shape):
            raise ValueError(f"{name}: shape {tuple(x.shape)} given, wanted [{', '.join(names)}] = {shape}.")
        if name in ("k", "v") and x.dtype != arrays["q"].dtype:
            raise TypeError(f"{name}: dtype {x.dtype} given, wanted that of q, {arrays['q'].dtype}.")
    if sizes["Hk"] < 1 or sizes["H"] % sizes["Hk"]:
        raise ValueError(f"v: {sizes['H']} heads given, wanted a multiple of the {sizes['Hk']} heads of k.")


def supports(q: Any, k: Any, v: Any, *, device: Any = None) -> str | None:
    """None where the kernel serves such q [B, T, Hk, K], k and v [B, T, H, V], or the reason why it does not.

    device: where it is to run; None asks about the arrays alone.
    """
    if str(q.dtype) not in ("bfloat16", "float16"):
        return f"the kernel takes bfloat16 and float16, not {q.dtype}"
    sizes = k.shape[-1], v.shape[-1]
    if not set(sizes) <= set(_SIZES):
        return f"the kernel takes key and value sizes of 64 and 128, not {sizes[0]} and {sizes[1]}"
    if device is not None:
        capability = str(getattr(device, "compute_capability", ""))
        if device.platform not in ("gpu", "cuda") or capability != "9.0":
            seen = f"{device.device_kind} ({device.platform}{', ' + capability if capability else ''})"
            return f"the kernel runs on NVIDIA Hopper (compute capability 9.0), not on {seen}"
    return None


def delta_rule_forward(
    q: Array,
    k: Array,
    v: Array,
    beta: Array,
    log_decay: Array | None = None,
    *,
    scale: float,
    initial_state: Array | None = None,
    normalize_q: bool = False,
    normalize_k: bool = False,
    eps: float | None = None,
    save_states: bool = False,
    config: Config | None = None,
) -> tuple[Array, Array] | tuple[Array, Array, Array]:
    """S <- S~ + beta k (v - S~^T k)^T with S~ = e^{log_decay} S, o = scale S^T q: output [B, T, H, V] and final state.

    Args:
        q, k: [B, T, Hk, K], bfloat16 or float16 (then states beyond 65504 overflow as operands); K 64 or 128.
        v: [B, T, H, V], dtype of q; V 64 or 128, H a multiple of Hk. Value head h reads key head h // (H // Hk).
        beta: [B, T, H], strength of the write, in [0, 2 / ||k||^2].
        log_decay: [B, T, H], natural log, <= 0, -inf legal; None for no decay. What is below -90 counts as -90.
        scale: multiplies q; a number.
        initial_state: [B, H, K, V]; None for zeros.
        normalize_q, normalize_k: x rsqrt(sum x^2 + 1e-6), in the kernel.
        eps: not None makes the strength beta / (||k||^2 + eps), in the kernel (KLA).
        save_states: also returns the states that the chunks of 64 tokens start from, [B, H, N, K, V].
        config: launch settings; None takes those of `tuning`.

    Returns:
        The output in the dtype of v, the final state [B, H, K, V] in float32, and the states where asked for.

    Raises:
        TypeError, ValueError: arguments that do not fit together. NotImplementedError: arrays that `supports` refuses.
    """
    _check_arguments({"q": q, "k": k, "v": v, "beta": beta, "log_decay": log_decay}, initial_state)
    reason = supports(q, k, v)
    if reason is not None:
        raise NotImplementedError(f"delta_rule_forward: {reason}.")
    B, T, H, V = v.shape
    config = config or forward_config(V)
    if V % (VALUE_TILE * config.tiles):
        raise ValueError(f"config.tiles: {config.tiles} given, wanted a divisor of V / 64 = {V // VALUE_TILE}.")
    if 0 in (B, T, H):
        state = jnp.zeros((B, H, k.shape[-1], V), jnp.float32)
        state = state if initial_state is None else initial_state.astype(jnp.float32)
        empty = jnp.zeros((B, H, 0, k.shape[-1], V), jnp.float32)
        return (jnp.zeros_like(v), state, empty) if save_states else (jnp.zeros_like(v), state)
    variant = Variant(log_decay is not None, normalize_q, normalize_k, eps)
    interpreted = plgpu.InterpretGPUParams(detect_races=True) if interpreting() else None
    # The copy engine fills what is beyond an array with zeros, but wants whole tiles. Other lengths cost a copy.
    whole = pl.cdiv(T, TILE_ROWS) * TILE_ROWS
    q, k, v = (jnp.pad(x, ((0, 0), (0, whole - T), (0, 0), (0, 0))) for x in (q, k, v))

    def by_head(x: Array) -> Array:
        """[B, T, H] to [B, H, N C], a chunk in one piece; rows that fill the last chunk write and forget nothing."""
        x = jnp.swapaxes(x.astype(jnp.float32), 1, 2)
        return jnp.pad(x, ((0, 0), (0, 0), (0, pl.cdiv(T, CHUNK) * CHUNK - T)))

    beta = by_head(beta)
    log_decay = None if log_decay is None else by_head(log_decay)
    inverses, vectors = inverse.solve(k, beta, log_decay, variant=variant, interpret=interpreted)
    turned = lambda x: jnp.swapaxes(x, -1, -2)
    first = None if initial_state is None else turned(initial_state.astype(jnp.float32))
    output, final, *states = forward.run(
        q,
        k,
        v,
        inverses,
        vectors,
        first,
        scale=scale,
        variant=variant,
        config=config,
        save_states=save_states,
        interpret=interpreted,
    )
    return output[:, :T], turned(final), *map(turned, states)
