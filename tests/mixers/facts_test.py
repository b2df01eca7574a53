"""Facts about the mixers that the papers and the docs rest on, each checked on random inputs."""

import numpy as np
import pytest
from cases import call, make_inputs, make_state
from tolerances import assert_close

FORMS = ("recurrent", "chunkwise")


@pytest.mark.parametrize("form", FORMS)
def test_kaczmarz_is_the_gated_delta_rule_on_unit_keys_and_scaled_values(form):
    x = make_inputs("kaczmarz", T=70)
    norm = np.linalg.norm(x["k"], axis=-1, keepdims=True)
    scaled = {"q": x["q"], "k": x["k"] / norm, "v": x["v"] / norm, "log_decay": x["log_decay"], "beta": x["eta"]}
    output, state = call("kaczmarz", x, eps=0.0, implementation=form)
    wanted, wanted_state = call("gated_delta_rule", scaled, implementation=form)
    assert_close(output, wanted, 1e-6)
    assert_close(state.S, wanted_state.S, 1e-6)


def test_a_kaczmarz_step_is_a_projection_and_a_line_search():
    """eta = 1, eps = 0: v is stored exactly, by the least change that does, of the length a line search would take."""
    x = make_inputs("kaczmarz", T=1)
    x["eta"] = np.ones_like(x["eta"])
    before = make_state("kaczmarz")
    _, after = call("kaczmarz", x, eps=0.0, initial_state=before)
    k, v = x["k"][:, 0].astype(np.float64), x["v"][:, 0].astype(np.float64)
    decayed = np.exp(x["log_decay"][:, 0].astype(np.float64))[..., None, None] * np.asarray(before.S, np.float64)
    change = np.asarray(after.S, np.float64) - decayed
    assert_close(np.einsum("bhkv,bhk->bhv", after.S, k), v, 1e-5, "stored")
    residual = v - np.einsum("bhkv,bhk->bhv", decayed, k)
    square = np.sum(k * k, -1)
    least = np.linalg.norm(residual, axis=-1) / np.sqrt(square)  # ||k^+ residual||, the least norm of a solution
    assert_close(np.linalg.norm(change, axis=(-2, -1)), least, 1e-5, "least change")
    # Along the gradient k residual^T, 1/2 ||v - S^T k||^2 is least at the step <residual, G k> / ||G k||^2.
    along = square[..., None] * residual
    step = np.sum(residual * along, -1) / np.sum(along * along, -1)
    assert_close(change, step[..., None, None] * k[..., :, None] * residual[..., None, :], 1e-5, "line search")


@pytest.mark.parametrize("form", FORMS)
def test_special_cases_are_the_simpler_mixers(form):
    gated = make_inputs("gated_delta_rule", T=40)
    still = gated | {"log_decay": np.zeros_like(gated["log_decay"])}
    plain = {name: a for name, a in gated.items() if name != "log_decay"}
    pairs = [
        ("gated_delta_rule", still, "delta_rule", plain),
        (
            "gla",
            {n: gated[n] for n in "qkv"} | {"log_decay": np.repeat(gated["log_decay"][..., None], 16, -1)},
            "simple_gla",
            {n: gated[n] for n in ("q", "k", "v", "log_decay")},
        ),
        (
            "simple_gla",
            {n: still[n] for n in ("q", "k", "v", "log_decay")},
            "linear_attention",
            {n: gated[n] for n in "qkv"},
        ),
    ]
    for name, inputs, simpler, its_inputs in pairs:
        output, state = call(name, inputs, implementation=form)
        wanted, wanted_state = call(simpler, its_inputs, implementation=form)
        assert_close(output, wanted, 2e-6, f"{name} as {simpler}")
        assert_close(state.S, wanted_state.S, 2e-6, f"{name} as {simpler}")


@pytest.mark.parametrize("form", FORMS)
def test_no_strength_is_pure_decay(form):
    x = make_inputs("gated_delta_rule", T=20)
    x["beta"] = np.zeros_like(x["beta"])
    before = make_state("gated_delta_rule")
    _, after = call("gated_delta_rule", x, initial_state=before, implementation=form)
    total = np.exp(np.sum(x["log_decay"].astype(np.float64), axis=1))
    assert_close(after.S, total[..., None, None] * np.asarray(before.S), 1e-5)
