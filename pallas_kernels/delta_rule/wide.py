"""The gradients local to a chunk, as `gradients` has them, where K or V is beyond 128 and a chunk's states fit nowhere.

Two kernels, both over value tiles of 64. `_errors`, for each chunk: the errors E from the states, dV, and dP and dA,
which are sums over values, with their weights. `_keys`, for each chunk and each part of the key columns: sums over
values of dO S^T, dR S^T and E dS^T, and then what dP and dA add. What takes sums over all key columns, the gradients of
norms, strengths and decays, is left to the compiler: `_finish`.

Floors at B, T, H, K, V = 4, 4096, 6, 256, 512 in bfloat16, 1536 chunks: `_errors` reads k, v, dO, dR, the inverse and
S, 498 KB a chunk, and writes E, dV, dP and dA, 147 KB; `_keys` reads q, k, dO, dR, E, S and dS, 786 KB and, for each
further part of 128 key columns, dO, dR, E, dP and dA again, 213 KB, and writes dQ and dK, 66 KB: 2.6 GB together,
0.62 ms at 4.25 TB/s. 130 MFLOP a chunk, 200 GFLOP, 0.28 ms at 724 TFLOP/s.

Who does what. In `_errors` two warpgroups share the value tiles of a chunk; each copies its own next tile as soon as
the last is used, and they meet once a chunk. In `_keys` one warpgroup copies, two value tiles ahead, and for each 64
key columns another computes; these do not meet.
"""

from __future__ import annotations

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
    tiles_buffer,
    weight,
    write_weights,
    zeros,
)
from pallas_kernels.delta_rule.tuning import CHUNK, GRADIENT_REGISTERS, MULTIPROCESSORS, VALUE_TILE

Array = jax.Array

_C = CHUNK
_KEY_TILE = 64  # key columns of a warpgroup
_STAGES = 2  # value tiles in use and on their way
_SUMS = ("query", "erase", "write", "end")  # over key columns


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
    """As `gradients.run`; K and V multiples of 64."""
    N = inverses.shape[2]
    options = {"variant": variant, "interpret": interpret}
    query = _query_weights(q, N, scale, variant)
    errors, dv, scores, system, strengths = _errors(
        k, v, outputs, residuals, states, inverses, vectors, query, **options
    )
    dq, dk, sums = _keys(q, k, outputs, residuals, errors, states, dstates, scores, system, vectors, query, **options)
    dq, dk, gates = _finish(q, k, dq, dk, sums, strengths, vectors, variant)
    return dq, dk, dv, gates


def _square_sums(x: Array) -> Array:
    return jnp.sum(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)


def _query_weights(q: Array, chunks: int, scale: float, variant: Variant) -> Array:
    """The weights of queries, [B, Hk, N, 64] in float32."""
    weights = lax.rsqrt(_square_sums(q) + NORM_EPS) if variant.normalize_q else jnp.ones((*q.shape[:3], 1), jnp.float32)
    weights = jnp.pad(scale * weights[..., 0], ((0, 0), (0, chunks * _C - q.shape[1]), (0, 0)))
    return jnp.swapaxes(weights, 1, 2).reshape(q.shape[0], q.shape[2], chunks, _C)


