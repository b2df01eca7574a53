"""The delta rule's kernels as one differentiable function of arrays: argument checks and what is served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import interpreting
from pallas_kernels.delta_rule import gradients, inverse, states, tuning, wide
from pallas_kernels.delta_rule.pieces import chain, forgotten, halves
from pallas_kernels.delta_rule.tiles import LEAST_LOG2_DECAY, LEAST_STRENGTH, LOG2_E, TILE_ROWS, Variant
from pallas_kernels.delta_rule.tuning import CHUNK, VALUE_TILE, Config
from pallas_kernels.devices import not_hopper
from pallas_kernels.sharding import by_rows, plainly_typed

Array = jax.Array

_TILE = 64  # of which the kernels' K and V are multiples; others are filled up with zeros
_MOST_KEYS = 256


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
    if k.shape[-1] > _MOST_KEYS:
        return f"the kernel takes key sizes up to {_MOST_KEYS}, not {k.shape[-1]}"
    return None if device is None else not_hopper(device)


@dataclass(frozen=True)
class _Options:
    """What is not an array, known when the kernels are built."""

    scale: float
    variant: Variant
    config: Config | None
    pieces: int
    save_states: bool

    @property
    def common(self) -> dict[str, Any]:
        """What the kernels are told."""
        interpreter = plgpu.InterpretGPUParams(detect_races=True) if interpreting() else None
        return {"scale": self.scale, "variant": self.variant, "interpret": interpreter}

    def walk(self, *arrays: Array | None, backward: bool = False, save_states: bool = False, **kwargs: Any) -> Any:
        """`states.walk` with the settings for it."""
        _, k, v, inverses, *_ = arrays
        assert k is not None
        assert inverses is not None
        width, rows = (k if v is None else v).shape[-1], inverses.shape[0] * inverses.shape[1]
        config = self.config or tuning.walk_config(k.shape[-1], width, rows, saving=save_states and not backward)
        kwargs |= {"backward": backward, "save_states": save_states, "config": config, **self.common}
        return states.walk(*arrays, **kwargs)  # type: ignore[arg-type]


def _fill(x: Array, **sizes: int) -> Array:
    """`x` with zeros behind its last axes, up to these sizes in this order: channels that touch no product or norm."""
    more = [size - had for size, had in zip(sizes.values(), x.shape[-len(sizes) :], strict=True)]
    return jnp.pad(x, [(0, 0)] * (x.ndim - len(sizes)) + [(0, n) for n in more]) if any(more) else x


def _turned(x: Array) -> Array:
    return jnp.swapaxes(x, -1, -2)


def _in_pieces(options: _Options, *arrays: Array) -> list[Array]:
    """Arrays [B, T, ...] as [B P, T', ...], T' a multiple of 8 tokens and, of several pieces, of chunks.

    The copy engine fills what is beyond an array with zeros, but wants whole tiles. Other lengths cost a copy.
    """
    B, T = arrays[0].shape[:2]
    P = options.pieces
    more = -T % (CHUNK * P if P > 1 else TILE_ROWS)
    padded = (jnp.pad(x, ((0, 0), (0, more), *[(0, 0)] * (x.ndim - 2))) for x in arrays)
    return [x.reshape(B * P, -1, *x.shape[2:]) for x in padded]


def _solve(options: _Options, k: Array, beta: Array, log_decay: Array | None) -> tuple[Array, Array]:
    def by_head(x: Array) -> Array:
        """[B, T, H] to [B, H, N C], a chunk in one piece; rows that fill the last chunk write and forget nothing."""
        (x,) = _in_pieces(options, x.astype(jnp.float32))
        x = jnp.swapaxes(x, 1, 2)
        return jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % CHUNK)))

    gates = by_head(beta), None if log_decay is None else by_head(log_decay)
    return inverse.solve(k, *gates, variant=options.variant, interpret=options.common["interpret"])


def _starts(
    options: _Options,
    walk: Callable[..., Any],
    maps: tuple[Array, ...],
    vectors: Array,
    initial: Array | None,
    backward: bool,
) -> Array | None:
    """The transposed states that the pieces' walks start from; walk: from zeros, without results."""
    if options.pieces == 1:
        return initial
    begin = forgotten(vectors, options.variant, backward=backward)[0] if options.variant.gated else None
    (offsets,) = walk(None, results=False, begin=begin)
    split = lambda x: x.reshape(-1, options.pieces, *x.shape[1:])
    high, low = map(split, maps)
    interpret = options.common["interpret"]
    starts = chain((high, low), split(offsets), initial, backward=backward, interpret=interpret)
    return starts.reshape(offsets.shape)


def _forward(options: _Options, x: dict[str, Array]) -> tuple[tuple[Array, Array], dict[str, Array]]:
    """Output and final state, and what the backward pass needs besides the arguments, where that is to be saved."""
    B, T, H, V = x["v"].shape
    q, k, v = _in_pieces(options, x["q"], x["k"], x["v"])
    inverses, vectors = _solve(options, k, x["beta"], x.get("log_decay"))
    maps: tuple[Array, ...] = ()
    if options.pieces > 1:
        begin = forgotten(vectors, options.variant)[1] if options.variant.gated else None
        (transitions,) = options.walk(q, k, None, inverses, vectors, None, results=False, begin=begin)
        maps = halves(transitions)
    walk = partial(options.walk, q, k, v, inverses, vectors)
    initial = _turned(x["initial_state"].astype(jnp.float32)) if "initial_state" in x else None
    final, output, *saved = walk(_starts(options, walk, maps, vectors, initial, False), save_states=options.save_states)
    result = output.reshape(B, -1, H, V)[:, :T], _turned(final.reshape(B, -1, *final.shape[1:])[:, -1])
    if not options.save_states:
        return result, {}
    extra = {"inverses": inverses, "vectors": vectors, "states": saved[0]}
    return result, extra | dict(zip(("transitions", "remainders"), maps, strict=False))


def _backward(options: _Options, x: dict[str, Array]) -> dict[str, Array]:
    """The gradients of the arguments; x: these, what `_forward` saved, and the gradients of output and final state."""
    B, T, Hk, K = x["k"].shape
    H = x["v"].shape[2]
    q, k, v, output = _in_pieces(options, x["q"], x["k"], x["v"], x["output"].astype(x["v"].dtype))
    inverses, vectors = x["inverses"], x["vectors"]
    walk = partial(options.walk, q, k, output, inverses, vectors, backward=True)
    maps = tuple(x[name] for name in ("transitions", "remainders") if name in x)
    start = _starts(options, walk, maps, vectors, _turned(x["final"].astype(jnp.float32)), True)
    initial, residuals, dstates = walk(start, save_states=True)
    local = gradients if max(K, v.shape[-1]) <= gradients.MOST else wide
    dq, dk, dv, gates = local.run(q, k, v, output, residuals, x["states"], dstates, inverses, vectors, **options.common)

    def by_token(x: Array) -> Array:
        return x.reshape(B, -1, *x.shape[2:])[:, :T]

    def of_keys(x: Array) -> Array:
        """From value heads to the key heads that they share."""
        x = by_token(x)
        if Hk == H:
            return x
        return x.reshape(B, T, Hk, H // Hk, K).astype(jnp.float32).sum(3).astype(x.dtype)

    gates = jnp.moveaxis(gates.reshape(*gates.shape[:3], 2, CHUNK), (2, 4), (1, 2))  # [B P, N, C, H, 2]
    gates = by_token(gates.reshape(gates.shape[0], -1, H, 2))
    beta = x["beta"].astype(jnp.float32)
    beta = jnp.where(jnp.abs(beta) < LEAST_STRENGTH, jnp.where(beta < 0, -LEAST_STRENGTH, LEAST_STRENGTH), beta)
    out = {"q": of_keys(dq), "k": of_keys(dk), "v": by_token(dv), "beta": gates[..., 0] / beta}
    if "log_decay" in x:
        # What forgets everything does so whatever its size.
        forgets = x["log_decay"].astype(jnp.float32) * LOG2_E < LEAST_LOG2_DECAY
        out["log_decay"] = jnp.where(forgets, 0.0, gates[..., 1])
    if "initial_state" in x:
        out["initial_state"] = _turned(initial.reshape(B, -1, *initial.shape[1:])[:, 0])
    return {name: grad.astype(x[name].dtype) for name, grad in out.items()}


def _batched(function: Callable[..., Any], options: _Options) -> Callable[[dict[str, Array]], Any]:
    """function(options, arrays), with axes of `jax.vmap` put before the rows: one launch, more programs.

    Devices share out the rows. What is interpreted has effects, which neither the compiler nor a device may part.
    """

    @jax.custom_batching.custom_vmap
    def call(x: dict[str, Array]) -> Any:
        def here(x: dict[str, Array]) -> Any:
            with jax.enable_x64(False):  # indices in kernels are of 32 bits
                return function(options, x)

        return here(x) if interpreting() else plainly_typed(by_rows(here))(x)

    @call.def_vmap
    def rule(size: int, mapped: list[Any], x: dict[str, Array]) -> Any:
        (is_mapped,) = mapped
        everywhere = {
            name: a if is_mapped[name] else jnp.broadcast_to(a[None], (size, *a.shape)) for name, a in x.items()
        }
        out = call({name: a.reshape(-1, *a.shape[2:]) for name, a in everywhere.items()})
        split = lambda a: a.reshape(size, a.shape[0] // size, *a.shape[1:])
        return jax.tree.map(split, out), jax.tree.map(lambda _: True, out)

    return call


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rule(options: _Options, x: dict[str, Array]) -> tuple[Array, Array]:
    result, _ = _batched(_forward, replace(options, save_states=False))(x)
    return result


def _rule_forward(options: _Options, x: dict[str, Array]) -> tuple[tuple[Array, Array], Any]:
    result, saved = _batched(_forward, options)(x)
    return result, (x, {name: checkpoint_name(a, f"delta_rule_{name}") for name, a in saved.items()})


def _rule_backward(options: _Options, saved: Any, given: tuple[Array, Array]) -> tuple[dict[str, Array]]:
    x, extra = saved
    if not extra:
        _, extra = _batched(_forward, replace(options, save_states=True))(x)
    output, final = given
    return (_batched(_backward, options)({**x, **extra, "output": output, "final": final}),)


_rule.defvjp(_rule_forward, _rule_backward)


def delta_rule(
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
    save_states: bool = True,
    config: Config | None = None,
    pieces: int | None = None,
) -> tuple[Array, Array]:
    """S <- S~ + beta k (v - S~^T k)^T with S~ = e^{log_decay} S, o = scale S^T q: output [B, T, H, V] and final state.

    Differentiable in all arrays, with respect to output and final state, once. What the backward pass needs is the
    arguments, each chunk's inverse (8 KB) and the states before chunks in 16 bit, under the names delta_rule_inverses,
    delta_rule_vectors and delta_rule_states (of pieces delta_rule_transitions and delta_rule_remainders too) for
    policies of `jax.checkpoint`.

    Args:
        q, k: [B, T, Hk, K], bfloat16 or float16 (then states beyond 65504 overflow as operands); K up to 256.
        v: [B, T, H, V], dtype of q; H a multiple of Hk. Value head h reads key head h // (H // Hk). Where K or V is no
            multiple of 64, a copy filled up with zeros is made.
        beta: [B, T, H], strength of the write, in [0, 2 / ||k||^2].
        log_decay: [B, T, H], natural log, <= 0, -inf legal; None for no decay. What is below -90 counts as -90.
        scale: multiplies q; a number.
        initial_state: [B, H, K, V]; None for zeros.
        normalize_q, normalize_k: x rsqrt(sum x^2 + 1e-6), in the kernel.
        eps: not None makes the strength beta / (||k||^2 + eps), in the kernel (KLA).
        save_states: False keeps the arguments alone for the backward pass, which then solves and walks forward again.
        config, pieces: launch settings, and into how many pieces, walked at once, rows are cut; None takes those of
            `tuning`. More pieces of few long rows fill the card, at the cost of two more walks of half the work.

    Returns:
        The output in the dtype of v and the final state [B, H, K, V] in float32.

    Raises:
        TypeError, ValueError: arguments that do not fit together. NotImplementedError: arrays that `supports` refuses.
    """
    _check_arguments({"q": q, "k": k, "v": v, "beta": beta, "log_decay": log_decay}, initial_state)
    reason = supports(q, k, v)
    if reason is not None:
        raise NotImplementedError(f"delta_rule: {reason}.")
    B, T, H, V = v.shape
    K = k.shape[-1]
    padded = {"K": pl.cdiv(K, _TILE) * _TILE, "V": pl.cdiv(V, _TILE) * _TILE}
    pieces = pieces or tuning.pieces(B * H, pl.cdiv(T, CHUNK), padded["K"])
    if config is not None and padded["V"] % (VALUE_TILE * config.tiles):
        tiles = padded["V"] // VALUE_TILE
        raise ValueError(f"config.tiles: {config.tiles} given, wanted a divisor of V / 64 = {tiles}.")
    if 0 in (B, T, H):
        state = jnp.zeros((B, H, K, V), jnp.float32)
        return jnp.zeros_like(v), state if initial_state is None else initial_state.astype(jnp.float32)
    variant = Variant(log_decay is not None, normalize_q, normalize_k, eps)
    given = {"q": q, "k": k, "v": v, "beta": beta, "log_decay": log_decay, "initial_state": initial_state}
    narrow = lambda x: jnp.asarray(x, jnp.float32 if x.dtype == jnp.float64 else None)
    arrays = {name: narrow(x) for name, x in given.items() if x is not None}
    filled = {"q": {"K": padded["K"]}, "k": {"K": padded["K"]}, "v": {"V": padded["V"]}, "initial_state": padded}
    arrays = {name: _fill(x, **filled[name]) if name in filled else x for name, x in arrays.items()}
    output, final = _rule(_Options(float(scale), variant, config, pieces, save_states), arrays)
    return output[..., :V], final[..., :K, :V]
