"""The record of kernels beside other implementations: a process for each shape, a JSON that grows by rows, a table."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

from linattn_jax import provenance
from linattn_jax.eval.against import OURS, Comparison, Row, measure
from linattn_jax.eval.timing import Shape
from linattn_jax.train.rundir import write_json

WAYS = ("forward", "both")
LEAST_SECONDS = 20.0  # less is not worth a start
SPOILED = 3  # the exit code of a process in which a launch failed and whose row says so


class Record:
    """A JSON with facts of the run and rows, of which later ones replace earlier ones; a table beside it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, Any]:
        """What is in the file."""
        return json.loads(self.path.read_text()) if self.path.exists() else {"rows": []}

    def write(self, rows: Iterable[Row] = (), without: Callable[[Row], bool] = lambda row: False, **facts: Any) -> None:
        """Adds facts and rows, and takes out the rows that `without` says."""
        content = self.read() | facts
        rows = list(rows)
        replaced = [_key(row) for row in rows]
        kept = [row for row in content.pop("rows") if _key(row) not in replaced and not without(row)]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = with_ratios([*kept, *rows])
        write_json(self.path, content | {"rows": rows})
        self.path.with_suffix(".md").write_text(table(rows) + "\n")

    def add(self, row: Row, facts: dict[str, Any]) -> None:
        """A row that was measured here, with what it depends on; how the run began stays."""
        origin = {name: facts[name] for name in ("commit", "dirty", "devices")} | {"jax": facts["versions"]["jax"]}
        began = {name: x for name, x in self.read().items() if name in ("started", "command")}
        self.write([row | origin], **(facts | began))


def _group(row: Row) -> tuple[Any, ...]:
    """What the rows share that are compared with each other."""
    return (*row["shape"].values(), *(row[name] for name in ("op", "against", "dtype", "seed", "smoke")))


def _key(row: Row) -> tuple[Any, ...]:
    return (*_group(row), row["implementation"])


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """The rows, ours with `ratio`: the time of the fastest other one over ours, by way, and by which clock.

    That is the device's where ours has it, and the wall's otherwise; times by different clocks are not compared.
    """
    out = []
    for row in rows:
        row = {name: x for name, x in row.items() if name != "ratio"}
        if row["implementation"] == OURS:
            others = [other for other in rows if _group(other) == _group(row) and other["implementation"] != OURS]
            ratios: dict[str, Any] = {}
            for way in WAYS:
                clock = "device_ms" if "device_ms" in row.get(way, {}) else "wall_ms"
                times = {o["implementation"]: o[way][clock] for o in others if clock in o.get(way, {})}
                if times and clock in row.get(way, {}):
                    best = min(times, key=times.__getitem__)
                    ratios[way] = {"over_ours": times[best] / row[way][clock], "of": best, "clock": clock}
            if ratios:
                row["ratio"] = ratios
        out.append(row)
    return out


def drive(
    comparisons: Sequence[Comparison], names: Sequence[str], record: Record, deadline: float, shape_seconds: float
) -> None:
    """Has every comparison measured, a row of each implementation (of `names`, where given) in the record.

    A process measures all implementations of a shape. Where it fails, so has the first one without a row, which then
    says how, and another process measures the rest.

    deadline: by `time.monotonic`. shape_seconds: the most that one process may take.
    """
    commit = provenance.commit()
    for comparison in comparisons:
        settings = comparison.settings()
        same = lambda row: _group(row) == _group(settings)
        mark = lambda name, **reason: record.write([settings | {"implementation": name} | reason | commit])
        waiting = [name for name in comparison.implementations() if not names or name in names]
        record.write(without=lambda row: same(row) and row["implementation"] in waiting)
        if not comparison.smoke and (reason := comparison.refused()):
            mark(OURS, skipped=f"not served: {reason}")
            waiting = []
        while waiting:
            left = deadline - time.monotonic()
            if left < LEAST_SECONDS:
                for name in waiting:
                    mark(name, skipped="not measured: the time limit was reached")
                break
            failure = start(comparison, waiting, record.path, min(left, shape_seconds))
            done = [row["implementation"] for row in record.read()["rows"] if same(row)]
            rest = [name for name in waiting if name not in done]
            if failure is None and rest == waiting:
                failure = "its process ended without a row"
            if rest and failure:
                mark(rest.pop(0), failed=failure)
            waiting = rest
        print(f"{table([row for row in record.read()['rows'] if same(row)])}\n", flush=True)


