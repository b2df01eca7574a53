"""The one benchmark harness of mixers: a correctness gate, then times, memory and floors of each implementation."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from linattn_jax.eval import peers
from linattn_jax.eval.tolerances import limit, relative_l2
from linattn_jax.mixers.dispatch import MIXERS, Mixer, choose_chunk
from linattn_jax.types import Argument, Array, UserError

# The gate runs on this many tokens of one key head: enough for many chunks, little enough for a float64 token loop.
GATE_TOKENS = 512

# Options of a call as sorted pairs, which can be hashed.
Options = tuple[tuple[str, Any], ...]


class Shape(NamedTuple):
    """B batch, T time, Hk key heads, H value heads, K key size, V value size, N modes, M basis functions."""

    B: int
    T: int
    Hk: int
    H: int
    K: int
    V: int
    N: int = 32
    M: int = 64


class Case(NamedTuple):
    """What one row of a benchmark measures, and how; `chunk_size` None is the mixer's own choice."""

    op: str
    shape: Shape
    implementation: str
    chunk_size: int | None = None
    dtype: str = "float32"
    seed: int = 0
    seconds: float = 1.0

    def settings(self) -> dict[str, Any]:
        """The case as JSON writes it."""
        return self._asdict() | {"shape": self.shape._asdict()}


def parse_shape(words: Sequence[str]) -> Shape:
    """The shape of sizes given as text, in its order; N and M may be left out."""
    try:
        shape = Shape(*map(int, words))
    except (TypeError, ValueError):
        raise UserError(f"shape {','.join(words)} given, wanted the integers B,T,Hk,H,K,V[,N,M]") from None
    if min(shape) < 1 or shape.H % shape.Hk:
        raise UserError(f"shape {','.join(words)} given, wanted sizes of at least 1 and H a multiple of Hk")
    return shape


def axis_sizes(mixer: Mixer, shape: Shape) -> dict[str, int]:
    """Sizes by axis name. The width D is H V; so is H where the heads of a mixer are channels, without K or V."""
    axes = " ".join(argument.axes for argument in mixer.arguments.values()).split()
    sizes = shape._asdict() | {"D": shape.H * shape.V}
    return sizes if {"K", "V", "D"} & set(axes) else sizes | {"H": sizes["D"]}


def make_inputs(mixer: Mixer, shape: Shape, dtype: str, seed: int) -> tuple[dict[str, Array], Array]:
    """Random arguments of the mixer by name and a cotangent for its output, in the device's memory.

    q and k have unit norm, and are positive where a penalty direction tells of reads that their sum normalises; modes
    are those of S4D at initialisation.
    """
    sizes = axis_sizes(mixer, shape)
    arguments = {**mixer.arguments, "cotangent": Argument(mixer.output)}
    keys = jax.random.split(jax.random.key(seed), len(arguments))
    inputs = {}
    for (name, argument), key in zip(arguments.items(), keys, strict=True):
        x = _draw(name, argument, tuple(sizes[axis] for axis in argument.axes.split()), key)
        if name in ("q", "k") and "penalty_direction" in arguments:
            x = jnp.abs(x)
        inputs[name] = x.astype(dtype) if argument.kind == "feature" else x
    return inputs, inputs.pop("cotangent")


def _draw(name: str, argument: Argument, size: tuple[int, ...], key: Array) -> Array:
    normal = jax.random.normal(key, size, jnp.complex64 if argument.kind == "complex" else jnp.float32)
    if name in ("q", "k"):
        return normal / jnp.linalg.norm(normal, axis=-1, keepdims=True)
    if name == "penalty_direction":
        return normal / jnp.linalg.norm(normal, axis=-1, keepdims=True) * size[-1] ** -0.5
    if name == "log_decay":
        return jax.nn.log_sigmoid(normal) / (16 if argument.axes.endswith("K") else 1)
    if name == "log_a":
        step = jnp.exp(jax.random.uniform(key, (*size[:-1], 1), minval=np.log(1e-3), maxval=np.log(1e-1)))
        return step * (-0.5 + 1j * jnp.pi * jnp.arange(size[-1]))
    if argument.kind == "complex":
        return jnp.ones_like(normal) if name == "b" else normal * size[-1] ** -0.5
    return jax.nn.sigmoid(normal) if argument.kind == "gate" else normal


@partial(jax.jit, static_argnames=("call", "options"))
def forward(arguments: dict[str, Array], call: Callable[..., Any], options: Options = ()) -> Any:
    """(output, state) of `call` on arguments by name."""
    return call(**arguments, **dict(options))


@partial(jax.jit, static_argnames=("call", "options"))
def both(arguments: dict[str, Array], cotangent: Array, call: Callable[..., Any], options: Options = ()) -> Any:
    """(output, state, gradients of the arguments by name), forward and backward."""
    (output, state), pullback = jax.vjp(lambda x: call(**x, **dict(options)), arguments)
    return output, state, pullback((cotangent, jax.tree.map(jnp.zeros_like, state)))[0]


