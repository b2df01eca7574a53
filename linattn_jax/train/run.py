"""One process's part of a run: steps, lines of metrics, evaluations, saves, and a clean end."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from linattn_jax.eval.perplexity import Heldout, placed
from linattn_jax.models.generate import generate
from linattn_jax.train import metrics as m
from linattn_jax.train.checkpoints import is_disk_full
from linattn_jax.train.plot import plot_loss
from linattn_jax.train.rundir import config_as_json, write_json
from linattn_jax.types import UserError


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


class Run:
    """One process's part of a run, from restored state to summary."""

    def __init__(self, config, run_dir, mesh, data, functional, step, evaluate, state, checkpoints, console, meta):
        self.config, self.run_dir, self.mesh, self.data, self.functional = config, run_dir, mesh, data, functional
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
            if summary["sample"]:
                print(f"\nA sample at temperature {self.config.sample.temperature:g}:\n{summary['sample']}", flush=True)
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
            "sample": None if reason else self._sample(),
            "seconds": round(self.seconds, 3),
            "tokens_per_second": latest.get("tokens_per_second"),
            "mfu": latest.get("mfu"),
            "peak_memory_bytes": m.peak_memory(),
            "skipped": latest.get("skipped", 0),
        }

    def _sample(self) -> str | None:
        """Text that the model writes after the prompt; None where none is wanted or the parameters are spread."""
        wanted = self.config.sample
        if not wanted.length or jax.process_count() > 1:
            return None
        tokenizer = self.data.tokenizer
        prompt = np.concatenate([[tokenizer.eot], tokenizer.encode(wanted.prompt)]).astype(np.int32)
        module = self.functional.module(self.state.params)
        drawn = generate(
            module, prompt, wanted.length, seed=self.config.seed, temperature=wanted.temperature, stop=tokenizer.eot
        )
        ids = np.concatenate([block[0] for block in drawn])
        ends = np.flatnonzero(ids == tokenizer.eot)
        return wanted.prompt + tokenizer.decode(ids[: ends[0]] if len(ends) else ids)

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
    if summary["peak_memory_bytes"]:
        rows.append(("peak memory", f"{summary['peak_memory_bytes'] / 1e9:.1f} GB of a device"))
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
