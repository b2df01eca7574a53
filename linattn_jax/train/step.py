"""One optimizer step as one compiled function over the mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from linattn_jax.sharding import BATCH_AXES, batch_sharding, parameter_shardings, replicated
from linattn_jax.train.functional import Functional, Params, batch_axes, strong_types
from linattn_jax.train.loss import sharded_cross_entropy
from linattn_jax.types import UserError


class Carry(NamedTuple):
    """What one batch leaves to the next: leaves begin with [accumulate], each microbatch has rows of its own."""

    state: Any
    segment_id: jax.Array  # int32 [accumulate, rows]: the segment to which the state belongs, -1 for none


class TrainState(NamedTuple):
    """Everything that a step changes."""

    step: jax.Array  # int32, batches seen
    params: Params
    opt_state: Any
    carry: Carry | None
    skipped: jax.Array  # int32, non-finite steps in all
    bad_in_row: jax.Array  # int32, non-finite steps up to now without a good one


def init_state(
    functional: Functional,
    params: Params,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    rows: int,
    accumulate: int = 1,
    carry_state: bool = False,
    abstract: bool = False,
) -> TrainState:
    """The state before the first step, laid over the mesh; `rows` is the global number of rows per step.

    With `abstract`, only its shapes, dtypes and shardings (to restore a checkpoint into), without any memory.

    Raises:
        UserError: rows that accumulation and devices do not divide, or carry_state with a state that grows.
    """
    check_rows(rows, accumulate, mesh)

    def rest(params):
        carry = None
        if carry_state:
            state = functional.init_state(params, rows // accumulate)
            stacked = jax.tree.map(lambda x: jnp.broadcast_to(x, (accumulate, *x.shape)), state)
            carry = Carry(stacked, jnp.full((accumulate, rows // accumulate), -1, jnp.int32))
        # Three arrays, not one three times: the step donates each.
        counts = [jnp.zeros((), jnp.int32) for _ in range(3)]
        return strong_types(TrainState(counts[0], params, optimizer.init(params), carry, counts[1], counts[2]))

    shapes = jax.eval_shape(rest, params)
    where = state_shardings(functional, shapes, mesh)
    if abstract:
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, where)
    return jax.jit(rest, out_shardings=where)(params)


def check_rows(rows: int, accumulate: int, mesh: Mesh) -> None:
    """Raises UserError unless `rows` is a multiple of accumulate times the devices that share a batch."""
    if accumulate < 1:
        raise UserError(f"accumulate must be at least 1, got {accumulate}")
    if rows < 1 or rows % (accumulate * mesh.size):
        raise UserError(
            f"batch_size={rows} must be a positive multiple of accumulate x devices = {accumulate} x {mesh.size}"
        )


def state_shardings(functional: Functional, state: TrainState, mesh: Mesh) -> Any:
    """A TrainState of NamedShardings: rules for parameters and optimizer, rows over devices for the carry."""
    whole = replicated(mesh)
    carry = None
    if state.carry is not None:
        axes = batch_axes(lambda rows: functional.init_state(state.params, rows))
        pair: Any = Carry
        carry = pair(jax.tree.map(lambda axis: batch_sharding(mesh, axis + 1), axes), batch_sharding(mesh, 1))
    tree: Any = TrainState  # of shardings, where its annotations say arrays
    return tree(
        step=whole,
        params=parameter_shardings(state.params, mesh),
        opt_state=parameter_shardings(state.opt_state, mesh),
        carry=carry,
        skipped=whole,
        bad_in_row=whole,
    )


def make_train_step(
    functional: Functional,
    optimizer: optax.GradientTransformation,
    rate: Callable[[Any], Any],
    mesh: Mesh,
    *,
    accumulate: int = 1,
    z_loss: float = 0.0,
    loss_chunk: int | None = None,
) -> Callable[[TrainState, dict[str, jax.Array]], tuple[TrainState, dict[str, jax.Array]]]:
    """The compiled step (state, batch) -> (state, metrics); the state passed in is consumed.

    batch: inputs, targets, segment_ids, int32 [B, T] laid by `batch_sharding`. With accumulate = A, row r belongs
    to microbatch r % A, so each device keeps its rows; gradients of summed nats are added in float32 and divided
    by all tokens at the end, which equals the whole batch up to rounding. A step whose loss or gradient norm is not
    finite leaves parameters, optimizer and carry as they were.

    metrics, scalars: nats (sum), tokens, loss (nats per token), grad_norm (before clipping), learning_rate,
    bad (1 if skipped), skipped, bad_in_row.
    """

    def microbatch_loss(params, batch, carry):
        segment_ids = batch["segment_ids"]
        state, before = (None, None) if carry is None else carry
        hidden, after = functional.apply(
            params, batch["inputs"], state=state, segment_ids=segment_ids, initial_segment_id=before
        )
        weights = (segment_ids >= 0).astype(jnp.float32)
        nats, tokens = sharded_cross_entropy(
            mesh, hidden, functional.unembedding(params), batch["targets"], weights, chunk=loss_chunk, z_loss=z_loss
        )
        new = None
        if carry is not None:
            after = jax.tree.map(lambda x, like: x.astype(like.dtype), after, carry.state)
            new = Carry(jax.lax.stop_gradient(after), last_segment(segment_ids, carry.segment_id))
        return nats, (tokens, new)

    gradient = jax.value_and_grad(microbatch_loss, has_aux=True)

    def step(state: TrainState, batch):
        params = state.params
        if accumulate == 1:
            carry = jax.tree.map(lambda x: x[0], state.carry)
            (nats, (tokens, carry)), grads = gradient(params, batch, carry)
            carry = jax.tree.map(lambda x: x[None], carry)
        else:
            nats, tokens, grads, carry = _accumulated(gradient, params, _microbatches(batch, accumulate, mesh), state)
        count = jnp.maximum(tokens, 1)
        grads = jax.tree.map(lambda g: g / count, grads)
        loss, norm = nats / count, optax.tree.norm(grads)
        good = jnp.isfinite(loss) & jnp.isfinite(norm)
        updates, opt_state = optimizer.update(grads, state.opt_state, params)
        stepped = (optax.apply_updates(params, updates), opt_state, carry)
        kept = (params, state.opt_state, state.carry)
        params, opt_state, carry = jax.tree.map(lambda new, old: jnp.where(good, new, old), stepped, kept)
        bad = 1 - good.astype(jnp.int32)
        new_state = TrainState(
            step=state.step + 1,
            params=params,
            opt_state=opt_state,
            carry=carry,
            skipped=state.skipped + bad,
            bad_in_row=(state.bad_in_row + 1) * bad,
        )
        metrics = {
            "nats": nats,
            "tokens": tokens.astype(jnp.int32),
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": rate(state.step - state.skipped),
            "bad": bad,
            "skipped": new_state.skipped,
            "bad_in_row": new_state.bad_in_row,
        }
        return new_state, metrics

    compiled: list[Any] = []

    def call(state, batch):
        if not compiled:
            where = state_shardings(functional, state, mesh)
            compiled.append(jax.jit(step, donate_argnums=0, out_shardings=(where, replicated(mesh))))
        return compiled[0](state, batch)

    return call


def last_segment(segment_ids: jax.Array, before: jax.Array) -> jax.Array:
    """The segment [B] that a row's state belongs to after the row: its last id >= 0, else the one before."""
    places = jnp.where(segment_ids >= 0, jnp.arange(segment_ids.shape[1]), -1)
    last = jnp.max(places, axis=1)
    found = jnp.take_along_axis(segment_ids, jnp.maximum(last, 0)[:, None], axis=1)[:, 0]
    return jnp.where(last >= 0, found, before).astype(jnp.int32)


def _microbatches(batch, accumulate: int, mesh: Mesh):
    where = NamedSharding(mesh, PartitionSpec(None, BATCH_AXES))

    def arrange(x):
        x = x.reshape(x.shape[0] // accumulate, accumulate, *x.shape[1:]).swapaxes(0, 1)
        return jax.lax.with_sharding_constraint(x, where)

    return jax.tree.map(arrange, batch)


def _accumulated(gradient, params, microbatches, state: TrainState):
    def body(sums, part):
        batch, carry = part
        (nats, (tokens, carry)), grads = gradient(params, batch, carry)
        return jax.tree.map(jnp.add, sums, (nats, tokens, grads)), carry

    zeros = (jnp.zeros(()), jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    (nats, tokens, grads), carry = jax.lax.scan(body, zeros, (microbatches, state.carry))
    return nats, tokens, grads, carry
