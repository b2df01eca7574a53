"""The delta rule's kernels: values, interpreted, against the token loop in float64; lowering for CUDA without a GPU."""

import jax
import jax.export
import jax.numpy as jnp
import pytest
from delta_rule_program import CASES, TWO, draw, forward
from interpreted import run_cases

from pallas_kernels.delta_rule.api import delta_rule, supports
from pallas_kernels.delta_rule.tuning import Config, forward_config

QUICK = ("plain", "gated", "tail", "kaczmarz, normalized")


def test_values():
    run_cases("delta_rule_program.py", QUICK)


@pytest.mark.slow
def test_values_of_all_cases():
    run_cases("delta_rule_program.py", [case for case in CASES if case not in QUICK])


@pytest.mark.parametrize(
    ("name", "drawn", "options"),
    [
        ("delta_rule", {"T": 128, "dtype": "float16"}, {}),
        ("gated_delta_rule", {"T": 128, "K": 128, "V": 128, "H": 4, "Hk": 2, "state": True}, {"config": TWO}),
        ("kaczmarz", {"T": 100, "K": 128}, {"normalize_q": True, "normalize_k": True, "save_states": True}),
    ],
)
def test_lowers_for_cuda(name, drawn, options):
    call, arguments = forward(name, *draw(name, **drawn), **options)
    unchecked = [jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
    exported = jax.export.export(call, platforms=["cuda"], disabled_checks=unchecked)(*arguments)
    assert "mosaic_gpu" in exported.mlir_module()


def test_no_tokens():
    inputs, state = draw("gated_delta_rule", T=0, state=True)
    call, arguments = forward("gated_delta_rule", inputs, state)
    output, final = call(*arguments)
    assert output.shape == (1, 0, 1, 64)
    assert jnp.array_equal(final, state.S)


def test_refusals_say_why():
    inputs, _ = draw("delta_rule")
    q, k, v, beta = (jnp.asarray(inputs[key]) for key in ("q", "k", "v", "beta"))
    assert supports(q, k, v) is None
    assert "float32" in supports(q.astype(jnp.float32), k, v)
    assert supports(q[..., :48], k[..., :48], v) is None
    assert "192" in supports(*(jnp.repeat(a, 3, axis=-1) for a in (q, k)), v)
    assert "Hopper" in supports(q, k, v, device=jax.devices("cpu")[0])
    with pytest.raises(NotImplementedError, match="192"):
        delta_rule(*(jnp.repeat(a, 3, axis=-1) for a in (q, k)), v, beta, scale=1.0)
    with pytest.raises(ValueError, match=r"k: shape .* wanted .*K"):
        delta_rule(q, k[..., :32], v, beta, scale=1.0)
    with pytest.raises(TypeError, match="v: dtype float32 given"):
        delta_rule(q, k, v.astype(jnp.float32), beta, scale=1.0)
    with pytest.raises(ValueError, match="multiple"):
        delta_rule(*(jnp.repeat(a, 2, axis=2) for a in (q, k)), v, beta, scale=1.0)
    with pytest.raises(ValueError, match="tiles"):
        delta_rule(q, k, v, beta, scale=1.0, config=TWO)


def test_settings_are_checked():
    assert forward_config(128).tiles == 2
    with pytest.raises(ValueError, match="tiles"):
        Config(tiles=3)
    with pytest.raises(ValueError, match="registers"):
        Config(tiles=2, state_registers=232, score_registers=232)
