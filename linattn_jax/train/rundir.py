"""The files of a run directory that say what was run: config.json, run.json, tokenizer.json, summary.json."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

_PACKAGES = ("linattn_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def write_json(path: Path, content: Any) -> None:
    """Writes a file whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    temporary.replace(path)


def config_as_json(config: Any) -> dict[str, Any]:
    """A ConfigDict as what json.loads gives of it: tuples become lists."""
    return json.loads(config.to_json())


def facts(config: Any, mesh: Mesh) -> dict[str, Any]:
    """What a run depends on besides its config."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    device = mesh.devices.flat[0]
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **commit(),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "seed": int(config.seed),
        "versions": versions,
        "devices": {
            "platform": device.platform,
            "kind": device.device_kind,
            "count": mesh.size,
            "processes": jax.process_count(),
            "mesh": dict(mesh.shape),
        },
    }


def commit() -> dict[str, Any]:
    """The commit of the source tree and whether it has changes; None for both outside a repository."""

    def git(*args: str) -> str | None:
        where = Path(__file__).resolve().parent
        try:
            done = subprocess.run(["git", "-C", where, *args], capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # An installed copy may lie inside some other project's repository: only our own file being tracked counts.
    if git("ls-files", "--error-unmatch", os.path.basename(__file__)) is None:
        return {"commit": None, "dirty": None}
    changes = git("status", "--porcelain", "--untracked-files=no")
    return {"commit": git("rev-parse", "HEAD"), "dirty": None if changes is None else bool(changes)}


def write_run(run_dir: Path, config: Any, mesh: Mesh, resumed_at: int | None) -> None:
    """Writes run.json, or adds to it that the run was resumed; config.json is that of the latest start."""
    write_json(run_dir / "config.json", config_as_json(config))
    path = run_dir / "run.json"
    now = facts(config, mesh)
    if resumed_at is not None and path.exists():
        before: dict[str, Any] = json.loads(path.read_text())
        before.setdefault("resumed", []).append({"step": resumed_at, **now})
        now = before
    write_json(path, now)


def read_config(run_dir: str | os.PathLike[str]) -> Mapping[str, Any]:
    """The resolved config of a run.

    Raises:
        FileNotFoundError: `run_dir` is not a run directory.
    """
    path = Path(run_dir) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{run_dir} is not a run directory: it has no config.json")
    return json.loads(path.read_text())
