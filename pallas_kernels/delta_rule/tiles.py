"""What the delta rule's kernels share: layouts, buffers and products of tiles of 64 rows on Hopper's tensor cores."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.delta_rule.tuning import CHUNK

Array = jax.Array
Ref = Any

TILE = plgpu.Layout.WGMMA  # [64 m, n] over the 128 threads of a warpgroup
ROW = plgpu.Layout.WGMMA.reduce(1)  # one value per row of such a tile
COLUMN = plgpu.Layout.WGMMA.reduce(0)  # one value per column
LOG2_E = math.log2(math.e)
TILE_ROWS = 8  # of a tile in shared memory

# Without the compiler's barriers around each access of shared memory, which stop the warpgroup at every vector.
# So each kernel sees to it itself: a barrier, which `commit_smem` is, between what one thread writes and another reads,
# and between what tensor cores or threads read and what overwrites it.
COMPILER = plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0)

# 2^-130 is 0 in float32, up to what no product can show. A bound makes -inf harmless and the sums of a chunk exact.
LEAST_LOG2_DECAY = -130.0
# Strengths below count as this. The gradient of a strength is a product of errors that both contain its root, divided
# by the strength: at 0 the quotient would be lost. 2^-32 of a value is less than float32 shows next to others.
LEAST_STRENGTH = 2.0**-32
NORM_EPS = 1e-6  # of the L2 norms of q and k, under the root
# Multiples of 1/16 down to 64 * -130 are exact in float32, and so are their sums and differences.
GRAIN = 16.0


@dataclass(frozen=True)
class Variant:
    """What the kernels compute besides the plain rule; all of it is known when the program is built.

    gated: there is a log decay. eps: KLA's, or None for the other rules. normalize_q, normalize_k: L2 norms inside.
    """

    gated: bool
    normalize_q: bool = False
    normalize_k: bool = False
    eps: float | None = None

    @property
    def keyed(self) -> bool:
        """Whether keys have weights of their own."""
        return self.normalize_k or self.eps is not None

    @property
    def vectors(self) -> tuple[str, ...]:
        """The rows of the array of vectors that `inverse.solve` writes for each chunk; 64 numbers each.

        coarse, fine: the binary logarithm of the decay since the chunk's start, in two sums. start: that decay.
        value, erase: weights of v and of K S before the inverse; without erase it equals value. write: of errors behind
        it, as the state takes them. column: the same as the scores take them. norm: 1 / ||k||. ratio: KLA's r.
        """
        return (
            self.column_vectors
            + ("write",)
            + (("start",) if self.gated else ())
            + (("norm",) if self.normalize_k else ())
            + (("ratio",) if self.eps is not None else ())
        )

    @property
    def column_vectors(self) -> tuple[str, ...]:
        """The first of `vectors`: those that weigh columns as well as rows of [64, 64] tiles.

        They are copied twice then: one buffer read along rows and along columns keeps the compiler's search for layouts
        from ending.
        """
        return (
            (("coarse", "fine") if self.gated else ())
            + ("value", "column")
            + (("erase",) if self.gated or self.keyed else ())
        )


def tiles_buffer(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory that TMA writes and wgmma reads: tiles of 8 rows, swizzled over the width of a row."""
    size = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(shape[-1] * size * 8)
    tiling = plgpu.TilingTransform((TILE_ROWS, swizzle // size))  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))  # type: ignore[abstract]


def by_row(x: Array, width: int = CHUNK) -> Array:
    """[64] to [64, width], the same in each column."""
    return lax.broadcast_in_dim(x, (x.shape[0], width), [0])


def by_column(x: Array, height: int = CHUNK) -> Array:
    """[n] to [height, n], the same in each row."""
    return lax.broadcast_in_dim(x, (height, x.shape[0]), [1])


def index(dimension: int) -> Array:
    """The row or column of each element of a [64, 64] tile."""
    return plgpu.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), dimension, layout=TILE)


def weight(x: Ref, height: int = CHUNK) -> Array:
    """A vector in shared memory as weights of the columns of a tile."""
    return by_column(plgpu.load(x, layout=COLUMN), height)


def normalized(x: Array) -> tuple[Array, Array]:
    """Rows [64, n] brought to at most 1, in float16, and what they were divided by, [64].

    float16 has three more bits than bfloat16 but a short range.
    """
    size = jnp.maximum(jnp.max(jnp.abs(x), axis=1), 1e-30)
    return (x * by_row(1 / size, x.shape[1])).astype(jnp.float16), size


def zeros(*shape: int) -> Array:
    """A tile of zeros."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), TILE)


def query_weights(variant: Variant, scale: float, x: dict[str, Ref]) -> tuple[Array, Array]:
    """The weights [64] of rows of the scores, and of what the state is read with."""
    query = plgpu.layout_cast(jnp.full((CHUNK,), scale, jnp.float32), ROW)
    if variant.normalize_q:
        query = query * lax.rsqrt(square_sums(x["q"]) + NORM_EPS)
    return query, query * plgpu.load(x["start_row"], layout=ROW) if variant.gated else query


def write_weights(variant: Variant, x: dict[str, Ref]) -> Array:
    """Decay from writes (columns) up to tokens (rows) times the weights of writes [64, 64], 0 above the diagonal."""
    lower = index(0) >= index(1)
    weights = weight(x["column"])
    if not variant.gated:
        return jnp.where(lower, weights, 0.0)
    spans = [by_row(plgpu.load(x[name + "_row"], layout=ROW)) - weight(x[name]) for name in ("coarse", "fine")]
    return weights * jnp.exp2(jnp.where(lower, spans[0] + spans[1], -jnp.inf))


def square_sums(x: Ref) -> Array:
    """Sums of squares over the rows of a tile in shared memory, one per row."""
    wide = plgpu.load(x, layout=TILE).astype(jnp.float32)
    return jnp.sum(wide * wide, axis=1)


class Products:
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
        return jnp.dot(a if isinstance(a, Array) else a[...], b[...], preferred_element_type=jnp.float32)
