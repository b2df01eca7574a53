"""The delta rule's kernels: values, interpreted, against the token loop in float64; lowering for CUDA without a GPU."""

import itertools
import re
import shutil
import subprocess

import jax
import jax.export
import jax.numpy as jnp
import pytest
from delta_rule_program import CASES, LARGE, TWO, draw, forward
from interpreted import run_cases

from pallas_kernels.delta_rule.api import delta_rule, supports
from pallas_kernels.delta_rule.tuning import Config, pieces, walk_config

QUICK = ("plain", "tail", "a piece forgets", "192 by 192", "kaczmarz, normalized")


def test_values():
    run_cases("delta_rule_program.py", QUICK)


@pytest.mark.slow
def test_values_of_all_cases():
    run_cases("delta_rule_program.py", [case for case in CASES if case not in QUICK])


def hopper():
    """Whether this machine has a Hopper GPU; JAX is not asked, which would take the GPU's memory from the programs."""
    if shutil.which("nvidia-smi") is None:
        return False
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    return "9.0" in subprocess.run(query, capture_output=True, text=True).stdout


@pytest.mark.slow
@pytest.mark.skipif(not hopper(), reason="the kernels run on NVIDIA Hopper")
@pytest.mark.parametrize("case", [*CASES, *LARGE])
def test_values_on_the_gpu(case):
    run_cases("delta_rule_program.py", [case], platform="cuda")


NORMS = {"normalize_q": True, "normalize_k": True}
RULES = [
    ("delta_rule", {}),
    ("gated_delta_rule", {}),
    ("kaczmarz", {}),
    ("gated_delta_rule", NORMS),
    ("kaczmarz", NORMS),
]
# Tokens, pieces, whether there is a state and shared key heads. Of pieces there is one signature, as of wide states.
LENGTHS = [(100, 1, False), (256, 1, True), (200, 2, True)]


def pairwise(rows):
    """Some of `rows` in which every two values that occur together in a row do so."""
    pairs = {row: set(itertools.combinations(enumerate(row), 2)) for row in rows}
    missing = set().union(*pairs.values())
    while missing:
        best = max(rows, key=lambda row: len(pairs[row] & missing))
        missing -= pairs[best]
        yield best


TYPES = ("bfloat16", "float16")
SIGNATURES = list(itertools.product(range(len(RULES)), (64, 128), (64, 128), TYPES, LENGTHS))
WIDE = list(itertools.product(range(len(RULES)), (192, 256), (64, 192, 512), TYPES, LENGTHS[:2]))
WIDE += list(itertools.product(range(len(RULES)), (64, 128), (192, 256), TYPES, LENGTHS))
PUSHED = {*pairwise([row for row in SIGNATURES if row[-1][1] == 1]), (4, 128, 64, "float16", LENGTHS[2])}
PUSHED |= {(4, 256, 192, "bfloat16", LENGTHS[1])}


@pytest.mark.parametrize(
    ("rule", "K", "V", "dtype", "length"),
    [pytest.param(*row, marks=() if row in PUSHED else pytest.mark.slow) for row in (*SIGNATURES, *WIDE)],
)
def test_lowers_for_cuda(rule, K, V, dtype, length):
    (name, options), (T, cut, state) = RULES[rule], length
    drawn = {"T": T, "K": K, "V": V, "H": 2, "Hk": 1 if state else 2, "dtype": dtype, "state": state}
    call, arguments = forward(name, *draw(name, **drawn), **options, pieces=cut, config=None)
    both = jax.jit(lambda *x: (lambda out, back: back(out))(*jax.vjp(call, *x)))
    unchecked = [jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
    exported = jax.export.export(both, platforms=["cuda"], disabled_checks=unchecked)(*arguments)
    # The inverses, two walks, the local gradients, these in two where states are wide; of pieces, a transition and
    # offsets each way and two chains more.
    wanted = 4 + (max(K, V) > 128) + (5 if cut > 1 else 0)
    assert exported.mlir_module().count("custom_call @mosaic_gpu") == wanted


@pytest.mark.parametrize("pieces", [1, 2])
def test_what_is_saved_has_names(pieces):
    """Policies of `jax.checkpoint` choose among what the backward pass keeps besides the arguments."""
    call, arguments = forward("gated_delta_rule", *draw("gated_delta_rule", T=128), pieces=pieces, config=None)
    traced = str(jax.make_jaxpr(lambda *x: jax.vjp(call, *x)[0])(*arguments))
    seen = set(re.findall(r"name=delta_rule_(\w+)", traced))
    assert seen == {"inverses", "vectors", "states", *(("transitions", "remainders") if pieces > 1 else ())}


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
    assert supports(*(jnp.repeat(a, 4, axis=-1) for a in (q, k)), jnp.repeat(v, 9, axis=-1)) is None
    assert "320" in supports(*(jnp.repeat(a, 5, axis=-1) for a in (q, k)), v)
    assert "Hopper" in supports(q, k, v, device=jax.devices("cpu")[0])
    with pytest.raises(NotImplementedError, match="320"):
        delta_rule(*(jnp.repeat(a, 5, axis=-1) for a in (q, k)), v, beta, scale=1.0)
    with pytest.raises(ValueError, match=r"k: shape .* wanted .*K"):
        delta_rule(q, k[..., :32], v, beta, scale=1.0)
    with pytest.raises(TypeError, match="v: dtype float32 given"):
        delta_rule(q, k, v.astype(jnp.float32), beta, scale=1.0)
    with pytest.raises(ValueError, match="multiple"):
        delta_rule(*(jnp.repeat(a, 2, axis=2) for a in (q, k)), v, beta, scale=1.0)
    with pytest.raises(ValueError, match="tiles"):
        delta_rule(q, k, v, beta, scale=1.0, config=TWO)


def test_settings_are_checked():
    assert walk_config(128, 128, 128).tiles == 2
    assert walk_config(128, 128, 16).tiles == walk_config(128, 192, 128).tiles == 1
    assert walk_config(256, 512, 128) == Config(tiles=1, stages=2)
    assert pieces(16, 256) == 8
    assert pieces(32, 128) == 4
    assert pieces(128, 256) == pieces(64, 512) == pieces(16, 16) == pieces(16, 256, 256) == 1
    with pytest.raises(ValueError, match="stages"):
        Config(tiles=1, stages=4)
    with pytest.raises(ValueError, match="tiles"):
        Config(tiles=3)
    with pytest.raises(ValueError, match="registers"):
        Config(tiles=2, state_registers=232, score_registers=232)
