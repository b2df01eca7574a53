"""Which devices kernels ask for: asked without importing what the kernels are written in."""

from __future__ import annotations

from typing import Any

import jax

HOPPER = "the kernel runs on NVIDIA Hopper (compute capability 9.0)"


def not_hopper(device: Any) -> str | None:
    """None for a Hopper GPU, or a reason that names the device."""
    capability = str(getattr(device, "compute_capability", ""))
    if device.platform in ("gpu", "cuda") and capability == "9.0":
        return None
    return f"{HOPPER}, not on {device.device_kind} ({device.platform}{', ' + capability if capability else ''})"


def cuda_devices() -> list[Any]:
    """The NVIDIA GPUs that JAX sees; empty where it sees none."""
    try:
        return jax.devices("cuda")
    except RuntimeError:
        return []
