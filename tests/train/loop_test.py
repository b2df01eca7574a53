"""Whole runs: killed, stopped, resumed, diverging, on a full disk; always to the same weights."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from linattn_jax.train.checkpoints import Checkpoints, newest_step, read_meta
from linattn_jax.train.metrics import read_metrics
from linattn_jax.types import UserError


def _weights(run_dir, step=12):
    """Every array of a checkpoint, and the data position, as they lie on disk."""
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        arrays = [checkpointer.restore(pathlib.Path(run_dir) / f"checkpoints/{step}/{x}") for x in ("params", "state")]
    data = [p.read_text() for p in sorted((pathlib.Path(run_dir) / f"checkpoints/{step}/data").glob("process*"))]
    return arrays, data


def _assert_same_run(one, other):
    (arrays, data), (others, other_data) = _weights(one), _weights(other)
    assert jax.tree.structure(arrays) == jax.tree.structure(others)
    jax.tree.map(np.testing.assert_array_equal, arrays, others)
    assert data == other_data
    lines = []
    for run_dir in (one, other):
        records = read_metrics(pathlib.Path(run_dir) / "metrics.jsonl")
        lines.append([{k: v for k, v in r.items() if k not in ("step_ms", "tokens_per_second")} for r in records])
    assert lines[0] == lines[1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A place for the run that nothing disturbs."""
    return tmp_path_factory.mktemp("whole")


@pytest.fixture
def undisturbed(whole, config, standin_loop):
    """The run directory of `config()` trained in one go."""
    if not (whole / "summary.json").exists():
        standin_loop.train(config(), whole)
    return whole


def test_a_run_leaves_what_the_house_says(undisturbed, config, capsys):
    run_dir = undisturbed
    names = {p.name for p in run_dir.iterdir()}
    wanted = {"config.json", "run.json", "metrics.jsonl", "tensorboard", "checkpoints", "loss.png", "summary.json"}
    assert names == wanted
    records = read_metrics(run_dir / "metrics.jsonl")
    train = [r for r in records if "loss" in r]
    assert [r["step"] for r in train] == [2, 4, 6, 8, 10, 12]
    assert [r["step"] for r in records if "heldout_nats_per_token" in r] == [6, 12]
    assert train[-1]["loss"] < train[0]["loss"] - 0.5
    assert [r["tokens"] for r in train] == [4 * 32 * r["step"] for r in train]
    assert train[0]["learning_rate"] == pytest.approx(0.05)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["heldout_bits_per_byte"] == records[-1]["heldout_bits_per_byte"]
    assert summary["heldout_bits_per_byte"] == pytest.approx(
        summary["heldout_nats_per_token"] * summary["heldout_tokens"] / np.log(2) / summary["heldout_bytes"]
    )
    assert (summary["step"], summary["stopped"], summary["skipped"]) == (12, None, 0)
    assert json.loads((run_dir / "config.json").read_text())["compute_dtype"] == "float32"
    facts = json.loads((run_dir / "run.json").read_text())
    assert facts["versions"]["jax"] == jax.__version__
    assert facts["devices"]["count"] == len(jax.devices())
    assert facts["seed"] == 0
    assert sorted(p.name for p in (run_dir / "checkpoints").iterdir()) == ["12", "4", "8"]


