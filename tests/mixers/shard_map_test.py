"""Inside shard_map over four host devices every form gives the numbers of one device."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PROGRAM = """
import jax
from cases import FAMILIES, call, make_inputs, sequences
from jax.sharding import AxisType, PartitionSpec
from tolerances import assert_close

mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
rows = PartitionSpec("data")
for name in FAMILIES:
    for form in ("recurrent", "chunkwise"):
        inputs = make_inputs(name, B=4, T=20, K=8, V=8)
        run = lambda x: call(name, x, implementation=form, chunk_size=8)
        specs = {key: rows if key in sequences(name) else PartitionSpec() for key in inputs}
        seen = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(specs,), out_specs=rows))(inputs)
        for a, b in zip(jax.tree.leaves(seen), jax.tree.leaves(jax.jit(run)(inputs)), strict=True):
            assert_close(a, b, 1e-6, f"{name} {form}")
"""


@pytest.mark.core
def test_shard_map():
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    flags = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    environment = os.environ | {"PYTHONPATH": paths, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
