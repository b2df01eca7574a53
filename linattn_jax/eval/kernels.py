"""The kernels that a benchmark holds against others: by mixer, its name, what it serves, and its peers.

Kernels are imported when they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

JLA, FLA, FLASH_QLA = "jax-linear-attention", "fla", "flash_qla"


class Kernel(NamedTuple):
    """One entry of the registry.

    name: of the mixer's implementation.
    supports: q, k, v and a device, or None for the arrays alone; the reason why they are not served, or None.
    peers: implementations of others; where there is none, the mixer of ours that costs what this one should.
    quiet: arguments whose zeros neither write to the state nor change it.
    """

    name: str
    supports: Callable[..., str | None]
    peers: tuple[str, ...]
    quiet: tuple[str, ...]


def _supports(q: Any, k: Any, v: Any, *, device: Any = None) -> str | None:
    from pallas_kernels.delta_rule.api import supports

    return supports(q, k, v, device=device)


_HOPPER = partial(Kernel, "mosaic_gpu", supports=_supports)

KERNELS: Mapping[str, Kernel] = {
    "delta_rule": _HOPPER(peers=(JLA, FLA), quiet=("beta",)),
    "gated_delta_rule": _HOPPER(peers=(JLA, FLA, FLASH_QLA), quiet=("log_decay", "beta")),
    "kaczmarz": _HOPPER(peers=("gated_delta_rule",), quiet=("log_decay", "eta")),
}
