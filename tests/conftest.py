"""Makes the helpers beside the tests importable, and compiling cheap."""

import os
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

# On a CPU these tests spend their time in the compiler. The programs are the same, only less optimised.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