def _finish(
    q: Array, k: Array, dq: Array, dk: Array, sums: Array, strengths: Array, vectors: Array, variant: Variant
) -> tuple[Array, Array, Array]:
    """dq and dk through the norms, and the gates' gradients [B, H, N, 2, 64].

    sums: [B, H, N, parts, 4, 64], by `_SUMS`; strengths: the diagonal of dR E^T, [B, H, N, 64].
    """
    B, T, Hk, _ = k.shape
    H = dq.shape[2]
    queried, erased, written, ended = jnp.moveaxis(sums.sum(3), 3, 0)
    decays = jnp.zeros_like(strengths)
    if variant.gated:
        later = queried + erased - written
        decays = lax.cumsum(later, 3, reverse=True) + ended.sum(-1, keepdims=True)

    def by_token(x: Array) -> Array:
        return jnp.swapaxes(x.reshape(B, H, -1), 1, 2)[:, :T, :, None]

    def vector(name: str) -> Array:
        return vectors[:, :, :, variant.vectors.index(name)]

    def by_value_head(x: Array) -> Array:
        return x if Hk == H else jnp.repeat(x, H // Hk, 2)

    dtype = k.dtype
    if variant.normalize_q:
        dq = dq - by_value_head(q.astype(jnp.float32) / (_square_sums(q) + NORM_EPS)) * by_token(queried)
    # As in `gradients`: through KLA's coefficient, and through the norm.
    changes = []
    if variant.eps is not None:
        changes.append(strengths * vector("ratio") * vector("ratio") * -2.0)
    if variant.normalize_k:
        square_of_norm = vector("norm") * vector("norm")
        changes = [change * square_of_norm * square_of_norm * NORM_EPS for change in changes]
        changes.append(-(erased + written) * square_of_norm)
    if changes:
        dk = dk + by_value_head(k.astype(jnp.float32)) * by_token(sum(changes[1:], changes[0]))
    return dq.astype(dtype), dk.astype(dtype), jnp.stack([strengths, decays], 3)


def _errors(
    k: Array,
    v: Array,
    outputs: Array,
    residuals: Array,
    states: Array,
    inverses: Array,
    vectors: Array,
    query: Array,
    *,
    variant: Variant,
    interpret: Any,
) -> tuple[Array, Array, Array, Array, Array]:
    """E and dV [B, T, H, V], weighted dP and dA [B, H, N, 64, 64], and the diagonal of dR E^T, [B, H, N, 64]."""
    B, T, Hk, K = k.shape
    H, V = v.shape[2:]
    N = inverses.shape[2]
    dtype = k.dtype
    tiles = V // VALUE_TILE
    groups = min(2, tiles)
    units = B * H * N
    programs = min(MULTIPROCESSORS, units)
    product = Products(interpret is not None)
    names, columns = variant.vectors, variant.column_vectors
    inputs = {
        "k": k,
        "solve": inverses,
        "vectors": vectors,
        "query": query,
        "v": v,
        "outputs": outputs,
        "residuals": residuals,
        "states": states,
    }
    results = {
        "errors": jax.ShapeDtypeStruct((B, T, H, V), dtype),
        "dv": jax.ShapeDtypeStruct((B, T, H, V), dtype),
        "scores": jax.ShapeDtypeStruct((B, H, N, _C, _C), dtype),
        "system": jax.ShapeDtypeStruct((B, H, N, _C, _C), dtype),
        "strengths": jax.ShapeDtypeStruct((B, H, N, _C), jnp.float32),
    }
    buffers: dict[str, Any] = {
        "shared": {
            "k": tiles_buffer((1, _C, K), dtype),
            "solve": tiles_buffer((1, _C, _C), jnp.float16),
            "by_column": plgpu.SMEM((2, len(columns), _C), jnp.float32),
            "by_row": plgpu.SMEM((2, len(names), _C), jnp.float32),
            "query": plgpu.SMEM((2, _C), jnp.float32),
        },
        "own": {
            "states": tiles_buffer((groups, VALUE_TILE, K), dtype),
            **{name: tiles_buffer((groups, _C, VALUE_TILE), dtype) for name in ("v", "outputs", "residuals")},
            # What is sent: errors and dV and, as the last of these are under way, dP and dA.
            **{name: tiles_buffer((groups, _C, VALUE_TILE), dtype) for name in ("errors", "dv")},
        },
        # What the second warpgroup has of dP and dA.
        "parts": plgpu.SMEM((2, _C, _C), jnp.float32),
        "strengths": plgpu.SMEM((_C,), jnp.float32),
        "unit_there": plgpu.Barrier(num_arrivals=5),
        "first_there": plgpu.Barrier(num_arrivals=2, num_barriers=groups),
        "last_there": plgpu.Barrier(num_arrivals=2, num_barriers=groups),
        "met": plgpu.Barrier(num_arrivals=groups),
        "done": plgpu.Barrier(num_arrivals=groups),
    }

    def body(*refs: Ref, shared, own, parts, strengths, **barriers) -> None:
        hbm = dict(zip((*inputs, *results), refs, strict=True))
        program, group = lax.axis_index("program"), lax.axis_index("group")
        count = lax.div(units - program + programs - 1, programs)

        def where(i: Any) -> tuple[Any, Any, Any]:
            unit = program + i * programs
            head = lax.div(unit, N)
            return lax.div(head, H), lax.rem(head, H), lax.rem(unit, N)

        def fetch_unit(i: Any) -> None:
            batch, head, n = where(i)
            key_head, slot, there = lax.div(head, H // Hk), lax.rem(i, 2), barriers["unit_there"]
            plgpu.copy_gmem_to_smem(hbm["k"].at[batch, pl.ds(n * _C, _C), key_head], shared["k"].at[0], there)
            plgpu.copy_gmem_to_smem(hbm["solve"].at[batch, head, n], shared["solve"].at[0], there)
            vectors = hbm["vectors"].at[batch, head, n]
            plgpu.copy_gmem_to_smem(vectors.at[pl.ds(0, len(columns))], shared["by_column"].at[slot], there)
            plgpu.copy_gmem_to_smem(vectors, shared["by_row"].at[slot], there)
            plgpu.copy_gmem_to_smem(hbm["query"].at[batch, key_head, n], shared["query"].at[slot], there)

        def fetch(step: Any, which: int, names: tuple[str, ...], barrier: str) -> None:
            """Copies of a value tile of the warpgroup, `step` counting its tiles over all chunks."""
            mine = len(range(which, tiles, groups))
            batch, head, n = where(lax.div(step, mine))
            columns = pl.ds((lax.rem(step, mine) * groups + which) * VALUE_TILE, VALUE_TILE)
            for name in names:
                states = name == "states"
                source = (
                    hbm[name].at[batch, head, n, columns]
                    if states
                    else hbm[name].at[batch, pl.ds(n * _C, _C), head, columns]
                )
                plgpu.copy_gmem_to_smem(source, own[name].at[which], barriers[barrier].at[which])

        def compute_chunk(i: Array, which: int) -> None:
            mine = len(range(which, tiles, groups))
            batch, head, n = where(i)
            slot, tokens = lax.rem(i, 2), pl.ds(n * _C, _C)
            # As in `gradients`: an index that the compiler does not know keeps descriptors out of registers.
            nought = lax.optimization_barrier(lax.rem(i, 1))
            x = {name: shared[name].at[nought] for name in ("k", "solve")}
            x |= {name: ref.at[nought + which] for name, ref in own.items()}
            x |= {name: shared["by_column"].at[slot, j] for j, name in enumerate(columns)}
            x |= {name + "_row": shared["by_row"].at[slot, j] for j, name in enumerate(names)}
            erase = "erase" if "erase" in x else "value"
            row = lambda name: plgpu.load(x[name + "_row"], layout=ROW)
            plgpu.barrier_wait(barriers["unit_there"])

            def tile(j: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
                step = i * mine + j
                values = pl.ds((j * groups + which) * VALUE_TILE, VALUE_TILE)

                def fetch_next(names: tuple[str, ...], barrier: str) -> None:
                    # The fence orders what was read before the copy that overwrites it.
                    plgpu.commit_smem()

                    @pl.when(step + 1 < count * mine)
                    def _fetch() -> None:
                        fetch(step + 1, which, names, barrier)

                plgpu.barrier_wait(barriers["first_there"].at[which])
                (expected,) = product((x["states"], x["k"].T))
                v = plgpu.load(x["v"].T, layout=TILE).astype(jnp.float32)
                residual, size = normalized(v * weight(x["value"]) - expected * weight(x[erase]))
                fetch_next(("states", "v"), "first_there")
                (errors,) = product((residual, x["solve"].T))
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                x["errors"].T[...] = (errors * by_row(size)).astype(dtype)
                plgpu.barrier_wait(barriers["last_there"].at[which])
                dv = plgpu.load(x["residuals"], layout=TILE).astype(jnp.float32)
                x["dv"][...] = (dv * by_row(row("value"), VALUE_TILE)).astype(dtype)
                plgpu.commit_smem()
                for name in ("errors", "dv"):
                    plgpu.copy_smem_to_gmem(x[name], hbm[name].at[batch, tokens, head, values])
                sums = product((x["outputs"], x["errors"].T), (x["residuals"], x["errors"].T), add=sums)
                fetch_next(("outputs", "residuals"), "last_there")
                return sums

            dp, da = lax.fori_loop(0, mine, tile, (zeros(_C, _C), zeros(_C, _C)))

            def meet() -> None:
                plgpu.commit_smem()
                if groups > 1:
                    plgpu.barrier_arrive(barriers["met"])
                    plgpu.barrier_wait(barriers["met"])

            if which == 1:
                for part, value in enumerate((dp, da)):
                    parts.at[part][...] = value
            meet()
            if which == 0:

                @pl.when(i + 1 < count)
                def _fetch() -> None:
                    fetch_unit(i + 1)

                if groups > 1:
                    dp, da = (
                        value + plgpu.load(parts.at[part], layout=TILE, optimized=False)
                        for part, value in enumerate((dp, da))
                    )
                r, c = index(0), index(1)
                weights = write_weights(variant, x)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                strengths[...] = jnp.sum(jnp.where(r == c, da, 0.0), axis=1)
                query = plgpu.load(shared["query"].at[slot], layout=ROW)
                x["errors"][...] = (dp * weights * by_row(query)).astype(dtype)
                keyed = row("column")
                weights = weights * by_row(jnp.where(row("value") < 0, keyed, -keyed))
                x["dv"][...] = jnp.where(r > c, da * weights, 0.0).astype(dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(x["errors"], hbm["scores"].at[batch, head, n])
                plgpu.copy_smem_to_gmem(x["dv"], hbm["system"].at[batch, head, n])
                plgpu.copy_smem_to_gmem(strengths, hbm["strengths"].at[batch, head, n])
            # Nobody writes parts that are still read.
            meet()

        for which in range(groups):

            @pl.when(group == which)
            def _compute(which: int = which) -> None:
                if which == 0:
                    fetch_unit(jnp.int32(0))
                fetch(jnp.int32(0), which, ("states", "v"), "first_there")
                fetch(jnp.int32(0), which, ("outputs", "residuals"), "last_there")
                pl.loop(0, count)(lambda i: compute_chunk(i, which))
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
        num_threads=groups,
        thread_name="group",
        interpret=interpret,
        compiler_params=COMPILER,
    )(*inputs.values())


def _keys(
    q: Array,
    k: Array,
    outputs: Array,
    residuals: Array,
    errors: Array,
    states: Array,
    dstates: Array,
    scores: Array,
    system: Array,
    vectors: Array,
    query: Array,
    *,
    variant: Variant,
    interpret: Any,
) -> tuple[Array, Array, Array]:
    """dq and dk [B, T, H, K], float32 where they go on through norms, and sums [B, H, N, K / 64, 4, 64] by `_SUMS`."""
    B, T, Hk, K = k.shape
    H, V = outputs.shape[2:]
    N = scores.shape[2]
    dtype = k.dtype
    width = 2 * _KEY_TILE if K % (2 * _KEY_TILE) == 0 else _KEY_TILE  # key columns of a program
    groups, parts, tiles = width // _KEY_TILE, K // width, V // VALUE_TILE
    units = B * H * N * parts
    programs = min(MULTIPROCESSORS, units)
    product = Products(interpret is not None)
    names = variant.vectors
    by_tile = {"outputs": outputs, "residuals": residuals, "errors": errors, "states": states, "dstates": dstates}
    by_unit = {"k": k, "q": q, "scores": scores, "system": system, "vectors": vectors, "query": query}
    inputs = by_tile | by_unit
    sent = {"dq": variant.normalize_q, "dk": variant.keyed}
    results = {
        **{name: jax.ShapeDtypeStruct((B, T, H, K), jnp.float32 if wide else dtype) for name, wide in sent.items()},
        "sums": jax.ShapeDtypeStruct((B, H, N, K // _KEY_TILE, len(_SUMS), _C), jnp.float32),
    }
    buffers: dict[str, Any] = {
        "tiled": {
            **{name: tiles_buffer((_STAGES, _C, VALUE_TILE), dtype) for name in ("outputs", "residuals", "errors")},
            **{name: tiles_buffer((_STAGES, VALUE_TILE, width), dtype) for name in ("states", "dstates")},
        },
        "once": {
            **{name: tiles_buffer((1, _C, width), dtype) for name in ("k", "q")},
            **{name: tiles_buffer((1, _C, _C), dtype) for name in ("scores", "system")},
            "vectors": plgpu.SMEM((1, len(names), _C), jnp.float32),
            "query": plgpu.SMEM((1, _C), jnp.float32),
        },
        "staged": tiles_buffer((groups, _C, _KEY_TILE), jnp.float32 if any(sent.values()) else dtype),
        "sums": plgpu.SMEM((groups, len(_SUMS), _C), jnp.float32),
        "tile_there": plgpu.Barrier(num_arrivals=len(by_tile), num_barriers=_STAGES),
        "tile_free": plgpu.Barrier(num_arrivals=groups, num_barriers=_STAGES),
        "unit_there": plgpu.Barrier(num_arrivals=len(by_unit)),
        "unit_free": plgpu.Barrier(num_arrivals=groups),
        "done": plgpu.Barrier(num_arrivals=groups + 1),
    }
    if len({bool(wide) for wide in sent.values()}) > 1:
        buffers["narrow"] = tiles_buffer((groups, _C, _KEY_TILE), dtype)

    def body(*refs: Ref, tiled, once, staged, sums, narrow=None, **barriers) -> None:
        hbm = dict(zip((*inputs, *results), refs, strict=True))
        program, group = lax.axis_index("program"), lax.axis_index("group")
        count = lax.div(units - program + programs - 1, programs)

        def where(i: Any) -> tuple[Any, Any, Any, Any]:
            unit = program + i * programs
            part, unit = lax.rem(unit, parts), lax.div(unit, parts)
            head = lax.div(unit, N)
            return lax.div(head, H), lax.rem(head, H), lax.rem(unit, N), part

        def copy_unit(i: Any) -> None:
            batch, head, n, part = where(i)
            key_head, there = lax.div(head, H // Hk), barriers["unit_there"]

            @pl.when(i > 0)
            def _free() -> None:
                plgpu.barrier_wait(barriers["unit_free"])

            for name in by_unit:
                source = hbm[name].at[batch, head, n] if name in ("scores", "system", "vectors") else None
                if name == "query":
                    source = hbm[name].at[batch, key_head, n]
                if source is None:
                    source = hbm[name].at[batch, pl.ds(n * _C, _C), key_head, pl.ds(part * width, width)]
                plgpu.copy_gmem_to_smem(source, once[name].at[0], there)

        def copy_tile(i: Array, j: Any) -> None:
            batch, head, n, part = where(i)
            step = i * tiles + j
            stage, values = lax.rem(step, _STAGES), pl.ds(j * VALUE_TILE, VALUE_TILE)

            @pl.when(step >= _STAGES)
            def _free() -> None:
                plgpu.barrier_wait(barriers["tile_free"].at[stage])

            for name in by_tile:
                if name in ("states", "dstates"):
                    source = hbm[name].at[batch, head, n, values, pl.ds(part * width, width)]
                else:
                    source = hbm[name].at[batch, pl.ds(n * _C, _C), head, values]
                plgpu.copy_gmem_to_smem(source, tiled[name].at[stage], barriers["tile_there"].at[stage])

        def copy_chunk(i: Array) -> None:
            # The first tiles do not wait until the chunk before is done with its keys.
            ahead = min(tiles, _STAGES)
            for j in range(ahead):
                copy_tile(i, j)
            copy_unit(i)
            pl.loop(ahead, tiles)(lambda j: copy_tile(i, j))

        def compute_chunk(i: Array, own: int) -> None:
            batch, head, n, part = where(i)
            mine = pl.ds(own * _KEY_TILE, _KEY_TILE)
            nought = lax.optimization_barrier(lax.rem(i, 1))
            x = {name: ref.at[nought] for name, ref in once.items()}
            x |= {name: x["vectors"].at[j] for j, name in enumerate(names)}
            row = lambda name: plgpu.load(x[name], layout=ROW)
            load = lambda ref: plgpu.load(ref, layout=TILE).astype(jnp.float32)
            erase = "erase" if "erase" in x else "value"

            def tile(j: Array, carried: tuple[Array, ...]) -> tuple[Array, ...]:
                *sums, stay = carried
                stage = lax.rem(i * tiles + j, _STAGES)
                plgpu.barrier_wait(barriers["tile_there"].at[stage])
                y = {name: ref.at[stage] for name, ref in tiled.items()}
                states, dstates = y["states"].at[:, mine], y["dstates"].at[:, mine]
                pairs = (y["outputs"], states), (y["residuals"], states), (y["errors"], dstates)
                added = product(*pairs, add=tuple(sums))
                if variant.gated:
                    stay = stay + jnp.sum(load(states) * load(dstates), axis=1)
                plgpu.commit_smem()
                plgpu.barrier_arrive(barriers["tile_free"].at[stage])
                return (*added, stay)

            nothing = zeros(_C, _KEY_TILE)
            none = plgpu.layout_cast(jnp.zeros((VALUE_TILE,), jnp.float32), ROW)
            dq, dk_erase, dk_write, stay = lax.fori_loop(0, tiles, tile, (nothing, nothing, nothing, none))

            plgpu.barrier_wait(barriers["unit_there"])
            end = jnp.sum(dk_write * load(x["k"].at[:, mine]), axis=1) * row("write")
            read = row("query")
            if variant.gated:
                end = end + stay * x["start"][_C - 1]
                read = read * row("start")
            dq = dq * by_row(read, _KEY_TILE)
            dk_erase = dk_erase * by_row(-row(erase), _KEY_TILE)
            dk_write = dk_write * by_row(row("write"), _KEY_TILE)
            k, q = x["k"].at[:, mine], x["q"].at[:, mine]
            pairs = (x["scores"], k), (x["system"], k), (x["scores"].T, q)
            dq, dk_erase, dk_write = product(*pairs, add=(dq, dk_erase, dk_write))
            (dk_write,) = product((x["system"].T, k), add=(dk_write,))

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            totals = {
                "query": jnp.sum(load(q) * dq, axis=1),
                "erase": jnp.sum(load(k) * dk_erase, axis=1),
                "write": jnp.sum(load(k) * dk_write, axis=1),
                "end": end,
            }
            for j, name in enumerate(_SUMS):
                sums.at[own, j][...] = totals[name]
            # The keys are read.
            plgpu.commit_smem()
            plgpu.barrier_arrive(barriers["unit_free"])
            plgpu.copy_smem_to_gmem(sums.at[own], hbm["sums"].at[batch, head, n, part * groups + own])
            for name, value in (("dq", dq), ("dk", dk_erase + dk_write)):
                buffer = (staged if sent[name] or narrow is None else narrow).at[own]
                if name == "dk" and (narrow is None):
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                buffer[...] = value.astype(buffer.dtype)
                plgpu.commit_smem()
                columns = pl.ds(part * width + own * _KEY_TILE, _KEY_TILE)
                plgpu.copy_smem_to_gmem(buffer, hbm[name].at[batch, pl.ds(n * _C, _C), head, columns])

        @pl.when(group == groups)
        def _copy() -> None:
            if groups == 2:
                plgpu.set_max_registers(GRADIENT_REGISTERS[1], action="decrease")
            pl.loop(0, count)(copy_chunk)
            # Every completion of a barrier has to be seen by those who wait on it.
            for late in reversed(range(_STAGES)):

                @pl.when(count * tiles > late)
                def _last(late: int = late) -> None:
                    plgpu.barrier_wait(barriers["tile_free"].at[lax.rem(count * tiles - 1 - late, _STAGES)])

            plgpu.barrier_wait(barriers["unit_free"])

        for own in range(groups):

            @pl.when(group == own)
            def _compute(own: int = own) -> None:
                if groups == 2:
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
