"""Cross-entropy in chunks of time, so that the logits of a whole batch never exist at once."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from linattn_jax.sharding import BATCH_AXES

_LOGITS_BYTES = 128 << 20


def default_chunk(rows: int, vocab_size: int) -> int:
    """Time steps per chunk that keep the float32 logits of `rows` rows near 128 MiB (at least 16 steps)."""
    return max(16, _LOGITS_BYTES // (4 * max(rows, 1) * vocab_size))


def chunked_cross_entropy(
    hidden: jax.Array,
    unembedding: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    chunk: int | None = None,
    z_loss: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """Weighted sum of -log softmax(hidden @ unembedding)[target], holding the logits of one chunk only.

    The logits are a product in hidden's dtype accumulated in float32. Under differentiation the gradients
    are formed beside the loss while a chunk's logits exist, so the product is made once, not again going backward.
    Gradients flow to `hidden` and `unembedding`; `weights` counts as a constant. Any T.

    Args:
        hidden: [B, T, D], any float dtype.
        unembedding: [D, V], any float dtype; cast to hidden's for the product, its gradient keeps its own.
        targets: integers [B, T] in [0, V); ignored where the weight is 0.
        weights: [B, T], 0 where a position does not count.
        chunk: time steps per chunk; None chooses by `default_chunk`.
        z_loss: adds z_loss * logsumexp(logits)**2 per position to the sum.
    Returns:
        (sum of nats, sum of weights), float32 scalars (float64 when hidden is float64).
    Raises:
        ValueError: shapes that do not fit together, or chunk < 1.
    """
    if hidden.ndim != 3 or unembedding.ndim != 2 or hidden.shape[-1] != unembedding.shape[0]:
        raise ValueError(
            f"hidden [B, T, D] and unembedding [D, V] do not fit: got {hidden.shape} and {unembedding.shape}"
        )
    for name, array in (("targets", targets), ("weights", weights)):
        if array.shape != hidden.shape[:2]:
            raise ValueError(f"{name} must have shape {hidden.shape[:2]}, got {array.shape}")
    if chunk is None:
        chunk = default_chunk(hidden.shape[0], unembedding.shape[1])
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    accumulator = jnp.promote_types(hidden.dtype, jnp.float32)
    weights = weights.astype(accumulator)
    if hidden.shape[1] == 0:
        return jnp.zeros((), accumulator), jnp.sum(weights)
    nats = _summed_nats(min(chunk, hidden.shape[1]), z_loss, hidden, unembedding, targets, weights)
    return nats, jnp.sum(weights)


def sharded_cross_entropy(
    mesh: Mesh,
    hidden: jax.Array,
    unembedding: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    chunk: int | None = None,
    z_loss: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """`chunked_cross_entropy` of rows laid over the mesh: each device sums its rows, one exchange at the end.

    Left to the compiler, the gradient of the unembedding would be summed over devices once per chunk.
    """
    if mesh.size == 1:
        return chunked_cross_entropy(hidden, unembedding, targets, weights, chunk=chunk, z_loss=z_loss)
    rows = PartitionSpec(BATCH_AXES)

    def local(hidden, unembedding, targets, weights):
        sums = chunked_cross_entropy(hidden, unembedding, targets, weights, chunk=chunk, z_loss=z_loss)
        return jax.lax.psum(sums, BATCH_AXES)

    return jax.shard_map(
        local, mesh=mesh, in_specs=(rows, PartitionSpec(), rows, rows), out_specs=PartitionSpec(), check_vma=False
    )(hidden, unembedding, targets, weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _summed_nats(chunk, z_loss, hidden, unembedding, targets, weights):
    def sum_chunk(h, y, w):
        nats, _ = _chunk_nats(z_loss, _logits(h, unembedding), y, w)
        return nats, ()

    nats, _, _ = _scan_chunks(chunk, sum_chunk, jnp.zeros((), weights.dtype), hidden, targets, weights)
    return nats


def _forward(chunk, z_loss, hidden, unembedding, targets, weights):
    accumulator = weights.dtype

    def sum_chunk(h, y, w):
        logits = _logits(h, unembedding)
        nats, d_logits = _chunk_nats(z_loss, logits, y, w)
        d_logits = d_logits.astype(h.dtype)
        d_h = jnp.einsum("btv,dv->btd", d_logits, unembedding.astype(h.dtype), preferred_element_type=accumulator)
        d_u = jnp.einsum("btd,btv->dv", h, d_logits, preferred_element_type=accumulator)
        return (nats, d_u), d_h.astype(h.dtype)

    zero = (jnp.zeros((), accumulator), jnp.zeros(unembedding.shape, accumulator))
    (nats, d_unembedding), d_hidden, rest = _scan_chunks(chunk, sum_chunk, zero, hidden, targets, weights)
    batch, steps, width = hidden.shape
    d_hidden = jnp.moveaxis(d_hidden, 0, 1).reshape(batch, steps // chunk * chunk, width)
    if rest is not None:
        d_hidden = jnp.concatenate([d_hidden, rest], axis=1)
    return nats, (d_hidden, d_unembedding, jnp.zeros((0,), unembedding.dtype))


def _backward(chunk, z_loss, residuals, cotangent):
    d_hidden, d_unembedding, like = residuals
    scaled = (d_hidden.astype(cotangent.dtype) * cotangent).astype(d_hidden.dtype)
    return scaled, (d_unembedding * cotangent).astype(like.dtype), None, None


_summed_nats.defvjp(_forward, _backward)


def _scan_chunks(chunk, body, zero, hidden, targets, weights):
    """Sums body(chunk)[0] over all chunks; body(chunk)[1] stacked for the whole chunks, and for the rest or None."""
    whole = hidden.shape[1] // chunk
    cut = whole * chunk

    def masked(h, y, w):
        # A padded position may hold anything, NaN included: 0 * NaN must not reach the sums.
        return jnp.where((w > 0)[..., None], h, 0), y, w

    def step(total, index):
        part = [jax.lax.dynamic_slice_in_dim(x, index * chunk, chunk, axis=1) for x in (hidden, targets, weights)]
        value, out = body(*masked(*part))
        return jax.tree.map(jnp.add, total, value), out

    total, outs = jax.lax.scan(step, zero, jnp.arange(whole))
    if cut == hidden.shape[1]:
        return total, outs, None
    value, rest = body(*masked(hidden[:, cut:], targets[:, cut:], weights[:, cut:]))
    return jax.tree.map(jnp.add, total, value), outs, rest


def _logits(h, unembedding):
    accumulator = jnp.promote_types(h.dtype, jnp.float32)
    return jnp.einsum("btd,dv->btv", h, unembedding.astype(h.dtype), preferred_element_type=accumulator)


def _chunk_nats(z_loss, logits, targets, weights):
    """Weighted nats of a chunk and their gradient with respect to its logits."""
    log_z = jax.nn.logsumexp(logits, axis=-1)
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    each = log_z - picked + z_loss * jnp.square(log_z)
    softmax = jnp.exp(logits - log_z[..., None]) * (1 + 2 * z_loss * log_z)[..., None]
    hit = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 2) == targets[..., None]
    d_logits = (softmax - hit) * weights[..., None]
    return jnp.sum(each * weights), d_logits
