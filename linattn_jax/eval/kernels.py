"""The kernels that a benchmark holds against others: by mixer, how ours is called, what it serves, and its peers.

Kernels are imported when they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from linattn_jax.mixers.state import MatrixState
from linattn_jax.types import Array

JLA, FLA, FLASH_QLA = "jax-linear-attention", "fla", "flash_qla"


class Kernel(NamedTuple):
    """One entry of the registry.

    name: of the implementation, as the mixers will call it.
    call: arguments of the mixer by name, results of the mixer.
    supports: q, k, v and a device, or None for the arrays alone; the reason why they are not served, or None.
    peers: implementations of others; where there is none, the mixer of ours that costs what this one should.
    quiet: arguments whose zeros neither write to the state nor change it.
    """

    name: str
    call: Callable[..., Any]
    supports: Callable[..., str | None]
    peers: tuple[str, ...]
    quiet: tuple[str, ...]


def _delta_rule(q: Array, k: Array, v: Array, *, eps: float | None = None, **gates: Array) -> tuple[Array, MatrixState]:
    from pallas_kernels.delta_rule.api import delta_rule

    strength = gates["beta"] if "beta" in gates else gates["eta"]
    log_decay = gates.get("log_decay")
    output, state = delta_rule(q, k, v, strength, log_decay, scale=k.shape[-1] ** -0.5, eps=eps)
    return output, MatrixState(state)


def _supports(q: Any, k: Any, v: Any, *, device: Any = None) -> str | None:
    from pallas_kernels.delta_rule.api import supports

    return supports(q, k, v, device=device)


_HOPPER = partial(Kernel, "mosaic_gpu", supports=_supports)

KERNELS: Mapping[str, Kernel] = {
    "delta_rule": _HOPPER(_delta_rule, peers=(JLA, FLA), quiet=("beta",)),
    "gated_delta_rule": _HOPPER(_delta_rule, peers=(JLA, FLA, FLASH_QLA), quiet=("log_decay", "beta")),
    "kaczmarz": _HOPPER(partial(_delta_rule, eps=1e-6), peers=("gated_delta_rule",), quiet=("log_decay", "eta")),
}
