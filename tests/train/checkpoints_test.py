"""Saving and restoring, refusing, passing over what is incomplete, and a disk that is really full."""

from __future__ import annotations

import shutil

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from linattn_jax.sharding import make_mesh
from linattn_jax.train.checkpoints import (
    Checkpoints,
    check_same_config,
    is_disk_full,
    load_params,
    newest_step,
    read_meta,
)
from linattn_jax.train.functional import initialise
from linattn_jax.train.optimizer import make_optimizer
from linattn_jax.train.step import init_state
from linattn_jax.types import UserError


def _iterator():
    return iter(grain.MapDataset.range(100).seed(0).shuffle().to_iter_dataset())


@pytest.fixture(scope="module")
def state(build_decoder):
    """A train state with Muon's and Adam's moments and a carry, values made unequal to their initial ones."""
    mesh = make_mesh()
    functional, params = initialise(build_decoder, mesh)
    config = {"name": "muon", "learning_rate": 0.1, "warmup_steps": 0, "final_fraction": 0.1, "weight_decay": 0.1}
    config |= {"beta1": 0.9, "beta2": 0.95, "clip_norm": 1.0}
    optimizer, _ = make_optimizer(ConfigDict(config), 10)
    made = init_state(functional, params, optimizer, mesh, rows=4, carry_state=True)
    leaves, tree = jax.tree.flatten(made)
    changed = [(x + i + 0.25 if x.dtype == jnp.float32 else x + i).astype(x.dtype) for i, x in enumerate(leaves)]
    return jax.tree.unflatten(tree, changed)


def _same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert x.sharding == y.sharding
        np.testing.assert_array_equal(x, y)


@pytest.mark.core
def test_everything_comes_back_bit_for_bit(tmp_path, state):
    iterator = _iterator()
    [next(iterator) for _ in range(7)]
    saver = Checkpoints(tmp_path / "c", keep=2)
    for step in (1, 2, 3):
        assert saver.save(step, state, iterator, {"config": {"a": [1, 2]}, "nats": 0.1 + step})
    assert not saver.save(3, state, iterator, {})  # already there
    want = [next(iterator) for _ in range(5)]
    saver.close()
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["2", "3"]

    other = _iterator()
    reader = Checkpoints(tmp_path / "c", keep=2)
    restored, meta = reader.restore(jax.tree.map(jnp.zeros_like, state), other)
    reader.close()
    _same(restored, state)
    assert meta == {"config": {"a": [1, 2]}, "nats": 3.1} == read_meta(tmp_path / "c", 3)
    assert [next(other) for _ in range(5)] == want


def test_a_save_is_of_the_moment_though_the_buffers_are_reused(tmp_path):
    with_big = init_like(jnp.arange(1 << 20, dtype=jnp.float32))
    saver = Checkpoints(tmp_path)
    saver.save(1, with_big, _iterator(), {})
    step = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    for _ in range(5):
        with_big = jax.block_until_ready(step(with_big))
    saver.close()
    found = load_params(tmp_path, with_big.params)
    np.testing.assert_array_equal(found["x"], np.arange(1 << 20, dtype=np.float32))


def init_like(array):
    """A state of one array."""
    from linattn_jax.train.step import TrainState

    zero = lambda: jnp.zeros((), jnp.int32)
    return TrainState(zero(), {"x": array}, (), None, zero(), zero())


