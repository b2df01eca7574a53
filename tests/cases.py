"""Inputs of the contract: seeded random arguments of any mixer, by its gates, in ordinary and in hard regimes."""

import jax
import jax.numpy as jnp
import numpy as np

from linattn_jax.mixers.dispatch import MIXERS

PER_CHANNEL = ("gla",)


def make_inputs(name, *, B=2, T=37, Hk=2, H=2, K=16, V=24, dtype="float32", seed=0, decay="mild", keys="random"):
    """q, k, v and the gates of mixer `name` as a dict of NumPy arrays (JAX arrays for bfloat16).

    decay: "mild" (-log of a sigmoid), "zero", "sometimes" (zero at random places), a number (every token), or
    ("spike", value, position): mild, with `value` at one token.
    keys: "random" (unit norm on average), "parallel", "long" (the delta rule's beta ||k||^2 up to 2), "tiny", "zero".
    """
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.standard_normal(shape)
    q, k, v = normal(B, T, Hk, K), normal(B, T, Hk, K) / np.sqrt(K), normal(B, T, H, V)
    strength = 1 / (1 + np.exp(-normal(B, T, H)))
    if keys == "parallel":
        k = normal(B, 1, Hk, K) / np.sqrt(K) + 0.03 * k
        k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    elif keys == "long":
        k = 3 * k / np.linalg.norm(k, axis=-1, keepdims=True)
        strength = 2 / 9 * (0.5 + strength / 2)
    elif keys == "tiny":
        k = 1e-4 * k / np.linalg.norm(k, axis=-1, keepdims=True)
    elif keys == "zero":
        k = k * (rng.random((B, T, Hk, 1)) < 0.5)
        q = q * (rng.random((B, T, Hk, 1)) < 0.5)
    shape = (B, T, Hk, K) if name in PER_CHANNEL else (B, T, H)
    log_decay = -np.logaddexp(0, -normal(*shape) - 1)
    if decay == "zero":
        log_decay = np.zeros(shape)
    elif decay == "sometimes":
        log_decay = log_decay * (rng.random(shape) < 0.5)
    elif isinstance(decay, tuple):
        log_decay[:, decay[2]] = decay[1]
    elif decay != "mild":
        log_decay = np.full(shape, float(decay)) * rng.uniform(0.9, 1.0, shape)
    gates = {"log_decay": log_decay, "beta": strength, "eta": strength}
    inputs = {"q": q, "k": k, "v": v} | {gate: gates[gate] for gate in MIXERS[name].gates}
    wide = "float64" if dtype == "float64" else "float32"
    return {
        key: np.asarray(a, wide) if key in gates or dtype in ("float32", "float64") else jnp.asarray(a, dtype)
        for key, a in inputs.items()
    }


def call(name, inputs, **options):
    """The mixer `name` on a dict of inputs."""
    mixer = MIXERS[name]
    return mixer.call(*(inputs[key] for key in ("q", "k", "v", *mixer.gates)), **options)


def make_state(name, *, B=2, Hk=2, H=2, K=16, V=24, dtype="float32", seed=7):
    """A random state of mixer `name`."""
    rng = np.random.default_rng(seed)
    empty = MIXERS[name].init(B, H, K, V, key_heads=Hk, dtype=dtype)
    return jax.tree.map(lambda s: jnp.asarray(0.3 * np.abs(rng.standard_normal(s.shape)), s.dtype), empty)
