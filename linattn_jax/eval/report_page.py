"""The page of a study's records and the overview of all studies, in Markdown; every number is computed from records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from linattn_jax.eval.report import (
    Records,
    Summary,
    Trial,
    Verdict,
    newest_protocol,
    read_trials,
    reported,
    summary,
    table,
    verdict,
)
from linattn_jax.eval.report_figure import figure
from linattn_jax.types import UserError

_LEGEND = (
    "Accuracy in percent on the test set: mean ± sample standard deviation over seeds (number of seeds), "
    "[number of the paper]. A diverged trial counts with its last finite evaluation where it has one."
)
# Lists longer than this are cut, and say so.
_LISTED = 40
_RESULTS = ("holds", "holds in part", "does not hold", "not measured")


def page(study: str, config: Any, records: Records, results: Summary, verdicts: Sequence[Verdict]) -> str:
    """README.md of a study; `results` and `verdicts` are those of the trials of the newest protocol."""
    trials, left_out = newest_protocol(records.trials)
    made = f"python -m experiments.{study}\npython -m experiments.report --studies={study}"
    parts = [
        f"# {config.title}",
        f"After {config.paper}. The first command measures; the second makes this page from "
        "[trials.jsonl](trials.jsonl).",
        f"```\n{made}\n```",
        f"![{config.title}]({study}.png)",
        "## Accuracy",
        _LEGEND,
        table(config, results),
        _bullets([*_gaps(results), *_unshown(config, trials)]),
        _bullets(config.get("notes") or ()),
        "## Claims" if verdicts else "",
        "\n".join(map(_claim, verdicts)),
        "## Provenance",
        _bullets(_provenance(records, trials, left_out)),
        *_listed("## Diverged and failed trials", [_fate(row) for row in trials if row["status"] != "done"]),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def overview(studies: Mapping[str, tuple[Any, Sequence[Verdict]]]) -> str:
    """studies.md: a line for every claim; `studies` maps names to (config, verdicts)."""
    results = Counter(verdict.result for _, verdicts in studies.values() for verdict in verdicts)
    lines = ["| study | claim | verdict |", "| --- | --- | --- |"]
    for study, (config, verdicts) in studies.items():
        for i, each in enumerate(verdicts or [Verdict("", "no claim", ())]):
            name = f"[{_cell(config.title)}]({study}/README.md), {_cell(config.paper)}" if i == 0 else ""
            lines.append(f"| {name} | {_cell(each.text)} | {each.result} |")
    counts = ", ".join(f"{word} {results[word]}" for word in _RESULTS if results[word])
    text = f"Claims: {counts or 'none'}. Made by `python -m experiments.report` from the trials of each study."
    return "\n\n".join(["# Studies", text, "\n".join(lines)]) + "\n"


def _claim(verdict: Verdict) -> str:
    lines = [f"- **{verdict.result}**: {verdict.text}"]
    for check in verdict.checks:
        word = {True: "yes", False: "no", None: "not measured"}[check.holds]
        lines.append(f"  - `{check.text}`: {word}" + (f"; {check.numbers}" if check.numbers else ""))
    return "\n".join(lines)


def _gaps(summary: Summary) -> Iterable[str]:
    """What a complete study would have and this one has not."""
    missing = [f"`{label}`" for label, result in summary.items() if not result.recorded]
    if missing:
        yield f"Not in the records: {', '.join(missing)}."
    empty, most = [], max((len(cell.values) for r in summary.values() for cell in r.cells.values()), default=0)
    fewer = []
    for label, result in summary.items():
        if not result.recorded:
            continue
        by_count: dict[int, list[str]] = {}
        for column, cell in result.cells.items():
            by_count.setdefault(len(cell.values), []).append(column)
        for count, columns in by_count.items():
            where = f"`{label}`" + ("" if len(columns) == len(result.cells) else f" at {', '.join(columns)}")
            if count == 0:
                empty.append(where)
            elif count < most:
                fewer.append(f"{where} ({count})")
    if empty:
        yield f"Without a number: {'; '.join(empty)}."
    if fewer:
        yield f"Fewer than {most} seeds: {'; '.join(fewer)}."


def _unshown(config: Any, trials: Sequence[Trial]) -> Iterable[str]:
    """What the records have and the table has not."""
    used = reported(trials)
    others = sum(row["stage"] == "report" for row in trials) - sum(row["stage"] == "report" for row in used)
    if others:
        yield f"Left out: {others} report trials at a learning rate other than that of the latest."
    recorded = dict.fromkeys(column for row in trials for column in row.get("metrics") or {})
    if columns := [column for column in recorded if column not in config.columns]:
        yield f"Recorded and not shown: {', '.join(columns)}."


def _provenance(records: Records, trials: Sequence[Trial], left_out: Mapping[str, int]) -> Iterable[str]:
    count = lambda name: Counter(row[name] for row in trials)
    words = lambda counts: ", ".join(f"{n:,} {word}" for word, n in sorted(counts.items()))
    yield f"{len(trials):,} trials: {words(count('stage'))}; {words(count('status'))}."
    if stops := Counter(row["stopped"] for row in trials if row.get("stopped")):
        yield f"Training ended by: {words(stops)}." + _patience(reported(trials))
    timed = [row for row in trials if row.get("tokens") and row.get("seconds")]
    tokens, seconds = (sum(row.get(name) or 0 for row in trials) for name in ("tokens", "seconds"))
    rate = sum(row["tokens"] for row in timed) / sum(row["seconds"] for row in timed) if timed else 0
    told = f": {rate:,.0f} tokens/s each, sharing devices or not." if timed else "."
    yield f"{tokens:,} tokens of training in {seconds:,.0f} seconds of the processes{told}"
    if started := sorted(row["started"] for row in trials if row.get("started")):
        yield f"Started {started[0]}" + (f" to {started[-1]}." if started[-1] != started[0] else ".")
    yield from _spelled("Commit", "commits", Counter(map(_commit, trials)))
    yield from _spelled("Device", "kinds of devices", Counter(_device(row.get("devices") or {}) for row in trials))
    yield from _spelled("Versions", "sets of versions", Counter(_versions(row.get("versions") or {}) for row in trials))
    yield f"Protocol {trials[0]['protocol']}." if trials else "No trials."
    if left_out:
        yield (
            f"**Left out: {sum(left_out.values())} trials of {len(left_out)} other protocols**, which do not mean the "
            f"same: {words(left_out)}."
        )
    if records.repeated:
        yield f"{records.repeated} lines repeat a trial; of each trial the last that is done counts."
    if records.torn:
        yield "The last line is torn and does not count."


def _patience(used: Sequence[Trial]) -> str:
    """The trials of the table that training cut short for want of gain."""
    cut = Counter(row["mixer"] for row in used if row.get("stopped") == "patience")
    total = Counter(row["mixer"] for row in used)
    listed = ", ".join(f"`{label}` {n} of {total[label]}" for label, n in cut.items())
    return f" Of those in the table, out of patience: {listed}." if cut else ""


def _spelled(one: str, several: str, counts: Counter[str]) -> Iterable[str]:
    """One value as it is; several with the number of their trials, and a word that there are several."""
    if len(counts) == 1:
        yield f"{one}: {next(iter(counts))}."
    elif counts:
        listed = "; ".join(f"{value} ({n} trials)" for value, n in counts.items())
        yield f"**The trials come from {len(counts)} {several}**: {listed}."


def _commit(row: Trial) -> str:
    state = {True: " with changes", False: "", None: ""}[row.get("dirty")]
    return f"{(row.get('commit') or 'unknown')[:12]}{state}"


def _device(devices: Mapping[str, Any]) -> str:
    cores = f", {devices['cores']} cores" if devices.get("cores") else ""
    return f"{devices.get('count', 1)} × {devices.get('kind', 'unknown')}{cores}"


def _versions(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items()) or "unknown"


def _fate(row: Trial) -> str:
    setting = "".join(f", {name} {value}" for name, value in row["setting"].items())
    said = f": {' '.join(row['error'].split())}" if row.get("error") else f" after {row.get('steps', 0):,} steps"
    where = f"`{row['mixer']}`{setting}, learning rate {row['learning_rate']:g}, seed {row['seed']}"
    return f"{where} ({row['stage']}) {row['status']}{said}"


def _listed(head: str, lines: Sequence[str]) -> Sequence[str]:
    if not lines:
        return []
    more = [f"and {len(lines) - _LISTED} more"] if len(lines) > _LISTED else []
    return [head, _bullets([*lines[:_LISTED], *more])]


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def write_reports(
    records: Path, output: Path, studies: Sequence[str] | None, config_of: Callable[[str], Any]
) -> Iterator[str]:
    """Writes each study's page and figure and, when none is left out, the overview; yields what to say of it.

    Args:
        records: folder of folders with trials.jsonl, named as their studies.
        output: folder to write to.
        studies: those to report; None for all that have records.
        config_of: a study's config by its name.
    Raises:
        UserError: no records, or records that cannot be read as `config_of` says.
    """
    known = sorted(path.parent.name for path in records.glob("*/trials.jsonl"))
    chosen = studies or known
    if unknown := [study for study in chosen if study not in known]:
        raise UserError(f"no {records}/{unknown[0]}/trials.jsonl; studies with records: {', '.join(known) or 'none'}")
    if not chosen:
        raise UserError(f"there is no trials.jsonl in a folder of {records}")
    told = {}
    for study in chosen:
        config, found = config_of(study), read_trials(records / study / "trials.jsonl", study)
        results = summary(config, newest_protocol(found.trials)[0])
        told[study] = config, [verdict(claim, results) for claim in config.get("claims", ())]
        (output / study).mkdir(parents=True, exist_ok=True)
        (output / study / "README.md").write_text(page(study, config, found, results, told[study][1]))
        figure(config, results, output / study / f"{study}.png")
        yield "\n  ".join([f"{study}:", *(f"{each.result}: {each.text}" for each in told[study][1])])
    if set(known) <= set(chosen):
        (output / "studies.md").write_text(overview(told))
    yield f"written to {output}" + ("" if set(known) <= set(chosen) else "; studies.md left as it is")
