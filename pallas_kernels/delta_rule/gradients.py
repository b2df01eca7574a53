"""The gradients local to a chunk, for all chunks at once: those of queries, keys, values, strengths and decays.

With the state S before a chunk, the gradient dS of the state after it, the residual's gradient dR (`states`, backward)
and the errors E, which are computed again from S, and with weights r (reading), e (erasing), w (writing) of rows and
W, W' of scores and of the system,
    dP = (dO E^T) o W,          dA = -(dR E^T) o W',
    dQ = r dO S^T + dP K,       dK = [-e dR S^T + dA K] + [w E dS^T + dP^T Q + dA^T K].
All weights, decays included, are factors of rows and columns of the products with q and k, so their gradients are sums
over rows of q dQ and of k times either bracket; the chunk's last state adds <S', dS>. Decays between two tokens are in
both brackets with opposite signs: what does not cross a gate cancels to the digits of float32, since both sides have
multiplied the same rounded numbers. A strength's gradient is the diagonal of dR E^T over the strength.

Floors at B, T, H, K, V = 8, 2048, 16, 128, 128 in bfloat16: q, k, v, dO, dR, S, dS and the inverse read, 154 KB
a chunk, dQ, dK and dV written, 48 KB: 830 MB, 0.195 ms at 4.25 TB/s. 15.7 MFLOP a chunk, 64 GFLOP, 0.089 ms at
724 TFLOP/s.

Who does what. A program walks over chunks of any rows and heads. One warpgroup copies; for each 64 key columns another
computes the gradients of these columns of q and k. What is [C, C] is shared: the first computes dP, the last dA, and
each the errors of its 64 value columns; they meet when the errors, dP and dA, and the sums over rows are there. Keys
and vectors have two buffers, everything else one, filled for the next chunk as soon as this chunk is done with it:
states and gradients halfway through, while the rest is computed from dP, dA, q and k.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.delta_rule.tiles import (
    COMPILER,
    NORM_EPS,
    ROW,
    TILE,
    Products,
    Ref,
    Variant,
    by_row,
    index,
    normalized,
    query_weights,
    square_sums,
    tiles_buffer,
    weight,
    write_weights,
    zeros,
)
from pallas_kernels.delta_rule.tuning import CHUNK, GRADIENT_REGISTERS, MULTIPROCESSORS, VALUE_TILE

Array = jax.Array

_C = CHUNK
_KEY_TILE = 64  # key columns of a warpgroup
MOST = 128  # of K and V; `wide` takes more
_EARLY = ("states", "solve", "v", "outputs", "residuals", "dstates")  # copied for the first half of a chunk


def run(
    q: Array,
    k: Array,
    v: Array,
    outputs: Array,
    residuals: Array,
    states: Array,
    dstates: Array,
    inverses: Array,
    vectors: Array,
    *,
    scale: float,
    variant: Variant,
    interpret: Any = None,
) -> tuple[Array, Array, Array, Array]:
    """dq, dk [B, T, H, K], dv [B, T, H, V] and, [B, H, N, 2, 64] in float32, of strengths and of log decays.

    The gradients of strengths are to be divided by the strengths. Those of q and k are of each value head.

    Args:
        q, k: [B, T, Hk, K], v: [B, T, H, V], 16 bit, T a multiple of 8.
        outputs, residuals: gradients, [B, T, H, V].
        states, dstates: before chunks, and gradients of those after them, [B, H, N, V, K], 16 bit.
        inverses, vectors: of `inverse.solve`.
    """
    B, T, Hk, K = k.shape
    H, V = v.shape[2:]
    N = inverses.shape[2]
    dtype = k.dtype
    groups, tiles = K // _KEY_TILE, V // VALUE_TILE
    units = B * H * N
    programs = min(MULTIPROCESSORS, units)
    product = Products(interpret is not None)
    names, columns = variant.vectors, variant.column_vectors
    inputs = {
        "q": q,
        "k": k,
        "v": v,
        "outputs": outputs,
        "residuals": residuals,
        "states": states,
        "dstates": dstates,
        "solve": inverses,
        "vectors": vectors,
    }
    results = {
        "dq": jax.ShapeDtypeStruct((B, T, H, K), dtype),
        "dk": jax.ShapeDtypeStruct((B, T, H, K), dtype),
        "dv": jax.ShapeDtypeStruct((B, T, H, V), dtype),
        "gates": jax.ShapeDtypeStruct((B, H, N, 2, _C), jnp.float32),
    }
    # What is summed over rows, a part from each warpgroup.
    rows = ("query", "erase", "write", "end")
    buffers = {
        "twice": {
            "k": tiles_buffer((2, _C, K), dtype),
            "by_column": plgpu.SMEM((2, len(columns), _C), jnp.float32),
            "by_row": plgpu.SMEM((2, len(names), _C), jnp.float32),
        },
        "once": {
            "q": tiles_buffer((1, _C, K), dtype),
            "v": tiles_buffer((1, _C, V), dtype),  # and then the errors
            "outputs": tiles_buffer((1, _C, V), dtype),
            "residuals": tiles_buffer((1, _C, V), dtype),
            "states": tiles_buffer((1, V, K), dtype),
            "dstates": tiles_buffer((1, V, K), dtype),
            "solve": tiles_buffer((1, _C, _C), jnp.float16),
            # dP and dA, and then, as their products have ended, dK of the first and last key columns on its way out.
            "scores": tiles_buffer((1, _C, _C), dtype),
            "system": tiles_buffer((1, _C, _C), dtype),
        },
        "staged": tiles_buffer((groups, _C, 64), dtype),
        "partial": plgpu.SMEM((groups, len(rows), _C), jnp.float32),
        "total": plgpu.SMEM((3, _C), jnp.float32),
        "gates": plgpu.SMEM((2, _C), jnp.float32),
        "keys_there": plgpu.Barrier(num_arrivals=3, num_barriers=2),
        "early_there": plgpu.Barrier(num_arrivals=len(_EARLY)),
        "queries_there": plgpu.Barrier(),
        "early_free": plgpu.Barrier(num_arrivals=groups),
        "all_free": plgpu.Barrier(num_arrivals=groups),
        "met": plgpu.Barrier(num_arrivals=groups),
        "done": plgpu.Barrier(num_arrivals=groups + 1),
    }

    def body(*refs: Ref, twice, once, staged, partial, total, gates, **barriers) -> None:
        hbm = dict(zip((*inputs, *results), refs, strict=True))
        program, group = lax.axis_index("program"), lax.axis_index("group")
        count = lax.div(units - program + programs - 1, programs)

        def where(i: Any) -> tuple[Any, Any, Any]:
            unit = program + i * programs
            head = lax.div(unit, N)
            return lax.div(head, H), lax.rem(head, H), lax.rem(unit, N)

        def copy_chunk(i: Array) -> None:
            batch, head, n = where(i)
            slot, key_head, tokens = lax.rem(i, 2), lax.div(head, H // Hk), pl.ds(n * _C, _C)
            there = barriers["keys_there"].at[slot]
            plgpu.copy_gmem_to_smem(hbm["k"].at[batch, tokens, key_head], twice["k"].at[slot], there)
            vectors = hbm["vectors"].at[batch, head, n]
            plgpu.copy_gmem_to_smem(vectors.at[pl.ds(0, len(columns))], twice["by_column"].at[slot], there)
            plgpu.copy_gmem_to_smem(vectors, twice["by_row"].at[slot], there)

            @pl.when(i > 0)
            def _early() -> None:
                plgpu.barrier_wait(barriers["early_free"])

            for name in _EARLY:
                chunked = name in ("states", "dstates", "solve")
                source = hbm[name].at[batch, head, n] if chunked else hbm[name].at[batch, tokens, head]
                plgpu.copy_gmem_to_smem(source, once[name].at[0], barriers["early_there"])

            @pl.when(i > 0)
            def _all() -> None:
                plgpu.barrier_wait(barriers["all_free"])

            plgpu.copy_gmem_to_smem(hbm["q"].at[batch, tokens, key_head], once["q"].at[0], barriers["queries_there"])

        def meet() -> None:
            """Waits until all that computes is here; what was written to shared memory can then be read."""
            plgpu.commit_smem()
            if groups > 1:
                plgpu.barrier_arrive(barriers["met"])
                plgpu.barrier_wait(barriers["met"])

        def compute_chunk(i: Array, own: int) -> None:
            """own: of the tiles of key columns, the warpgroup's."""
            first, last = own == 0, own == groups - 1
            batch, head, n = where(i)
            slot, tokens, mine = lax.rem(i, 2), pl.ds(n * _C, _C), pl.ds(own * _KEY_TILE, _KEY_TILE)
            # Were it known that all chunks use the same memory, some 60 descriptors of products would be computed
            # before the loop and, for want of registers, kept in memory.
            nought = lax.optimization_barrier(lax.rem(i, 1))
            x = {"k": twice["k"].at[slot]} | {name: ref.at[nought] for name, ref in once.items()}
            scores, system = x.pop("scores"), x.pop("system")
            x |= {name: twice["by_column"].at[slot, j] for j, name in enumerate(columns)}
            x |= {name + "_row": twice["by_row"].at[slot, j] for j, name in enumerate(names)}
            erase = "erase" if "erase" in x else "value"
            row = lambda name: plgpu.load(x[name + "_row"], layout=ROW)
            tile = lambda name: plgpu.load(x[name].at[:, mine], layout=TILE).astype(jnp.float32)
            plgpu.barrier_wait(barriers["keys_there"].at[slot])
            weights = write_weights(variant, x)
            plgpu.barrier_wait(barriers["early_there"])

            for part in range(own, tiles, groups):
                values = pl.ds(part * VALUE_TILE, VALUE_TILE)
                (expected,) = product((x["states"].at[values], x["k"].T))
                v = plgpu.load(x["v"].at[:, values].T, layout=TILE).astype(jnp.float32)
                residual, size = normalized(v * weight(x["value"]) - expected * weight(x[erase]))
                (errors,) = product((residual, x["solve"].T))
                x["v"].at[:, values].T[...] = (errors * by_row(size)).astype(dtype)
                dv = plgpu.load(x["residuals"].at[:, values], layout=TILE).astype(jnp.float32)
                # Of what is on its way, the last, dK, has a buffer of its own.
                plgpu.wait_smem_to_gmem(1 if part == own else 0, wait_read_only=True)
                staged.at[own][...] = (dv * by_row(row("value"), VALUE_TILE)).astype(dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(staged.at[own], hbm["dv"].at[batch, tokens, head, values])
            meet()

            states, dstates = x["states"].at[:, mine], x["dstates"].at[:, mine]
            pairs = [(x["outputs"], states), (x["residuals"], states), (x["v"], dstates)]
            pairs += [(x["outputs"], x["v"].T)] if first else []
            pairs += [(x["residuals"], x["v"].T)] if last else []
            dq, dk_erase, dk_write, *square = product(*pairs)
            end = jnp.sum(dk_write * tile("k"), axis=1) * row("write")
            if variant.gated:
                # <S, dS>, by value channel: only the sum over all rows matters.
                stay = zeros(VALUE_TILE, _KEY_TILE)
                for part in range(tiles):
                    values = pl.ds(part * VALUE_TILE, VALUE_TILE)
                    s, ds = (plgpu.load(a.at[values], layout=TILE).astype(jnp.float32) for a in (states, dstates))
                    stay = stay + s * ds
                end = end + jnp.sum(stay, axis=1) * x["start_row"][_C - 1]
            plgpu.commit_smem()
            plgpu.barrier_arrive(barriers["early_free"])

            plgpu.barrier_wait(barriers["queries_there"])
            query, read = query_weights(variant, scale, x)
            # dK of the chunk before has left its buffer.
            plgpu.wait_smem_to_gmem(1 if own < tiles else 0, wait_read_only=True)
            if first:
                scores[...] = (square[0] * weights * by_row(query)).astype(dtype)
            if last:
                r, c = index(0), index(1)
                total.at[0][...] = jnp.sum(jnp.where(r == c, square[-1], 0.0), axis=1)
                keyed = row("column")
                weights = weights * by_row(jnp.where(row("value") < 0, keyed, -keyed))
                system[...] = jnp.where(r > c, square[-1] * weights, 0.0).astype(dtype)
            dq = dq * by_row(read, _KEY_TILE)
            dk_erase = dk_erase * by_row(-row(erase), _KEY_TILE)
            dk_write = dk_write * by_row(row("write"), _KEY_TILE)
            meet()

            k, q = x["k"].at[:, mine], x["q"].at[:, mine]
            dq, dk_erase, dk_write = product((scores, k), (system, k), (scores.T, q), add=(dq, dk_erase, dk_write))
            (dk_write,) = product((system.T, k), add=(dk_write,))
            sums = {
                "query": jnp.sum(tile("q") * dq, axis=1),
                "erase": jnp.sum(tile("k") * dk_erase, axis=1),
                "write": jnp.sum(tile("k") * dk_write, axis=1),
                "end": end,
            }
            for j, name in enumerate(rows):
                partial.at[own, j][...] = sums[name]
            meet()

            def whole(name: str) -> Array:
                parts = [plgpu.load(partial.at[g, rows.index(name)], layout=ROW) for g in range(groups)]
                return functools.reduce(jnp.add, parts)

            queried, erased, written, ended = map(whole, rows)
            dk = dk_erase + dk_write
            if variant.normalize_q:
                square_of_norm = 1 / (square_sums(x["q"]) + NORM_EPS)
                dq = dq - tile("q") * by_row(square_of_norm * queried, _KEY_TILE)
            # Through KLA's r = rsqrt(|k|^2 + eps), whose logarithm has twice the diagonal, and through the norm.
            changes = []
            if variant.eps is not None:
                changes.append(plgpu.load(total.at[0], layout=ROW) * row("ratio") * row("ratio") * -2.0)
            if variant.normalize_k:
                square_of_norm = row("norm") * row("norm")
                changes = [change * square_of_norm * square_of_norm * NORM_EPS for change in changes]
                changes.append(-(erased + written) * square_of_norm)
            for change in changes:
                dk = dk + tile("k") * by_row(change, _KEY_TILE)

            def send(buffer: Ref, value: Array, name: str) -> None:
                buffer[...] = value.astype(dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(buffer, hbm[name].at[batch, tokens, head, mine])

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            if first:
                gates.at[0][...] = plgpu.load(total.at[0], layout=ROW)
                if variant.gated:
                    total.at[1][...], total.at[2][...] = queried + erased - written, ended
                    plgpu.commit_smem()
                    later = jnp.where(index(1) >= index(0), weight(total.at[1]), 0.0)
                    gates.at[1][...] = jnp.sum(later + weight(total.at[2]), axis=1)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(gates, hbm["gates"].at[batch, head, n])
            send(staged.at[own], dq, "dq")
            send(scores if first else system, dk, "dk")
            plgpu.barrier_arrive(barriers["all_free"])

        @pl.when(group == groups)
        def _copy() -> None:
            if GRADIENT_REGISTERS is not None and groups == 2:
                plgpu.set_max_registers(GRADIENT_REGISTERS[1], action="decrease")
            pl.loop(0, count)(copy_chunk)
            plgpu.barrier_wait(barriers["early_free"])
            plgpu.barrier_wait(barriers["all_free"])

        for own in range(groups):

            @pl.when(group == own)
            def _compute(own: int = own) -> None:
                if GRADIENT_REGISTERS is not None and groups == 2:
                    plgpu.set_max_registers(GRADIENT_REGISTERS[0], action="increase")
                pl.loop(0, count)(lambda i: compute_chunk(i, own))
                plgpu.wait_smem_to_gmem(0)

        # Nobody leaves early: a warpgroup that exits while others use the tensor cores has led to illegal instructions.
        plgpu.barrier_arrive(barriers["done"])
        plgpu.barrier_wait(barriers["done"])

    return plgpu.kernel(
        body,
        out_type=tuple(results.values()),
        scratch_types=buffers,
        grid=(programs,),
        grid_names=("program",),
        num_threads=groups + 1,
        thread_name="group",
        interpret=interpret,
        compiler_params=COMPILER,
    )(*inputs.values())
