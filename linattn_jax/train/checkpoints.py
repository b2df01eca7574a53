"""Checkpoints of a run: saved behind the training, whole or not at all, and refused to another config."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import grain.checkpoint
import jax
import numpy as np
import orbax.checkpoint as ocp

from linattn_jax.sharding import path_name
from linattn_jax.types import UserError

Say = Callable[[str], None]

# Fields of the config that may change when a run is resumed: they steer the run but not what a step computes
# from a state (`steps` does through the learning rate, and lengthening a run is what people do).
MAY_DIFFER = (
    r"steps",
    r"log_every",
    r"time_limit_minutes",
    r"max_bad_steps",
    r"init_from",
    r"eval\..*",
    r"checkpoint\..*",
    r"sample\..*",
    r"mesh\..*",
    r"data\.workers",
    r"data\.heldout_max_bytes",
    r"model\.remat",
    r"model\.implementation",
)
# Fields that came later: a run that began without one goes on without it.
ADDED = ("optimizer.modes_rate",)
_ITEMS = ("params", "state", "data", "meta")
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Checkpoints:
    """The checkpoints of one run directory, newest `keep` of them.

    A save returns once the arrays are copied and is written by a thread; a step's directory takes its name when it
    is whole. If the disk is full, what was saved stays, the unfinished directory goes, `say` gets one sentence and
    training goes on: the next save may find room.
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int = 3, say: Say = print):
        if keep < 1:
            raise UserError(f"checkpoint.keep must be at least 1, got {keep}")
        self.directory = Path(directory).absolute()
        self._keep, self._say = keep, say
        self._pending: int | None = None
        quieten_orbax()
        self.directory.mkdir(parents=True, exist_ok=True)
        for step in _numbered(self.directory):
            if not _complete(self.directory / str(step)):
                self._set_aside(step)
        self._open()

    def newest(self) -> int | None:
        """The newest step that is whole on disk, or None."""
        return newest_step(self.directory)

    def save(self, step: int, state: Any, iterator: Any, meta: Mapping[str, Any]) -> bool:
        """Starts saving; False if `step` is there already or the disk was full (then `say` told so).

        Args:
            step: batches seen.
            state: a TrainState.
            iterator: the grain iterator whose next batch is that of the step to come.
            meta: JSON-able facts, among them the config.
        """
        if not self.wait() or step == self.newest():
            return False
        rest = {name: value for name, value in state._asdict().items() if name != "params" and value is not None}
        items = ocp.args.Composite(
            params=ocp.args.StandardSave(state.params),
            state=ocp.args.StandardSave(rest),
            data=grain.checkpoint.CheckpointSave(iterator),
            meta=ocp.args.JsonSave(dict(meta)),
        )
        self._pending = step
        try:
            self._manager.save(step, args=items, force=True)
        except Exception as error:
            self._recover(error)
            return False
        return True

    def wait(self) -> bool:
        """Waits for a save under way; False if the disk was too full for it."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            self._recover(error)
            return False
        self._pending = None
        return True

    def restore(self, like: Any, iterator: Any) -> tuple[Any, dict[str, Any]]:
        """(TrainState, meta) of the newest step; sets `iterator` to where it stood.

        Args:
            like: a TrainState with the shapes, dtypes and shardings to restore to.
        Raises:
            FileNotFoundError: there is no checkpoint.
        """
        step = self.newest()
        if step is None:
            raise FileNotFoundError(f"no checkpoint in {self.directory}")
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
        rest = {name: value for name, value in abstract._asdict().items() if name != "params" and value is not None}
        found = self._manager.restore(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardRestore(abstract.params),
                state=ocp.args.StandardRestore(rest),
                data=grain.checkpoint.CheckpointRestore(iterator),
                meta=ocp.args.JsonRestore(),
            ),
        )
        return like._replace(params=found.params, **found.state), found.meta

    def close(self) -> None:
        """Waits for a save under way and frees the threads."""
        self.wait()
        self._manager.close()

    def _open(self) -> None:
        if jax.process_index() == 0:
            # Left by a kill or a full disk; Orbax would remove them too, but some time later.
            for unfinished in self.directory.glob("*.orbax-checkpoint-tmp*"):
                shutil.rmtree(unfinished, ignore_errors=True)
        options = ocp.CheckpointManagerOptions(max_to_keep=self._keep)
        self._manager = ocp.CheckpointManager(self.directory, item_names=_ITEMS, options=options)

    def _recover(self, error: Exception) -> None:
        if not is_disk_full(error):
            raise error
        step, self._pending = self._pending, None
        # A manager keeps raising the error of a failed save, and the unfinished directory fills the disk further.
        try:
            self._manager.close()
        except Exception as again:
            if not is_disk_full(again):
                raise
        self._open()
        kept = self.newest()
        self._say(
            f"step {step} was not saved: no space left on the disk of {self.directory}; "
            + (f"the checkpoint of step {kept} is kept" if kept is not None else "there is no checkpoint yet")
            + ", training goes on; free some space before the next save"
        )

    def _set_aside(self, step: int) -> None:
        target = self.directory / f"incomplete-{step}"
        number = 1
        while target.exists():
            number += 1
            target = self.directory / f"incomplete-{step}-{number}"
        (self.directory / str(step)).rename(target)
        self._say(f"the checkpoint of step {step} is incomplete and is passed over; it is now {target.name}")


def newest_step(directory: str | os.PathLike[str]) -> int | None:
    """The newest whole checkpoint in a checkpoints directory, or None. Changes nothing."""
    directory = Path(directory)
    return max((step for step in _numbered(directory) if _complete(directory / str(step))), default=None)


def read_meta(directory: str | os.PathLike[str], step: int) -> dict[str, Any]:
    """The facts saved with a step, the config among them."""
    return json.loads((Path(directory) / str(step) / "meta" / "metadata").read_text())


def load_params(run_dir: str | os.PathLike[str], like: Any, step: int | None = None) -> Any:
    """Parameters of a run's newest checkpoint (or of `step`), laid as `like`.

    Args:
        run_dir: the run's directory, or its checkpoints directory.
        like: a tree of arrays or ShapeDtypeStructs with shardings.
    Raises:
        UserError: no such run or checkpoint, or a parameter missing, unknown or of another shape, which it names.
    """
    quieten_orbax()
    directory = Path(run_dir).absolute()
    if not directory.is_dir():
        raise UserError(f"there is no run directory {run_dir}")
    if (directory / "checkpoints").is_dir():
        directory = directory / "checkpoints"
    if step is None:
        step = newest_step(directory)
    if step is None or not _complete(directory / str(step)):
        raise UserError(f"there is no checkpoint{'' if step is None else f' of step {step}'} in {run_dir}")
    source = directory / str(step) / "params"
    with ocp.StandardCheckpointer() as checkpointer:
        metadata: Any = checkpointer.metadata(source)
        stored = _shapes(getattr(metadata, "item_metadata", metadata))
        wanted = _shapes(like)
        for name in [*wanted, *stored]:
            if wanted.get(name) != stored.get(name):
                have, want = stored.get(name, "absent"), wanted.get(name, "absent")
                raise UserError(f"parameter {name} is {have} in the checkpoint of {run_dir} and {want} in this model")
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
        return checkpointer.restore(source, abstract)


def drop_added(saved: Mapping[str, Any], config: Any) -> list[str]:
    """Takes out of `config`, a ConfigDict, the fields of ADDED that the config of its checkpoints (as JSON) lacks.

    Returns their names. What a field's absence means is said where it is read.
    """
    before, dropped = flatten(saved), []
    for name in ADDED:
        group, _, field = name.rpartition(".")
        if name not in before and field in config[group]:
            del config[group][field]
            dropped.append(name)
    return dropped


def check_same_config(saved: Mapping[str, Any], current: Mapping[str, Any], where: str) -> None:
    """Raises UserError naming the first fields in which two configs (as JSON) differ, beyond MAY_DIFFER."""
    before, now = flatten(saved), flatten(current)
    names = [name for name in [*now, *(n for n in before if n not in now)] if before.get(name) != now.get(name)]
    names = [name for name in names if not any(re.fullmatch(pattern, name) for pattern in MAY_DIFFER)]
    if names:
        shown = "; ".join(
            f"{name} was {before.get(name, 'absent')!r} and is now {now.get(name, 'absent')!r}" for name in names[:3]
        )
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise UserError(
            f"{where} holds a checkpoint of another config: {shown}{more}; choose another run directory or "
            "give the same config"
        )


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one dict of dotted names, in order."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an error, or one that it came from, says that no space is left (some say so only in words)."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        if any(os.strerror(code) in str(error) for code in _FULL):
            return True
        error = error.__cause__ or error.__context__
    return False


def _shapes(tree: Any) -> dict[str, str]:
    return {
        path_name(path): f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(getattr(tree, "tree", tree))
    }


def _numbered(directory: Path) -> list[int]:
    if not directory.is_dir():
        return []
    return sorted(int(child.name) for child in directory.iterdir() if child.name.isdigit() and child.is_dir())


def _complete(step_directory: Path) -> bool:
    """Whether every part of a checkpoint is there, as after a copy that was not cut short."""
    needed = ["_CHECKPOINT_METADATA", "meta/metadata", "data"]
    needed += [f"{item}/{name}" for item in ("params", "state") for name in ("_METADATA", "manifest.ocdbt")]
    return all((step_directory / name).exists() for name in needed)


def quieten_orbax() -> None:
    """Drops Orbax's lines on each save from absl's log."""
    logger = logging.getLogger("absl")
    if not any(isinstance(known, _OrbaxNoise) for known in logger.filters):
        logger.addFilter(_OrbaxNoise())


class _OrbaxNoise(logging.Filter):
    """Drops Orbax's account of each save, and its tracebacks of a full disk, which `Checkpoints` says in a sentence."""

    def filter(self, record: logging.LogRecord) -> bool:
        if "orbax" not in record.pathname:
            return True
        # It also warns that a part of a checkpoint, read alone, is not a checkpoint.
        if record.levelno < logging.WARNING or "Metadata file does not exist" in str(record.msg):
            return False
        error = record.exc_info[1] if record.exc_info else None
        text = record.getMessage() + ("".join(traceback.format_exception(error)) if error else "")
        return not (is_disk_full(error) or any(os.strerror(code) in text for code in _FULL))
