"""The delta rules' mixers on their kernels: values, interpreted, lowering for CUDA, and who is told why not."""

import re
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from cases import call, make_inputs
from delta_mixers_program import CASES
from interpreted import run, run_cases
from jax.sharding import AxisType, PartitionSpec

import pallas_kernels
from linattn_jax.mixers import dispatch
from pallas_kernels import devices

MIXERS = ("delta_rule", "gated_delta_rule", "kaczmarz")
QUICK = ("packed, odd sizes",)
HOPPER = SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="NVIDIA H200")
AMPERE = SimpleNamespace(platform="gpu", compute_capability="8.0", device_kind="NVIDIA A100")
NAMED = {"implementation": "mosaic_gpu"}


def arguments(name, **options):
    sizes = {"B": 2, "T": 70, "K": 48, "V": 64, "dtype": "bfloat16"} | options
    return {key: jnp.asarray(a) for key, a in make_inputs(name, **sizes).items()}


def lowered(function, *arguments, platform="cuda"):
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()


def loss(name, **options):
    """A scalar function of the mixer's inputs, through output and state."""

    def function(x, **arrays):
        output, state = call(name, x, **options, **arrays)
        return output.astype(jnp.float32).sum() + state.S.sum()

    return function


def test_values():
    run_cases("delta_mixers_program.py", QUICK)


@pytest.mark.slow
def test_values_of_all_cases():
    run_cases("delta_mixers_program.py", [case for case in CASES if case not in QUICK])


@pytest.mark.parametrize("name", ["delta_rule", *(pytest.param(n, marks=pytest.mark.slow) for n in MIXERS[1:])])
def test_lowers_for_cuda(name):
    x, ids = arguments(name), jnp.zeros((2, 70), jnp.int32)
    gradient = jax.grad(jax.checkpoint(loss(name, **NAMED)))
    assert "mosaic_gpu" in lowered(lambda x, ids: gradient(x, segment_ids=ids), x, ids)


def test_lowers_for_cuda_inside_shard_map():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("data")
    split = jax.shard_map(lambda x: call("delta_rule", x, **NAMED), mesh=mesh, in_specs=spec, out_specs=spec)
    gradient = jax.grad(lambda x: split(x)[0].astype(jnp.float32).sum())
    assert "mosaic_gpu" in lowered(gradient, arguments("delta_rule", T=64, K=64))


def test_devices_share_out_rows():
    flags = "--xla_force_host_platform_device_count=4"
    assert run("sharding_program.py", XLA_FLAGS=flags) == ["ok"]


@pytest.mark.parametrize("name", MIXERS)
def test_no_other_device_takes_the_name(name):
    x = arguments(name, T=9)
    run = lambda x: call(name, x, **NAMED)
    mapped = lambda x: jax.vmap(run)(jax.tree.map(lambda a: a[None], x))
    for function in (run, jax.jit(run), jax.grad(loss(name, **NAMED)), jax.jit(mapped)):
        with pytest.raises(NotImplementedError, match=rf"{name} has .*'mosaic_gpu' here: .*Hopper.*, not on cpu\."):
            function(x)
    assert jax.eval_shape(run, x)[0].shape == x["v"].shape


@pytest.mark.parametrize(
    ("drawn", "options", "words"),
    [
        ({"dtype": "float32"}, {}, "takes bfloat16 and float16, not float32"),
        ({"K": 257}, {}, "key sizes up to 256, not 257"),
        ({}, {"chunk_size": 32}, "chunks have 64 rows, not 32"),
    ],
)
def test_refusals_say_why(drawn, options, words, monkeypatch, caplog):
    """By name they raise; unasked, the chunkwise form runs and the log says why."""
    x = arguments("gated_delta_rule", T=21, **drawn)
    with pallas_kernels.interpret(), pytest.raises(NotImplementedError, match=words):
        call("gated_delta_rule", x, **NAMED, **options)
    monkeypatch.setattr(devices, "cuda_devices", lambda: [HOPPER])
    dispatch._announce.cache_clear()
    with caplog.at_level("INFO", logger="linattn_jax"):
        text = lowered(lambda x: call("gated_delta_rule", x, **options), x)
    assert "mosaic_gpu" not in text
    assert "no mosaic_gpu: the kernel" in caplog.text
    assert words in caplog.text


def test_chunk_sizes_are_checked():
    with pytest.raises(ValueError, match="chunk_size: 48"):
        call("delta_rule", arguments("delta_rule"), **NAMED, chunk_size=48)


@pytest.mark.parametrize(
    ("seen", "chosen", "words"),
    [
        ([HOPPER, HOPPER], True, "cuda mosaic_gpu"),
        ([], False, "Hopper .*, and none is seen"),
        ([HOPPER, AMPERE], False, "Hopper .*, not on NVIDIA A100"),
    ],
)
def test_the_choice_follows_the_devices(seen, chosen, words, monkeypatch, caplog):
    monkeypatch.setattr(devices, "cuda_devices", lambda: seen)
    x = arguments("kaczmarz", T=22)
    dispatch._announce.cache_clear()
    with caplog.at_level("INFO", logger="linattn_jax"):
        assert ("mosaic_gpu" in lowered(lambda x: call("kaczmarz", x), x)) == chosen
        assert "mosaic_gpu" not in lowered(lambda x: call("kaczmarz", x), x, platform="cpu")
    assert re.search(words, caplog.text)
    ours, state = jax.jit(lambda x: call("kaczmarz", x))(x)
    plain, last = jax.jit(lambda x: call("kaczmarz", x, implementation="chunkwise"))(x)
    assert jnp.array_equal(ours, plain)
    assert jnp.array_equal(state.S, last.S)


def test_a_name_on_other_gpus_is_refused_when_traced(monkeypatch):
    monkeypatch.setattr(devices, "cuda_devices", lambda: [AMPERE])
    with pytest.raises(NotImplementedError, match=r"Hopper .*, not on NVIDIA A100"):
        jax.eval_shape(lambda x: call("delta_rule", x, **NAMED), arguments("delta_rule"))


def test_kernels_are_imported_where_they_are_wanted():
    program = """
import sys
import jax.numpy as jnp
from linattn_jax import delta_rule
x = jnp.zeros((1, 8, 1, 64), jnp.bfloat16)
delta_rule(x, x, x, jnp.zeros((1, 8, 1)))
wanted = ("pallas_kernels.delta_rule", "jax.experimental.pallas.mosaic_gpu")
print([name for name in wanted if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_lowers_where_numbers_are_wide():
    """Gates of 64 bits beside q, k and v of 16, and a strict caller."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        x = arguments("gated_delta_rule", T=20)
        x |= {name: x[name].astype(jnp.float64) for name in ("log_decay", "beta")}
        gradient = jax.grad(lambda x: call("gated_delta_rule", x, **NAMED)[1].S.sum())
        assert "mosaic_gpu" in lowered(gradient, x)
        assert jax.eval_shape(gradient, x)["beta"].dtype == jnp.float64
