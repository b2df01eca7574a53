"""A trained run opened again: its config, tokenizer and parameters, and its loss on any text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_collections
from jax.sharding import Mesh

from linattn_jax.data import eval_batches, load_tokenizer
from linattn_jax.data.sources import open_source, open_splits
from linattn_jax.eval.perplexity import Heldout, make_evaluator
from linattn_jax.sharding import make_mesh
from linattn_jax.train.checkpoints import load_params, newest_step
from linattn_jax.train.functional import Functional, Params
from linattn_jax.train.loop import open_model
from linattn_jax.train.rundir import read_config
from linattn_jax.types import UserError


class TrainedRun(NamedTuple):
    """What a checkpoint holds of a model, ready to use."""

    config: Any
    tokenizer: Any
    functional: Functional
    params: Params
    mesh: Mesh
    step: int

    @property
    def model(self) -> Any:
        """The decoder as a module that holds the parameters."""
        return self.functional.module(self.params)


def open_run(run_dir: str | os.PathLike[str], step: int | None = None, compute_dtype: str = "") -> TrainedRun:
    """Opens the newest checkpoint of a run, or that of `step`, on the present devices.

    Raises:
        FileNotFoundError: `run_dir` is not a run directory.
        UserError: it has no such checkpoint.
    """
    config = ml_collections.ConfigDict(read_config(run_dir))
    if compute_dtype:
        config.compute_dtype = compute_dtype
    written = Path(run_dir) / "tokenizer.json"
    tokenizer = load_tokenizer(str(written) if written.exists() else config.data.tokenizer)
    if step is None:
        step = newest_step(Path(run_dir) / "checkpoints")
    mesh = make_mesh()
    functional, params = open_model(config, tokenizer.vocab_size, mesh)
    return TrainedRun(config, tokenizer, functional, load_params(run_dir, params, step), mesh, step or 0)


def evaluate_run(run: TrainedRun, *, data: str = "", rows: int = 0, seq_len: int = 0, max_bytes: int = 0) -> Heldout:
    """Loss of a run on its held-out documents, or on all documents of the source `data`.

    Args:
        run: as `open_run` gives it.
        data: a source as in config.data.train; "" takes the run's held-out documents.
        rows: rows per batch; 0 takes the run's microbatch, made a multiple of the devices.
        seq_len: tokens per row; 0 takes the run's. It changes the loss only where the state cannot be carried.
        max_bytes: as in `data.eval_batches`; 0 takes everything.
    Raises:
        UserError: the run holds nothing out, or `data` has no text.
    """
    config = run.config
    if data:
        corpus = open_source(data, text_field=config.data.text_field, data_dir=config.data.get("data_dir", ""))
    else:
        _, corpus = open_splits(config.data)
    if not len(corpus):
        raise UserError("the run holds no documents out: name a source to evaluate on with --data")
    rows = rows or -(-(config.batch_size // config.accumulate) // run.mesh.size) * run.mesh.size
    if rows % run.mesh.size:
        raise UserError(f"rows={rows} must be a multiple of the {run.mesh.size} devices")
    batches = eval_batches(
        corpus,
        run.tokenizer,
        batch_size=rows // jax.process_count(),
        seq_len=seq_len or config.data.seq_len,
        max_bytes=max_bytes,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    )
    return make_evaluator(run.functional, run.params, run.mesh)(run.params, batches)
