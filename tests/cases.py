"""Inputs of the contract: seeded random arguments of any mixer, by its declaration, in ordinary and in hard regimes."""

import jax
import jax.numpy as jnp
import numpy as np

from linattn_jax.mixers.dispatch import MIXERS

# One mixer of each family, for tests of what the families share.
FAMILIES = ("gated_delta_rule", "gla", "linear_attention", "ccq_gla", "variational", "interdomain", "s4d", "longhorn")


def make_inputs(
    name, *, B=2, T=37, Hk=2, H=2, K=16, V=24, N=8, M=6, dtype="float32", seed=0, decay="mild", keys="random"
):
    """The arguments of mixer `name` as a dict of NumPy arrays (JAX arrays for bfloat16).

    decay: "mild" (-log of a sigmoid), "zero", "sometimes" (zero at random places), a number (every token), or
    ("spike", value, position): mild, with `value` at one token.
    keys: "random" (unit norm on average), "parallel", "long" (the delta rule's beta ||k||^2 up to 2), "tiny", "zero",
    "offset" (a mean of 100).
    """
    sizes = {"B": B, "T": T, "Hk": Hk, "H": H, "K": K, "V": V, "N": N, "M": M, "D": V}
    arguments = MIXERS[name].arguments
    shape = {key: tuple(sizes[axis] for axis in argument.axes.split()) for key, argument in arguments.items()}
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.standard_normal(shape)
    inputs = {key: normal(*s) for key, s in shape.items() if arguments[key].kind == "feature"}
    strength = 1 / (1 + np.exp(-normal(B, T, H)))
    if "k" in inputs:
        inputs["k"] = _keys(inputs["k"] / np.sqrt(shape["k"][-1]), keys, rng)
    if keys == "zero":
        inputs["q"] = inputs["q"] * (rng.random((*shape["q"][:-1], 1)) < 0.5)
    if name == "variational":
        inputs["q"], inputs["k"] = np.abs(inputs["q"]), np.abs(inputs["k"])
        inputs["penalty_direction"] = inputs["penalty_direction"] / np.sqrt(K)
    for key, argument in arguments.items():
        if key == "log_decay":
            inputs[key] = _log_decay(shape[key], decay, rng)
        elif key in ("beta", "eta"):
            inputs[key] = 2 / 9 * (0.5 + strength / 2) if keys == "long" else strength
        elif key == "log_a":
            inputs[key] = -np.exp(normal(*shape[key]) - 2) + 1j * np.pi * rng.random(shape[key])
        elif argument.kind == "complex":
            inputs[key] = (normal(*shape[key]) + 1j * normal(*shape[key])) / np.sqrt(N)
        elif key not in inputs:
            inputs[key] = 1 / (1 + np.exp(-normal(*shape[key])))
    return {key: _cast(inputs[key], arguments[key].kind, dtype) for key in arguments}


def _keys(k, keys, rng):
    unit = lambda k: k / np.linalg.norm(k, axis=-1, keepdims=True)
    if keys == "parallel":
        return unit(rng.standard_normal((k.shape[0], 1, *k.shape[2:])) / np.sqrt(k.shape[-1]) + 0.03 * k)
    if keys == "long":
        return 3 * unit(k)
    if keys == "tiny":
        return 1e-4 * unit(k)
    if keys == "zero":
        return k * (rng.random((*k.shape[:-1], 1)) < 0.5)
    return k + 100 if keys == "offset" else k


def _log_decay(shape, decay, rng):
    mild = -np.logaddexp(0, -rng.standard_normal(shape) - 1)
    if decay == "zero":
        return np.zeros(shape)
    if decay == "sometimes":
        return mild * (rng.random(shape) < 0.5)
    if isinstance(decay, tuple):
        mild[:, decay[2]] = decay[1]
        return mild
    return mild if decay == "mild" else np.full(shape, float(decay)) * rng.uniform(0.9, 1.0, shape)


def _cast(a, kind, dtype):
    if kind == "complex":
        return np.asarray(a, "complex128" if dtype == "float64" else "complex64")
    if kind == "feature" and dtype not in ("float32", "float64"):
        return jnp.asarray(a, dtype)
    return np.asarray(a, "float64" if dtype == "float64" else "float32")


def sequences(name):
    """Names of the arguments of mixer `name` that run over time."""
    return [key for key, argument in MIXERS[name].arguments.items() if argument.sequence]


def cut(name, inputs, start, stop):
    """The inputs of tokens start to stop."""
    return inputs | {key: inputs[key][:, start:stop] for key in sequences(name)}


def call(name, inputs, **options):
    """The mixer `name` on a dict of inputs."""
    mixer = MIXERS[name]
    return mixer.call(*(inputs[key] for key in mixer.arguments), **options)


def step(name, state, inputs, t):
    """Token t of the inputs through the mixer's `_step`."""
    mixer = MIXERS[name]
    at = (inputs[key][:, t] if argument.sequence else inputs[key] for key, argument in mixer.arguments.items())
    return mixer.step(state, *at)


def make_state(name, *, B=2, Hk=2, H=2, K=16, V=24, N=8, M=6, dtype="float32", seed=7):
    """A random state of mixer `name`."""
    rng = np.random.default_rng(seed)
    sizes = {"B": B, "Hk": Hk, "H": H, "K": K, "V": V, "N": N, "M": M, "D": V}

    def fill(s):
        if jnp.issubdtype(s.dtype, jnp.complexfloating):
            return jnp.asarray(0.3 * (rng.standard_normal(s.shape) + 1j * rng.standard_normal(s.shape)), s.dtype)
        return jnp.asarray(0.3 * np.abs(rng.standard_normal(s.shape)), s.dtype)

    state = jax.tree.map(fill, MIXERS[name].empty(sizes, dtype))
    square = lambda a: jnp.matmul(a, jnp.swapaxes(a, -1, -2), precision="highest")
    if "A" in state._fields:  # the inverse of M, both symmetric and positive
        M = 0.1 * jnp.eye(K, dtype=state.M.dtype) + square(state.M)
        return state._replace(M=M, A=jnp.linalg.inv(M))
    if "query" in state._fields:
        query = state.query._replace(count=10 * state.query.count, scatter=square(state.query.scatter))
        return state._replace(query=query)
    if "scatter" in state._fields:
        return state._replace(count=10 * state.count, scatter=square(state.scatter))
    return state
