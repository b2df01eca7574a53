"""The inverses of all chunks' triangular systems, and the weights that go with them: the part that needs no state.

For each chunk of 64 tokens of each value head, with A = strict_tril(diag(beta) (K K^T o L)), L_ij = e^{G_i - G_j},
    D = diag(sqrt |beta|),   A = D B D^{-1} up to signs,   (I + A)^{-1} diag(beta) = D (I + B)^{-1} D.
B is bounded by 2 wherever the rule contracts, whatever the sizes of strengths and keys, and so is its inverse, which
fits float16; the two D join the weights around it. KLA's r = rsqrt(||k||^2 + eps) on k and v, and the L2 norm of k,
are weights of rows and columns around the same K K^T, and the norms are its diagonal: they cost vectors, not passes.

Floors at B, T, H, K = 8, 2048, 16, 128 in bfloat16: 67 MB of keys read, 34 MB of inverses and 7 MB of vectors written,
0.026 ms at 4.25 TB/s. 4096 chunks of K K^T and four products of 64x64x64, 4.2 MFLOP, 17 GFLOP, 0.024 ms at 724
TFLOP/s. The products are small and wait for each other, so a multiprocessor keeps several chunks going
(`SOLVE_GROUPS`), one for each warpgroup, each with its next keys on the way.

The inverse. Diagonal blocks of 16 by forward substitution in float32, one for each warp, then doubled to 64:
X <- X - X (A o M) X, two rounds of two 64x64x64 products with float32 accumulators and float16 operands, which have
three bits more than bfloat16. No power of A is formed.

Decays are exponentials of differences of two sums, one of multiples of 1/16, one of remainders: as good as sums over
each span, also behind a gate that forgets everything.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector
from jaxlib.mlir.dialects import math as math_dialect

from pallas_kernels.delta_rule.tiles import (
    COLUMN,
    COMPILER,
    GRAIN,
    LEAST_LOG2_DECAY,
    LEAST_STRENGTH,
    LOG2_E,
    NORM_EPS,
    ROW,
    TILE,
    Products,
    Ref,
    Variant,
    by_column,
    by_row,
    index,
    tiles_buffer,
)
from pallas_kernels.delta_rule.tuning import CHUNK, MULTIPROCESSORS, SOLVE_GROUPS

Array = jax.Array

_C = CHUNK
_STAGES = 2  # keys being used, keys on the way
_BLOCK = 16  # of the system, solved by substitution; 16 rows of a tile belong to a warp


def _emulate_invert_blocks(a: Array) -> Array:
    """What `_invert_blocks` computes, for the interpreter, which runs no code of single threads."""
    row, column = index(0), index(1)
    inside = jnp.where(row // _BLOCK == column // _BLOCK, a, 0.0)
    one = jnp.where(row == column, 1.0, 0.0)
    return lax.fori_loop(1, _BLOCK, lambda _, x: one + jnp.dot(inside, x, precision="highest"), one)


@plgpu.inline_mgpu(
    arg_types=(TILE, plgpu.RefType()),
    return_type=plgpu.ShapeDtypeStruct((_C, _C), jnp.dtype(jnp.float32), layout=TILE),
)
def _invert_blocks(context: Any, a: Any, scratch: Any) -> Any:
    """Inverses of the diagonal blocks of size 16 of I - a, a strictly lower triangular, by forward substitution.

    A warp holds the 16 rows of its block. It puts them into `scratch` [64, 24], from where all lanes read the same row
    at a time, each lane solves one column (16 columns, twice), and the columns come back as rows the same way.
    """
    del context
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    two, four = ir.VectorType.get([2], f32), ir.VectorType.get([4], f32)
    constant = lambda value, kind=i32: mgpu_utils.c(value, kind)
    at = lambda row, column: [arith.index_cast(ir.IndexType.get(), x) for x in (row, column)]
    equal = lambda x, value: arith.cmpi(arith.CmpIPredicate.eq, x, constant(value))

    thread = arith.remui(mgpu_utils.thread_idx(), constant(128))
    warp, lane = arith.divui(thread, constant(32)), arith.remui(thread, constant(32))
    first = arith.muli(warp, constant(_BLOCK))
    row = arith.addi(first, arith.divui(lane, constant(4)))
    pair = arith.muli(arith.remui(lane, constant(4)), constant(2))
    # Of the eight 8-column parts of a tile's rows, a warp's block has the parts 2 w and 2 w + 1.
    registers = a.registers.reshape(_C // 8, 2)
    places = [(part, half) for part in range(2) for half in range(2)]
    place = lambda part, half: at(arith.addi(row, constant(8 * half)), arith.addi(pair, constant(8 * part)))
    for part, half in places:
        own = registers[part, half]
        for w in range(1, 4):
            own = arith.select(equal(warp, w), registers[2 * w + part, half], own)
        vector.store(own, scratch, place(part, half))
    mgpu_utils.warp_barrier()

    column = arith.remui(lane, constant(_BLOCK))
    zero, one = constant(0.0, f32), constant(1.0, f32)
    x: list[Any] = []
    for i in range(_BLOCK):
        value = arith.select(equal(column, i), one, zero)
        for j in range(i):
            if j % 4 == 0:
                several = vector.load(four, scratch, at(arith.addi(first, constant(i)), constant(j)))
            factor = vector.extract(several, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([j % 4]))
            value = math_dialect.fma(factor, x[j], value)
        x.append(value)
    mgpu_utils.warp_barrier()

    lower = arith.divui(lane, constant(_BLOCK))
    upper_lanes = equal(lower, 0)
    for i in range(8):
        target = arith.addi(first, arith.addi(constant(i), arith.muli(lower, constant(8))))
        memref.store(arith.select(upper_lanes, x[i], x[i + 8]), scratch, at(target, column))
    mgpu_utils.warp_barrier()
    own = {key: vector.load(two, scratch, place(*key)) for key in places}
    nothing = vector.broadcast(two, zero)
    out = np.empty((_C // 8, 2), dtype=object)
    for part in range(_C // 8):
        for half in range(2):
            out[part, half] = arith.select(equal(warp, part // 2), own[part % 2, half], nothing)
    return mgpu.FragmentedArray(_registers=out.reshape(a.registers.shape), _layout=a.layout, _is_signed=None)


def _invert(product: Products, a: Array, a_ref: Ref, x_refs: list[Ref], scratch: Ref) -> Array:
    """(I - a)^{-1} for a strictly lower triangular a [C, C], given in registers and, narrow, in shared memory.

    x_refs: a buffer for each round, as a warp may write the next while others still multiply by the last.

    The inverses X of the diagonal blocks of size s give those of size 2 s: X + X (a o M) X, with M the lower left
    quarters.
    """
    row, column = (plgpu.broadcasted_iota(jnp.int32, (_C,), 0, layout=layout) for layout in (ROW, COLUMN))

    def cross(bit: int) -> Array:
        """Where the off-diagonal quarters of the diagonal blocks of size 2^(bit + 1) are; the upper ones hold zeros.

        The barrier makes the compiler compare what it has computed once for each row and column, where it would
        rewrite the comparison into more work for each element.
        """
        r, c = lax.optimization_barrier(((row >> bit) ^ 1, column >> bit))
        return by_row(r) == by_column(c)

    x = _emulate_invert_blocks(a) if product.interpreted else _invert_blocks(a, scratch)
    for x_ref, bit in zip(x_refs, range(_BLOCK.bit_length() - 1, _C.bit_length() - 1), strict=True):
        narrow = x.astype(x_ref.dtype)
        x_ref[...] = narrow
        plgpu.commit_smem()
        # Blocks of X times all of a, of which the quarters are kept: a then stays where it is in every round.
        (y,) = product((narrow, a_ref))
        y = lax.optimization_barrier(jnp.where(cross(bit), y, 0.0))
        (x,) = product((y.astype(x_ref.dtype), x_ref), add=(x,))
    return x


def _solve_chunk(product: Products, variant: Variant, x: dict[str, Ref]) -> None:
    """Writes the vectors of a chunk and its inverse, "solve", from k and the gates."""
    row, column = index(0), index(1)
    (overlap,) = product((x["k"], x["k"].T))

    key = value = start = kept = None
    if variant.keyed:
        square = jnp.sum(jnp.where(row == column, overlap, 0.0), axis=1)
        if variant.normalize_k:
            key = lax.rsqrt(square + NORM_EPS)
            x["norm"][...] = key
            square = square * key * key
        if variant.eps is not None:
            square = square + variant.eps
            value = jnp.where(square > 0, lax.rsqrt(jnp.where(square > 0, square, 1.0)), 0.0)
            x["ratio"][...] = value
            key = value if key is None else key * value
    # The strength's sign goes with the root on the right.
    beta = plgpu.load(x["beta"], layout=ROW)
    root = jnp.sqrt(jnp.maximum(jnp.abs(beta), LEAST_STRENGTH))
    signed = jnp.where(beta < 0, -root, root)
    keyed = signed if key is None else signed * key
    write = root if key is None else root * key
    x["value"][...] = signed if value is None else signed * value
    x["column"][...] = write
    if variant.gated:
        gate = plgpu.load(x["gate"], layout=COLUMN) * LOG2_E
        gate = jnp.maximum(gate, LEAST_LOG2_DECAY)
        coarse = jnp.round(gate * GRAIN) * (1 / GRAIN)
        sums = [jnp.sum(jnp.where(row >= column, by_column(part), 0.0), axis=1) for part in (coarse, gate - coarse)]
        x["coarse"][...], x["fine"][...] = sums
        start = jnp.exp2(sums[0] + sums[1])
        x["start"][...] = start
    if "erase" in x:
        x["erase"][...] = keyed if start is None else keyed * start
    plgpu.commit_smem()

    decay = by_column(plgpu.load(x["column"], layout=COLUMN))
    if variant.gated:
        by_columns = [plgpu.load(x[name], layout=COLUMN) for name in ("coarse", "fine")]
        spans = [by_row(r) - by_column(c) for r, c in zip(sums, by_columns, strict=True)]
        decay = decay * jnp.exp2(jnp.where(row > column, spans[0] + spans[1], -jnp.inf))
        kept = jnp.exp2((x["coarse"][_C - 1] - sums[0]) + (x["fine"][_C - 1] - sums[1]))
    x["write"][...] = write if kept is None else write * kept
    system = jnp.where(row > column, overlap * decay * by_row(-keyed), 0.0)
    system = lax.optimization_barrier(system)
    x["system"][...] = system.astype(x["system"].dtype)
    inverse = _invert(product, system, x["system"], [x["solve"], x["inverse"]], x["scratch"])
    x["solve"][...] = inverse.astype(x["solve"].dtype)


def solve(
    k: Array, beta: Array, log_decay: Array | None, *, variant: Variant, interpret: Any = None
) -> tuple[Array, Array]:
    """Inverses [B, H, N, 64, 64] in float16 and vectors [B, H, N, names, 64] in float32, as `Variant.vectors` names.

    k: [B, T, Hk, K], 16 bit, T a multiple of 8; beta, log_decay: [B, H, N 64] in float32, 0 beyond the row's end.
    """
    B, _, Hk, K = k.shape
    H, N = beta.shape[1], beta.shape[2] // _C
    groups = SOLVE_GROUPS if K <= 128 else 2  # as far as shared memory goes
    programs = min(MULTIPROCESSORS, pl.cdiv(B * H * N, groups))
    stride = programs * groups
    product = Products(interpret is not None)
    gates = {"beta": beta} if log_decay is None else {"beta": beta, "gate": log_decay}
    inputs = {"k": k, **gates}
    names = variant.vectors
    buffers = {
        "loaded": {
            "k": tiles_buffer((groups * _STAGES, _C, K), k.dtype),
            **{name: plgpu.SMEM((groups * _STAGES, _C), jnp.float32) for name in gates},
        },
        "system": tiles_buffer((groups, _C, _C), jnp.float16),
        "inverse": tiles_buffer((groups, _C, _C), jnp.float16),
        "solve": tiles_buffer((groups, _C, _C), jnp.float16),
        "vectors": plgpu.SMEM((groups, len(names), _C), jnp.float32),
        # Rows of 24: eight rows of pairs, as a warp writes them, then fall into different banks.
        "scratch": plgpu.SMEM((groups, _C, 24), jnp.float32),
        "arrived": plgpu.Barrier(num_arrivals=1 + len(gates), num_barriers=groups * _STAGES),
        "done": plgpu.Barrier(num_arrivals=groups),
    }

    def body(*refs: Ref, loaded, system, inverse, solve, vectors, scratch, arrived, done) -> None:
        hbm = dict(zip((*inputs, "inverses", "vectors"), refs, strict=True))
        group = lax.axis_index("group")
        first = lax.axis_index("program") * groups + group
        count = lax.div(B * H * N - first + stride - 1, stride)

        def where(i: Array) -> tuple[Array, Array, Array]:
            unit = first + i * stride
            head = lax.div(unit, N)
            return lax.div(head, H), lax.rem(head, H), lax.rem(unit, N)

        def fetch(i: Array) -> None:
            stage = group * _STAGES + lax.rem(i, _STAGES)
            batch, head, n = where(i)
            rows = pl.ds(n * _C, _C)
            barrier = arrived.at[stage]
            source = hbm["k"].at[batch, rows, lax.div(head, H // Hk)]
            plgpu.copy_gmem_to_smem(source, loaded["k"].at[stage], barrier)
            for name in gates:
                plgpu.copy_gmem_to_smem(hbm[name].at[batch, head, rows], loaded[name].at[stage], barrier)

        @pl.when(count > 0)
        def _first() -> None:
            fetch(jnp.int32(0))

        @pl.loop(0, count)
        def _chunk(i: Array) -> None:
            stage = group * _STAGES + lax.rem(i, _STAGES)

            # The chunk before the last one's keys were read by products that have ended.
            @pl.when(i + 1 < count)
            def _fetch() -> None:
                fetch(i + 1)

            plgpu.barrier_wait(arrived.at[stage])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            x = {name: ref.at[stage] for name, ref in loaded.items()}
            x |= {name: vectors.at[group, j] for j, name in enumerate(names)}
            work = {"system": system, "inverse": inverse, "solve": solve, "scratch": scratch}
            x |= {name: ref.at[group] for name, ref in work.items()}
            _solve_chunk(product, variant, x)
            plgpu.commit_smem()
            batch, head, n = where(i)
            plgpu.copy_smem_to_gmem(solve.at[group], hbm["inverses"].at[batch, head, n])
            plgpu.copy_smem_to_gmem(vectors.at[group], hbm["vectors"].at[batch, head, n])

        plgpu.wait_smem_to_gmem(0)
        # Nobody leaves early: a warpgroup that exits while others use the tensor cores has led to illegal instructions.
        plgpu.barrier_arrive(done)
        plgpu.barrier_wait(done)

    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((B, H, N, _C, _C), jnp.float16),
            jax.ShapeDtypeStruct((B, H, N, len(names), _C), jnp.float32),
        ),
        scratch_types=buffers,
        grid=(programs,),
        grid_names=("program",),
        num_threads=groups,
        thread_name="group",
        interpret=interpret,
        compiler_params=COMPILER,
    )(*inputs.values())
