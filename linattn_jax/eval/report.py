"""Recorded trials of a study as a reader meets them: means over seeds, verdicts on claims, a page of Markdown.

A record is a line of trials.jsonl, the object of one trial: mixer, layer, setting, learning_rate, seed, stage, status,
metrics and the facts of its run. A study's config says how to show them: title, paper, columns, x, x_label, chance,
published, claims, notes and, where it has them, mixers, whose names are those that the records should hold.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from linattn_jax.layers import LAYERS
from linattn_jax.types import UserError

Trial = dict[str, Any]

_KINDS: dict[str, type | tuple[type, ...]] = {
    "study": str, "mixer": str, "layer": str, "setting": dict, "seed": int, "learning_rate": (int, float),
    "stage": str, "status": str, "protocol": str,
}  # fmt: skip
_WORDS = {"stage": ("select", "report"), "status": ("done", "diverged", "failed")}
_CHECK = re.compile(
    r"(?P<left>\S.*?)\s+(?P<op>>=|<=|>|<|~)\s+(?P<right>\S.*?)(?:\s+(?P<sign>\+-|\+|-)\s+(?P<margin>[0-9.eE-]+))?"
)
# Means of three decimal fractions are off by a few last bits; no accuracy is known to a billionth.
_EPSILON = 1e-9
_OPERATORS: dict[str, Callable[[float], bool]] = {
    ">=": lambda excess: excess >= -_EPSILON,
    ">": lambda excess: excess > _EPSILON,
    "<=": lambda excess: excess <= _EPSILON,
    "<": lambda excess: excess < -_EPSILON,
    "~": lambda excess: excess <= _EPSILON,
}
NONE = "–"


class Records(NamedTuple):
    """What a file of trials holds: each trial once; how many lines were torn, and how many repeated a trial."""

    trials: list[Trial]
    torn: int
    repeated: int


def read_trials(path: str | Path, study: str | None = None) -> Records:
    """Reads trials.jsonl, whose trials must be of `study` if it is given.

    A last line without its end, as a killed run leaves it, is counted and left out. Of the lines of one trial (mixer,
    setting, learning rate, seed and protocol are the same) the last that is done counts, else the last.

    Raises:
        UserError: any other line that is not a record, by file and number.
    """
    lines = Path(path).read_text(encoding="utf-8", errors="replace").split("\n")
    torn, last, found = 0, len(lines), []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if number == last:
                torn = 1
                continue
            raise UserError(f"{path}, line {number}: not JSON: {error.msg}") from None
        complaint = _complaint(row)
        if not complaint and study not in (None, row["study"]):
            complaint = f"a trial of {row['study']}, wanted {study}"
        if complaint:
            raise UserError(f"{path}, line {number}: {complaint}")
        found.append(row)
    trials = _once(found)
    return Records(trials, torn, len(found) - len(trials))


def _complaint(row: Any) -> str | None:
    """What makes `row` no record."""
    if not isinstance(row, dict):
        return "not an object"
    for name, kind in _KINDS.items():
        if not isinstance(row.get(name), kind):
            return f"{name} is {row.get(name)!r}"
    for name, words in _WORDS.items():
        if row[name] not in words:
            return f"{name} is {row[name]!r}, wanted one of {', '.join(words)}"
    metrics = row.get("metrics") or {}
    if row["status"] == "done" and not metrics:
        return "a trial that is done has no metrics"
    for column, value in metrics.items():
        if not isinstance(value, int | float) or not 0 <= value <= 1:
            return f"metrics: {column} is {value!r}, wanted an accuracy in [0, 1]"
    return None


def _once(rows: Iterable[Trial]) -> list[Trial]:
    kept: dict[tuple[Any, ...], Trial] = {}
    for row in rows:
        key = (row["mixer"], _setting(row), row["learning_rate"], row["seed"], row["protocol"])
        before = kept.get(key, row)
        stays = before["status"] == "done" and row["status"] != "done"
        stage = "report" if "report" in (before["stage"], row["stage"]) else "select"
        kept[key] = (before if stays else row) | {"stage": stage}
    return list(kept.values())


def _setting(row: Trial) -> str:
    return json.dumps(row["setting"], sort_keys=True)


def newest_protocol(trials: Sequence[Trial]) -> tuple[list[Trial], dict[str, int]]:
    """The trials of the protocol that was started last, and how many of each other protocol that leaves out."""
    if not trials:
        return [], {}
    _, newest = max((row.get("started") or "", i) for i, row in enumerate(trials))
    protocol = trials[newest]["protocol"]
    others = Counter(row["protocol"] for row in trials if row["protocol"] != protocol)
    return [row for row in trials if row["protocol"] == protocol], dict(others)


class Cell(NamedTuple):
    """A mixer's accuracies in a column, one a seed, at the chosen learning rate; the paper's number if it has one.

    A diverged trial counts with its last finite evaluation, if it has one. diverged, failed: how many did.
    """

    values: tuple[float, ...] = ()
    learning_rate: float | None = None
    published: float | None = None
    diverged: int = 0
    failed: int = 0

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values) if self.values else None

    @property
    def std(self) -> float:
        """Sample standard deviation over seeds; NaN for fewer than two."""
        return statistics.stdev(self.values) if len(self.values) > 1 else math.nan

    def __str__(self) -> str:
        """The number alone: `98.4 ± 0.3 (3)`."""
        if self.mean is None:
            return NONE
        spread = "" if math.isnan(self.std) else f" ± {100 * self.std:.1f}"
        return f"{100 * self.mean:.1f}{spread} ({len(self.values)})"


class Result(NamedTuple):
    """What a study says of one mixer; `recorded` tells whether it has any trial at all."""

    layer: str
    recorded: bool
    parameters: tuple[int, ...]
    cells: dict[str, Cell]


Summary = dict[str, Result]


def summary(config: Any, trials: Sequence[Trial]) -> Summary:
    """A result for every mixer that the config or the trials name, with a cell for every column of the config.

    Args:
        config: the study's.
        trials: as `read_trials` gives them, of one protocol.

    Raises:
        UserError: trials of several protocols or studies, or a column that two settings of a mixer fill.
    """
    for name in ("protocol", "study"):
        if len(several := {row[name] for row in trials}) > 1:
            raise UserError(f"trials of {len(several)} values of {name} cannot be averaged: {', '.join(several)}")
    published = _published(config)
    columns: dict[str, set[str]] = {}
    for row in trials:
        columns.setdefault(_setting(row), set()).update(row.get("metrics") or {})
    results = {}
    for label in _labels(config, trials):
        rows = [row for row in trials if row["mixer"] == label]
        kept = reported(rows)
        cells = {}
        for column in config.columns:
            here = [row for row in kept if column in columns[_setting(row)]]
            filled = [row for row in here if column in (row.get("metrics") or {})]
            if len(settings := {_setting(row) for row in filled}) > 1:
                raise UserError(f"{label}: the column {column} has numbers of {' and '.join(sorted(settings))}")
            cells[column] = Cell(
                tuple(row["metrics"][column] for row in sorted(filled, key=lambda row: row["seed"])),
                filled[0]["learning_rate"] if filled else None,
                published.get(label, {}).get(column),
                *(sum(row["status"] == status for row in here) for status in ("diverged", "failed")),
            )
        sizes = {row["parameters"] for row in kept if row.get("parameters")}
        results[label] = Result(layer_of(label, rows), bool(rows), tuple(sorted(sizes)), cells)
    return results


def reported(trials: Sequence[Trial]) -> list[Trial]:
    """The trials that tables show: those at the learning rate chosen for their mixer and setting.

    It is the rate of the report trials, the latest of them if they differ: those of the setting, else the mixer's.
    Without any, it is the rate of the best sum of validation accuracies over the select trials, where one that is not
    done adds nothing; of equals the lower.
    """
    kept = []
    for label in dict.fromkeys(row["mixer"] for row in trials):
        rows = [row for row in trials if row["mixer"] == label]
        rates: dict[str, float] = {}
        latest = None
        for row in sorted(rows, key=lambda row: row.get("started") or ""):
            if row["stage"] == "report":
                latest = rates[_setting(row)] = row["learning_rate"]
        if latest is None:
            sums: dict[float, float] = {}
            for row in rows:
                gain = (row.get("validation") or 0.0) if row["status"] == "done" else 0.0
                sums[row["learning_rate"]] = sums.get(row["learning_rate"], 0.0) + gain
            latest = max(sums, key=lambda rate: (sums[rate], -rate))
        kept += [row for row in rows if row["learning_rate"] == rates.get(_setting(row), latest)]
    return kept


def layer_of(label: str, rows: Sequence[Trial] = ()) -> str:
    """The layer that a label stands for: its trials', else the longest layer's name that it begins with, else none."""
    if rows:
        return rows[-1]["layer"]
    return max((name for name in LAYERS if label == name or label.startswith(name + "_")), key=len, default="")


def _labels(config: Any, trials: Sequence[Trial]) -> list[str]:
    """Every mixer that should be there or is: in the config's order, then in that of the registry of layers."""
    given = config.get("mixers") or ()
    # A ConfigDict of mixers has them by the alphabet, which is no order to read them in.
    listed = list(given) if isinstance(given, tuple | list) else []
    named = {row["mixer"] for row in trials} | set(_published(config)) | set(given)
    for claim in config.get("claims") or ():
        for check in claim["checks"]:
            _, left, right, _ = _parsed(check)
            named |= {term.rpartition("@")[0] for term in (left, right) if "@" in term}
    place = {name: i for i, name in enumerate(LAYERS)}

    def order(label: str) -> tuple[int, str]:
        return place.get(layer_of(label, [row for row in trials if row["mixer"] == label]), len(place)), label

    return [*listed, *sorted(named - set(listed), key=order)]


