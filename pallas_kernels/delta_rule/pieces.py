"""Long rows of few heads in pieces: what each makes of a state is combined, then all walk at once from true states.

A piece maps the state before it to M S + R. R is the last state of a walk from zeros, M that of a walk from the
identity without values, both without outputs (`states.walk`). `chain` combines them, from the first piece to the last,
or for gradients, which M^T takes from a piece's end to its start, from the last to the first. No state is guessed. But
where the decay over a piece is a factor that float32 does not hold, M is 0, and R has nothing of the chunks before
(`forgotten`): what decays so costs no walk.

Floors at B, T, H, K, V = 1, 16384, 16, 128, 128 in 8 pieces: 25 MB, 0.006 ms, and 8 products of [64, 128] by
[128, 128], three times for the digits, one after the other in 32 programs.
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
    LEAST_LOG2_DECAY,
    TILE,
    Products,
    Ref,
    Variant,
    tiles_buffer,
    zeros,
)
from pallas_kernels.delta_rule.tuning import VALUE_TILE

Array = jax.Array


def halves(maps: Array) -> tuple[Array, Array]:
    """float32 as the sum of two bfloat16, which has 16 binary digits."""
    high = maps.astype(jnp.bfloat16)
    return high, (maps - high.astype(jnp.float32)).astype(jnp.bfloat16)


def forgotten(vectors: Array, variant: Variant, *, backward: bool = False) -> tuple[Array, Array]:
    """How many of a piece's first chunks its R, and its M, may leave out, each int32 [B, H]; of M it is none or all.

    First in the order of the walk, from the last chunk backward. Left out is what decays by 2^-130 on the way.

    vectors: of `inverse.solve`, [B, H, N, names, 64], of a gated rule.
    """
    ends = [vectors[:, :, :, variant.vectors.index(name), -1] for name in ("coarse", "fine")]
    decays = lax.cumsum(ends[0] + ends[1], 2, reverse=not backward)  # from each chunk on, or up to it
    count = jnp.sum(decays <= LEAST_LOG2_DECAY, 2, dtype=jnp.int32)
    return jnp.maximum(count - 1, 0), jnp.where(count > 0, jnp.int32(vectors.shape[2]), 0)


def chain(
    maps: tuple[Array, Array], offsets: Array, initial: Array | None, *, backward: bool = False, interpret: Any = None
) -> Array:
    """The transposed states before pieces or, backward, the gradients of those after them, [B, P, H, V, K] in float32.

    maps: `halves` of the transposed M, [B, P, H, K, K]. offsets: transposed R, [B, P, H, V, K]. initial: before the
    first piece or, backward, after the last, [B, H, V, K]; None for zeros.
    """
    B, P, H, V, K = offsets.shape
    tiles = V // VALUE_TILE
    product = Products(interpret is not None)
    inputs = {"high": maps[0], "low": maps[1], "offsets": offsets}
    if initial is not None:
        inputs["initial"] = initial
    scratch = {
        "high": tiles_buffer((2, K, K), jnp.bfloat16),
        "low": tiles_buffer((2, K, K), jnp.bfloat16),
        "offset": plgpu.SMEM((2, VALUE_TILE, K), jnp.float32),
        "arrived": plgpu.Barrier(num_arrivals=3, num_barriers=2),
    }

    def body(*refs: Ref, high, low, offset, arrived) -> None:
        hbm = dict(zip((*inputs, "states"), refs, strict=True))
        program = lax.axis_index("program")
        tile, head = lax.rem(program, tiles), lax.rem(lax.div(program, tiles), H)
        batch = lax.div(program, tiles * H)
        columns = pl.ds(tile * VALUE_TILE, VALUE_TILE)
        place = lambda n: P - 1 - n if backward else n

        def fetch(n: Any) -> None:
            slot = lax.rem(n, 2)
            for name, buffer in (("high", high), ("low", low)):
                source = hbm[name].at[batch, place(n), head]
                plgpu.copy_gmem_to_smem(source, buffer.at[slot], arrived.at[slot])
            source = hbm["offsets"].at[batch, place(n), head, columns]
            plgpu.copy_gmem_to_smem(source, offset.at[slot], arrived.at[slot])

        fetch(jnp.int32(0))
        if initial is None:
            first = zeros(VALUE_TILE, K)
        else:
            first = plgpu.load(hbm["initial"].at[batch, head, columns], layout=TILE, optimized=False)

        def piece(n: Array, state: Array) -> Array:
            slot = lax.rem(n, 2)
            hbm["states"].at[batch, place(n), head, columns][...] = state

            @pl.when(n + 1 < P)
            def _next() -> None:
                fetch(n + 1)

            wide = state.astype(jnp.bfloat16)
            narrow = (state - wide.astype(jnp.float32)).astype(jnp.bfloat16)
            plgpu.barrier_wait(arrived.at[slot])
            m_high, m_low = (x.at[slot].T if backward else x.at[slot] for x in (high, low))
            after = plgpu.load(offset.at[slot], layout=TILE, optimized=False)
            for a, b in ((narrow, m_high), (wide, m_low), (wide, m_high)):
                (after,) = product((a, b), add=(after,))
            # Offsets were read by ordinary loads; the fence orders these before the copy that overwrites them.
            plgpu.commit_smem()
            return after

        last = lax.fori_loop(0, P, piece, first)
        del last

    (states,) = plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct(offsets.shape, jnp.float32),),
        scratch_types=scratch,
        grid=(B * H * tiles,),
        grid_names=("program",),
        interpret=interpret,
        compiler_params=COMPILER,
    )(*inputs.values())
    return states