def gate(
    mixer: Mixer, shape: Shape, inputs: tuple[dict[str, Array], Array], call: Callable[..., Any], options: Options = ()
) -> tuple[dict[str, float], bool]:
    """Relative L2 errors against the float64 token loop on the inputs cut short, and whether all are in limits."""
    sizes = axis_sizes(mixer, shape._replace(B=1, T=min(shape.T, GATE_TOKENS), Hk=1, H=shape.H // shape.Hk))
    cut = lambda x, axes: x[tuple(slice(sizes[axis]) for axis in axes.split())]
    arguments = {name: cut(inputs[0][name], argument.axes) for name, argument in mixer.arguments.items()}
    cotangent = cut(inputs[1], mixer.output)
    seen = both(arguments, cotangent, call, options)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, _wide(x))), (arguments, cotangent))
        exact = jax.tree.map(np.asarray, both(*wide, mixer.call, (("implementation", "recurrent"),)))
    dtype = str(cotangent.dtype)
    errors = {"output": relative_l2(seen[0], exact[0])}
    for (path, s), e in zip(jax.tree.leaves_with_path(seen[1]), jax.tree.leaves(exact[1]), strict=True):
        errors[f"state {jax.tree_util.keystr(path, simple=True, separator='.')}"] = relative_l2(s, e)
    passed = all(error <= limit(name, dtype) for name, error in errors.items())
    for name, gradient in seen[2].items():
        errors[f"d{name}"] = relative_l2(gradient, exact[2][name])
        passed = passed and errors[f"d{name}"] <= limit(name, dtype, gradient=True)
    return errors, passed


def _wide(x: Array) -> Any:
    return np.complex128 if jnp.iscomplexobj(x) else np.float64


def time_calls(function: Callable[..., Any], *arguments: Any, seconds: float = 1.0) -> dict[str, float]:
    """Milliseconds of a compiled call, by wall clock around calls that fill the device: median, least and most."""
    jax.block_until_ready(function(*arguments))
    start = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    once = max(time.perf_counter() - start, 1e-6)
    calls = max(1, int(min(0.1, seconds / 10) / once))
    times: list[float] = []
    while len(times) < 5 or (sum(times) * calls < seconds and len(times) < 50):
        start = time.perf_counter()
        result = None
        for _ in range(calls):
            result = function(*arguments)
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / calls)
    ms = 1e3 * np.array(times)
    return {"median_ms": float(np.median(ms)), "least_ms": float(ms.min()), "most_ms": float(ms.max())}


def matmul_rate(dtype: str, size: int = 0) -> float:
    """Measured operations per second of a large square matrix product: the ceiling that floors are quoted against."""
    size = size or (2048 if jax.default_backend() == "cpu" else 8192)
    a = jax.random.normal(jax.random.key(1), (size, size), jnp.float32).astype(dtype)
    product = jax.jit(lambda x: jnp.matmul(x, x, preferred_element_type=jnp.float32).astype(dtype))
    return 2 * size**3 / (time_calls(product, a)["least_ms"] * 1e-3)


def chunkwise_flops(mixer: Mixer, shape: Shape, chunk_size: int | None) -> float | None:
    """Operations of the matrix products of one forward pass in chunks; None for mixers that are not counted here.

    Two operations per multiplication and addition: Q S_0 and the write, 2 C K V each; Q K^T, C^2 K; scores times
    values, C^2 V. The delta rule adds K K^T, C^2 K; K S_0, C K V; (I + A)^{-1} times C x V, C^2 V; the inverse, C^3 /
    3.
    """
    gates = set(mixer.arguments) - {"q", "k", "v"}
    if len(mixer.arguments) - len(gates) < 3 or not gates <= {"log_decay", "beta", "eta"}:
        return None
    C, K, V = choose_chunk(chunk_size, shape.T, shape.K, shape.V), shape.K, shape.V
    products: float = 2 * C * K * V + C * C * K + C * C * V
    if gates & {"beta", "eta"}:
        products += C * C * K + C * K * V + C * C * V + C**3 / 3
    return 2.0 * products * shape.B * shape.H * -(-shape.T // C)


def bytes_of(tree: Any) -> int:
    """Bytes of all arrays of a pytree."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def state_bytes(mixer: Mixer, shape: Shape) -> int:
    """Bytes of the mixer's state."""
    return bytes_of(jax.eval_shape(lambda: mixer.empty(axis_sizes(mixer, shape), jnp.float32)))


def memory(compiled: Any) -> dict[str, int]:
    """Bytes that a compiled function holds: its arguments, results and temporaries, and their sum, the peak."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        return {}
    sizes = {
        "arguments": int(analysis.argument_size_in_bytes),
        "outputs": int(analysis.output_size_in_bytes - analysis.alias_size_in_bytes),
        "temporary": int(analysis.temp_size_in_bytes),
    }
    return sizes | {"peak": sum(sizes.values())}


def measure(case: Case, rate: float) -> dict[str, Any]:
    """One row of a benchmark: errors, then times, memory and floors; times only if the gate passes.

    rate: operations per second that the floors are stated at.
    """
    mixer = MIXERS[case.op]
    call: Callable[..., Any] | None = mixer.call
    options: Options = (("chunk_size", case.chunk_size), ("implementation", case.implementation))
    if case.implementation == peers.NAME:
        call, options = peers.find(case.op), ()
    assert call is not None
    arguments, cotangent = make_inputs(mixer, case.shape, case.dtype, case.seed)
    row = case.settings() | {"matmul_flops_per_second": rate}
    row["errors"], row["gate_passed"] = gate(mixer, case.shape, (arguments, cotangent), call, options)
    if not row["gate_passed"]:
        return row
    flops = chunkwise_flops(mixer, case.shape, case.chunk_size)
    if flops is not None:
        row["floors"] = {"forward": flops / rate * 1e3, "both": 3 * flops / rate * 1e3}
    row["memory"] = {"state": state_bytes(mixer, case.shape)}
    for what, function, inputs in (("forward", forward, (arguments,)), ("both", both, (arguments, cotangent))):
        compiled = function.lower(*inputs, call=call, options=options).compile()
        row["memory"][what] = memory(compiled)
        row[what] = time_calls(compiled, *inputs, seconds=case.seconds)
    return row
