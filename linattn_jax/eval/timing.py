"""The one benchmark harness of mixers: a correctness gate, then times, memory and floors of each implementation."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from linattn_jax.eval.tolerances import limit, relative_l2
from linattn_jax.mixers.dispatch import MIXERS, Mixer
from linattn_jax.types import Array

# The gate runs on this many tokens and value heads: enough for many chunks, little enough for a float64 token loop.
GATE_TOKENS, GATE_GROUPS = 512, 1


class Shape(NamedTuple):
    """B batch, T time, Hk key heads, H value heads, K key size, V value size."""

    B: int
    T: int
    Hk: int
    H: int
    K: int
    V: int


def make_inputs(mixer: Mixer, shape: Shape, dtype: str, seed: int) -> dict[str, Array]:
    """Random q, k (unit norm), v and gates, and `cotangent` for the output, in the device's memory."""
    keys = iter(jax.random.split(jax.random.key(seed), 8))
    draw = lambda *size: jax.random.normal(next(keys), (shape.B, shape.T, *size), jnp.float32)
    unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    q, k, v = unit(draw(shape.Hk, shape.K)), unit(draw(shape.Hk, shape.K)), draw(shape.H, shape.V)
    inputs = {name: x.astype(dtype) for name, x in (("q", q), ("k", k), ("v", v))}
    for gate in mixer.gates:
        if gate == "log_decay" and mixer.name == "gla":
            inputs[gate] = jax.nn.log_sigmoid(draw(shape.Hk, shape.K)) / 16
        elif gate == "log_decay":
            inputs[gate] = jax.nn.log_sigmoid(draw(shape.H))
        else:
            inputs[gate] = jax.nn.sigmoid(draw(shape.H))
    inputs["cotangent"] = draw(shape.H, shape.V).astype(dtype)
    return inputs


def functions(mixer: Mixer, **options: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(forward, forward and backward) of a mixer on a dict of inputs; the second returns also gradients."""
    names = ("q", "k", "v", *mixer.gates)

    def forward(inputs: dict[str, Array]) -> Any:
        return mixer.call(*(inputs[name] for name in names), **options)

    def both(inputs: dict[str, Array]) -> Any:
        arguments = {name: inputs[name] for name in names}
        (output, state), pullback = jax.vjp(forward, arguments)
        return output, state, pullback((inputs["cotangent"], jax.tree.map(jnp.zeros_like, state)))[0]

    return forward, both


def gate(mixer: Mixer, inputs: dict[str, Array], dtype: str, **options: Any) -> tuple[dict[str, float], bool]:
    """Relative L2 errors against the float64 token loop on the inputs cut short, and whether all are in limits."""
    heads = inputs["v"].shape[2] // inputs["q"].shape[2]
    cut = {}
    for name, x in inputs.items():
        count = heads if x.shape[2] == inputs["v"].shape[2] else 1
        cut[name] = x[:1, :GATE_TOKENS, : count * GATE_GROUPS]
    output, state, gradients = jax.jit(functions(mixer, **options)[1])(cut)
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(np.asarray(x, np.float64)) for name, x in cut.items()}
        exact = jax.tree.map(np.asarray, jax.jit(functions(mixer, implementation="recurrent")[1])(wide))
    errors = {"output": relative_l2(output, exact[0])}
    errors |= {f"state {n}": relative_l2(s, e) for n, s, e in zip(state._fields, state, exact[1], strict=True)}
    errors |= {f"d{name}": relative_l2(g, exact[2][name]) for name, g in gradients.items()}
    bounds = {name: limit(name[1:] if name[0] == "d" else name, dtype, name[0] == "d") for name in errors}
    return errors, all(errors[name] <= bounds[name] for name in errors)


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


def chunkwise_flops(mixer: Mixer, shape: Shape, chunk: int) -> float:
    """Operations of the matrix products of one forward pass in chunks of `chunk` rows.

    Two operations per multiplication and addition: Q S_0 and the write, 2 C K V each; Q K^T, C^2 K; scores times
    values, C^2 V. The delta rule adds K K^T, C^2 K; K S_0, C K V; (I + A)^{-1} times C x V, C^2 V; the inverse, C^3 /
    3.
    """
    C, K, V = chunk, shape.K, shape.V
    products: float = 2 * C * K * V + C * C * K + C * C * V
    if "beta" in mixer.gates or "eta" in mixer.gates:
        products += C * C * K + C * K * V + C * C * V + C**3 / 3
    return 2.0 * products * shape.B * shape.H * -(-shape.T // C)


def bytes_of(tree: Any) -> int:
    """Bytes of all arrays of a pytree."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def measure(
    name: str, shape: Shape, dtype: str, implementation: str, chunk: int, seed: int, rate: float, seconds: float = 1.0
) -> dict[str, Any]:
    """One row of a benchmark: errors, then times, memory and floors; times only if the gate passes."""
    mixer = MIXERS[name]
    options: dict[str, Any] = {"implementation": implementation, "chunk_size": chunk}
    inputs = make_inputs(mixer, shape, dtype, seed)
    row: dict[str, Any] = {"implementation": implementation, "chunk_size": chunk}
    row["errors"], row["gate_passed"] = gate(mixer, inputs, dtype, **options)
    if not row["gate_passed"]:
        return row
    floor = chunkwise_flops(mixer, shape, chunk) / rate * 1e3
    row["floors"] = {"forward_ms": floor, "both_ms": 3 * floor}
    chunks = -(-shape.T // chunk) if implementation != "recurrent" else 1
    state = jax.eval_shape(lambda: mixer.init(shape.B, shape.H, shape.K, shape.V, key_heads=shape.Hk))
    row["memory"] = {"inputs": bytes_of(inputs), "chunk_states": chunks * bytes_of(state)}
    for what, function in zip(("forward", "both"), functions(mixer, **options), strict=True):
        compiled = jax.jit(function).lower(inputs).compile()
        analysis = compiled.memory_analysis()
        if analysis is not None:
            row["memory"][f"{what}_temporary"] = int(analysis.temp_size_in_bytes)
        row[what] = time_calls(compiled, inputs, seconds=seconds)
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as aligned text: times in ms, floors in percent, memory in MB."""
    lines = [
        f"{'implementation':<16}{'chunk':>6}{'forward ms':>12}{'fwd+bwd ms':>12}{'of floor':>10}"
        f"{'temp MB':>9}{'worst error':>13}  gate"
    ]
    for row in rows:
        head = f"{row['implementation']:<16}{row['chunk_size']:>6}"
        worst = max(row["errors"], key=lambda name: row["errors"][name])
        tail = f"{row['errors'][worst]:>13.1e}  {'passed' if row['gate_passed'] else 'FAILED at ' + worst}"
        if row["gate_passed"]:
            share = row["floors"]["both_ms"] / row["both"]["median_ms"]
            memory = row["memory"].get("both_temporary", 0) / 1e6
            head += f"{row['forward']['median_ms']:>12.3f}{row['both']['median_ms']:>12.3f}{share:>10.0%}{memory:>9.1f}"
        else:
            head += " " * 43
        lines.append(head + tail)
    return "\n".join(lines)
