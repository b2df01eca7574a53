"""A small recurrent decoder that obeys the decoder's interface, and batches for it."""

from __future__ import annotations

import os
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs.lm import get_config
from linattn_jax.train import loop
from linattn_jax.train.functional import initialise


@pytest.fixture(scope="session", autouse=True)
def _compile_once(tmp_path_factory):
    """Runs of one config compile the same programs: the second run of a test session finds them compiled."""
    names = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in names}
    for name, value in names.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


class _Mixer(nnx.Module):
    def __init__(self, layers, width, rngs):
        self.q_proj = _Kernel((layers, width, width), rngs)
        self.o_proj = _Kernel((layers, width, width), rngs)
        self.dt_bias = nnx.Param(jnp.full((layers, width), 1.0))


class _Kernel(nnx.Module):
    def __init__(self, shape, rngs):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), shape) / shape[-2] ** 0.5)


class _Norm(nnx.Module):
    def __init__(self, layers, width):
        self.scale = nnx.Param(jnp.ones((layers, width)))


class _Layers(nnx.Module):
    def __init__(self, layers, width, rngs):
        self.mixer = _Mixer(layers, width, rngs)
        self.norm = _Norm(layers, width)


class StandIn(nnx.Module):
    """Two stacked layers of a gated running average, tied embedding; segments and padding respected."""

    def __init__(self, vocab_size=17, width=16, layers=2, *, rngs):
        self.embed = nnx.Param(0.5 * jax.random.normal(rngs.params(), (vocab_size, width)))
        self.layers = _Layers(layers, width, rngs)
        self.shape = (layers, width)

    def init_state(self, batch, capacity=None):
        del capacity
        return {"h": jnp.zeros((self.shape[0], batch, self.shape[1]))}

    def unembedding(self):
        return self.embed[...].T

    def __call__(self, tokens, *, state=None, segment_ids=None, initial_segment_id=None):
        batch, steps = tokens.shape
        state = self.init_state(batch) if state is None else state
        segments = jnp.zeros((batch, steps), jnp.int32) if segment_ids is None else segment_ids
        before = jnp.full((batch,), -1, jnp.int32) if initial_segment_id is None else initial_segment_id
        # An id outside the table reads NaN, as a blown-up activation would.
        x = self.embed[...].at[tokens].get(mode="fill", fill_value=jnp.nan)
        parameters = (
            self.layers.mixer.q_proj.kernel[...],
            self.layers.mixer.o_proj.kernel[...],
            self.layers.mixer.dt_bias[...],
            self.layers.norm.scale[...],
        )

        def layer(x, inputs):
            (query, output, bias, scale), start = inputs
            gate = jax.nn.sigmoid(bias)
            y = jnp.tanh(x @ query) * scale

            def tick(carry, position):
                h, last = carry
                value, segment = position
                real = segment >= 0
                kept = jnp.where((segment == last)[:, None], h, 0)
                h = jnp.where(real[:, None], gate * kept + (1 - gate) * value, h)
                return (h, jnp.where(real, segment, last)), h

            (final, _), hs = jax.lax.scan(tick, (start, before), (y.swapaxes(0, 1), segments.T))
            return x + hs.swapaxes(0, 1) @ output, final

        x, finals = jax.lax.scan(layer, x, (parameters, state["h"]))
        return x, {"h": finals}


@pytest.fixture(scope="session")
def build_decoder():
    """build_decoder(seed=0, **sizes) -> a stand-in decoder."""
    return lambda seed=0, **sizes: StandIn(**sizes, rngs=nnx.Rngs(seed))


@pytest.fixture(scope="session")
def make_batch():
    """make_batch(rows, steps, seed) -> a batch with ragged padding and two segments a row."""

    def make(rows=4, steps=12, seed=0, vocab_size=17):
        rng = np.random.default_rng(seed)
        ids = np.repeat(np.arange(2), [steps // 3, steps - steps // 3])[None].repeat(rows, 0).astype(np.int32)
        for row in range(rows):
            ids[row, steps - row :] = -1
        return {
            "inputs": rng.integers(0, vocab_size, (rows, steps), dtype=np.int32),
            "targets": rng.integers(0, vocab_size, (rows, steps), dtype=np.int32),
            "segment_ids": ids,
        }

    return make


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MiB."""
    where = tmp_path / "disk"
    where.mkdir()
    if os.name != "posix" or os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(where)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let us mount a small file system")
    yield where
    subprocess.run(["umount", "-l", str(where)], check=False)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A folder of 40 text files of a few hundred bytes with some structure to learn."""
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(40):
        words = [f"word{(i * j) % 7} " for j in range(40 + i)]
        (folder / f"{i:02d}.txt").write_text("".join(words))
    return folder


@pytest.fixture
def config(corpus):
    """config(**changes): twelve steps of the stand-in decoder; changes are dotted names."""

    def make(**changes):
        made = get_config(f"data={corpus},steps=12,batch=4,seq_len=32,lr=0.05")
        made.log_every = 2
        made.eval.every = 6
        made.checkpoint.every = 4
        made.data.heldout_percent = 20.0
        made.sample.length = 0
        for name, value in changes.items():
            made.update_from_flattened_dict({name.replace("__", "."): value})
        return made

    return make


@pytest.fixture
def standin_loop(monkeypatch):
    """linattn_jax.train.loop with the stand-in decoder in place of the real one."""
    use_standin(monkeypatch.setattr)
    return loop


def use_standin(setattr):
    """Replaces the loop's model."""

    def open_model(config, vocab_size, mesh):
        return initialise(lambda: StandIn(vocab_size=vocab_size, rngs=nnx.Rngs(config.seed)), mesh)

    setattr(loop, "open_model", open_model)
