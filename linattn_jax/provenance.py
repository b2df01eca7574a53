"""What a result depends on besides its configuration: commit, versions, devices, seed, command."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax

PACKAGES = ("linattn_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def facts(seed: int) -> dict[str, Any]:
    """The facts of this process, for the JSON of a run or a measurement; no path of the machine is among them."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    device = jax.devices()[0]
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **commit(),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "seed": int(seed),
        "versions": versions,
        "devices": {
            "platform": device.platform,
            "kind": device.device_kind,
            "count": jax.device_count(),
            "processes": jax.process_count(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        },
    }


def commit() -> dict[str, Any]:
    """The commit of the source tree and whether it has changes; None for both outside a repository.

    Where the tree travels without its repository, or with a stale one, LINATTN_JAX_COMMIT in the environment names it.
    """
    if named := os.environ.get("LINATTN_JAX_COMMIT"):
        return {"commit": named, "dirty": None}

    def git(*args: str) -> str | None:
        where = Path(__file__).resolve().parent
        try:
            done = subprocess.run(["git", "-C", where, *args], capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # An installed copy may lie inside some other project's repository: only our own file being tracked counts.
    if git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return {"commit": None, "dirty": None}
    changes = git("status", "--porcelain", "--untracked-files=no")
    return {"commit": git("rev-parse", "HEAD"), "dirty": None if changes is None else bool(changes)}