def test_an_incomplete_newest_is_passed_over_and_set_aside(tmp_path, state):
    said = []
    saver = Checkpoints(tmp_path)
    for step in (4, 9):
        saver.save(step, state, _iterator(), {"step": step})
    saver.close()
    (tmp_path / "9" / "state" / "manifest.ocdbt").unlink()
    shutil.copytree(tmp_path / "4", tmp_path / "12.orbax-checkpoint-tmp")
    assert newest_step(tmp_path) == 4
    again = Checkpoints(tmp_path, say=said.append)
    assert again.newest() == 4
    assert again.restore(state, _iterator())[1] == {"step": 4}
    again.save(9, state, _iterator(), {"step": "new"})
    again.close()
    assert said == ["the checkpoint of step 9 is incomplete and is passed over; it is now incomplete-9"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["4", "9", "incomplete-9"]
    assert read_meta(tmp_path, 9) == {"step": "new"}


def test_no_checkpoint_is_said(tmp_path, state):
    with pytest.raises(FileNotFoundError, match="no checkpoint in"):
        Checkpoints(tmp_path / "c").restore(state, _iterator())
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no checkpoint in .*empty"):
        load_params(tmp_path / "empty", state.params)
    with pytest.raises(UserError, match=r"there is no run directory .*absent"):
        load_params(tmp_path / "absent", state.params)


def test_parameters_load_into_another_run_or_name_what_differs(tmp_path, state):
    saver = Checkpoints(tmp_path / "run" / "checkpoints")
    saver.save(2, state, _iterator(), {})
    saver.close()
    _same(load_params(tmp_path / "run", jax.tree.map(jnp.zeros_like, state.params)), state.params)
    wrong = jax.tree.map(lambda x: x, state.params)
    wrong["layers"]["norm"]["scale"] = jnp.zeros((2, 8))
    message = (
        r"parameter layers/norm/scale is float32\[2, 16\] in the checkpoint of .* and float32\[2, 8\] in this model"
    )
    with pytest.raises(UserError, match=message):
        load_params(tmp_path / "run", wrong)
    with pytest.raises(UserError, match=r"parameter new is absent in .* and float32\[1\] in this model"):
        load_params(tmp_path / "run", state.params | {"new": jnp.zeros((1,))})


def test_another_config_is_refused_with_the_fields_named():
    base = {"seed": 0, "steps": 10, "model": {"width": 8, "remat": "none"}, "data": {"train": "a", "seq_len": 4}}
    same = {"seed": 0, "steps": 99, "model": {"width": 8, "remat": "full"}, "data": {"train": "a", "seq_len": 4}}
    check_same_config(base, same, "runs/x")
    other = {"seed": 1, "steps": 10, "model": {"width": 16}, "data": {"train": "b", "seq_len": 8}}
    with pytest.raises(UserError) as caught:
        check_same_config(base, other, "runs/x")
    assert str(caught.value) == (
        "runs/x holds a checkpoint of another config: seed was 0 and is now 1; model.width was 8 and is now 16; "
        "data.train was 'a' and is now 'b' and 1 more; choose another run directory or give the same config"
    )


def test_a_full_disk_keeps_what_was_saved_and_says_one_sentence(small_disk, caplog):
    said = []
    noise = np.random.default_rng(0).normal(size=450_000).astype(np.float32)  # 1.8 MB that does not compress
    big = init_like(jnp.asarray(noise))
    saver = Checkpoints(small_disk / "c", keep=3, say=said.append)
    for step in (1, 2, 3):
        saver.save(step, big, _iterator(), {"step": step})
    saver.wait()
    assert saver.newest() is not None
    kept = saver.newest()
    assert len(said) >= 1
    for sentence in said:
        assert "was not saved: no space left on the disk of" in sentence
        assert "is kept, training goes on" in sentence
    assert not [r for r in caplog.records if r.levelname == "ERROR"]
    assert not list((small_disk / "c").glob("*tmp*"))
    np.testing.assert_array_equal(load_params(small_disk / "c", big.params)["x"], noise)
    # With room again, saving works again.
    shutil.rmtree(small_disk / "c" / str(kept))
    saver.close()
    again = Checkpoints(small_disk / "c", say=said.append)
    assert again.save(9, big, _iterator(), {})
    again.close()
    assert newest_step(small_disk / "c") == 9


def test_a_full_disk_is_known_by_number_or_words():
    assert is_disk_full(OSError(28, "x"))
    assert is_disk_full(ValueError("RESOURCE_EXHAUSTED: Failed to write: No space left on device [os_error_code='28']"))
    try:
        try:
            raise OSError(28, "x")
        except OSError as error:
            raise RuntimeError("wrapped") from error
    except RuntimeError as error:
        assert is_disk_full(error)
    assert not is_disk_full(OSError(13, "Permission denied"))
