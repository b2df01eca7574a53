"""Assertions on the one table of tolerances, `linattn_jax.eval.tolerances`."""

from linattn_jax.eval.tolerances import GATES, limit, relative_l2

__all__ = ["CONDITIONED", "GATES", "PERTURBATION", "assert_close", "limit", "relative_l2"]

# Ill-conditioned cases: the limit is this many times the float64 loop's own response to a 1e-7 relative perturbation of
# its inputs, since float32 inputs are already rounded by 6e-8.
CONDITIONED = 10.0
PERTURBATION = 1e-7


def assert_close(seen: object, wanted: object, bound: float, what: str = "") -> None:
    """Asserts a relative L2 error within `bound`."""
    error = relative_l2(seen, wanted)
    assert error <= bound, f"{what}: relative L2 error {error:.3g}, limit {bound:.3g}"
