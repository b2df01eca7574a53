"""The only table of tolerances: relative L2 limits by dtype, for values and for gradients."""

import numpy as np

# Narrow types: rounding of operands and of the output, whatever the length. The bfloat16 row is the one that kernels
# elsewhere are held to. float32 and float64: accumulated rounding, generous by about 10 for the lengths tested.
VALUES = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-3, "bfloat16": 5e-3}
GRADIENTS = {"float64": 1e-11, "float32": 2e-5, "float16": 3e-3, "bfloat16": 8e-3}
GATE_GRADIENTS = {"float64": 1e-11, "float32": 5e-5, "float16": 1e-2, "bfloat16": 2e-2}

# Ill-conditioned cases: the limit is this many times the float64 loop's own response to a 1e-7 relative perturbation of
# its inputs, since float32 inputs are already rounded by 6e-8.
CONDITIONED = 10.0
PERTURBATION = 1e-7

GATES = ("log_decay", "beta", "eta")


def limit(name: str, dtype: str, gradient: bool = False) -> float:
    """The limit for the value or gradient of the tensor called `name`."""
    if not gradient:
        return VALUES[dtype]
    return (GATE_GRADIENTS if name in GATES else GRADIENTS)[dtype]


def relative_l2(seen: object, wanted: object) -> float:
    """||seen - wanted|| / ||wanted||; infinite where anything is not finite; absolute where wanted is zero."""
    seen, wanted = (np.asarray(x, np.complex128 if np.iscomplexobj(x) else np.float64) for x in (seen, wanted))
    if seen.shape != wanted.shape:
        raise AssertionError(f"shapes {seen.shape} and {wanted.shape}")
    if not np.all(np.isfinite(seen)):
        return np.inf
    norm = np.linalg.norm(wanted)
    return float(np.linalg.norm(seen - wanted) / (norm if norm > 0 else 1.0))


def assert_close(seen: object, wanted: object, bound: float, what: str = "") -> None:
    """Asserts a relative L2 error within `bound`."""
    error = relative_l2(seen, wanted)
    assert error <= bound, f"{what}: relative L2 error {error:.3g}, limit {bound:.3g}"
