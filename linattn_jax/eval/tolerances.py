"""The only table of tolerances, for tests and benchmark gates: relative L2 limits by dtype, values and gradients."""

from __future__ import annotations

from typing import Any

import numpy as np

# Narrow types: rounding of operands and of the output, whatever the length. The bfloat16 row is the one that public
# kernels hold themselves to. float32 and float64: accumulated rounding, generous by about 10 for the lengths tested.
VALUES = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-3, "bfloat16": 5e-3}
GRADIENTS = {"float64": 1e-11, "float32": 2e-5, "float16": 3e-3, "bfloat16": 8e-3}
GATE_GRADIENTS = {"float64": 1e-11, "float32": 5e-5, "float16": 1e-2, "bfloat16": 2e-2}

GATES = ("log_decay", "beta", "eta", "log_a")


def limit(name: str, dtype: str, gradient: bool = False) -> float:
    """The limit for the value or gradient of the tensor called `name`."""
    if not gradient:
        return VALUES[dtype]
    return (GATE_GRADIENTS if name in GATES else GRADIENTS)[dtype]


def relative_l2(seen: Any, wanted: Any) -> float:
    """||seen - wanted|| / ||wanted||; infinite where anything seen is not finite.

    Absolute where ||wanted|| is below 1e-30: devices flush float32 numbers that small to zero.
    """
    seen, wanted = (np.asarray(x, np.complex128 if np.iscomplexobj(x) else np.float64) for x in (seen, wanted))
    if seen.shape != wanted.shape:
        raise ValueError(f"shapes {seen.shape} and {wanted.shape} given, wanted the same.")
    if not np.all(np.isfinite(seen)):
        return np.inf
    norm = np.linalg.norm(wanted)
    return float(np.linalg.norm(seen - wanted) / (norm if norm > 1e-30 else 1.0))
