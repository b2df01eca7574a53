"""On a mesh of explicit axes mixers and the convolution give one device's numbers, rows where they lay."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
PROGRAM = """
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from cases import FAMILIES, call, make_inputs, sequences, step
from linattn_jax import softmax_attention, softmax_attention_init
from linattn_jax.mixers.convolution import short_convolution
from tolerances import assert_close

rng = np.random.default_rng(0)
normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
x, history, filters = normal(4, 9, 3), normal(4, 3, 3), (normal(4, 3), normal(3))
qkv = normal(4, 9, 4, 6), normal(4, 9, 2, 6), normal(4, 9, 2, 5)
cache = softmax_attention_init(4, 2, 6, 5, capacity=9)

@jax.jit
def convolve(x, filters, packing):
    return with_gradient(lambda x: short_convolution(x, *filters, **packing), x)

@jax.jit
def attend(qkv, packing):
    return with_gradient(lambda qkv: softmax_attention(*qkv, **packing), qkv)

def with_gradient(f, x):
    def loss(x):
        y, state = f(x)
        return jnp.sum(y**2) + sum(jnp.sum(s**2) for s in jax.tree.leaves(state) if s.dtype == jnp.float32), (y, state)
    return jax.grad(loss, has_aux=True)(x)

def calls(rows, whole):
    for packing in PACKINGS:
        with_history = packing | {"initial_state": history}
        with_cache = packing | {"initial_state": cache}
        for p in (packing, with_history):
            yield "convolution", p, convolve(rows(x), whole(filters), rows(p))
        for p in (packing, with_cache):
            yield "softmax", p, attend(rows(qkv), rows(p))

ids = np.array([[1] * 4 + [2] * 5, [-1, 3, 3, -1, 3, -9, 2, 2, -1], [0] * 9, [-1] * 9], np.int32)
PACKINGS = [{}, {"segment_ids": ids, "initial_segment_id": np.array([1, 2, 5, 0], np.int32)}]
same = lambda tree: tree
wanted = [out for _, _, out in calls(same, same)]
mesh = jax.make_mesh((4,), ("data",))
with jax.set_mesh(mesh):
    put = lambda spec: lambda tree: jax.device_put(tree, NamedSharding(mesh, spec))
    for (name, packing, seen), one in zip(calls(put(PartitionSpec("data")), put(PartitionSpec())), wanted, strict=True):
        for a, b in zip(jax.tree.leaves(seen), jax.tree.leaves(one), strict=True):
            assert a.sharding.spec[0] == "data", (name, packing.keys())
            assert_close(a, b, 1e-5, f"{name} {list(packing)}")

for name in FAMILIES:
    inputs = make_inputs(name, B=4, T=9, K=4, V=4)

    def both(x, ids):
        def loss(x):
            out = call(name, x, implementation="chunkwise", chunk_size=4, segment_ids=ids)
            return jnp.sum(jnp.real(out[0])), out
        gradients, (y, state) = jax.grad(loss, has_aux=True)(x)
        return (y, state, step(name, state, x, 0)), gradients

    one = jax.jit(both)(inputs, ids)
    with jax.set_mesh(mesh):
        lie = lambda a, rows: jax.device_put(a, NamedSharding(mesh, PartitionSpec("data" if rows else None)))
        placed = {key: lie(a, key in sequences(name)) for key, a in inputs.items()}
        seen = jax.jit(both)(placed, lie(ids, True))
    for a, b in zip(jax.tree.leaves(seen), jax.tree.leaves(one), strict=True):
        assert_close(a, b, 1e-5, name)
    assert {a.sharding.spec[0] for a in jax.tree.leaves(seen[0])} == {"data"}, name
"""


def test_explicit_mesh():
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    flags = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    environment = os.environ | {"PYTHONPATH": paths, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
