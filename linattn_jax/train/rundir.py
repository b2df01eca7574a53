"""The files of a run directory that say what was run: config.json and run.json."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from linattn_jax.provenance import facts


def write_json(path: Path, content: Any) -> None:
    """Writes a file whole or not at all."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")  # other processes may be writing it too
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    temporary.replace(path)


def config_as_json(config: Any) -> dict[str, Any]:
    """A ConfigDict as what json.loads gives of it: tuples become lists."""
    return json.loads(config.to_json())


def write_run(run_dir: Path, config: Any, mesh: Mesh, resumed_at: int | None) -> None:
    """Writes run.json, or adds to it that the run was resumed; config.json is that of the latest start."""
    write_json(run_dir / "config.json", config_as_json(config))
    path = run_dir / "run.json"
    now = facts(config.seed)
    now["devices"]["mesh"] = dict(mesh.shape)
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
