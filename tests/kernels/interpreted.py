"""Runs a program of this folder that checks cases on kernels, interpreted unless a GPU is named."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def run(program, *arguments, **environment):
    """The lines that `program` prints, in a process of its own, with threads enough for every warpgroup."""
    paths = os.pathsep.join(map(str, (HERE, HERE.parent, HERE.parents[1])))
    environment = {**os.environ, "NPROC": "8", "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths, **environment}
    command = [sys.executable, str(HERE / program), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
    return done.stdout.splitlines()


def run_cases(program, cases, platform="cpu"):
    """Asserts that all cases pass."""
    assert run(program, *cases, JAX_PLATFORMS=platform) == [f"ok {case}" for case in cases]
