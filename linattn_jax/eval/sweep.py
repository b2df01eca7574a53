"""Many measurements as one record: which to make, a JSON that can be written in several sittings, growth, a table."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from linattn_jax.eval import peers
from linattn_jax.eval.timing import Case, Shape, axis_sizes, state_bytes
from linattn_jax.mixers.dispatch import MIXERS
from linattn_jax.train.rundir import write_json

Row = dict[str, Any]


def plan(
    ops: Sequence[str],
    shapes: Sequence[Shape],
    small: Sequence[Shape],
    associative_limit: float,
    implementations: Collection[str] = (),
    **settings: Any,
) -> list[Case]:
    """A case for every mixer of `ops`, implementation (all plain ones, or those named) and shape; the same `settings`.

    The associative form holds every token's state several times over. It is measured at the shapes where T states take
    no more than `associative_limit` bytes and, where that leaves some out, also at the `small` ones within the limit.
    """
    cases = []
    for op in ops:
        mixer = MIXERS[op]
        fits = lambda shape: shape.T * state_bytes(mixer, shape) <= associative_limit
        kernels = [form for form in mixer.kernels if form in implementations]
        forms = [
            *mixer.implementations,
            *kernels,
            *([peers.NAME] if peers.find(op) and shapes[0].Hk == shapes[0].H else []),
        ]
        for form in (form for form in forms if not implementations or form in implementations):
            chosen = list(shapes)
            if form == "associative" and not all(map(fits, shapes)):
                chosen = [*filter(fits, shapes), *filter(fits, small)]
            cases += [Case(op, shape, form, **settings) for shape in chosen]
    return cases


def sweep(cases: Sequence[Case], measure: Callable[[Case], Row], path: Path, facts: Mapping[str, Any]) -> list[Row]:
    """The rows of `cases`, in order; those not in the JSON at `path` yet are measured and written there one by one.

    A row is taken from the JSON where settings, commit, devices and version of JAX are the same and the commit tells
    the code: it is known and the tree has no changes. What the device has no memory for, and what is not served on it,
    gives a row that says so as `skipped`.
    """
    origin = {name: facts[name] for name in ("commit", "dirty", "devices")} | {"jax": facts["versions"]["jax"]}
    kept: list[Row] = json.loads(path.read_text())["rows"] if path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    for case in cases:
        wanted = case.settings() | origin
        same = [row for row in kept if all(row.get(name) == value for name, value in wanted.items())]
        print(f"{case.op}, {_form(wanted)}, T={case.shape.T} {_shape(wanted)} ...", end=" ", flush=True)
        if same and facts["commit"] and not facts["dirty"]:
            rows.append(same[-1])
            print("in the file", flush=True)
            continue
        rows.append(_measured(case, measure) | origin)
        kept = [row for row in kept if row not in same] + rows[-1:]
        write_json(path, {**facts, "rows": kept})
        print(rows[-1].get("skipped") or f"{_times(rows[-1])} ms, error {_worst(rows[-1])}", flush=True)
    return rows


def _measured(case: Case, measure: Callable[[Case], Row]) -> Row:
    try:
        return measure(case)
    except NotImplementedError as error:
        return case.settings() | {"skipped": str(error)}
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return case.settings() | {"skipped": "out of memory"}


def series(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows grouped by what they share but for T, each group in order of T."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        shape = tuple(size for axis, size in row["shape"].items() if axis != "T")
        key = (row["op"], row["implementation"], row["chunk_size"], row["dtype"], shape)
        groups.setdefault(key, []).append(row)
    return [sorted(group, key=lambda row: row["shape"]["T"]) for group in groups.values()]


def exponent(rows: Sequence[Row], what: str) -> float:
    """p where the time of `what` grows as T^p, by least squares on logarithms; NaN with fewer than two lengths."""
    timed = {row["shape"]["T"]: row[what]["median_ms"] for row in rows if what in row}
    if len(timed) < 2:
        return math.nan
    return float(np.polyfit(np.log(list(timed)), np.log(list(timed.values())), 1)[0])


def table(rows: Sequence[Row]) -> str:
    """A Markdown table with a line for every mixer, implementation and shape but for T; pairs are forward / both.

    growth: `exponent`. The other columns are of the longest T measured: most over least time; peak memory; the floor's
    share of the time; the time over that of the peer package, where it was measured; the gate's largest error.
    """
    lengths = sorted({row["shape"]["T"] for row in rows})
    peer = {(row["op"], str(row["shape"])): row for row in rows if row["implementation"] == peers.NAME}
    head = ["mixer", "form", "shape", *(f"ms, T={length}" for length in lengths)]
    lines = [[*head, "spread", "growth", "peak MB", "of floor", "over peer", "error"]]
    lines.append(["---"] * len(lines[0]))
    for group in series(rows):
        row = next((row for row in reversed(group) if "both" in row), group[-1])
        times = {row["shape"]["T"]: _times(row) for row in group}
        line = [row["op"], _form(row), _shape(row), *(times.get(length, "") for length in lengths)]
        line.append(_pair(lambda what: row[what]["most_ms"] / row[what]["least_ms"], ".1f"))
        line.append(_pair(lambda what: exponent(group, what), ".2f"))
        line.append(_pair(lambda what: row["memory"][what]["peak"] / 1e6, ",.1f"))
        line.append(_pair(lambda what: row["floors"][what] / row[what]["median_ms"], ".0%"))
        other = peer.get((row["op"], str(row["shape"])), {})
        line.append(_pair(lambda what: row[what]["median_ms"] / other[what]["median_ms"], ".2f"))
        lines.append([*line, _worst(row)])
    notes = [f"\n{row['op']} {_form(row)} T={row['shape']['T']}: {row['skipped']}" for row in rows if "skipped" in row]
    return "\n".join(["| " + " | ".join(line) + " |" for line in lines] + notes)


def _pair(number: Callable[[str], float], form: str) -> str:
    """`number` of forward and of both, formatted; empty where the rows do not tell it."""
    try:
        pair = [number(what) for what in ("forward", "both")]
    except KeyError:
        return ""
    return " / ".join(format(x, form) for x in pair if not math.isnan(x))


def _times(row: Row) -> str:
    if row.get("gate_passed", True):
        return _pair(lambda what: row[what]["median_ms"], ",.3f")
    return "FAILED"


def _form(row: Row) -> str:
    return row["implementation"] + (f", {row['chunk_size']}" if row["chunk_size"] else "")


def _shape(row: Row) -> str:
    mixer = MIXERS[row["op"]]
    axes = dict.fromkeys(" ".join(argument.axes for argument in mixer.arguments.values()).split())
    sizes = axis_sizes(mixer, Shape(**row["shape"]))
    return " ".join(f"{axis}={sizes[axis]}" for axis in axes if axis != "T")


def _worst(row: Row) -> str:
    errors = row.get("errors")
    if not errors:
        return ""
    name = max(errors, key=errors.__getitem__)
    return f"{errors[name]:.1e} ({name})"
