"""A study: trials of many mixers on one task, as a plan, one JSONL of results, and what to do when something breaks."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

from linattn_jax.data.recall import make_task
from linattn_jax.layers import LAYERS
from linattn_jax.models.decoder import Decoder
from linattn_jax.models.presets import DecoderConfig
from linattn_jax.models.tiny import TinyConfig, TinyLM
from linattn_jax.provenance import facts
from linattn_jax.train.checkpoints import is_disk_full, quieten_orbax
from linattn_jax.train.rundir import write_json
from linattn_jax.train.trials import Outcome, Programs, Progress, Recipe, Trial, compile_programs, inputs, train_group
from linattn_jax.types import UserError

Row = dict[str, Any]
SELECT, REPORT = "select", "report"


class OutOfTime(Exception):
    """The sitting's time is over; what was saved goes on in the next."""


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """Trials of one mixer that train as one program."""

    mixer: str
    stage: str
    bucket: int
    trials: tuple[tuple[int, float | None, tuple[tuple[str, int], ...]], ...]  # seed, rate or None, setting

    @property
    def name(self) -> str:
        return f"{self.mixer} {self.stage}" + (f" {self.bucket + 1}" if self.stage == REPORT else "")


def variant(config: Any, label: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """(layer, its options, changes to the model) of a label: an entry of config.variants, or a layer's own name.

    Raises:
        UserError: neither.
    """
    variants = config.get("variants", {})
    if label in variants:
        entry = variants[label]
        return entry["layer"], dict(entry["options"]), dict(entry.get("model", {}))
    if label not in LAYERS:
        known = ", ".join(sorted({*variants, *LAYERS}))
        raise UserError(f"mixer {label!r} is not known; known are {known}.")
    return label, {}, {}


def plan(config: Any) -> list[Group]:
    """The groups of a study: per mixer, first those that choose the learning rate, then the buckets in order.

    Choosing trains the first seed at every rate on the settings config.select of the first bucket (all if it is
    empty); what it trained at the rate that wins is not trained again.

    Raises:
        UserError: a mixer that is not known, a setting that occurs twice, or one of `select` that does not occur.
    """
    first, *seeds = config.seeds
    rates, groups = tuple(config.learning_rates), []
    settings = [[_setting(setting) for setting in bucket["settings"]] for bucket in config.buckets]
    chosen_on = [_setting(setting) for setting in config.get("select", ())] or settings[0]
    if strange := [s for s in chosen_on if s not in settings[0]]:
        raise UserError(f"select: {dict(strange[0])} is no setting of the first bucket.")
    every = [setting for bucket in settings for setting in bucket]
    if twice := [s for s in every if every.count(s) > 1]:
        raise UserError(f"buckets: the setting {dict(twice[0])} occurs twice; records could not tell its trials apart.")
    for mixer in config.mixers:
        variant(config, mixer)
        done = chosen_on if len(rates) > 1 else []
        if done:
            trials = [(first, rate, setting) for setting in done for rate in rates]
            groups += [Group(mixer, SELECT, 0, tuple(part)) for part in _parts(trials, config.max_trials)]
        for index, bucket in enumerate(settings):
            wanted = [(seed, setting) for setting in bucket for seed in (first, *seeds)]
            left = [
                (seed, setting) for seed, setting in wanted if not (index == 0 and seed == first and setting in done)
            ]
            rate = None if done else rates[0]
            for part in _parts(left, config.max_trials):
                groups.append(Group(mixer, REPORT, index, tuple((seed, rate, setting) for seed, setting in part)))
    return groups


def _setting(setting: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted((name, int(value)) for name, value in setting.items()))


def _parts[T](items: Sequence[T], most: int) -> Iterator[Sequence[T]]:
    """`items` in as few parts of at most `most` as there must be, about equally long."""
    count = -(-len(items) // most)
    for i in range(count):
        yield items[len(items) * i // count : len(items) * (i + 1) // count]


def protocol(config: Any) -> str:
    """A short hash of all that a trial's meaning depends on, the mixer and its options aside."""
    return hashlib.sha256(json.dumps(config.protocol.to_dict(), sort_keys=True).encode()).hexdigest()[:12]


def recipe(config: Any, mixer: str, bucket: int) -> Recipe:
    """The recipe of a mixer's trials in a bucket."""
    layer, options, changes = variant(config, mixer)
    given = config.protocol
    sizes = dict(given.task.sizes) | dict(config.buckets[bucket].get("sizes", {}))
    task = make_task(given.task.name, **sizes)
    evaluations = {
        column: make_task(given.task.name, **(sizes | dict(there))) for column, there in given.evaluations.items()
    }
    model = dict(given.model) | changes
    kind = model.pop("kind")
    if kind == "tiny":
        tiny = TinyConfig(layer, vocab_size=task.vocab_size, options=options, **model)
        make: Any = lambda rngs: TinyLM(tiny, rngs=rngs)
    elif kind == "decoder":
        decoder = DecoderConfig(
            vocab_size=task.vocab_size, mixers=(layer,), options={layer: options} if options else {}, **model
        )
        make = lambda rngs: Decoder(decoder, rngs=rngs)
    else:
        raise UserError(f"protocol.model.kind {kind!r} is not known; known are tiny, decoder.")
    return Recipe(make, task, evaluations, given.optimizer, **given.trials)


class Records:
    """A JSONL, for a study each line a trial; several processes may append to one file."""

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def read(self) -> list[Row]:
        """The rows there are; a line that a kill cut short is passed over."""
        lines = self.path.read_bytes().splitlines() if self.path.exists() else []
        return [row for row in map(_row, lines) if row is not None]

    def add(self, rows: Sequence[Row]) -> None:
        """Appends rows; a last line that a kill cut short is taken away, for readers accept it nowhere else."""
        text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()
        with self.path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed; what is torn now is nobody's work in progress
            file.seek(0)
            *_, last = file.read().split(b"\n")
            if last and _row(last) is None:
                file.truncate(file.tell() - len(last))
            elif last:
                text = b"\n" + text
            file.write(text)


def _row(line: bytes) -> Row | None:
    """The object of a line; None where it is no whole one."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def chosen_rate(rows: Sequence[Row], mixer: str) -> float | None:
    """The learning rate with the highest sum of validation accuracies in the trials that choose it; None without any.

    What diverged or failed adds nothing, as in `eval.report`; of equals the lower rate is taken.
    """
    sums: dict[float, float] = {}
    for row in rows:
        if row["mixer"] == mixer and row["stage"] == SELECT and row["status"] != "failed":
            gain = row["validation"] if row["status"] == "done" else 0.0
            sums[row["learning_rate"]] = sums.get(row["learning_rate"], 0.0) + gain
    return max(sums, key=lambda rate: (sums[rate], -rate)) if sums else None


def run_study(config: Any, run_dir: str | os.PathLike[str], *, time_limit_minutes: float = 0.0) -> list[Row]:
    """Runs what the records do not have yet, and returns all rows of this protocol.

    A trial that was "done" or "diverged" under the same protocol is not run again; a failed one is. A group that the
    device has no memory for is halved until it fits. Any other error fails the group's trials, with its sentence, and
    the study goes on; it ends where the device no longer answers. Buckets run one after another, each for all mixers,
    those that failed before at the end. Several processes may work in one run_dir: each takes mixers that no other is
    at, so that one compiles while another trains.

    Args:
        config: as configs/vla_capacity.py gives it.
        run_dir: gets trials.jsonl, config.json, sittings.jsonl and the state of a group under way.
        time_limit_minutes: of this sitting; 0 for none. A group under way is saved and goes on in the next sitting.
    Raises:
        OutOfTime: the limit came first.
    """
    return _Sitting(config, Path(run_dir), time_limit_minutes).run()


class _Sitting:
    def __init__(self, config: Any, run_dir: Path, limit: float):
        self.config, self.run_dir = config, run_dir
        self.compiled: dict[tuple[int, int], Programs] = {}
        self.crowd: dict[int, int] = {}  # by bucket, how many trials of the present mixer were too many for the device
        self.records = Records(run_dir / "trials.jsonl")
        run_dir.mkdir(parents=True, exist_ok=True)
        self.started, self.limit = time.monotonic(), 60 * limit
        self.facts, self.protocol = facts(config.protocol.trials.get("data_seed", 42)), protocol(config)
        self.trials = self.tokens = 0
        write_json(run_dir / "config.json", json.loads(config.to_json()))

    def run(self) -> list[Row]:
        groups = plan(self.config)
        failed = {row["mixer"] for row in self.rows() if row["status"] == "failed"}
        parts = dict.fromkeys((group.bucket, group.mixer in failed, group.mixer) for group in groups)
        try:
            for part in sorted(parts, key=lambda part: part[:2]):
                bucket, _, mixer = part
                with _alone(self.run_dir / "locks" / mixer) as alone:
                    if not alone:
                        print(f"{mixer}: another process is at it", flush=True)
                        continue
                    self.compiled.clear()
                    self.crowd.clear()
                    for i, group in enumerate(groups):
                        if (group.bucket, group.mixer) == (bucket, mixer) and (trials := self.missing(group)):
                            self.check_time()
                            self.group(group, trials, f"[{i + 1}/{len(groups)}] {group.name}")
        finally:
            self.note()
        return self.rows()

    def rows(self) -> list[Row]:
        """The rows of this protocol and of the mixers' present options, each trial once: its last that did not fail."""
        kept: dict[tuple[Any, ...], Row] = {}
        for row in self.records.read():
            if row.get("protocol") != self.protocol or not self.present(row):
                continue
            identity = _identity(row)
            if identity not in kept or row["status"] != "failed" or kept[identity]["status"] == "failed":
                kept[identity] = row
        return list(kept.values())

    def present(self, row: Row) -> bool:
        """Whether a row's label means now what it meant then."""
        if row["mixer"] not in self.config.mixers:
            return True
        meant = json.loads(json.dumps(variant(self.config, row["mixer"])))
        return [row["layer"], row["options"], row.get("model", {})] == meant

    def missing(self, group: Group) -> list[Trial]:
        """The group's trials that are not in the records, at the chosen rate where the group leaves it open."""
        rows = self.rows()
        rate = chosen_rate(rows, group.mixer)
        done = {_identity(row) for row in rows if row["status"] != "failed"}
        trials = [Trial(seed, rate if given is None else given, setting) for seed, given, setting in group.trials]  # type: ignore[arg-type]
        return [t for t in trials if (group.mixer, t.seed, t.learning_rate, t.setting) not in done]

    def programs(self, group: Group, count: int) -> Programs:
        """The programs of `count` trials of the group; groups of one mixer share those that are alike."""
        key = group.bucket, count
        if key not in self.compiled:
            names = [name for name, _ in group.trials[0][2]]
            self.compiled[key] = compile_programs(recipe(self.config, group.mixer, group.bucket), count, names)
        return self.compiled[key]

    def over(self) -> bool:
        return bool(self.limit) and time.monotonic() - self.started > self.limit

    def end(self) -> str:
        return f"the sitting's {self.limit / 60:g} minutes are over; run again to go on"

    def check_time(self) -> None:
        if self.over():
            raise OutOfTime(self.end())

    def group(self, group: Group, trials: list[Trial], title: str) -> None:
        if trials[0].learning_rate is None:
            print(f"{title}: no learning rate could be chosen, as all trials that choose it failed", flush=True)
            return
        count = len(trials)
        if count < self.crowd.get(group.bucket, count + 1):
            try:
                began = time.monotonic()
                programs = self.programs(group, count)
                compiled = time.monotonic() - began
                outcomes, seconds = self.train(group, trials, programs, f"{title}, compiled in {compiled:.0f} s")
            except OutOfTime:
                raise
            except Exception as error:
                sentence = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                crowded = "RESOURCE_EXHAUSTED" in str(error) and count > 1
            else:
                self.keep(group, trials, outcomes, seconds)
                return
            # Out here the error is gone, and with it the arrays that its frames held.
            if not crowded:
                self.fail(group, trials, sentence)
                return
            print(f"{title}: no memory for {count} trials at once, halving", flush=True)
            self.crowd[group.bucket] = count
            self.compiled.pop((group.bucket, count), None)
        for part in (trials[: count // 2], trials[count // 2 :]):
            self.check_time()
            self.group(group, part, title)

    def train(self, group: Group, trials: list[Trial], programs: Programs, title: str) -> tuple[list[Outcome], float]:
        """Outcomes, and the seconds that they took in all sittings."""
        made = recipe(self.config, group.mixer, group.bucket)
        meant = json.dumps(variant(self.config, group.mixer), sort_keys=True)
        where = self.run_dir / "groups" / _digest([self.protocol, group.mixer, meant, *map(repr, trials)])
        resume, before = _load_state(where, programs, trials)
        began = shown = saved = time.monotonic()
        tokens = made.eval_every * made.batch * made.task.length * len(trials)

        def say(done: int, state: Progress, seconds: float) -> None:
            nonlocal shown
            last = done == made.steps or not np.any(np.asarray(state.active))
            if time.monotonic() - shown < 10 and not last and not sys.stdout.isatty():
                return
            shown = time.monotonic()
            accuracy = np.sort(np.asarray(state.accuracy))
            low, middle, high = accuracy[0], accuracy[len(accuracy) // 2], accuracy[-1]
            running = int(np.sum(np.asarray(state.active)))
            text = (
                f"{title}: step {done}/{made.steps}, accuracy {low:.3f} {middle:.3f} {high:.3f}, "
                f"{running} of {len(trials)} running, {tokens / seconds / 1e6:.2f} M tokens/s"
            )
            print(text, end="\r" if sys.stdout.isatty() and not last else "\n", flush=True)

        def save(done: int, state: Progress) -> None:
            nonlocal saved
            if done == made.steps or not np.any(np.asarray(state.active)):
                return
            over = self.over()
            if over or time.monotonic() - saved > 60 * self.config.checkpoint_minutes:
                _save_state(where, done, state, before + time.monotonic() - began)
                saved = time.monotonic()
            if over:
                raise OutOfTime(self.end())

        outcomes = train_group(made, trials, programs, say=say, save=save, resume=resume)
        shutil.rmtree(where, ignore_errors=True)
        return outcomes, before + time.monotonic() - began

    def keep(self, group: Group, trials: list[Trial], outcomes: list[Outcome], seconds: float) -> None:
        made = recipe(self.config, group.mixer, group.bucket)
        common, rows = self.row(group, made), []
        for trial, outcome in zip(trials, outcomes, strict=True):
            setting = dict(trial.setting)
            tokens = outcome.steps * made.batch * setting.get("used", made.task.length)
            self.tokens += tokens
            metrics = {column.format(**setting): value for column, value in outcome.metrics.items()}
            outcome = outcome._replace(metrics=metrics)
            counts = {"tokens": tokens, "seconds": seconds / len(trials)}
            rows.append(common | _of_trial(trial) | outcome._asdict() | counts)
        self.trials += len(rows)
        self.records.add(rows)

    def fail(self, group: Group, trials: list[Trial], sentence: str) -> None:
        print(f"{group.name}: failed: {sentence}", flush=True)
        failure: Row = {"status": "failed", "error": sentence, "metrics": {}, "validation": None}
        self.records.add([self.row(group) | _of_trial(trial) | failure for trial in trials])
        try:
            jax.block_until_ready(jnp.zeros(()) + 1)
        except Exception as error:
            raise RuntimeError(f"the device no longer answers, start again: {sentence}") from error

    def row(self, group: Group, made: Recipe | None = None) -> Row:
        """What the rows of a group share."""
        layer, options, model = variant(self.config, group.mixer)
        kept = {name: self.facts[name] for name in ("commit", "dirty", "devices", "versions", "started")}
        return {
            "study": self.config.study,
            "mixer": group.mixer,
            "layer": layer,
            "options": options,
            "model": model,
            "stage": group.stage,
            "parameters": None if made is None else parameter_count(made),
            "protocol": self.protocol,
            **kept,
        }

    def note(self) -> None:
        """Adds this sitting to sittings.jsonl: its seconds, the trials that it finished, and all tokens of these."""
        seconds = time.monotonic() - self.started
        mine = {"seconds": round(seconds, 1), "trials": self.trials, "tokens": self.tokens}
        Records(self.run_dir / "sittings.jsonl").add([self.facts | mine])
        rate = self.tokens / max(seconds, 1e-9) / 1e6
        print(f"{self.trials} trials and {self.tokens / 1e6:.1f} M tokens in {seconds:.0f} s: {rate:.2f} M tokens/s")


def parameter_count(made: Recipe) -> int:
    """Parameters of one trial's model."""
    shapes = jax.eval_shape(lambda: nnx.to_pure_dict(nnx.state(made.model(nnx.Rngs(0)), nnx.Param)))
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(shapes))


@contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Holds a lock for as long as the body runs, or gives False where another process holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def _of_trial(trial: Trial) -> Row:
    return {"seed": trial.seed, "learning_rate": trial.learning_rate, "setting": dict(trial.setting)}


def _identity(row: Row) -> tuple[Any, ...]:
    return row["mixer"], row["seed"], row["learning_rate"], _setting(row["setting"])


def _digest(parts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _save_state(where: Path, done: int, state: Progress, seconds: float) -> None:
    """Saves a group under way in place of its older states; on a full disk these stay and training goes on."""
    quieten_orbax()
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            kept = state._asdict() | {"seconds": jnp.float32(seconds)}
            checkpointer.save(where.absolute() / str(done), kept, force=True)
    except Exception as error:
        if not is_disk_full(error):
            raise
        print(f"step {done} was not saved: no space left on the disk of {where}; training goes on", flush=True)
        for unfinished in where.glob(f"{done}*"):
            shutil.rmtree(unfinished, ignore_errors=True)
        return
    for old in where.iterdir():
        if old.name != str(done):
            shutil.rmtree(old, ignore_errors=True)


def _load_state(where: Path, programs: Programs, trials: Sequence[Trial]) -> tuple[tuple[int, Progress] | None, float]:
    """What `train_group` resumes from, None where nothing is saved that can be read, and the seconds spent on it."""
    steps = [int(child.name) for child in where.iterdir() if child.name.isdigit()] if where.is_dir() else []
    if not steps:
        return None, 0.0
    quieten_orbax()
    like = programs.init(inputs(trials))._asdict() | {"seconds": jnp.float32(0)}
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            found = checkpointer.restore(where.absolute() / str(max(steps)), like)
    except Exception as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            raise
        print(f"the state in {where} cannot be read ({type(error).__name__}), its trials start anew", flush=True)
        shutil.rmtree(where)
        return None, 0.0
    seconds = float(found.pop("seconds"))
    return (max(steps), Progress(**found)), seconds
