"""Makes the helpers beside the tests importable, and compiling cheap."""

import os
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

# On a CPU these tests spend their time in the compiler. The programs are the same, only less optimised.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

# A process may hold 65,530 memory mappings on Linux. Compiled programs take some each; beyond the limit the compiler
# aborts.
MAPPINGS = Path("/proc/self/maps")


@pytest.fixture(autouse=True)
def bounded_programs():
    """Forgets compiled programs once they hold a third of the mappings that a process may have."""
    yield
    if MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > 20_000:
        import jax

        jax.clear_caches()
