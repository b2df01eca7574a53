"""Placement rules, and the step on eight host devices against one."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from linattn_jax.sharding import logical_axes, make_mesh, partition_spec
from linattn_jax.types import UserError


class _Mesh:
    shape = {"data": 2, "fsdp": 4}  # noqa: RUF012


@pytest.mark.parametrize(
    ("name", "shape", "want"),
    [
        ("layers/mixer/q_proj/kernel", (3, 8, 6), P(None, "fsdp", None)),
        ("layers/0/mixer/q_proj/kernel", (8, 6), P("fsdp", None)),
        ("0/mu/layers/mixer/o_proj/kernel", (3, 6, 8), P(None, None, "fsdp")),
        ("layers/mixer/q_proj/kernel", (3, 6, 8), P(None, None, None)),  # 6 does not divide by 4
        ("layers/mixer/q_conv/kernel", (3, 4, 8), P(None, None, None)),
        ("layers/mixer/A_log", (3, 4), P(None, None)),
        ("layers/mixer/modes/a_log", (3, 8, 16), P(None, None, None)),
        ("layers/mixer/mix_real", (3, 8, 64, 32), P(None, None, None, None)),
        ("layers/mixer/contraction/weight", (3, 8, 64), P(None, None, None)),
        ("layers/mixer/out_norm/scale", (3, 8), P(None, None)),
        ("embed", (16, 8), P(None, "fsdp")),
        ("unembed/kernel", (8, 16), P("fsdp", None)),
        ("0/count", (), P()),
        ("something/new", (8, 8), P()),
    ],
)
def test_rules_are_aligned_to_the_right(name, shape, want):
    assert partition_spec(name, shape, _Mesh()) == want


def test_vectors_have_one_axis():
    for name in ("a/A_log", "a/dt_bias", "q_proj/bias", "q_norm/scale", "out_norm/weight", "a/square_scale"):
        assert logical_axes(name) == ("feature",)


def test_mesh_sizes_must_use_all_devices():
    assert dict(make_mesh().shape) == {"data": len(jax.devices()), "fsdp": 1}
    for sizes, message in (((3, 7), "data=3, fsdp=7 does not use exactly"), ((-1, -1), "one of them may be -1")):
        with pytest.raises(UserError, match=message):
            make_mesh(*sizes)


@pytest.mark.core
def test_eight_devices_give_the_numbers_of_one():
    program = pathlib.Path(__file__).parent / "sharded_program.py"
    root = program.parents[2]
    env = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    done = subprocess.run([sys.executable, str(program)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    seen = json.loads(done.stdout)
    one, fsdp = seen["one"], seen["fsdp"]  # the second also accumulates over two microbatches
    np.testing.assert_allclose(fsdp["loss"], one["loss"], rtol=2e-5)
    np.testing.assert_allclose(fsdp["grad_norm"], one["grad_norm"], rtol=2e-4)
    np.testing.assert_allclose(fsdp["embed"], one["embed"], rtol=1e-4)
    assert one["shards"] == [[[2, 16, 16]]] * 2
    assert fsdp["shards"] == [[[2, 4, 16]] * 8] * 2
    assert fsdp["norm_shard"] == [2, 16]
    # [accumulate, layers, rows, width]: rows over all eight devices.
    assert fsdp["carry_shard"] == [2, 2, 1, 16]
