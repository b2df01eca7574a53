"""Layers built small, their parameters moved off the initial values, and their float64 forward pass."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import reference_model
from flax import nnx

from linattn_jax.layers import LAYERS

D, T = 10, 9
SIZES = {"heads": 4, "key_heads": 2, "key_size": 4, "value_size": 6}
UNGROUPED = ("vla", "interdomain")
FEW_MODES = {
    "interdomain": {"basis": 6},
    "s4d": {"state_size": 6},
    "s4d_interdomain": {"basis": 6},
    "longhorn": {"state_size": 3},
}
IDS = np.array([[7, 7, -1, 7, 8, 8, 8, 7, 7], [-1, -1, 0, 0, 5, 5, 5, -4, -4]], np.int32)


def sizes(name):
    return SIZES | ({"key_heads": 4} if name in UNGROUPED else {})


@functools.cache
def build(name, **options):
    """The layer split in structure and parameters, these moved off their initial values (biases of 0, scales of 1)."""
    options = FEW_MODES.get(name, {}) | sizes(name) | options
    module = LAYERS[name](D, options.pop("heads"), rngs=nnx.Rngs(0), **options)
    graph, parameters = nnx.split(module)
    rng = np.random.default_rng(1)

    def move(p):
        return p + 0.3 * rng.standard_normal(p.shape).astype(np.float32)

    return graph, jax.tree.map(move, parameters), module


def inputs(seed=0, length=T):
    return np.random.default_rng(seed).standard_normal((2, length, D)).astype(np.float32)


@functools.partial(jax.jit, static_argnums=0)
def forward(graph, parameters, x, state, ids, first):
    return nnx.merge(graph, parameters)(x, state=state, segment_ids=ids, initial_segment_id=first)


@functools.partial(jax.jit, static_argnums=0)
def gradients(graph, parameters, x, state, ids, weights):
    """Of a weighted sum of outputs, by parameters and x."""

    def loss(parameters, x):
        return jnp.sum(weights * nnx.merge(graph, parameters)(x, state=state, segment_ids=ids)[0])

    return jax.grad(loss, argnums=(0, 1))(parameters, x)


def run(name, x, ids=None, state=None, first=None):
    graph, parameters, _ = build(name)
    return forward(graph, parameters, x, state, ids, first)


def empty(name):
    return build(name)[2].init_state(2, T)


def exact(name, x, options=(), **layer_options):
    """The float64 layer on rows x [B, T, D]."""
    p = parameters_of(name, **dict(options))
    return np.stack([reference_model.layer(name, p, np.float64(row), **sizes(name), **layer_options) for row in x])


def parameters_of(name, **options):
    _, parameters, _ = build(name, **options)
    return jax.tree.map(lambda a: np.asarray(a, np.float64), nnx.to_pure_dict(parameters))