def _published(config: Any) -> dict[str, dict[str, float]]:
    published = {label: dict(values) for label, values in (config.get("published") or {}).items()}
    for label, values in published.items():
        for column, value in values.items():
            if column not in config.columns or not 0 <= value <= 1:
                raise UserError(
                    f"published: {label} has {value} in {column}; wanted an accuracy in [0, 1] in one of "
                    f"{', '.join(config.columns)}"
                )
    return published


class Check(NamedTuple):
    """One comparison: whether it holds, None where a number is missing, and the measured numbers that decided."""

    text: str
    holds: bool | None
    numbers: str


class Verdict(NamedTuple):
    """A claim and what became of it: holds, holds in part, does not hold, not measured."""

    text: str
    result: str
    checks: tuple[Check, ...]


def verdict(claim: Mapping[str, Any], summary: Summary) -> Verdict:
    """Evaluates the checks of a claim on means over seeds.

    Args:
        claim: {"text": sentence, "checks": tuple of "LEFT op RIGHT [+ or - NUMBER]" with op one of >= > <= <, or of
            "LEFT ~ RIGHT +- NUMBER"}; a side is label@column or a number.
        summary: the study's.

    Raises:
        UserError: a check that is not of this form, or names a column that is not the config's.
    """
    checks = tuple(_checked(text, summary) for text in claim["checks"])
    held = [check.holds for check in checks]
    if None in held or not held:
        result = "not measured"
    elif all(held):
        result = "holds"
    else:
        result = "holds in part" if any(held) else "does not hold"
    return Verdict(claim["text"], result, checks)


