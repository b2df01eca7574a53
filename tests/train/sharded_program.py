"""Run by sharding_test.py with eight host devices: trains on several meshes and prints what it saw as JSON."""

from __future__ import annotations

import json
import pathlib
import sys

import jax
import numpy as np
import optax
from flax import nnx

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from conftest import StandIn  # type: ignore[import-not-found]

from linattn_jax.sharding import batch_sharding, make_mesh
from linattn_jax.train.functional import initialise
from linattn_jax.train.step import init_state, make_train_step


def batch(rows=16, steps=12):
    """Rows of two segments with different amounts of padding."""
    rng = np.random.default_rng(0)
    ids = np.repeat(np.arange(2), [4, 8])[None].repeat(rows, 0).astype(np.int32)
    for row in range(rows):
        ids[row, steps - row % 5 :] = -1
    tokens = rng.integers(0, 17, (2, rows, steps), dtype=np.int32)
    return {"inputs": tokens[0], "targets": tokens[1], "segment_ids": ids}


def run(devices, data, fsdp, accumulate):
    """Losses of two steps, gradient norms, and how the parameters lie."""
    mesh = make_mesh(data, fsdp, jax.devices()[:devices])
    functional, params = initialise(lambda: StandIn(rngs=nnx.Rngs(0)), mesh)
    rate = lambda count: 0.1
    optimizer = optax.adam(rate)
    state = init_state(functional, params, optimizer, mesh, rows=16, accumulate=accumulate, carry_state=True)
    step = make_train_step(functional, optimizer, rate, mesh, accumulate=accumulate)
    placed = jax.device_put(batch(), batch_sharding(mesh))
    seen: dict = {"loss": [], "grad_norm": []}
    for _ in range(2):
        state, metrics = step(state, placed)
        for name in ("loss", "grad_norm"):
            seen[name].append(float(metrics[name]))
    kernel = state.params["layers"]["mixer"]["q_proj"]["kernel"]
    moment = state.opt_state[0].mu["layers"]["mixer"]["q_proj"]["kernel"]
    seen["shards"] = [[list(s.data.shape) for s in x.addressable_shards] for x in (kernel, moment)]
    seen["norm_shard"] = list(state.params["layers"]["norm"]["scale"].addressable_shards[0].data.shape)
    seen["carry_shard"] = list(state.carry.state["h"].addressable_shards[0].data.shape)
    seen["embed"] = float(np.abs(np.asarray(state.params["embed"], np.float64)).sum())
    return seen


if __name__ == "__main__":
    meshes = {"one": (1, 1, 1, 1), "fsdp": (8, 2, 4, 2)}
    print(json.dumps({name: run(*sizes) for name, sizes in meshes.items()}))
