"""Runs the delta rule's kernels, interpreted, on the cases named by the arguments, against the token loop in float64.

A program of its own because every warpgroup that is interpreted holds a thread of the compute pool while it waits for
the others: the pool must have more threads than the kernel has warpgroups, and its size is fixed when a process starts.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from cases import make_inputs, make_state
from reference import reference
from tolerances import assert_close, limit

import pallas_kernels
from pallas_kernels.delta_rule.api import delta_rule_forward
from pallas_kernels.delta_rule.tuning import CHUNK, Config

ONE, TWO = Config(tiles=1), Config(tiles=2)
INSIDE = {"normalize_q": True, "normalize_k": True}

# The mixer, its arguments (beside those of `draw`), the kernel's options.
CASES = {
    "plain": ("delta_rule", {"T": 192, "double": True}, {}),
    "gated": ("gated_delta_rule", {"T": 256, "B": 2, "V": 128}, {"config": TWO}),
    "wide": ("gated_delta_rule", {"T": 320, "K": 128, "V": 128, "H": 2, "Hk": 1}, {"config": TWO}),
    "wide in two programs": ("gated_delta_rule", {"T": 128, "K": 128, "V": 128}, {"config": ONE}),
    "wide keys": ("delta_rule", {"T": 128, "K": 128, "double": True}, {}),
    "float16": ("gated_delta_rule", {"T": 128, "dtype": "float16"}, {}),
    "strong": ("gated_delta_rule", {"T": 192, "decay": -6.0}, {}),
    "stronger": ("gated_delta_rule", {"T": 128, "decay": -100.0}, {}),
    "no decay": ("gated_delta_rule", {"T": 128, "decay": "zero", "double": True}, {}),
    "forget at a start": ("gated_delta_rule", {"T": 128, "decay": ("spike", -np.inf, 64)}, {}),
    "forget inside": ("gated_delta_rule", {"T": 192, "decay": ("spike", -1000.0, 100)}, {}),
    "one token": ("gated_delta_rule", {"T": 1, "state": True}, {}),
    "short": ("gated_delta_rule", {"T": 15, "state": True}, {}),
    "tail": ("gated_delta_rule", {"T": 129, "K": 128, "state": True}, {}),
    "parallel": ("gated_delta_rule", {"T": 128, "keys": "parallel"}, {}),
    "states": ("gated_delta_rule", {"T": 200, "state": True}, {"save_states": True}),
    "normalized": ("gated_delta_rule", {"T": 128, "keys": "long", "state": True}, INSIDE),
    "kaczmarz": ("kaczmarz", {"T": 192, "keys": "long", "double": True}, {}),
    "kaczmarz, tiny keys": ("kaczmarz", {"T": 128, "keys": "tiny"}, {}),
    "kaczmarz, zero keys": ("kaczmarz", {"T": 100, "keys": "zero"}, {}),
    "kaczmarz, normalized": ("kaczmarz", {"T": 128, "K": 128, "H": 2, "Hk": 1, "keys": "long"}, INSIDE),
}


def draw(name, *, double=False, state=False, **options):
    """Arguments of mixer `name` and an initial state or None; with `double`, strengths up to 2."""
    sizes = {"B": 1, "T": 64, "Hk": 1, "H": 1, "K": 64, "V": 64, "dtype": "bfloat16"} | options
    sizes["Hk"] = options.get("Hk", sizes["H"])
    inputs = make_inputs(name, **sizes)
    strength = "eta" if "eta" in inputs else "beta"
    if double:
        inputs[strength] = 2 * inputs[strength]
    sizes = {axis: sizes[axis] for axis in ("B", "Hk", "H", "K", "V")}
    return inputs, make_state(name, **sizes) if state else None


def forward(name, inputs, state, *, config=ONE, **options):
    """The jitted kernel for such arguments of mixer `name`, and the arguments that it takes."""
    x = {key: jnp.asarray(a) for key, a in inputs.items()}
    if name == "kaczmarz":
        options.setdefault("eps", 1e-6)
    options = {"scale": x["k"].shape[-1] ** -0.5, "config": config, **options}
    call = jax.jit(lambda q, k, v, b, g, s: delta_rule_forward(q, k, v, b, g, initial_state=s, **options))
    strength = x["eta"] if name == "kaczmarz" else x["beta"]
    return call, (x["q"], x["k"], x["v"], strength, x.get("log_decay"), None if state is None else state.S)


def check(case):
    """Asserts output, final state and, where they are saved, the states that chunks start from."""
    name, drawn, options = CASES[case]
    inputs, state = draw(name, **drawn)
    call, arguments = forward(name, inputs, state, **options)
    with pallas_kernels.interpret():
        output, final, *states = call(*arguments)
    options = {key: value for key, value in options.items() if key not in ("config", "save_states")}
    wanted, last = reference(name, inputs, initial_state=state, **options)
    dtype = str(output.dtype)
    assert_close(output, wanted, limit("output", dtype), f"{case}: output")
    assert_close(final, last["S"], limit("state", dtype), f"{case}: final state")
    assert output.dtype == inputs["v"].dtype
    assert final.dtype == jnp.float32
    if not states:
        return
    (states,) = states
    if state is not None:
        assert_close(states[:, :, 0], state.S, 1e-6, f"{case}: first state")
    for n in range(1, states.shape[2]):
        until = {key: a[:, : n * CHUNK] for key, a in inputs.items()}
        _, at = reference(name, until, initial_state=state, **options)
        assert_close(states[:, :, n], at["S"], limit("state", dtype), f"{case}: state {n}")


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        check(case)
        print("ok", case, flush=True)