def start(comparison: Comparison, names: Sequence[str], path: Path, seconds: float) -> str | None:
    """Measures in a process, into the JSON at `path`; None where it ended well or said itself what failed, or how not.

    It is killed, with all that it started, when its time is over. What it complained of is shown where it failed.
    """
    job = json.dumps({"comparison": comparison, "names": list(names), "path": str(path)})
    command = [sys.executable, "-m", __spec__.name, job]
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # torch wants memory of the same GPU
    platforms = "cpu" if comparison.smoke else os.environ.get("JAX_PLATFORMS")
    if platforms:
        environment["JAX_PLATFORMS"] = platforms if "cpu" in platforms else f"{platforms},cpu"
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stderr=log, env=environment, start_new_session=True)
        try:
            code = process.wait(timeout=seconds)
            failure = f"its process ended with code {code}"
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            failure = f"killed after {seconds:.0f} s"
        if code in (0, SPOILED):
            return None
        log.seek(0)
        print("".join(f"    {line}" for line in log.readlines()[-20:]), flush=True)
    return failure


def serve(text: str) -> None:
    """What `start` starts: measures; the exit code SPOILED says that a launch failed, and that its row says so."""
    job = json.loads(text)
    op, shape, *settings = job["comparison"]
    comparison = Comparison(op, Shape(*shape), *settings)
    record, facts = Record(Path(job["path"])), provenance.facts(comparison.seed)
    try:
        measure(comparison, job["names"], lambda row: record.add(row, facts))
    except jax.errors.JaxRuntimeError:
        sys.exit(SPOILED)


def table(rows: Sequence[Row]) -> str:
    """A Markdown table of the rows, and below it what failed and where we are behind; pairs are forward / both.

    ms: the kernels' time by the device's clock, median of launches; wall ms: per call, the host's part included. of
    floor: the share of that time in which memory alone could move the arrays. temp MB: temporary memory of both.
    ratio: the time of the fastest other implementation over ours. error: the largest of the gate's.
    """
    head = ["mixer", "B, T, Hk/H, K, V", "implementation", "ms", "wall ms", "of floor", "temp MB", "ratio", "error"]
    lines = [head, ["---"] * len(head)]
    notes, behind = [], []
    for row in rows:
        s = row["shape"]
        shape = f"{s['B']}, {s['T']}, {s['Hk']}/{s['H']}, {s['K']}, {s['V']}"
        ratio = " / ".join(f"{r['over_ours']:.2f}" for r in row.get("ratio", {}).values())
        for way, r in row.get("ratio", {}).items():
            if r["over_ours"] < 1:
                passes = "forward" if way == "forward" else "forward and backward"
                behind.append(f"{row['op']} {shape}, {passes}: {r['over_ours']:.2f} of {r['of']}")
        if note := _note(row):
            notes.append(f"{row['op']} {shape}, {row['implementation']}: {note}")
        name = row["implementation"] + (f" ({row['form']})" if "form" in row else "")
        name += f" {row['version']}" if row.get("version") else ""
        cells = [_pair(row, "device_ms", ".3f"), _pair(row, "wall_ms", ".3f"), _pair(row, "of_floor", ".0%")]
        temporary = row.get("both", {}).get("temporary")
        cells.append("" if temporary is None else f"{temporary / 1e6:,.1f}")
        errors = row.get("errors", {})
        worst = max(errors, key=errors.__getitem__, default=None)
        error = f"{errors[worst]:.1e} ({worst})" if worst else ""
        lines.append([row["op"], shape, name, *cells, ratio + (", behind" if _behind(row) else ""), error])
    text = ["| " + " | ".join(line) + " |" for line in lines]
    if notes:
        text += ["", "Without times, or with a reservation:", "", *(f"* {note}" for note in notes)]
    if behind:
        text += ["", "Behind the fastest of the others:", "", *(f"* {line}" for line in behind)]
    return "\n".join(text)


def _note(row: Row) -> str:
    if "skipped" in row:
        return row["skipped"]
    if "failed" in row:
        return f"failed: {row['failed']}"
    if row.get("within_limits", True) and row.get("finite", True):
        return ""
    return "not timed, as it failed the gate" if row["implementation"] == OURS else "errors beyond the limits of ours"


def right(row: Row) -> bool:
    """Whether ours ran and passed the gate, if it was to run; nothing is asked of others."""
    return row["implementation"] != OURS or not _note(row) or "skipped" in row


def _behind(row: Row) -> bool:
    return any(ratio["over_ours"] < 1 for ratio in row.get("ratio", {}).values())


def _pair(row: Row, name: str, form: str) -> str:
    seen = [format(row[way][name], form) if name in row.get(way, {}) else "–" for way in WAYS]
    return "" if set(seen) == {"–"} else " / ".join(seen)


if __name__ == "__main__":
    serve(sys.argv[1])
