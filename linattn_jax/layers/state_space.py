"""The layers over state-space models: Interdomain attention, S4D with its control, and Longhorn."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from linattn_jax.layers.common import (
    LayerState,
    Make,
    MixerLayer,
    document_length,
    heads,
    merge_heads,
    positions,
    rotary,
)
from linattn_jax.layers.linear import PositionedState
from linattn_jax.mixers.delta import l2_normalize
from linattn_jax.mixers.interdomain import interdomain, interdomain_init
from linattn_jax.mixers.longhorn import longhorn, longhorn_init
from linattn_jax.mixers.s4d import ModeState, s4d, s4d_init
from linattn_jax.types import Array


class Modes(nnx.Module):
    """N continuous modes per head and their zero-order hold: A = -exp(a_log) + i a_imag, stepped by dt = exp(log_dt).

    Starts as S4D-Lin: A_n = -1/2 + i pi n, log dt ~ U(log 1e-3, log 1e-1), one dt per head.
    """

    def __init__(self, count: int, modes: int, *, rngs: nnx.Rngs):
        low, high = jnp.log(1e-3), jnp.log(1e-1)
        self.log_dt = nnx.Param(jax.random.uniform(rngs.params(), (count,), jnp.float32, low, high))
        self.a_log = nnx.Param(jnp.full((count, modes), jnp.log(0.5), jnp.float32))
        self.a_imag = nnx.Param(jnp.broadcast_to(jnp.pi * jnp.arange(modes, dtype=jnp.float32), (count, modes)))

    def discrete(self) -> tuple[Array, Array]:
        """log_a = dt A and b = (e^{dt A} - 1) / A, complex64 [count, modes]."""
        a = jax.lax.complex(-jnp.exp(self.a_log[...]), self.a_imag[...])
        log_a = jnp.exp(self.log_dt[...])[:, None] * a
        return log_a, jnp.expm1(log_a) / a


class Interdomain(MixerLayer):
    """Interdomain attention (Kiyohara et al. 2026): queries read what an S4D keeps of keys and values.

    Features of q and k are SiLU(conv(W x)) / ||.||, values are W x; keys and values are RMS-normalised, with a bias per
    head, on their way into modes that they share. What the paper leaves open, as we read it: convolution of width 4
    without bias, `basis` M = 64 functions over N = M / 2 modes, b by zero-order hold, one dt per head, positions before
    the norm of keys; c starts complex normal with mean square 1 / N, as the output is quadratic in the state.

    basis: M. mixing: "dense" (a complex M x N matrix per head), "diagonal" (M = N) or "identity" (real and imaginary
    parts of the modes, no parameters). output_norm: per-head RMSNorm of the output, as it is quadratic in the state
    (not in the paper). rope: rotary positions on q and k.
    """

    def build(
        self,
        make: Make,
        *,
        basis: int = 64,
        mixing: str = "dense",
        output_norm: bool = True,
        rope: bool = False,
        theta: float = 1e4,
        conv_width: int = 4,
    ) -> None:
        self.only_value_heads()
        if rope:
            self.only_even_keys()
        if mixing not in ("dense", "diagonal", "identity"):
            raise ValueError(f"mixing: {mixing!r} given, wanted 'dense', 'diagonal' or 'identity'.")
        if basis < 2 or basis % 2:
            raise ValueError(f"basis: {basis} given, wanted an even number of functions.")
        self.mixing, self.rope, self.theta, self.size = mixing, rope, theta, basis // 2
        self.build_projections(make)
        self.convolution = make.convolution(2 * self.keys, conv_width)
        self.key_norm, self.value_norm = make.norm(self.key_size), make.norm(self.value_size)
        self.key_bias = nnx.Param(jnp.zeros((self.num_heads, self.key_size), jnp.float32))
        self.value_bias = nnx.Param(jnp.zeros((self.num_heads, self.value_size), jnp.float32))
        self.modes = Modes(self.num_heads, self.size, rngs=make.rngs)
        if mixing != "identity":
            rows = () if mixing == "diagonal" else (basis,)
            shape = (self.num_heads, *rows, self.size)
            self.mix_real, self.mix_imag = make.complex_normal(*shape, scale=self.size**-0.5)
        self.output_norm = make.norm(self.value_size) if output_norm else None
        self.output = make.linear(self.values, self.width)

    def functions(self) -> Array:
        """c, complex64 [H, M, N]."""
        eye = jnp.eye(self.size, dtype=jnp.complex64)
        if self.mixing == "identity":
            c = jnp.concatenate([0.5 * eye, -0.5j * eye])
            return jnp.broadcast_to(c, (self.num_heads, *c.shape))
        c = jax.lax.complex(self.mix_real[...], self.mix_imag[...])
        return c[..., None] * eye if self.mixing == "diagonal" else c

    def forward(self, x: Array, state: LayerState | None, packing: dict[str, Any]) -> tuple[Array, LayerState]:
        convolution, memory = (None, None) if state is None else state
        qk = jnp.concatenate([self.query(x), self.key(x)], axis=-1)
        qk, convolution = self.convolution(qk, state=convolution, **packing)
        q, k = (l2_normalize(heads(a, self.num_heads)) for a in jnp.split(qk, 2, axis=-1))
        length = None
        if self.rope:
            before, memory = (None, None) if memory is None else memory
            position = positions(x, before, **packing)
            q, k = rotary(q, position, self.theta), rotary(k, position, self.theta)
            length = document_length(position, before, packing["segment_ids"])
        k = self.key_norm(k) + self.key_bias[...].astype(k.dtype)
        v = heads(self.value(x), self.num_heads)
        v = self.value_norm(v) + self.value_bias[...].astype(v.dtype)
        log_a, b = self.modes.discrete()
        y, memory = interdomain(q, k, v, log_a, b, self.functions(), initial_state=memory, **packing, **self.options)
        y = y if self.output_norm is None else self.output_norm(y)
        memory = memory if length is None else PositionedState(length, memory)
        return self.output(merge_heads(y)), LayerState(convolution, memory)

    def init_state(self, batch: int, capacity: int | None = None) -> LayerState:
        """The empty state; it does not grow, so `capacity` is not used."""
        del capacity
        memory: Any = interdomain_init(batch, self.num_heads, self.key_size, self.value_size, modes=self.size)
        if self.rope:
            memory = PositionedState(jnp.zeros((batch,), jnp.int32), memory)
        return LayerState(self.convolution.init_state(batch), memory)


class S4D(MixerLayer):
    """S4D (Gu et al. 2022): N / 2 modes for each of the D channels of x, exact GELU, then a gated linear unit.

    `state_size` is N; c starts complex normal with mean square 1, the weight of x itself normal. There are no heads:
    num_heads, key_size and value_size are not used.
    """

    def build(self, make: Make, *, state_size: int = 64) -> None:
        self.size = state_size // 2
        self.modes = Modes(self.width, self.size, rngs=make.rngs)
        self.c_real, self.c_imag = make.complex_normal(self.width, self.size)
        self.skip = make.normal(self.width)
        self.output = make.linear(self.width, 2 * self.width, bias=True)

    def forward(self, x: Array, state: ModeState | None, packing: dict[str, Any]) -> tuple[Array, ModeState]:
        c = jax.lax.complex(self.c_real[...], self.c_imag[...])
        x = x.astype(self.dtype)
        log_a, b = self.modes.discrete()
        y, state = s4d(x, log_a, b, c, self.skip[...], initial_state=state, **packing, **self.options)
        return nnx.glu(self.output(jax.nn.gelu(y, approximate=False))), state

    def init_state(self, batch: int, capacity: int | None = None) -> ModeState:
        """The empty state; it does not grow, so `capacity` is not used."""
        del capacity
        return s4d_init(batch, self.width, self.size)


class S4DControl(MixerLayer):
    """The Interdomain paper's S4D-only: the same modes over normalised values alone, read by a learned c per channel.

    No keys, no query. With `basis` M as there, the modes number M (K + V) / 2 V, so that the states are equally large.
    That c is one row per channel of V, that values keep their norm and bias and outputs their norm, is our reading.
    """

    def build(self, make: Make, *, basis: int = 64, output_norm: bool = True) -> None:
        self.size = basis * (self.key_size + self.value_size) // (2 * self.value_size)
        self.value = make.linear(self.width, self.values)
        self.value_norm = make.norm(self.value_size)
        self.value_bias = nnx.Param(jnp.zeros((self.num_heads, self.value_size), jnp.float32))
        self.modes = Modes(self.num_heads, self.size, rngs=make.rngs)
        self.c_real, self.c_imag = make.complex_normal(self.values, self.size, scale=self.size**-0.5)
        self.output_norm = make.norm(self.value_size) if output_norm else None
        self.output = make.linear(self.values, self.width)

    def forward(self, x: Array, state: ModeState | None, packing: dict[str, Any]) -> tuple[Array, ModeState]:
        v = heads(self.value(x), self.num_heads)
        v = merge_heads(self.value_norm(v) + self.value_bias[...].astype(v.dtype))
        log_a, b = (jnp.repeat(a, self.value_size, axis=0) for a in self.modes.discrete())
        c = jax.lax.complex(self.c_real[...], self.c_imag[...])
        y, state = s4d(v, log_a, b, c, jnp.zeros(self.values), initial_state=state, **packing, **self.options)
        y = heads(y, self.num_heads)
        y = y if self.output_norm is None else self.output_norm(y)
        return self.output(merge_heads(y)), state

    def init_state(self, batch: int, capacity: int | None = None) -> ModeState:
        """The empty state; it does not grow, so `capacity` is not used."""
        del capacity
        return s4d_init(batch, self.values, self.size)


class Longhorn(MixerLayer):
    """Longhorn (Liu et al. 2024) in its Mamba block: x = SiLU(conv(W x) + b); k, q and dt from x; times SiLU(W_z x).

    delta = sigmoid(W_dt (low rank) + bias) per channel. The num_heads * value_size inner channels have a state of
    `state_size` each; there are no heads. rank: of dt, default D / 16. No norm.
    """

    def build(self, make: Make, *, state_size: int = 16, rank: int | None = None, conv_width: int = 4) -> None:
        self.size = state_size
        rank = rank or -(-self.width // 16)
        self.value, self.gate = make.linear(self.width, self.values), make.linear(self.width, self.values)
        self.convolution = make.convolution(self.values, conv_width, bias=True)
        self.key, self.query = make.linear(self.values, state_size), make.linear(self.values, state_size)
        self.step_down, self.step_up = make.linear(self.values, rank), make.linear(rank, self.values, bias=True)
        self.skip = nnx.Param(jnp.ones((self.values,), jnp.float32))
        self.output = make.linear(self.values, self.width)

    def forward(self, x: Array, state: LayerState | None, packing: dict[str, Any]) -> tuple[Array, LayerState]:
        convolution, memory = (None, None) if state is None else state
        v, convolution = self.convolution(self.value(x), state=convolution, **packing)
        delta = jax.nn.sigmoid(self.step_up(self.step_down(v)).astype(jnp.float32))
        y, memory = longhorn(v, self.key(v), self.query(v), delta, initial_state=memory, **packing, **self.options)
        y = (y + self.skip[...].astype(v.dtype) * v) * jax.nn.silu(self.gate(x))
        return self.output(y), LayerState(convolution, memory)

    def init_state(self, batch: int, capacity: int | None = None) -> LayerState:
        """The empty state; it does not grow, so `capacity` is not used."""
        del capacity
        return LayerState(self.convolution.init_state(batch), longhorn_init(batch, self.values, self.size))
