"""A training run from config to summary: resumes, evaluates, saves, stops cleanly."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from linattn_jax.data import eval_batches, load_tokenizer, open_splits, train_iterator
from linattn_jax.eval.perplexity import Heldout, make_evaluator, placed
from linattn_jax.models.decoder import Decoder
from linattn_jax.models.presets import decoder_config
from linattn_jax.sharding import make_mesh
from linattn_jax.train import metrics as m
from linattn_jax.train.checkpoints import (
    Checkpoints,
    check_same_config,
    is_disk_full,
    load_params,
    newest_step,
    read_meta,
)
from linattn_jax.train.functional import Functional, Params, has_fixed_size, initialise
from linattn_jax.train.optimizer import make_optimizer
from linattn_jax.train.plot import plot_loss
from linattn_jax.train.rundir import config_as_json, write_json, write_run
from linattn_jax.train.step import check_rows, init_state, make_train_step
from linattn_jax.types import UserError


class Data(NamedTuple):
    """What a run reads."""

    tokenizer: Any
    iterator: Any  # grain DatasetIterator of this process's training batches
    heldout: Any  # eval_batches, or None where nothing is held out


class Window:
    """Sums since the last line of metrics; goes into checkpoints so that a resumed run writes the same lines."""

    def __init__(self, saved: dict[str, Any] | None = None):
        self.nats, self.tokens, self.bytes, self.steps = 0.0, 0, 0, 0
        self.total_tokens = 0
        self.__dict__.update(saved or {})

    def add(self, nats: float, tokens: int, size: int) -> None:
        """Counts one step; a step that is not finite counts its tokens but not its loss."""
        self.total_tokens += tokens
        self.steps += 1
        if math.isfinite(nats):
            self.nats += nats
            self.tokens += tokens
            self.bytes += size

    def reset(self) -> None:
        """Begins a new line."""
        self.nats, self.tokens, self.bytes, self.steps = 0.0, 0, 0, 0


def train(config: Any, run_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """See `linattn_jax.train.train`."""
    began = time.monotonic()
    config = resolved(config)
    run_dir = Path(run_dir)
    saved = newest_step(run_dir / "checkpoints")
    as_json = config_as_json(config)
    if saved is not None:
        check_same_config(read_meta(run_dir / "checkpoints", saved)["config"], as_json, str(run_dir))
    mesh = make_mesh(config.mesh.data, config.mesh.fsdp)
    check_rows(config.batch_size, config.accumulate, mesh)
    _check_counts(config)
    optimizer, rate = make_optimizer(config.optimizer, config.steps)
    data = open_data(config)
    functional, params = open_model(config, data.tokenizer.vocab_size, mesh)
    _check_carry(config, functional, params)
    run_dir.mkdir(parents=True, exist_ok=True)

    console = m.Console(config.steps, saved or 0)
    checkpoints = Checkpoints(run_dir / "checkpoints", keep=config.checkpoint.keep, say=console.say)
    if config.init_from and saved is None:
        params = load_params(config.init_from, params)
    rows = {"rows": config.batch_size, "accumulate": config.accumulate, "carry_state": config.carry_state}
    state = init_state(functional, params, optimizer, mesh, **rows, abstract=saved is not None)
    del params  # from here on the state owns them: two copies may not fit
    meta: dict[str, Any] = {}
    if saved is not None:
        state, meta = checkpoints.restore(state, data.iterator)
        console.say(f"resuming {run_dir.name} at step {saved}")
    write_run(run_dir, config, mesh, saved)
    if config.data.tokenizer != "bytes":
        data.tokenizer.save(run_dir / "tokenizer.json")

    step = make_train_step(
        functional, optimizer, rate, mesh, accumulate=config.accumulate, z_loss=config.get("z_loss", 0.0)
    )
    evaluate = make_evaluator(functional, state.params, mesh) if data.heldout is not None else None
    run = Run(config, run_dir, mesh, data, step, evaluate, state, checkpoints, console, meta)
    sizes = m.count_parameters(state.params)
    console.say(
        f"{'+'.join(dict.fromkeys(config.model.mixers))}: {m.short(sizes['total'])} parameters, "
        f"{m.short(config.batch_size * config.data.seq_len)} tokens a step, "
        f"{mesh.size} {mesh.devices.flat[0].device_kind} device{'s' if mesh.size > 1 else ''}"
    )
    try:
        reason = run.loop(began)
        return run.finish(reason)
    finally:
        run.close()


def resolved(config: Any) -> Any:
    """A copy of the config with "auto" decided for the present devices."""
    config = config.copy_and_resolve_references()
    if config.compute_dtype == "auto":
        config.compute_dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return config


def open_data(config: Any) -> Data:
    """Tokenizer, training iterator and held-out batches of this process."""
    tokenizer = load_tokenizer(config.data.tokenizer)
    corpus, heldout = open_splits(config.data)
    processes = jax.process_count()
    iterator = train_iterator(
        corpus,
        tokenizer,
        batch_size=config.batch_size // processes,
        seq_len=config.data.seq_len,
        layout=config.data.layout,
        seed=config.seed,
        process_index=jax.process_index(),
        process_count=processes,
        workers=config.data.workers,
    )
    batches = None
    if len(heldout):
        batches = eval_batches(
            heldout,
            tokenizer,
            batch_size=config.batch_size // config.accumulate // processes,
            seq_len=config.data.seq_len,
            max_bytes=config.eval.max_bytes,
            process_index=jax.process_index(),
            process_count=processes,
        )
    return Data(tokenizer, iterator, batches)


def open_model(config: Any, vocab_size: int, mesh: Mesh) -> tuple[Functional, Params]:
    """The decoder that the config names, initialised from its seed over the mesh."""
    decoder = decoder_config(config.model, vocab_size, config.compute_dtype)
    return initialise(lambda: Decoder(decoder, rngs=nnx.Rngs(config.seed)), mesh)


def _check_counts(config: Any) -> None:
    for name, least in (("steps", 1), ("log_every", 1), ("max_bad_steps", 1)):
        if config[name] < least:
            raise UserError(f"{name} must be at least {least}, got {config[name]}")
    for group in ("eval", "checkpoint"):
        if config[group].every < 0:
            raise UserError(f"{group}.every must not be negative (0 is only at the end), got {config[group].every}")


def _check_carry(config: Any, functional: Functional, params: Params) -> None:
    if not config.carry_state:
        return
    if config.data.layout != "contiguous":
        raise UserError(f"carry_state needs data.layout='contiguous', got {config.data.layout!r}")
    if not has_fixed_size(functional, params):
        raise UserError("carry_state needs mixers whose state has a fixed size; a softmax layer's cache grows")


class Run:
    """One process's part of a run, from restored state to summary."""

    def __init__(self, config, run_dir, mesh, data, step, evaluate, state, checkpoints, console, meta):
        self.config, self.run_dir, self.mesh, self.data = config, run_dir, mesh, data
        self.step, self.evaluate, self.state = step, evaluate, state
        self.checkpoints, self.console = checkpoints, console
        self.start = self.done = int(state.step)
        self.seconds = meta.get("seconds", 0.0)
        self.window = Window(meta.get("window"))
        self.latest: dict[str, Any] = meta.get("latest", {})
        self.primary = jax.process_index() == 0
        self.log = m.MetricsLog(run_dir, self.start, console.say) if self.primary else None
        self.clock = m.Clock()
        self.pending: deque[tuple[Any, int]] = deque()
        self.counts_bytes = data.tokenizer.name == "bytes" and jax.process_count() == 1
        self.flops = m.flops_per_token(state.params)
        self.peak = m.peak_flops(mesh.devices.flat[0].device_kind)
        self.heldout_at: tuple[int, Heldout] | None = None
        self.closed = False

    def loop(self, began: float) -> str | None:
        """Steps until the end or a reason to stop, which it returns in words; None at the end."""
        config = self.config
        with stop_signals(self.console.say) as stopped:
            for batch in self._batches():
                self.state, scalars = self.step(self.state, batch)
                self.done += 1
                self.pending.append((scalars, self._bytes))
                self.console.advance()
                # One step stays in flight, so the device works while the host counts the one before.
                self._settle(keep=1)
                if self.done == self.start + 1:
                    self._settle(keep=0)  # compiled now; the clock is for steps only
                    self.window.steps = 0
                    self.clock.start()
                bad = self.latest.get("bad_in_row", 0)
                if bad >= config.max_bad_steps or self.done % config.log_every == 0:
                    self._settle(keep=0)
                    bad = self.latest["bad_in_row"]
                    self._write_line()
                if config.eval.every and self.done % config.eval.every == 0 and self.done < config.steps:
                    self._evaluate()
                if config.checkpoint.every and self.done % config.checkpoint.every == 0:
                    self._save()
                if bad >= config.max_bad_steps:
                    return f"the loss or gradient was not finite in {bad} steps in a row"
                limit = config.time_limit_minutes
                late = bool(limit) and (time.monotonic() - began) / 60 >= limit
                if self._agreed(bool(stopped) or late):
                    return (
                        f"the time limit of {limit:g} minutes is reached"
                        if late
                        else f"{(*stopped, 'a signal')[0]} came"
                    )
        return None

    def finish(self, reason: str | None) -> dict[str, Any]:
        """Saves, evaluates if the run is at its end, plots and sums up."""
        self.clock.stop()
        self._settle(keep=0)
        diverged = self.latest.get("bad_in_row", 0) >= self.config.max_bad_steps
        if self.window.tokens and reason is None:
            self._write_line()
        self._save()
        self.checkpoints.wait()
        if reason is None:
            self._evaluate()
        summary = self._summary(reason)
        self._write_files(summary)
        self.close()
        kept = self.checkpoints.newest()
        if kept != self.done:
            where = f"the newest that is kept is of step {kept}" if kept is not None else "there is none"
            raise UserError(f"the checkpoint of step {self.done} could not be saved, the disk is full; {where}")
        if diverged:
            raise UserError(
                f"stopped at step {self.done}: {reason}; step {kept} is saved with the last good parameters; "
                "lower optimizer.learning_rate or optimizer.clip_norm, or look at the data near that step"
            )
        if reason is not None:
            print(f"Stopped at step {self.done}: {reason}. Saved; the same command goes on from here.", flush=True)
        elif self.primary:
            print(summary_table(summary, self.run_dir), flush=True)
        return summary

    def close(self) -> None:
        """Ends the progress line, flushes what is buffered, frees threads."""
        if self.closed:
            return
        self.closed = True
        self.console.close()
        if self.log is not None:
            self.log.close()
        self.checkpoints.close()
        if hasattr(self.data.iterator, "close"):
            self.data.iterator.close()

    def _agreed(self, stop: bool) -> bool:
        """Whether to stop: processes of one run must take the same number of steps, so they ask at each line."""
        if jax.process_count() == 1:
            return stop
        if self.done % self.config.log_every:
            return False
        return bool(np.any(multihost_utils.process_allgather(np.array(stop))))

    def _batches(self) -> Iterator[dict[str, jax.Array]]:
        def local():
            while self.done < self.config.steps:
                batch = next(self.data.iterator)
                self._bytes = self._byte_count(batch)
                yield batch

        return iter(placed(local(), self.mesh))

    def _byte_count(self, batch: dict[str, np.ndarray]) -> int:
        if not self.counts_bytes:
            return 0
        text = (batch["segment_ids"] >= 0) & (batch["targets"] != self.data.tokenizer.eot)
        return int(text.sum())

    def _settle(self, keep: int) -> None:
        """Counts the steps whose numbers have come, all but `keep` of them."""
        while len(self.pending) > keep:
            scalars, size = self.pending.popleft()
            self.latest = {name: value.item() for name, value in jax.device_get(scalars).items()}
            self.window.add(self.latest["nats"], self.latest["tokens"], size)

    def _write_line(self) -> None:
        window, latest = self.window, self.latest
        seconds = self.clock.seconds()
        self.seconds += self.clock.reset()
        record: dict[str, Any] = {
            "step": self.done,
            "loss": window.nats / window.tokens if window.tokens else float("nan"),
            "bits_per_byte": window.nats / math.log(2) / window.bytes if window.bytes else None,
            "learning_rate": latest["learning_rate"],
            "grad_norm": latest["grad_norm"],
            "tokens": window.total_tokens,
            "skipped": latest["skipped"],
        }
        if window.steps and seconds:
            per_step = window.total_tokens / self.done
            record["step_ms"] = 1000 * seconds / window.steps
            record["tokens_per_second"] = per_step * window.steps / seconds
            if self.peak:
                record["mfu"] = self.flops * record["tokens_per_second"] / (self.peak * self.mesh.size)
        self.latest = latest | {
            name: record.get(name) for name in ("loss", "bits_per_byte", "tokens_per_second", "mfu", "step_ms")
        }
        window.reset()
        if self.log is not None:
            self.log.write(record)
            self.console.show(record)

    def _evaluate(self) -> None:
        if self.evaluate is None:
            return
        self.clock.stop()
        self._settle(keep=0)
        result = self.evaluate(self.state.params, self.data.heldout)
        self.heldout_at = (self.done, result)
        record: dict[str, Any] = {"step": self.done, "heldout_nats_per_token": result.nats_per_token}
        text = f"held out at step {self.done}: {result.nats_per_token:.4f} nats/token"
        if result.bits_per_byte is not None:
            record["heldout_bits_per_byte"] = result.bits_per_byte
            text += f", {result.bits_per_byte:.4f} bits/byte"
        if self.log is not None:
            if self.done > self.start or not self._has_heldout_line():
                self.log.write(record)
            self.console.say(text)
        if self.done < self.config.steps:
            self.clock.start()

    def _has_heldout_line(self) -> bool:
        """Whether a run that had ended, and is started again, told its last held-out loss."""
        return any(
            record["step"] == self.done and "heldout_nats_per_token" in record
            for record in m.read_metrics(self.run_dir / "metrics.jsonl")
        )

    def _save(self) -> None:
        self.clock.stop()
        self._settle(keep=0)
        meta = {
            "config": config_as_json(self.config),
            "window": dict(self.window.__dict__),
            "latest": {k: v for k, v in self.latest.items() if not isinstance(v, float) or math.isfinite(v)},
            "seconds": self.seconds + self.clock.seconds(),
        }
        self.checkpoints.save(self.done, self.state, self.data.iterator, meta)
        if self.done < self.config.steps:
            self.clock.start()

    def _summary(self, reason: str | None) -> dict[str, Any]:
        latest = self.latest
        heldout = self.heldout_at[1] if self.heldout_at else None
        return {
            "step": self.done,
            "steps": self.config.steps,
            "stopped": reason,
            "tokens": self.window.total_tokens,
            "parameters": m.count_parameters(self.state.params)["total"],
            "loss": latest.get("loss"),
            "bits_per_byte": latest.get("bits_per_byte"),
            "heldout_step": self.heldout_at[0] if self.heldout_at else None,
            "heldout_nats_per_token": heldout.nats_per_token if heldout else None,
            "heldout_bits_per_byte": heldout.bits_per_byte if heldout else None,
            "heldout_tokens": heldout.tokens if heldout else None,
            "heldout_bytes": heldout.bytes if heldout else None,
            "heldout_state_carried": heldout.carried if heldout else None,
            "seconds": round(self.seconds, 3),
            "tokens_per_second": latest.get("tokens_per_second"),
            "mfu": latest.get("mfu"),
            "skipped": latest.get("skipped", 0),
        }

    def _write_files(self, summary: dict[str, Any]) -> None:
        if not self.primary:
            return
        try:
            write_json(self.run_dir / "summary.json", summary)
            title = f"{'+'.join(self.config.model.mixers)}, {m.short(summary['parameters'])} parameters"
            plot_loss(self.run_dir / "loss.png", m.read_metrics(self.run_dir / "metrics.jsonl"), title)
        except OSError as error:
            if not is_disk_full(error):
                raise
            self.console.say(f"summary.json and loss.png of {self.run_dir} are not complete: the disk is full")


