"""What a run records and shows: metrics.jsonl, TensorBoard, a progress line, and use of the hardware."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np
import tqdm
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.summary import scalar

from linattn_jax.sharding import logical_axes, path_name

Record = dict[str, Any]

# Dense bfloat16 floating-point operations per second that the vendors state for a device, by its device_kind.
PEAK_FLOPS = (
    (r"h100|h200|gh200", 989e12),
    (r"a100", 312e12),
    (r"tpu ?7x", 2307e12),
    (r"tpu v6( ?lite|e)", 918e12),
    (r"tpu v5p|tpu v5$", 459e12),
    (r"tpu v5( ?lite|e)", 197e12),
    (r"tpu v4$", 275e12),
)


def peak_flops(device_kind: str) -> float | None:
    """Peak of one device in operations per second, or None where it is not known (a CPU, a new chip)."""
    return next((peak for pattern, peak in PEAK_FLOPS if re.search(pattern, device_kind.lower())), None)


def peak_memory() -> int | None:
    """Most bytes that any of this process's devices has held at once, or None where they do not say (a CPU)."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    return max((s["peak_bytes_in_use"] for s in stats if "peak_bytes_in_use" in s), default=None)


def count_parameters(params: Any) -> dict[str, int]:
    """Parameters in all, and those that multiply activations (all but an embedding that is only looked up)."""
    sizes = {
        path_name(path): (logical_axes(path_name(path)), int(np.prod(leaf.shape)))
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    total = sum(size for _, size in sizes.values())
    untied = any(axes == ("embed", "vocab") for axes, _ in sizes.values())
    looked_up = sum(size for axes, size in sizes.values() if axes == ("vocab", "embed")) if untied else 0
    return {"total": total, "multiplying": total - looked_up}


def flops_per_token(params: Any, mixer_flops: float = 0.0) -> float:
    """Operations to train on one token: 6 per multiplying parameter, and what the mixers say of themselves."""
    return 6.0 * count_parameters(params)["multiplying"] + mixer_flops


class MetricsLog:
    """metrics.jsonl (one object a line) and TensorBoard events of a run; a full disk costs lines, not the run."""

    def __init__(self, run_dir: Path, start: int, say: Callable[[str], None] = print):
        self.path = run_dir / "metrics.jsonl"
        self._say, self._warned = say, False
        self._keep_up_to(start)
        self._board = _Board(run_dir / "tensorboard", start)

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends a record; it must hold `step`. Numbers that are not finite become null."""
        clean = {name: _finite(value) for name, value in record.items()}
        try:
            append_line(self.path, json.dumps(clean))
            self._board.write(clean)
        except OSError as error:
            if not self._warned:
                self._say(f"metrics of step {clean['step']} were not written to {self.path}: {error.strerror}")
            self._warned = True

    def close(self) -> None:
        """Writes out what TensorBoard buffers."""
        try:
            self._board.close()
        except OSError as error:
            self._say(f"TensorBoard's events are incomplete: {error.strerror}")

    def _keep_up_to(self, step: int) -> None:
        """Drops the lines past the restored step, and a last line that a kill cut short."""
        if not self.path.exists():
            return
        kept = [record for record in read_metrics(self.path) if step and record["step"] <= step]
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(record) + "\n" for record in kept))
        temporary.replace(self.path)


def append_line(path: Path, line: str) -> None:
    """Appends a line whole or, raising OSError, not at all: half a line would spoil the next one too."""
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("a") as file:
            file.write(line + "\n")
    except OSError:
        with contextlib.suppress(OSError):
            os.truncate(path, size)
        raise


def read_metrics(path: str | Path) -> list[Record]:
    """The records of a metrics.jsonl, none if it is not there; lines that are not whole are passed over."""
    if not Path(path).exists():
        return []
    records = []
    for line in Path(path).read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


class _Board:
    """TensorBoard events, written at once: tensorboardX's own writer thread hangs its caller after a full disk."""

    def __init__(self, directory: Path, start: int):
        directory.mkdir(parents=True, exist_ok=True)
        self._writer = EventsWriter(str(directory / "events"), f".{os.getpid()}")
        if start:
            # Tells TensorBoard to drop what an earlier process wrote of the steps that come again.
            self._add(Event(step=start + 1, session_log=SessionLog(status=SessionLog.START)))

    def write(self, record: Mapping[str, Any]) -> None:
        for name, value in record.items():
            if name != "step" and value is not None:
                self._add(Event(step=record["step"], summary=scalar(_board_name(name), value)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _add(self, event: Any) -> None:
        event.wall_time = time.time()
        self._writer.write_event(event)


class Clock:
    """Seconds spent training, without compiling, evaluating or saving."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._seconds = 0.0

    def start(self) -> None:
        """Goes on counting."""
        if self._since is None:
            self._since = time.perf_counter()

    def stop(self) -> None:
        """Stops counting until `start`."""
        self._seconds = self.seconds()
        self._since = None

    def seconds(self) -> float:
        """Seconds counted since `reset`."""
        return self._seconds + (time.perf_counter() - self._since if self._since is not None else 0.0)

    def reset(self) -> float:
        """Begins at zero again; returns what was counted."""
        counted, self._seconds = self.seconds(), 0.0
        if self._since is not None:
            self._since = time.perf_counter()
        return counted


class Console:
    """A bar on a terminal, plain lines elsewhere, so that a log file stays readable."""

    def __init__(self, steps: int, start: int, stream: TextIO | None = None):
        self._stream = stream if stream is not None else sys.stderr
        self._steps = steps
        self._bar: Any = None
        if self._stream.isatty():
            self._bar = tqdm.tqdm(
                total=steps,
                initial=start,
                file=self._stream,
                dynamic_ncols=True,
                bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} {desc}",
            )

    def advance(self) -> None:
        """One step is done."""
        if self._bar is not None:
            self._bar.update()

    def show(self, record: Mapping[str, Any]) -> None:
        """Shows a record of training."""
        line = progress_line(record, self._steps)
        if self._bar is not None:
            self._bar.set_description_str(line)
        else:
            print(f"step {record['step']}/{self._steps}  {line}", file=self._stream, flush=True)

    def say(self, text: str) -> None:
        """A sentence of its own, above the bar where there is one."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Ends the bar's line."""
        if self._bar is not None:
            self._bar.close()


def progress_line(record: Mapping[str, Any], steps: int) -> str:
    """loss 1.234 nats (1.78 bits/byte)  12.3k tokens/s  MFU 41.0 %  3 min left."""
    parts = [f"loss {_number(record['loss'])} nats"]
    if record.get("bits_per_byte") is not None:
        parts[0] += f" ({record['bits_per_byte']:.3f} bits/byte)"
    if record.get("tokens_per_second"):
        parts.append(f"{short(record['tokens_per_second'])} tokens/s")
    if record.get("mfu") is not None:
        parts.append(f"MFU {100 * record['mfu']:.1f} %")
    if record.get("skipped"):
        parts.append(f"{record['skipped']} skipped")
    if record.get("step_ms"):
        parts.append(f"{duration((steps - record['step']) * record['step_ms'] / 1000)} left")
    return "  ".join(parts)


def short(number: float) -> str:
    """12345 as 12.3k."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:.3g}"


def duration(seconds: float) -> str:
    """Seconds as a person would say them: 42 s, 3 min, 2 h 05 min, 3 d 4 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def table(rows: Iterable[tuple[str, str]]) -> str:
    """Two aligned columns."""
    rows = list(rows)
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def _number(value: float | None) -> str:
    return "not finite" if value is None or not math.isfinite(value) else f"{value:.4f}"


def _finite(value: Any) -> Any:
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else None
    return int(value) if isinstance(value, np.integer) else value


def _board_name(name: str) -> str:
    group, _, rest = name.partition("_")
    return f"heldout/{rest}" if group == "heldout" else f"train/{name}"
