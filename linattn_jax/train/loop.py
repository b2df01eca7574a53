"""A training run made from its config: checks, data, model, optimizer, then a new or a restored state."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh

from linattn_jax.data import eval_batches, load_tokenizer, open_splits, train_iterator
from linattn_jax.eval.perplexity import make_evaluator
from linattn_jax.models.decoder import Decoder
from linattn_jax.models.presets import decoder_config
from linattn_jax.sharding import make_mesh
from linattn_jax.train import metrics as m
from linattn_jax.train.checkpoints import (
    Checkpoints,
    check_same_config,
    drop_added,
    load_params,
    newest_step,
    read_meta,
)
from linattn_jax.train.functional import Functional, Params, has_fixed_size, initialise
from linattn_jax.train.optimizer import make_optimizer
from linattn_jax.train.run import Run
from linattn_jax.train.rundir import config_as_json, write_run
from linattn_jax.train.step import check_rows, init_state, make_train_step
from linattn_jax.types import UserError


class Data(NamedTuple):
    """What a run reads."""

    tokenizer: Any
    iterator: Any  # grain DatasetIterator of this process's training batches
    heldout: Any  # eval_batches, or None where nothing is held out


def train(config: Any, run_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """See `linattn_jax.train.train`."""
    began = time.monotonic()
    config = resolved(config)
    run_dir = Path(run_dir)
    saved = newest_step(run_dir / "checkpoints")
    dropped: list[str] = []
    if saved is not None:
        before = read_meta(run_dir / "checkpoints", saved)["config"]
        dropped = drop_added(before, config)
        check_same_config(before, config_as_json(config), str(run_dir))
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
        for name in dropped:
            console.say(f"{name} is left out: the run began without it")
    write_run(run_dir, config, mesh, saved)
    if config.data.tokenizer != "bytes":
        data.tokenizer.save(run_dir / "tokenizer.json")

    step = make_train_step(
        functional, optimizer, rate, mesh, accumulate=config.accumulate, z_loss=config.get("z_loss", 0.0)
    )
    evaluate = make_evaluator(functional, state.params, mesh) if data.heldout is not None else None
    run = Run(config, run_dir, mesh, data, functional, step, evaluate, state, checkpoints, console, meta)
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