def summary_table(summary: dict[str, Any], run_dir: Path) -> str:
    """The summary as a person wants to read it."""
    rows = [("steps", f"{summary['step']:,}"), ("tokens", f"{summary['tokens']:,}")]
    rows.append(("parameters", f"{summary['parameters']:,}"))
    if summary["loss"] is not None:
        rows.append(("training loss", f"{summary['loss']:.4f} nats/token"))
    if summary["heldout_nats_per_token"] is not None:
        rows.append(("held-out loss", f"{summary['heldout_nats_per_token']:.4f} nats/token"))
    if summary["heldout_bits_per_byte"] is not None:
        rows.append(("held-out text", f"{summary['heldout_bits_per_byte']:.4f} bits/byte"))
    rows.append(("time in steps", m.duration(summary["seconds"])))
    if summary["tokens_per_second"]:
        rows.append(("speed", f"{m.short(summary['tokens_per_second'])} tokens/s"))
    if summary["mfu"] is not None:
        rows.append(("MFU", f"{100 * summary['mfu']:.1f} %"))
    if summary["skipped"]:
        rows.append(("skipped steps", str(summary["skipped"])))
    rows.append(("run directory", str(run_dir)))
    return m.table(rows)


@contextmanager
def stop_signals(say: Callable[[str], None]) -> Iterator[list[str]]:
    """A list that gets the name of SIGTERM or of the first Ctrl-C when it comes; a second Ctrl-C interrupts."""
    names: list[str] = []
    if threading.current_thread() is not threading.main_thread():
        yield names
        return

    def note(number, frame):
        if names and number == signal.SIGINT:
            raise KeyboardInterrupt
        names.append("SIGTERM" if number == signal.SIGTERM else "Ctrl-C")
        say("stopping after this step; Ctrl-C again stops at once, without saving")

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield names
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def load_summary(run_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """summary.json of a run."""
    return json.loads((Path(run_dir) / "summary.json").read_text())
