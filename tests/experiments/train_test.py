"""The programs on the real decoder: train, stop by a signal, go on, evaluate, and what mistakes look like."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from linattn_jax.train.checkpoints import newest_step

ROOT = Path(__file__).parents[2]
CACHE = tempfile.TemporaryDirectory()
MODEL = [
    "--config.model.layers=1",
    "--config.model.width=32",
    "--config.model.head_size=16",
    "--config.model.mlp_width=32",
]


def _command(name, *args):
    return [sys.executable, "-m", f"experiments.{name}", *map(str, args)]


def _run(name, *args):
    return subprocess.run(_command(name, *args), cwd=ROOT, env=_env(), capture_output=True, text=True, check=False)


def _env():
    """Small programs, compiled once for all processes of the test."""
    cache = {"JAX_COMPILATION_CACHE_DIR": CACHE.name, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    return (
        os.environ
        | cache
        | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    )


def test_train_stop_go_on_evaluate(tmp_path):
    for i in range(30):
        (tmp_path / f"{i}.txt").write_text(f"number {i} " * (20 + i))
    argument = f"configs/lm.py:data={tmp_path}/*.txt,mixer=softmax,batch=2,seq_len=32,steps=1000000,lr=1e-2"
    common = [*MODEL, "--config.sample.length=8", "--config.eval.max_bytes=2000", "--config.optimizer.warmup_steps=2"]
    run_dir = tmp_path / "run"
    process = subprocess.Popen(
        _command("train", f"--config={argument}", f"--run_dir={run_dir}", *common),
        cwd=ROOT, env=_env(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 240
    while not (run_dir / "metrics.jsonl").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err[-2000:]
    assert "SIGTERM came. Saved; the same command goes on from here." in out
    step = newest_step(run_dir / "checkpoints")
    assert step >= 10

    argument = argument.replace("steps=1000000", f"steps={step + 10}")
    done = _run("train", f"--config={argument}", f"--run_dir={run_dir}", *common)
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"resuming run at step {step}" in done.stderr
    assert "held-out text" in done.stdout
    assert "A sample at temperature 0.8" in done.stdout
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["step"] == step + 10

    done = _run("evaluate", f"--run_dir={run_dir}", "--max_bytes=2000", f"--json={tmp_path}/e.json")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "context ends with each row" in done.stdout
    found = json.loads((tmp_path / "e.json").read_text())
    assert found["nats_per_token"] == pytest.approx(summary["heldout_nats_per_token"], rel=1e-5)
    assert found["bytes"] == summary["heldout_bytes"]


@pytest.mark.parametrize(
    ("program", "args", "message"),
    [
        ("train", ["--config=configs/lm.py:mixr=kla", "--run_dir=x"], "error: unknown key 'mixr' in the config's"),
        ("train", ["--config=configs/lm.py:data=/nowhere/at/all.txt", "--run_dir=x"], "/nowhere/at/all.txt"),
        ("evaluate", ["--run_dir=/nowhere/at/all"], "error: /nowhere/at/all is not a run directory"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(program, args, message):
    done = _run(program, *args)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if line and not line.startswith(("I", "W"))]
    assert len(lines) == 1
    assert message in lines[0]
