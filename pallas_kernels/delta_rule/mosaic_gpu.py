"""Forward pass of the delta rule on NVIDIA Hopper in Pallas Mosaic GPU: DeltaNet, Gated DeltaNet and KLA in one kernel.

Floors at B, T, H, K, V = 8, 2048, 16, 128, 128 in bfloat16, for a card that copies 4.25 TB/s and reaches 724 TFLOP/s.
    Bytes: q, k, v and o once, 268 MB, 0.063 ms. Final states add 8 MB, and twice that for turning them outside.
    Operations: 15.7 MFLOP a chunk, of which 5.2 are the inverse; 4096 chunks, 64 GFLOP, 0.089 ms at that rate, which
    large products reach and products of 64 rows that wait for each other do not. Without the inverse, 0.059 ms.
The kernel itself has not been timed yet; it was laid out to take between 0.12 and 0.18 ms at this shape.

The chunk form. With G the sums of log decays in a chunk of C = 64 tokens, L_ij = e^{G_i - G_j} for i >= j, and S_0 the
state [K, V] before the chunk,
    A = strict_tril(diag(beta) (K K^T o L)),   E = (I + A)^{-1} diag(beta) (V - e^G K S_0),
    O = e^G Q S_0 + (Q K^T o L) E,             S_C = e^{G_C} S_0 + (e^{G_C - G} K)^T E.
L2 norms of q and k, KLA's r = rsqrt(||k||^2 + eps) on k and v, and `scale` are weights of rows and columns around the
same products of the raw q, k and v: they cost vectors, not passes. The norms of keys are the diagonal of K K^T.

Who does what. A program is one row of the batch and one value head, all of V or a part of it (`Config.tiles`), and
walks over the chunks in order. Its warpgroups:
    Prepare, one: issues the copies of q, k, v and gates, one chunk ahead, into three stages; then what no state enters:
        cumulative decays, K K^T, the inverse, Q K^T o L and the weights, into two slots of shared memory.
    State, one for each 64 value columns: keeps the transposed state [64 v, K] in registers, float32. Transposed, every
        left operand (the narrow state, residuals, errors) is what the warpgroup has just computed, in the layout that
        wgmma takes from registers, and the right ones (k, q, the inverse, the scores) lie in shared memory as copied or
        prepared: nothing of the chain from state to state passes through shared memory.
    arrived[stage]: the copies are there. ready[slot]: a chunk is prepared. consumed[stage]: its q, k, v, inverse and
    scores may be overwritten. Preparing runs at most two chunks ahead; no warpgroup waits for one that waits for it.

The inverse. Doubling from diagonal blocks of 2 to 64: X <- X - X (A o M) X, five rounds of two 64x64x64 products with
float32 accumulators. The operands are float16, after scaling the system by the roots of the strengths, which bounds it
and its inverse by 2 where the rule contracts. (The interpreter runs no per-thread code and wgmma has no 16x16 product,
so blocks of 16 in float32 registers were not to be had.) With bfloat16 for inverse and residuals the errors of o and S
at strengths up to 2 without decay were 5.9e-3 and 5.7e-3 (K = 64, 512 tokens, emulated, against float64), with float16
4.3e-3 and 3.7e-3. Rounding o alone makes 1.7e-3.

Numbers. q, k, v, the state as an operand, errors and scores are bfloat16, accumulators and the state itself float32.
Inverse and residuals are float16, the residuals brought to at most 1 per value channel. Decays are exponentials of
differences of two sums, one of multiples of 1/16, one of remainders: as good as sums over each span.

Room, K = V = 128: three stages of 48 KB, two slots of 16 KB, 16 KB for the inverse, 16 KB of output on its way out, and
vectors at 1 KB each: 220 of 227 KB, one program on a multiprocessor, 128 of 132 busy at the shape above. Registers: 184
of a state thread (state 64, its narrow copy 32, a product 32, values 32, two weights 16 each; below that the compiler
serialises wgmma) and 136 of a preparing one, which spills 100 bytes. K = V = 64: 192, without spills, and 140 KB.
Instructions a chunk, in the compiled code: 2,470 of a preparing warp, 670 of a state warp. So preparing is expected to
bound the time, and sharing it better (scores by the state warpgroups in turn; the small blocks of the inverse as
products of 16 columns instead of 64) is what to try first.

Single long rows (B H below the number of multiprocessors) leave most of the card idle here. Two ways, not taken yet:
    Two kernels: inverse and scores of all chunks in parallel first, 16 KB a chunk written and read back (0.03 ms at the
    shape above), then a state pass whose chain is three products a chunk. Helps where preparing bounds the chain.
    Pieces over time: a piece's affine map S -> P S + R needs P [K, K], carried like K more value columns from S = I;
    the maps are combined in order, then pieces run from true states. Exact; twice the products, in more programs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.delta_rule.tuning import CHUNK, VALUE_TILE, Config

Array = jax.Array
Ref = Any

_C = CHUNK
_TILE = plgpu.Layout.WGMMA  # [64 m, n] over the 128 threads of a warpgroup
_ROW = plgpu.Layout.WGMMA.reduce(1)  # one value per row of such a tile
_COLUMN = plgpu.Layout.WGMMA.reduce(0)  # one value per column
_LOG2_E = math.log2(math.e)
_TILE_ROWS = 8  # of a tile in shared memory
_SLOTS = 2  # prepared chunks: one being read, one being written

# 2^-130 is 0 in float32, up to what no product can show. A bound makes -inf harmless and the sums of a chunk exact.
_LEAST_LOG2_DECAY = -130.0
# Multiples of 1/16 down to 64 * -130 are exact in float32, and so are their sums and differences.
_GRAIN = 16.0


@dataclass(frozen=True)
class Variant:
    """What the kernel computes besides the plain rule; all of it is known when the program is built.

    gated: there is a log decay. eps: KLA's, or None for the other rules. normalize_q, normalize_k: L2 norms inside.
    initial: there is an initial state. save_states: the states before each chunk are an output too.
    """

    gated: bool
    normalize_q: bool = False
    normalize_k: bool = False
    eps: float | None = None
    initial: bool = False
    save_states: bool = False


def _tiles_buffer(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory that TMA writes and wgmma reads: tiles of 8 rows, swizzled over the width of a row."""
    size = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(shape[-1] * size * 8)
    tiling = plgpu.TilingTransform((_TILE_ROWS, swizzle // size))  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))  # type: ignore[abstract]


def _by_row(x: Array, width: int) -> Array:
    return lax.broadcast_in_dim(x, (x.shape[0], width), [0])


def _by_column(x: Array, height: int) -> Array:
    return lax.broadcast_in_dim(x, (height, x.shape[0]), [1])


def _index(dimension: int) -> Array:
    return plgpu.broadcasted_iota(jnp.int32, (_C, _C), dimension, layout=_TILE)


class _Products:
    """Matrix products on the tensor cores, or what stands for them where the kernel is interpreted.

    The interpreter has no wgmma whose left operand or initial accumulator is in registers; it gets the same product of
    the same rounded operands, in float32.
    """

    def __init__(self, interpreted: bool):
        self.interpreted = interpreted

    def __call__(self, *pairs: tuple[Any, Ref], add: tuple[Array, ...] | None = None) -> tuple[Array, ...]:
        """a @ b, or add + a @ b, for each pair: a in shared memory or registers (16 bit), b in shared memory.

        Reading an accumulator waits for the tensor cores, but nothing ties the wait to arithmetic on what was read:
        the barrier keeps the compiler from moving that before it.
        """
        if self.interpreted:
            out = tuple(self._emulated(a, b) for a, b in pairs)
            return out if add is None else tuple(x + y for x, y in zip(add, out, strict=True))

        def multiply(accumulators: tuple[Ref, ...]) -> None:
            for accumulator, (a, b) in zip(accumulators, pairs, strict=True):
                plgpu.wgmma(accumulator, a, b)

        if add is not None:
            out = pl.run_state(multiply)(tuple(plgpu.ACC.init(x) for x in add))
        else:

            def scoped(*accumulators: Ref) -> tuple[Array, ...]:
                multiply(accumulators)
                return tuple(accumulator[...] for accumulator in accumulators)

            out = pl.run_scoped(scoped, *(plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32) for a, b in pairs))
        return tuple(lax.optimization_barrier(out))

    @staticmethod
    def _emulated(a: Any, b: Ref) -> Array:
        if isinstance(a, Array):
            return jnp.dot(a, b[...], preferred_element_type=jnp.float32)

        def scoped(accumulator: Ref) -> Array:
            plgpu.wgmma(accumulator, a, b)
            return accumulator[...]

        return pl.run_scoped(scoped, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def _inverse(product: _Products, a_ref: Ref, x_ref: Ref) -> Array:
    """(I - a)^{-1} for a strictly lower triangular a [C, C] in shared memory, by doubling blocks.

    The inverses X of the diagonal blocks of size s give those of size 2 s: X + X (a o M) X, with M the lower left
    quarters. As stable as forward substitution: no power of `a` is formed.
    """
    row, column = (plgpu.broadcasted_iota(jnp.int32, (_C,), 0, layout=layout) for layout in (_ROW, _COLUMN))

    def cross(bit: int) -> Array:
        """Where the off-diagonal quarters of the diagonal blocks of size 2^(bit + 1) are; the upper ones hold zeros.

        The barrier makes the compiler compare what it has computed once for each row and column, where it would
        rewrite the comparison into more work for each element.
        """
        r, c = lax.optimization_barrier(((row >> bit) ^ 1, column >> bit))
        return _by_row(r, _C) == _by_column(c, _C)

    x = plgpu.load(a_ref, layout=_TILE).astype(jnp.float32)
    x = jnp.where(_index(0) == _index(1), 1.0, jnp.where(cross(0), x, 0.0))
    for bit in range(1, _C.bit_length() - 1):
        narrow = x.astype(x_ref.dtype)
        x_ref[...] = narrow
        plgpu.commit_smem()
        # Blocks of X times all of a, of which the quarters are kept: a then stays where it is in every round.
        (y,) = product((narrow, a_ref))
        y = lax.optimization_barrier(jnp.where(cross(bit), y, 0.0))
        (x,) = product((y.astype(x_ref.dtype), x_ref), add=(x,))
    return x


def _square_sums(x: Ref) -> Array:
    """Sums of squares over the rows of a tile in shared memory, one per row."""
    wide = plgpu.load(x, layout=_TILE).astype(jnp.float32)
    return jnp.sum(wide * wide, axis=1)


def _prepare(product: _Products, variant: Variant, scale: float, x: dict[str, Ref]) -> None:
    """All of a chunk that needs no state: the inverse, the scores and the weights of keys, queries and values.

    x: q, k, the gates and work buffers, which are read; "solve", "scores" and the weights, which are written. Column
    vectors take 16 registers of each thread, so they are read again where they are needed again.
    """
    row, column = _index(0), _index(1)
    (overlap,) = product((x["k"], x["k"].T))

    key = value = start = kept = None
    if variant.normalize_k or variant.eps is not None:
        square = jnp.sum(jnp.where(row == column, overlap, 0.0), axis=1)
        if variant.normalize_k:
            key = lax.rsqrt(square + 1e-6)
            square = square * key * key
        if variant.eps is not None:
            square = square + variant.eps
            value = jnp.where(square > 0, lax.rsqrt(jnp.where(square > 0, square, 1.0)), 0.0)
            key = value if key is None else key * value
        x["key"][...] = key
    if variant.gated:
        gate = plgpu.load(x["gate"], layout=_COLUMN) * _LOG2_E
        gate = jnp.maximum(gate, _LEAST_LOG2_DECAY)
        # Two sums: of multiples of 1/16, which are exact, and of what is left, which stay small. Their differences are
        # as good as sums over their own spans, also behind a gate that forgets everything.
        coarse = jnp.round(gate * _GRAIN) * (1 / _GRAIN)
        sums = [
            jnp.sum(jnp.where(row >= column, _by_column(part, _C), 0.0), axis=1) for part in (coarse, gate - coarse)
        ]
        x["coarse"][...], x["fine"][...] = sums
    plgpu.commit_smem()

    if variant.gated:
        by_column = [plgpu.load(x[name], layout=_COLUMN) for name in ("coarse", "fine")]
        spans = [_by_row(r, _C) - _by_column(c, _C) for r, c in zip(sums, by_column, strict=True)]
        decay = jnp.exp2(jnp.where(row >= column, spans[0] + spans[1], -jnp.inf))
        start = jnp.exp2(sums[0] + sums[1])
        kept = jnp.exp2((x["coarse"][_C - 1] - sums[0]) + (x["fine"][_C - 1] - sums[1]))
        x["start"][...] = start
    else:
        decay = jnp.where(row >= column, 1.0, 0.0)
    if key is not None:
        decay = decay * _by_column(plgpu.load(x["key"], layout=_COLUMN), _C)

    # With D = diag(sqrt beta) the system is I + D B D^{-1}, and B is bounded by 2 wherever the rule contracts, whatever
    # the sizes of strengths and keys; (I + D B D^{-1})^{-1} diag(beta) = D (I + B)^{-1} D. The bounded inverse fits
    # float16, the two D join the weights around it. The sign of a strength goes with the D on the right.
    beta = plgpu.load(x["beta_row"], layout=_ROW)
    root = jnp.sqrt(jnp.abs(beta))
    signed = jnp.where(beta < 0, -root, root)
    root_column = jnp.sqrt(jnp.abs(plgpu.load(x["beta_column"], layout=_COLUMN)))
    decay = decay * _by_column(root_column, _C)
    keyed = signed if key is None else signed * key
    system = lax.optimization_barrier(jnp.where(row > column, overlap * decay * _by_row(-keyed, _C), 0.0))
    x["system"][...] = system.astype(x["system"].dtype)
    x["value"][...] = signed if value is None else signed * value
    if "erase" in x:
        x["erase"][...] = keyed if start is None else keyed * start
    write = root if key is None else root * key
    x["write"][...] = write if kept is None else write * kept

    # The scores of queries against writes, and what the state is read with.
    (scores,) = product((x["q"], x["k"].T))
    query = plgpu.layout_cast(jnp.full((_C,), scale, jnp.float32), _ROW)
    if variant.normalize_q:
        query = query * lax.rsqrt(_square_sums(x["q"]) + 1e-6)
    x["scores"][...] = (scores * decay * _by_row(query, _C)).astype(x["scores"].dtype)
    x["read"][...] = query if start is None else query * start

    plgpu.commit_smem()
    x["solve"][...] = _inverse(product, x["system"], x["inverse"]).astype(x["solve"].dtype)
    plgpu.commit_smem()


def _advance(
    product: _Products, variant: Variant, state: Array, x: dict[str, Ref], wait: Callable[[], None]
) -> tuple[Array, Array]:
    """The transposed output [64 v, C] of a chunk, and the transposed state [64 v, K] after it.

    x: q, k, v and what `_prepare` wrote, which is there once `wait` returns.
    """
    dtype = x["k"].dtype
    (expected,) = product((state.astype(dtype), x["k"].T))
    values = plgpu.load(x["v"].T, layout=_TILE).astype(jnp.float32)
    wait()

    def weight(name: str) -> Array:
        return _by_column(plgpu.load(x[name], layout=_COLUMN), VALUE_TILE)

    if "erase" in x:
        residual = values * weight("value") - expected * weight("erase")
    else:
        residual = (values - expected) * weight("value")
    # float16 has three more bits than bfloat16 but a short range: each value channel is brought to at most 1 for it.
    # Channels do not mix in what follows.
    size = jnp.maximum(jnp.max(jnp.abs(residual), axis=1), 1e-30)
    (errors,) = product(((residual * _by_row(1 / size, _C)).astype(jnp.float16), x["solve"].T))
    errors = errors * _by_row(size, _C)
    writes = (errors * weight("write")).astype(dtype)
    # The narrow copy of the state is made again: kept, it would take 32 registers through all of the above.
    state = lax.optimization_barrier(state)
    memory = state.astype(dtype)
    if variant.gated:
        state = state * x["start"][_C - 1]
    nothing = plgpu.layout_cast(jnp.zeros((VALUE_TILE, _C), jnp.float32), _TILE)
    output, state = product((memory, x["q"].T), (writes, x["k"]), add=(nothing, state))
    (output,) = product((errors.astype(dtype), x["scores"].T), add=(output * weight("read"),))
    return output, state


def forward(
    q: Array,
    k: Array,
    v: Array,
    beta: Array,
    log_decay: Array | None,
    initial_state: Array | None,
    *,
    scale: float,
    variant: Variant,
    config: Config,
    interpret: Any = None,
) -> tuple[Array, Array, Array | None]:
    """Output [B, T, H, V], final state [B, H, K, V] and, where asked for, the states before chunks [B, H, N, K, V].

    q, k: [B, T, Hk, K], v: [B, T, H, V], 16 bit; beta, log_decay: [B, T, H]; initial_state: [B, H, K, V].
    """
    B, length, Hk, K = k.shape
    H, V = v.shape[2:]
    N = pl.cdiv(length, _C)
    # The copy engine fills what is beyond an array with zeros, but wants whole tiles. Other lengths cost a copy.
    T = pl.cdiv(length, _TILE_ROWS) * _TILE_ROWS
    q, k, v = (jnp.pad(x, ((0, 0), (0, T - length), (0, 0), (0, 0))) for x in (q, k, v))
    tiles, stages = config.tiles, config.stages
    parts = V // (VALUE_TILE * tiles)
    dtype = k.dtype
    product = _Products(interpret is not None)

    def gate_rows(x: Array) -> Array:
        """[B, T, H] to [B, H, N C], a chunk in one piece; rows that fill the last chunk write and forget nothing."""
        x = jnp.swapaxes(x.astype(jnp.float32), 1, 2)
        return jnp.pad(x, ((0, 0), (0, 0), (0, N * _C - length)))

    gates = {"beta_row": gate_rows(beta)}
    gates["beta_column"] = gates["beta_row"]
    if log_decay is not None:
        gates["gate"] = gate_rows(log_decay)
    inputs = {"q": q, "k": k, "v": v, **gates}
    if initial_state is not None:
        inputs["initial"] = jnp.swapaxes(initial_state.astype(jnp.float32), -1, -2)
    outputs = {
        "output": jax.ShapeDtypeStruct((B, T, H, V), dtype),
        "final": jax.ShapeDtypeStruct((B, H, V, K), jnp.float32),
    }
    if variant.save_states:
        outputs["states"] = jax.ShapeDtypeStruct((B, H, N, V, K), jnp.float32)

    vectors = ["value", "write", "read"]
    vectors += ["start"] if variant.gated else []
    vectors += ["erase"] if variant.gated or variant.normalize_k or variant.eps is not None else []
    work = ["coarse", "fine"] if variant.gated else []
    work += ["key"] if variant.normalize_k or variant.eps is not None else []
    scratch = {
        "loaded": {
            "q": _tiles_buffer((stages, _C, K), dtype),
            "k": _tiles_buffer((stages, _C, K), dtype),
            "v": _tiles_buffer((stages, tiles, _C, VALUE_TILE), dtype),
            **{name: plgpu.SMEM((stages, _C), jnp.float32) for name in gates},
        },
        "prepared": {
            "solve": _tiles_buffer((_SLOTS, _C, _C), jnp.float16),
            "scores": _tiles_buffer((_SLOTS, _C, _C), dtype),
            **{name: plgpu.SMEM((_SLOTS, _C), jnp.float32) for name in vectors},
        },
        "work": {
            "system": _tiles_buffer((_C, _C), jnp.float16),
            "inverse": _tiles_buffer((_C, _C), jnp.float16),
            **{name: plgpu.SMEM((_C,), jnp.float32) for name in work},
        },
        "staged": _tiles_buffer((tiles, _C, VALUE_TILE), dtype),
        "arrived": plgpu.Barrier(num_arrivals=2 + tiles + len(gates), num_barriers=stages),
        "ready": plgpu.Barrier(num_barriers=_SLOTS),
        "consumed": plgpu.Barrier(num_arrivals=tiles, num_barriers=stages),
        "done": plgpu.Barrier(num_arrivals=tiles + 1),
    }
    names = (*inputs, *outputs)

    def body(*refs: Ref, loaded, prepared, work, staged, arrived, ready, consumed, done) -> None:
        hbm = dict(zip(names, refs, strict=True))
        program, group = lax.axis_index("program"), lax.axis_index("group")
        part, head = lax.rem(program, parts), lax.rem(lax.div(program, parts), H)
        batch = lax.div(program, parts * H)
        key_head = lax.div(head, H // Hk)

        def fetch(n: Any) -> None:
            stage, rows = lax.rem(n, stages), pl.ds(n * _C, _C)
            barrier = arrived.at[stage]
            for name in ("q", "k"):
                plgpu.copy_gmem_to_smem(hbm[name].at[batch, rows, key_head], loaded[name].at[stage], barrier)
            for tile in range(tiles):
                columns = pl.ds((part * tiles + tile) * VALUE_TILE, VALUE_TILE)
                source = hbm["v"].at[batch, rows, head, columns]
                plgpu.copy_gmem_to_smem(source, loaded["v"].at[stage, tile], barrier)
            for name in gates:
                plgpu.copy_gmem_to_smem(hbm[name].at[batch, head, rows], loaded[name].at[stage], barrier)

        def set_registers(wanted: int | None) -> None:
            if wanted is not None:
                launch = 65536 // (128 * (tiles + 1)) // 8 * 8
                plgpu.set_max_registers(wanted, action="increase" if wanted > launch else "decrease")

        @pl.when(group == tiles)
        def _prepare_chunks() -> None:
            set_registers(config.prepare_registers)
            fetch(jnp.int32(0))

            @pl.loop(0, N)
            def _chunk(n: Array) -> None:
                stage, slot = lax.rem(n, stages), lax.rem(n, _SLOTS)

                # Frees the slot of chunk n - 2 and the stage of chunk n + 1, which are two and three chunks old.
                @pl.when(n >= _SLOTS)
                def _freed() -> None:
                    plgpu.barrier_wait(consumed.at[lax.rem(n - _SLOTS, stages)])

                @pl.when(n + 1 < N)
                def _fetch() -> None:
                    fetch(n + 1)

                plgpu.barrier_wait(arrived.at[stage])
                x = {name: loaded[name].at[stage] for name in ("q", "k", *gates)}
                x |= {name: ref.at[slot] for name, ref in prepared.items()} | work
                _prepare(product, variant, scale, x)
                plgpu.barrier_arrive(ready.at[slot])

            # Every completion of a barrier has to be seen by those who wait on it.
            for n in range(max(N - _SLOTS, 0), N):
                plgpu.barrier_wait(consumed.at[n % stages])

        @pl.when(group < tiles)
        def _advance_state() -> None:
            set_registers(config.state_registers)
            columns = pl.ds((part * tiles + group) * VALUE_TILE, VALUE_TILE)
            if variant.initial:
                first = plgpu.load(hbm["initial"].at[batch, head, columns], layout=_TILE, optimized=False)
            else:
                first = plgpu.layout_cast(jnp.zeros((VALUE_TILE, K), jnp.float32), _TILE)

            def chunk(n: Array, state: Array) -> Array:
                stage, slot = lax.rem(n, stages), lax.rem(n, _SLOTS)
                if variant.save_states:
                    hbm["states"].at[batch, head, n, columns][...] = state
                plgpu.barrier_wait(arrived.at[stage])
                x = {name: loaded[name].at[stage] for name in ("q", "k")}
                x |= {"v": loaded["v"].at[stage, group]} | {name: ref.at[slot] for name, ref in prepared.items()}
                output, state = _advance(product, variant, state, x, lambda: plgpu.barrier_wait(ready.at[slot]))
                # Values were read by ordinary loads; the fence orders these before the copy that overwrites them.
                plgpu.commit_smem()
                plgpu.barrier_arrive(consumed.at[stage])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                staged.at[group].T[...] = output.astype(dtype)
                plgpu.commit_smem()
                target = hbm["output"].at[batch, pl.ds(n * _C, _C), head, columns]
                plgpu.copy_smem_to_gmem(staged.at[group], target)
                return state

            last = lax.fori_loop(0, N, chunk, first)
            hbm["final"].at[batch, head, columns][...] = last
            plgpu.wait_smem_to_gmem(0)

        # Nobody leaves early: a warpgroup that exits while others use the tensor cores has led to illegal instructions.
        plgpu.barrier_arrive(done)
        plgpu.barrier_wait(done)

    out = plgpu.kernel(
        body,
        out_type=tuple(outputs.values()),
        scratch_types=scratch,
        grid=(B * H * parts,),
        grid_names=("program",),
        num_threads=tiles + 1,
        thread_name="group",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*inputs.values())
    results = dict(zip(outputs, out, strict=True))
    turned = lambda x: jnp.swapaxes(x, -1, -2)
    states = turned(results["states"]) if variant.save_states else None
    return results["output"][:, :length], turned(results["final"]), states