def _parsed(check: str) -> tuple[str, str, str, float]:
    """Operator, left, right and signed margin."""
    match = _CHECK.fullmatch(check.strip())
    if match is None or (match["op"] == "~") != (match["sign"] == "+-"):
        raise UserError(f"check {check!r}: wanted `a@x >= b@y + 0.1`, also with > <= <, or `a@x ~ b@y +- 0.1`")
    margin = _number(match["margin"], check) if match["margin"] else 0.0
    return match["op"], match["left"], match["right"], -margin if match["sign"] == "-" else margin


def _number(text: str, check: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"check {check!r}: {text!r} is neither label@column nor a number") from None


def _checked(text: str, summary: Summary) -> Check:
    op, left, right, margin = _parsed(text)
    cells: dict[str, Cell] = {}

    def value(term: str) -> float | None:
        label, at, column = term.rpartition("@")
        if not at:
            return _number(term, text)
        if label not in summary or column not in summary[label].cells:
            raise UserError(f"check {text!r}: there is no {term}")
        cells[term] = summary[label].cells[column]
        return cells[term].mean

    first, second = value(left), value(right)
    numbers = ", ".join(f"{term} {cell}{_casualties(cell)}" for term, cell in cells.items())
    if first is None or second is None:
        return Check(text, None, numbers)
    gap = first - second
    if len(cells) == 2:
        numbers += f", difference {100 * gap:+.1f}"
    slack = abs(gap) - margin if op == "~" else gap - margin
    spread = math.hypot(*(cell.std for cell in cells.values() if len(cell.values) > 1))
    if abs(slack) < spread:
        numbers += ", nearer to the limit than the spread of the seeds"
    return Check(text, _OPERATORS[op](slack), numbers)


def _casualties(cell: Cell) -> str:
    return "".join(f", {n} {what}" for n, what in ((cell.diverged, "diverged"), (cell.failed, "failed")) if n)


def table(config: Any, summary: Summary) -> str:
    """Markdown: a line a mixer, `mean ± std (seeds) [published]` in percent, the learning rate and the parameters."""
    columns = tuple(config.columns)
    lines = [["mixer", *columns, "learning rate", "parameters"]]
    lines.append(["---"] + ["---:"] * (len(columns) + 2))
    for label, result in summary.items():
        cells = [result.cells[column] for column in columns]
        rates = sorted({cell.learning_rate for cell in cells if cell.learning_rate is not None})
        sizes = dict.fromkeys(f"{size:,}" for size in (result.parameters[:1] + result.parameters[-1:]))
        texts = [f"{cell}{_casualties(cell)}{_bracket(cell)}" for cell in cells]
        lines.append(
            [f"`{label}`", *texts, ", ".join(f"{rate:g}" for rate in rates) or NONE, " to ".join(sizes) or NONE]
        )
    escaped = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join("| " + " | ".join(line) + " |" for line in escaped)


def _bracket(cell: Cell) -> str:
    if cell.published is None:
        return ""
    return f" [{f'{100 * cell.published:.2f}'.rstrip('0').rstrip('.')}]"