def test_a_run_killed_while_saving_goes_on_to_identical_weights(tmp_path, undisturbed, config, standin_loop):
    program = pathlib.Path(__file__).parent / "killed_program.py"
    root = program.parents[2]
    env = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", "JAX_PLATFORMS": "cpu"}
    (tmp_path / "config.json").write_text(config().to_json())
    run_dir = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path / "config.json"), str(run_dir)],
        env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    assert newest_step(run_dir / "checkpoints") in (4, 8)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 10, "loss": 1.0}\n{"step": 12, "lo')  # lines of lost steps, one cut short
    standin_loop.train(config(), run_dir)
    _assert_same_run(undisturbed, run_dir)
    assert json.loads((run_dir / "run.json").read_text())["resumed"][0]["step"] in (4, 8)


def test_sigterm_saves_and_the_run_goes_on_to_identical_weights(
    tmp_path, undisturbed, config, standin_loop, monkeypatch, capsys
):
    advance = standin_loop.m.Console.advance
    seen = []

    def signal_at_five(self):
        seen.append(1)
        advance(self)
        if len(seen) == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(standin_loop.m.Console, "advance", signal_at_five)
    summary = standin_loop.train(config(), tmp_path)
    assert summary["stopped"] == "SIGTERM came"
    assert "Stopped at step 5: SIGTERM came. Saved; the same command goes on from here." in capsys.readouterr().out
    assert newest_step(tmp_path / "checkpoints") == 5
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    standin_loop.train(config(), tmp_path)
    assert len(seen) == 12
    _assert_same_run(undisturbed, tmp_path)


def test_the_time_limit_stops_and_saves(tmp_path, config, standin_loop):
    summary = standin_loop.train(config(time_limit_minutes=1e-9), tmp_path)
    assert summary["stopped"] == "the time limit of 1e-09 minutes is reached"
    assert newest_step(tmp_path / "checkpoints") == summary["step"] == 1


def test_a_finished_run_started_again_stays_as_it_is(undisturbed, config, standin_loop):
    before = read_metrics(undisturbed / "metrics.jsonl")
    summary = standin_loop.train(config(), undisturbed)
    assert read_metrics(undisturbed / "metrics.jsonl") == before
    assert summary["heldout_nats_per_token"] == before[-1]["heldout_nats_per_token"]


def test_another_config_is_refused_and_nothing_is_lost(undisturbed, config, standin_loop):
    files = {p: p.stat().st_mtime_ns for p in undisturbed.rglob("*")}
    with pytest.raises(UserError, match=r"optimizer.learning_rate was 0.05 and is now 0.01; choose another run"):
        standin_loop.train(config(optimizer__learning_rate=0.01), undisturbed)
    assert {p: p.stat().st_mtime_ns for p in undisturbed.rglob("*")} == files


def test_a_run_of_a_config_without_later_fields_goes_on(tmp_path, undisturbed, config, standin_loop, capfd):
    """With the same command, which now sets them, to the same weights, and again once it has ended."""
    older = config(time_limit_minutes=1e-9)
    del older.optimizer.modes_rate
    del older.model.options
    standin_loop.train(older, tmp_path)
    capfd.readouterr()
    for step in (1, 12):
        assert newest_step(tmp_path / "checkpoints") == step
        standin_loop.train(config(), tmp_path)
        assert "optimizer.modes_rate is left out: the run began without it" in capfd.readouterr().err
        assert "modes_rate" not in json.loads((tmp_path / "config.json").read_text())["optimizer"]
    jax.tree.map(np.testing.assert_array_equal, _weights(tmp_path)[0][0], _weights(undisturbed)[0][0])
    assert "modes_rate" in json.loads((undisturbed / "config.json").read_text())["optimizer"]


def test_init_from_begins_with_the_other_runs_parameters(tmp_path, undisturbed, config, standin_loop):
    changes = {"init_from": str(undisturbed), "optimizer__learning_rate": 0.0, "steps": 2, "optimizer__warmup_steps": 0}
    standin_loop.train(config(**changes), tmp_path)
    jax.tree.map(np.testing.assert_array_equal, _weights(tmp_path, 2)[0][0], _weights(undisturbed)[0][0])


def test_divergence_stops_with_the_last_good_parameters(tmp_path, config, standin_loop):
    changes = {"optimizer__name": "sgd", "optimizer__learning_rate": 1e30, "optimizer__clip_norm": 0.0}
    with pytest.raises(
        UserError, match=r"stopped at step \d+: the loss or gradient was not finite in 3 steps in a row"
    ):
        standin_loop.train(config(max_bad_steps=3, **changes, optimizer__weight_decay=0.0), tmp_path)
    params = _weights(tmp_path, newest_step(tmp_path / "checkpoints"))[0][0]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(params))
    assert json.loads((tmp_path / "summary.json").read_text())["skipped"] >= 3


def test_a_carried_state_is_saved_and_resumed(tmp_path, config, standin_loop):
    changes = {"carry_state": True, "data__layout": "contiguous", "accumulate": 2, "eval__every": 0}
    standin_loop.train(config(**changes, optimizer__name="muon"), tmp_path / "one")
    shorter = config(**changes, optimizer__name="muon", time_limit_minutes=1e-9)
    standin_loop.train(shorter, tmp_path / "two")
    standin_loop.train(config(**changes, optimizer__name="muon"), tmp_path / "two")
    _assert_same_run(tmp_path / "one", tmp_path / "two")
    assert np.abs(_weights(tmp_path / "one")[0][1]["carry"]["state"]["h"]).max() > 0.1


def test_a_full_disk_costs_the_saves_only(small_disk, config, standin_loop, monkeypatch, capfd):
    save = Checkpoints.save

    def fill_after_the_first(self, step, *args):
        result = save(self, step, *args)
        if step == 4:
            self.wait()
            with (small_disk / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(b"x" * 512)
        return result

    monkeypatch.setattr(Checkpoints, "save", fill_after_the_first)
    with pytest.raises(
        UserError, match=r"checkpoint of step 12 could not be saved, the disk is full; the newest .* step 4"
    ):
        standin_loop.train(config(), small_disk / "run")
    shown = capfd.readouterr().err
    assert "step 8 was not saved: no space left on the disk" in shown
    assert "Traceback" not in shown
    assert read_meta(small_disk / "run/checkpoints", 4)["config"]["seed"] == 0
    (small_disk / "ballast").unlink()
    assert standin_loop.train(config(), small_disk / "run")["step"] == 12


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"carry_state": True}, "carry_state needs data.layout='contiguous', got 'packed'"),
        ({"log_every": 0}, "log_every must be at least 1, got 0"),
        ({"steps": 0, "optimizer__warmup_steps": 0}, "steps must be at least 1, got 0"),
        ({"eval__every": -1}, "eval.every must not be negative"),
        ({"batch_size": 0}, "batch_size=0 must be a positive multiple"),
        ({"optimizer__name": "adam"}, "unknown optimizer 'adam'"),
        ({"mesh__fsdp": 3}, "mesh data=-1, fsdp=3|mesh data=0, fsdp=3"),
    ],
)
def test_mistakes_in_the_config_are_named_before_anything_is_written(tmp_path, config, standin_loop, changes, message):
    with pytest.raises(UserError, match=message):
        standin_loop.train(config(**changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()
