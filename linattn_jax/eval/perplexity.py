"""Loss on held-out text: each token once, with all of its document before it where the state's size is fixed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from linattn_jax.sharding import batch_sharding, replicated
from linattn_jax.train.functional import Functional, Params, has_fixed_size
from linattn_jax.train.loss import sharded_cross_entropy
from linattn_jax.train.step import Carry, last_segment


class Heldout(NamedTuple):
    """Loss on held-out text."""

    nats_per_token: float
    bits_per_byte: float | None  # None where the bytes of the text are not known
    tokens: int
    bytes: int | None
    carried: bool  # whether the state went from batch to batch; if not, context ends with a row


def make_evaluator(
    functional: Functional, params: Params, mesh: Mesh, *, loss_chunk: int | None = None
) -> Callable[[Params, Any], Heldout]:
    """evaluate(params, batches) -> Heldout, compiled once.

    `batches` are those of `data.eval_batches`: contiguous rows [B, T] of this process, and `total_bytes` of their
    documents. B times the processes must be a multiple of the devices.
    """
    carried = has_fixed_size(functional, params)

    @jax.jit
    def start(params, like):
        rows = like.shape[0]
        return Carry(functional.init_state(params, rows), jnp.full((rows,), -1, jnp.int32))

    @jax.jit
    def step(params, carry, batch):
        segment_ids = batch["segment_ids"]
        state, before = (None, None) if carry is None else carry
        hidden, after = functional.apply(
            params, batch["inputs"], state=state, segment_ids=segment_ids, initial_segment_id=before
        )
        if carry is not None:
            after = jax.tree.map(lambda x, like: x.astype(like.dtype), after, carry.state)
            carry = Carry(after, last_segment(segment_ids, carry.segment_id))
        weights = (segment_ids >= 0).astype(jnp.float32)
        nats, tokens = sharded_cross_entropy(
            mesh, hidden, functional.unembedding(params), batch["targets"], weights, chunk=loss_chunk
        )
        sums = jax.lax.with_sharding_constraint((nats, tokens), replicated(mesh))
        return carry, sums

    def evaluate(params: Params, batches: Any) -> Heldout:
        carry, nats, tokens = None, 0.0, 0
        for batch in placed(batches, mesh):
            if carried and carry is None:
                carry = start(params, batch["inputs"])
            carry, (batch_nats, batch_tokens) = step(params, carry, batch)
            nats += float(batch_nats)  # summed in float64: float32 loses whole tokens after 16 million nats
            tokens += int(batch_tokens)
        total_bytes = getattr(batches, "total_bytes", None)
        bits = nats / math.log(2) / total_bytes if total_bytes else None
        return Heldout(nats / max(tokens, 1), bits, tokens, total_bytes, carried)

    return evaluate


def placed(batches: Iterable[dict[str, np.ndarray]], mesh: Mesh) -> Iterable[dict[str, jax.Array]]:
    """Batches of this process's rows as global arrays, rows over the devices."""
    where = batch_sharding(mesh)
    for batch in batches:
        yield {name: jax.make_array_from_process_local_data(where, array) for name, array in batch.items()}
