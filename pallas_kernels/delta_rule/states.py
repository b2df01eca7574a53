"""The two passes over states, forward with the state and back with its gradient: one kernel with two steps.

The chunk form. With G the sums of log decays in a chunk of C = 64 tokens, L_ij = e^{G_i - G_j} for i >= j, and S_0 the
state [K, V] before the chunk,
    A = strict_tril(diag(beta) (K K^T o L)),   E = (I + A)^{-1} diag(beta) (V - e^G K S_0),
    O = e^G Q S_0 + (Q K^T o L) E,             S_C = e^{G_C} S_0 + (e^{G_C - G} K)^T E.
L2 norms, KLA's coefficient, strengths and `scale` are weights of rows and columns around products of raw q, k and v.
Inverses and weights come from `inverse.solve`, which works on all chunks at once.

Backward, from the last chunk to the first, with X the inverse, P the scores, dS the gradient of a chunk's last state,
    dE = P^T dO + w K dS,   dR = X^T dE,   dS <- e^{G_C} dS + (e^G Q)^T dO - (e^G K)^T dR,
where w are the weights that errors are written with, and R the residual before the inverse. The rest of the gradients
is local to chunks: `gradients` computes it for all chunks at once, from dR and the saved states and their gradients.

Floors at B, T, H, K, V = 8, 2048, 16, 128, 128 in bfloat16, for a card that copies 4.25 TB/s and reaches 724 TFLOP/s.
    Bytes: q, k, v and o once, 268 MB, and inverses and vectors, 41 MB: 0.073 ms.
    Operations: 9.4 MFLOP a chunk, 39 GFLOP, 0.053 ms.
Backward the same. The states, 16 bit, are 134 MB more, 0.032 ms, in each direction.

Who does what. A program is one row of the batch and one value head, all of V or a part of it (`Config.tiles`), and
walks over the chunks in order. Its warpgroups:
    Scores, one: issues the copies, one chunk ahead, into three stages; then Q K^T o L, into two slots.
    State, one for each 64 value columns: keeps the transposed state [64 v, K] in registers, float32. Transposed, every
        left operand (the narrow state, residuals, errors) is what the warpgroup has just computed, in the layout that
        wgmma takes from registers, and the right ones (k, q, the inverse, the scores) lie in shared memory as copied or
        prepared: nothing of the chain from state to state passes through shared memory.
    arrived[stage]: the copies are there. ready[slot]: scores are prepared. consumed[stage]: what was copied, and its
    scores, may be overwritten. Scores run at most two chunks ahead; no warpgroup waits for one that waits for it.

Numbers. q, k, v, the state as an operand, errors and scores have the dtype of k, accumulators and the state itself are
float32. Inverse and residuals are float16, the residuals brought to at most 1 per value channel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.delta_rule.tiles import (
    COMPILER,
    TILE,
    Products,
    Ref,
    Variant,
    by_row,
    normalized,
    query_weights,
    tiles_buffer,
    weight,
    write_weights,
    zeros,
)
from pallas_kernels.delta_rule.tuning import CHUNK, VALUE_TILE, Config

Array = jax.Array

_C = CHUNK
_MOST = 128  # key columns of a state that are narrow all at once, as far as registers go
_PART = 64  # of wider states, at once
_SLOTS = 2  # scores of chunks: one being read, one being written


def _score(product: Products, variant: Variant, scale: float, x: dict[str, Ref]) -> None:
    """Writes "scores", of queries against writes, and "read", what the state is read with."""
    (scores,) = product((x["q"], x["k"].T))
    query, x["read"][...] = query_weights(variant, scale, x)
    x["scores"][...] = (scores * write_weights(variant, x) * by_row(query)).astype(x["scores"].dtype)
    plgpu.commit_smem()


def _from_state(product: Products, state: Array, *refs: Ref) -> tuple[Array, ...]:
    """The transposed state [64 v, K] times each of `refs` [C, K], transposed."""
    K = state.shape[1]
    width = K if K <= _MOST else _PART
    total: tuple[Array, ...] | None = None
    for at in range(0, K, width):
        # The barrier keeps the narrow copies from being made all at once.
        state = state if at == 0 else lax.optimization_barrier(state)
        narrow = state[:, at : at + width].astype(refs[0].dtype)
        total = product(*((narrow, x.at[:, pl.ds(at, width)].T) for x in refs), add=total)
    assert total is not None
    return total


def _advance(
    product: Products, variant: Variant, state: Array, x: dict[str, Ref], wait: Callable[[], None] | None
) -> tuple[Array | None, Array]:
    """The transposed output [64 v, C] of a chunk, and the transposed state [64 v, K] after it.

    x: what was copied, and what `_score` wrote, which is there once `wait` returns; without `wait` there is no output,
    without "v" the values are zeros.
    """
    dtype = x["k"].dtype
    # With a wide state the tensor cores cannot work on output and state at once, for want of registers.
    wide = state.shape[1] > _MOST and wait is not None
    expected, *read = _from_state(product, state, *((x["k"], x["q"]) if wide else (x["k"],)))
    residual = expected * -weight(x["erase" if "erase" in x else "value"])
    if "v" in x:
        residual = residual + plgpu.load(x["v"].T, layout=TILE).astype(jnp.float32) * weight(x["value"])
    # Value channels do not mix in what follows.
    residual, size = normalized(residual)
    (errors,) = product((residual, x["solve"].T))
    errors = errors * by_row(size)
    writes = (errors * weight(x["write"])).astype(dtype)
    if wide:
        assert wait is not None
        wait()
        (output,) = product((errors.astype(dtype), x["scores"].T), add=(read[0] * weight(x["read"]),))
        state = state * x["start"][_C - 1] if variant.gated else state
        return output.astype(dtype), product((writes, x["k"]), add=(state,))[0]
    # The narrow copy of the state is made again: kept, it would take 32 registers through all of the above.
    state = lax.optimization_barrier(state)
    memory = state.astype(dtype)
    if variant.gated:
        state = state * x["start"][_C - 1]
    if wait is None:
        return None, product((writes, x["k"]), add=(state,))[0]
    output, state = product((memory, x["q"].T), (writes, x["k"]), add=(zeros(VALUE_TILE, _C), state))
    wait()
    (output,) = product((errors.astype(dtype), x["scores"].T), add=(output * weight(x["read"]),))
    return output, state


def _retreat(
    product: Products, variant: Variant, state: Array, x: dict[str, Ref], wait: Callable[[], None] | None
) -> tuple[Array, Array]:
    """The transposed gradient of the residual [64 v, C] of a chunk, and that of the state before it, [64 v, K].

    state: the gradient of the state after the chunk. x: as for `_advance`, with the outputs' gradients for "v".
    """
    dtype = x["k"].dtype
    (errors,) = _from_state(product, state, x["k"])
    outputs = plgpu.load(x["v"].T, layout=TILE)
    errors = errors * weight(x["write"])
    assert wait is not None
    wait()
    (errors,) = product((outputs, x["scores"]), add=(errors,))
    errors, size = normalized(errors)
    outputs = (outputs.astype(jnp.float32) * weight(x["read"])).astype(dtype)
    if variant.gated:
        state = state * x["start"][_C - 1]
    residual, state = product((errors, x["solve"]), (outputs, x["q"]), add=(zeros(VALUE_TILE, _C), state))
    residual = residual * by_row(size)
    erased = (residual * -weight(x["erase" if "erase" in x else "value"])).astype(dtype)
    (state,) = product((erased, x["k"]), add=(state,))
    return residual, state


def walk(
    q: Array,
    k: Array,
    v: Array | None,
    inverses: Array,
    vectors: Array,
    initial_state: Array | None,
    *,
    scale: float,
    variant: Variant,
    config: Config,
    backward: bool = False,
    results: bool = True,
    save_states: bool = False,
    begin: Array | None = None,
    interpret: Any = None,
) -> tuple[Array, ...]:
    """The transposed last state [B, H, V, K] in float32; where asked for, output [B, T, H, V] and states before chunks.

    Backward, the last chunk comes first: from the outputs' gradients and the final state's to the initial state's, and
    to the residuals' [B, T, H, V] and those of the states after chunks.

    Args:
        q, k: [B, T, Hk, K], 16 bit, T a multiple of 8.
        v: [B, T, H, V], the values or, backward, the outputs' gradients; None for what the row makes of a state: the
            walk starts from the identity, and the last state is the row's transition [B, H, K, K].
        inverses, vectors: of `inverse.solve`.
        initial_state: transposed, [B, H, V, K], of the first chunk of the walk; None for zeros.
        results: whether there is an output.
        save_states: whether there are states, [B, H, N, V, K] in the dtype of k.
        begin: how many of the first chunks of each walk to leave out, int32 [B, H], 0 to N; if any, it starts from
            zeros. None for none. Without results only.
    """
    B, T, Hk, K = k.shape
    H, N = inverses.shape[1:3]
    V = K if v is None else v.shape[3]
    tiles, stages = config.tiles, config.stages
    parts = V // (VALUE_TILE * tiles)
    dtype = k.dtype
    product = Products(interpret is not None)
    step = _retreat if backward else _advance
    scored = results or backward

    inputs = {"k": k, "solve": inverses, "vectors": vectors}
    if scored:
        inputs["q"] = q
    if v is not None:
        inputs["v"] = v
    if initial_state is not None:
        inputs["initial"] = initial_state
    if begin is not None:
        inputs["begin"] = begin
    outputs = {"final": jax.ShapeDtypeStruct((B, H, V, K), jnp.float32)}
    if results:
        outputs["output"] = jax.ShapeDtypeStruct((B, T, H, V), dtype)
    if save_states:
        outputs["states"] = jax.ShapeDtypeStruct((B, H, N, V, K), dtype)

    names = variant.vectors
    sums = ("coarse_row", "fine_row") if variant.gated and scored else ()
    keys = tuple(name for name in ("k", "q") if name in inputs)
    values: dict[str, Any] = {} if v is None else {"v": tiles_buffer((stages, tiles, _C, VALUE_TILE), dtype)}
    by_key: dict[str, Any] = {name: tiles_buffer((stages, _C, K), dtype) for name in keys}
    scratch = {
        "loaded": {
            **by_key,
            **values,
            "solve": tiles_buffer((stages, _C, _C), jnp.float16),
            "vectors": plgpu.SMEM((stages, len(names), _C), jnp.float32),
            **{name: plgpu.SMEM((_SLOTS, _C), jnp.float32) for name in sums},
        },
        "prepared": {
            "scores": tiles_buffer((_SLOTS, _C, _C), dtype),
            "read": plgpu.SMEM((_SLOTS, _C), jnp.float32),
        },
        "staged": tiles_buffer((tiles, 2, _C, 64), dtype),
        "arrived": plgpu.Barrier(num_arrivals=2 + len(keys) + tiles * len(values) + len(sums), num_barriers=stages),
        "ready": plgpu.Barrier(num_barriers=_SLOTS),
        "consumed": plgpu.Barrier(num_arrivals=tiles, num_barriers=stages),
        "done": plgpu.Barrier(num_arrivals=tiles + 1),
    }

    def body(*refs: Ref, loaded, prepared, staged, arrived, ready, consumed, done) -> None:
        hbm = dict(zip((*inputs, *outputs), refs, strict=True))
        program, group = lax.axis_index("program"), lax.axis_index("group")
        part, head = lax.rem(program, parts), lax.rem(lax.div(program, parts), H)
        batch = lax.div(program, parts * H)
        key_head = lax.div(head, H // Hk)
        skipped = jnp.int32(0) if begin is None else hbm["begin"][batch, head]
        count = N if begin is None else N - skipped

        def place(n: Any) -> Any:
            """The chunk that is the n-th of the walk."""
            n = n if begin is None else n + skipped
            return N - 1 - n if backward else n

        def fetch(n: Any) -> None:
            stage, slot = lax.rem(n, stages), lax.rem(n, _SLOTS)
            n = place(n)
            rows = pl.ds(n * _C, _C)
            barrier = arrived.at[stage]
            for key in keys:
                plgpu.copy_gmem_to_smem(hbm[key].at[batch, rows, key_head], loaded[key].at[stage], barrier)
            for tile in range(tiles if values else 0):
                columns = pl.ds((part * tiles + tile) * VALUE_TILE, VALUE_TILE)
                source = hbm["v"].at[batch, rows, head, columns]
                plgpu.copy_gmem_to_smem(source, loaded["v"].at[stage, tile], barrier)
            for name in ("solve", "vectors"):
                plgpu.copy_gmem_to_smem(hbm[name].at[batch, head, n], loaded[name].at[stage], barrier)
            for j, name in enumerate(sums):
                plgpu.copy_gmem_to_smem(hbm["vectors"].at[batch, head, n, j], loaded[name].at[slot], barrier)

        def at(stage: Any) -> dict[str, Ref]:
            x = {name: loaded[name].at[stage] for name in (*keys, "solve")}
            x |= {name: loaded["vectors"].at[stage, j] for j, name in enumerate(names)}
            return x | {"start_row": x["start"]} if variant.gated else x

        def set_registers(wanted: int | None) -> None:
            if wanted is not None:
                launch = 65536 // (128 * (tiles + 1)) // 8 * 8
                plgpu.set_max_registers(wanted, action="increase" if wanted > launch else "decrease")

        @pl.when(group == tiles)
        def _score_chunks() -> None:
            set_registers(config.score_registers)
            pl.when(count > 0)(lambda: fetch(jnp.int32(0)))

            @pl.loop(0, count)
            def _chunk(n: Array) -> None:
                stage, slot = lax.rem(n, stages), lax.rem(n, _SLOTS)

                def freed(age: int) -> None:
                    @pl.when(n >= age)
                    def _wait() -> None:
                        plgpu.barrier_wait(consumed.at[lax.rem(n - age, stages)])

                def fetch_next() -> None:
                    @pl.when(n + 1 < count)
                    def _fetch() -> None:
                        fetch(n + 1)

                # With three stages, chunk n - 2 frees the slot that this chunk's scores go to, and the stage of chunk
                # n + 1. With two, the slot was freed a chunk ago, and chunk n - 1 frees the stage.
                if stages == 3:
                    freed(_SLOTS)
                    fetch_next()
                if scored:
                    plgpu.barrier_wait(arrived.at[stage])
                    x = at(stage) | {name: ref.at[slot] for name, ref in prepared.items()}
                    x |= {name: loaded[name].at[slot] for name in sums}
                    _score(product, variant, scale, x)
                    plgpu.barrier_arrive(ready.at[slot])
                if stages == 2:
                    freed(1)
                    fetch_next()

            # Every completion of a barrier has to be seen by those who wait on it.
            for age in reversed(range(1, stages)):

                @pl.when(count >= age)
                def _last(age: int = age) -> None:
                    plgpu.barrier_wait(consumed.at[lax.rem(count - age, stages)])

        @pl.when(group < tiles)
        def _advance_state() -> None:
            set_registers(config.state_registers)
            columns = pl.ds((part * tiles + group) * VALUE_TILE, VALUE_TILE)
            if initial_state is not None:
                first = plgpu.load(hbm["initial"].at[batch, head, columns], layout=TILE, optimized=False)
            elif v is None:
                at_row, at_column = (
                    plgpu.broadcasted_iota(jnp.int32, (VALUE_TILE, K), axis, layout=TILE) for axis in (0, 1)
                )
                one = 1.0 if begin is None else jnp.where(skipped == 0, 1.0, 0.0)
                first = jnp.where(at_row + (part * tiles + group) * VALUE_TILE == at_column, one, 0.0)
            else:
                first = zeros(VALUE_TILE, K)

            def chunk(n: Array, state: Array) -> Array:
                stage, slot = lax.rem(n, stages), lax.rem(n, _SLOTS)
                sends = K // 64 if save_states else 0  # before the output

                def send(j: int, write: Callable[[Ref], None], target: Ref) -> None:
                    buffer = staged.at[group, lax.rem(n * (sends + 1) + j, 2)]
                    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                    write(buffer)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(buffer, target)

                for j in range(sends):

                    def write_state(buffer: Ref, j: int = j) -> None:
                        buffer[...] = state[:, j * 64 : (j + 1) * 64].astype(dtype)

                    send(j, write_state, hbm["states"].at[batch, head, place(n), columns, pl.ds(j * 64, 64)])
                plgpu.barrier_wait(arrived.at[stage])
                x = at(stage) | {name: loaded[name].at[stage, group] for name in values}
                x |= {name: ref.at[slot] for name, ref in prepared.items()}
                wait = (lambda: plgpu.barrier_wait(ready.at[slot])) if scored else None
                output, state = step(product, variant, state, x, wait)
                # Values were read by ordinary loads; the fence orders these before the copy that overwrites them.
                plgpu.commit_smem()
                plgpu.barrier_arrive(consumed.at[stage])

                def write_output(buffer: Ref) -> None:
                    assert output is not None
                    buffer.T[...] = output.astype(dtype)

                if results:
                    send(sends, write_output, hbm["output"].at[batch, pl.ds(place(n) * _C, _C), head, columns])
                return state

            last = lax.fori_loop(0, count, chunk, first)
            hbm["final"].at[batch, head, columns][...] = last
            plgpu.wait_smem_to_gmem(0)

        # Nobody leaves early: a warpgroup that exits while others use the tensor cores has led to illegal instructions.
        plgpu.barrier_arrive(done)
        plgpu.barrier_wait(done)

    return plgpu.kernel(
        body,
        out_type=tuple(outputs.values()),
        scratch_types=scratch,
        grid=(B * H * parts,),
        grid_names=("program",),
        num_threads=tiles + 1,
        thread_name="group",
        interpret=interpret,
        compiler_params=COMPILER,
    )(*inputs.values())
