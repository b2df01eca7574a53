"""Runs the delta rule's kernels on the cases named by the arguments, against the token loop in float64.

On a CPU they run interpreted, on a GPU as they are; cases of LARGE want one. With --report errors are only printed.
A program of its own because every warpgroup that is interpreted holds a thread of the compute pool while it waits for
the others: the pool must have more threads than the kernel has warpgroups, and its size is fixed when a process starts.
"""

import sys
from contextlib import ExitStack, nullcontext
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from cases import make_inputs, make_state
from reference import reference
from tolerances import assert_close, limit

import pallas_kernels
from linattn_jax import gated_delta_rule
from pallas_kernels.delta_rule import gradients as gradients_kernel
from pallas_kernels.delta_rule import inverse, wide
from pallas_kernels.delta_rule.api import delta_rule
from pallas_kernels.delta_rule.tuning import Config

ONE, TWO = Config(tiles=1), Config(tiles=2)
STAYS = {"decay": "zero"}
INSIDE = {"normalize_q": True, "normalize_k": True}

# The mixer, its arguments (beside those of `draw`), the kernel's options.
CASES = {
    "plain": ("delta_rule", {"T": 192, "double": True}, {}),
    "gated": ("gated_delta_rule", {"T": 256, "B": 2, "V": 128}, {"config": TWO}),
    "wide": ("gated_delta_rule", {"T": 320, "K": 128, "V": 128, "H": 2, "Hk": 1}, {"config": TWO}),
    "wide in two programs": ("gated_delta_rule", {"T": 128, "K": 128, "V": 128}, {"config": ONE}),
    "wide keys": ("delta_rule", {"T": 128, "K": 128, "double": True}, {}),
    "float16": ("gated_delta_rule", {"T": 128, "dtype": "float16"}, {}),
    "strong": ("gated_delta_rule", {"T": 192, "decay": -6.0}, {}),
    "stronger": ("gated_delta_rule", {"T": 128, "decay": -100.0}, {}),
    "no decay": ("gated_delta_rule", {"T": 128, "decay": "zero", "double": True}, {}),
    "forget at a start": ("gated_delta_rule", {"T": 128, "decay": ("spike", -np.inf, 64)}, {}),
    "forget inside": ("gated_delta_rule", {"T": 192, "decay": ("spike", -1000.0, 100)}, {}),
    "one token": ("gated_delta_rule", {"T": 1, "state": True}, {}),
    "short": ("gated_delta_rule", {"T": 15, "state": True}, {}),
    "tail": ("gated_delta_rule", {"T": 129, "K": 128, "state": True}, {}),
    "parallel": ("gated_delta_rule", {"T": 128, "keys": "parallel"}, {}),
    # Without decay, which would leave nothing of the state that a piece starts from.
    "pieces": ("gated_delta_rule", {"T": 600, "B": 2, "H": 2, "Hk": 1, "state": True, **STAYS}, {"pieces": 4}),
    "pieces, wide": ("kaczmarz", {"T": 256, "K": 128, "V": 128, "keys": "long", **STAYS}, {"pieces": 2, "config": TWO}),
    # One piece of two forgets everything inside; both forget early and late.
    "a piece forgets": (
        "gated_delta_rule",
        {"T": 500, "state": True, "forget": 300, "H": 2, "Hk": 1, **STAYS},
        {"pieces": 2},
    ),
    "pieces forget": ("kaczmarz", {"T": 500, "state": True, "decay": -1.0, "keys": "long"}, {"pieces": 2}),
    "keys of 256": ("gated_delta_rule", {"T": 200, "K": 256, "V": 64, "state": True}, {"config": None}),
    "256 by 512": ("kaczmarz", {"T": 128, "K": 256, "V": 512, "keys": "long"}, {"config": None}),
    "192 by 192": ("gated_delta_rule", {"T": 129, "K": 192, "V": 192, "H": 2, "Hk": 1}, {"config": None, **INSIDE}),
    "values of 256": ("delta_rule", {"T": 130, "K": 64, "V": 256, "B": 2}, {"config": TWO, "normalize_k": True}),
    "values of 320": ("gated_delta_rule", {"T": 128, "V": 320, "dtype": "float16"}, {"config": None}),
    # A program of the kernels that share out chunks works on all of them, one after the other.
    "one program": ("gated_delta_rule", {"T": 200, "B": 2, "H": 2, "Hk": 1}, {"programs": 1}),
    "one program, wide": ("kaczmarz", {"T": 200, "K": 256, "V": 128, "keys": "long"}, {"config": None, "programs": 1}),
    "states walked again": ("gated_delta_rule", {"T": 150, "state": True}, {"save_states": False}),
    "zero and negative strengths": ("gated_delta_rule", {"T": 128, "signs": True}, {}),
    "normalized": ("gated_delta_rule", {"T": 128, "keys": "long", "state": True}, INSIDE),
    "kaczmarz": ("kaczmarz", {"T": 192, "keys": "long", "double": True}, {}),
    "kaczmarz, tiny keys": ("kaczmarz", {"T": 128, "keys": "tiny"}, {}),
    "kaczmarz, zero keys": ("kaczmarz", {"T": 100, "keys": "zero"}, {}),
    "kaczmarz, normalized": ("kaczmarz", {"T": 128, "K": 128, "H": 2, "Hk": 1, "keys": "long"}, INSIDE),
}


def draw(name, *, double=False, signs=False, forget=None, state=False, **options):
    """Arguments of mixer `name` and an initial state or None.

    double: strengths up to 2. signs: some strengths are 0, some negative. forget: a token that forgets everything.
    """
    sizes = {"B": 1, "T": 64, "Hk": 1, "H": 1, "K": 64, "V": 64, "dtype": "bfloat16"} | options
    sizes["Hk"] = options.get("Hk", sizes["H"])
    inputs = make_inputs(name, **sizes)
    strength = "eta" if "eta" in inputs else "beta"
    if double:
        inputs[strength] = 2 * inputs[strength]
    if forget is not None:
        inputs["log_decay"][:, forget] = -np.inf
    if signs:
        factor = np.ones(inputs[strength].shape[1], inputs[strength].dtype)
        factor[::3], factor[1::7] = 0, -0.25
        inputs[strength] = inputs[strength] * factor[:, None]
    sizes = {axis: sizes[axis] for axis in ("B", "Hk", "H", "K", "V")}
    return inputs, make_state(name, **sizes) if state else None


def forward(name, inputs, state, *, config=ONE, **options):
    """The jitted kernel for such arguments of mixer `name`, and the arguments that it takes."""
    x = {key: jnp.asarray(a) for key, a in inputs.items()}
    if name == "kaczmarz":
        options.setdefault("eps", 1e-6)
    options = {"scale": x["k"].shape[-1] ** -0.5, "config": config, "pieces": 1, **options}
    call = jax.jit(lambda q, k, v, b, g, s: delta_rule(q, k, v, b, g, initial_state=s, **options))
    strength = x["eta"] if name == "kaczmarz" else x["beta"]
    return call, (x["q"], x["k"], x["v"], strength, x.get("log_decay"), None if state is None else state.S)


def gradients(name, inputs, state, output, final, *, scale, eps=1e-6, normalize_q=False, normalize_k=False):
    """The gradients of sum(o * output) + sum(S * final) by the arguments, in float64, token by token."""
    x = {key: np.asarray(a, np.float64) for key, a in inputs.items()}
    group = x["v"].shape[2] // x["k"].shape[2]
    q, k = (np.repeat(x[key], group, 2) for key in ("q", "k"))
    qn = 1 / np.sqrt((q**2).sum(-1) + 1e-6) if normalize_q else np.ones(q.shape[:3])
    kn = 1 / np.sqrt((k**2).sum(-1) + 1e-6) if normalize_k else np.ones(k.shape[:3])
    q_hat, k_hat = q * qn[..., None], k * kn[..., None]
    strength = x["eta"] if name == "kaczmarz" else x["beta"]
    square = (k_hat**2).sum(-1) + eps if name == "kaczmarz" else np.ones(k.shape[:3])
    beta = strength / np.where(square > 0, square, np.inf)
    decay = np.exp(x["log_decay"]) if "log_decay" in x else np.ones(beta.shape)
    B, T, H, V = x["v"].shape
    S = np.zeros((B, H, k.shape[-1], V)) if state is None else np.asarray(state.S, np.float64)
    before = []
    for t in range(T):
        before.append(S)
        S = decay[:, t, :, None, None] * S
        error = x["v"][:, t] - np.einsum("bhkv,bhk->bhv", S, k_hat[:, t])
        S = S + np.einsum("bhk,bhv->bhkv", k_hat[:, t], beta[:, t, :, None] * error)
    dS = np.asarray(final, np.float64)
    d = {key: np.zeros(a.shape) for key, a in {**x, "q": q, "k": k, "beta": beta, "log_decay": beta}.items()}
    for t in reversed(range(T)):
        S = decay[:, t, :, None, None] * before[t]
        error = x["v"][:, t] - np.einsum("bhkv,bhk->bhv", S, k_hat[:, t])
        write = beta[:, t, :, None] * error
        do = scale * np.asarray(output, np.float64)[:, t]
        after = S + np.einsum("bhk,bhv->bhkv", k_hat[:, t], write)
        d["q"][:, t] = np.einsum("bhkv,bhv->bhk", after, do)
        dS = dS + np.einsum("bhk,bhv->bhkv", q_hat[:, t], do)
        dwrite = np.einsum("bhkv,bhk->bhv", dS, k_hat[:, t])
        derror = beta[:, t, :, None] * dwrite
        d["k"][:, t] = np.einsum("bhkv,bhv->bhk", dS, write) - np.einsum("bhkv,bhv->bhk", S, derror)
        d["v"][:, t] = derror
        d["beta"][:, t] = (dwrite * error).sum(-1)
        dS = dS - np.einsum("bhk,bhv->bhkv", k_hat[:, t], derror)
        d["log_decay"][:, t] = (dS * S).sum((-1, -2))
        dS = decay[:, t, :, None, None] * dS
    if name == "kaczmarz":
        d["k"] -= 2 * (d["beta"] * beta / np.where(square > 0, square, np.inf))[..., None] * k_hat
        d["eta"] = d["beta"] / np.where(square > 0, square, np.inf)
    for key, raw, hat, norm in (("q", q, q_hat, qn), ("k", k, k_hat, kn)):
        if normalize_q if key == "q" else normalize_k:
            d[key] = norm[..., None] * (d[key] - hat * norm[..., None] * (d[key] * raw).sum(-1, keepdims=True))
        d[key] = d[key].reshape(B, T, -1, group, raw.shape[-1]).sum(3)
    return {key: d[key] for key in x} | ({} if state is None else {"initial_state": dS})


def running():
    """Interpreted on a CPU, as they are on a GPU."""
    return pallas_kernels.interpret() if jax.default_backend() == "cpu" else nullcontext()


def check(case, report=False):
    """Asserts output and final state, and the gradients of all arguments."""
    name, drawn, options = CASES[case]
    options = dict(options)
    programs = options.pop("programs", gradients_kernel.MULTIPROCESSORS)
    with ExitStack() as stack:
        for module in (gradients_kernel, inverse, wide):
            stack.enter_context(mock.patch.object(module, "MULTIPROCESSORS", programs))
        _check(case, name, drawn, options, report)


def _check(case, name, drawn, options, report):
    inputs, state = draw(name, **drawn)
    call, arguments = forward(name, inputs, state, **options)
    random = np.random.default_rng(7)
    names = ("q", "k", "v", "strength", "log_decay", "initial_state")
    given = []

    def run():
        results, back = jax.vjp(call, *arguments)
        given[:] = given or [jnp.asarray(random.normal(size=x.shape), x.dtype) for x in results]
        return results, dict(zip(names, back(tuple(given)), strict=True))

    with running():
        (output, final), grads = run()
        if jax.default_backend() != "cpu":
            for one, other in zip(*map(jax.tree.leaves, (((output, final), grads), run())), strict=True):
                assert jnp.array_equal(one, other), f"{case}: another run gives other bits"
    options = {key: value for key, value in options.items() if key not in ("config", "pieces", "save_states")}
    wanted, last = reference(name, inputs, initial_state=state, **options)
    dtype = str(output.dtype)
    assert output.dtype == inputs["v"].dtype
    assert final.dtype == jnp.float32
    assert_close(output, wanted, limit("output", dtype), f"{case}: output")
    assert_close(final, last["S"], limit("state", dtype), f"{case}: final state")
    for key, grad in gradients(name, inputs, state, *given, scale=inputs["k"].shape[-1] ** -0.5, **options).items():
        ours = grads["strength" if key in ("beta", "eta") else key]
        judge(ours, grad, bound(key), f"{case}: gradient of {key}", report)


# Sizes, and the tokens that are held against float64 from a token on that forgets what was before; None: all tokens,
# against the plain chunkwise form in float32.
LARGE = {
    "long row": ({"T": 65537, "H": 4, "K": 128}, None),
    "more than 2^31 elements": ({"T": 2**20 + 72, "H": 16, "K": 128}, 500),
    "documents of one token": ({"T": 4096, "H": 32, "K": 64}, 64),
}


def check_large(case, report=False):
    """Asserts output, final state and gradients of the gated rule at sizes that are too much for a token loop."""
    size, last = LARGE[case]
    T, H, K = size["T"], size["H"], size["K"]
    random = jax.jit(lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape), static_argnums=(1, 2, 3, 4))
    repeats = -(-T // 4096)

    def drawn(seed, *shape):
        return jnp.tile(random(seed, 1, 4096, *shape).astype(jnp.bfloat16), (1, repeats, 1, 1))[:, :T]

    unit = lambda x: x / jnp.linalg.norm(x.astype(jnp.float32), axis=-1, keepdims=True).astype(x.dtype)
    q, k, v, given = unit(drawn(0, H, K)), unit(drawn(1, H, K)), drawn(2, H, K), drawn(3, H, K)
    beta, log_decay = (jax.nn.sigmoid(drawn(seed, H, 1)[..., 0].astype(jnp.float32)) for seed in (4, 5))
    log_decay = jnp.log(log_decay)
    if last is not None:
        log_decay = log_decay.at[:, T - last].set(-jnp.inf)
    if case == "documents of one token":
        log_decay = jnp.full_like(log_decay, -jnp.inf)
    final = random(6, 1, H, K, K)
    names = ("q", "k", "v", "beta", "log_decay")
    inputs = dict(zip(names, (q, k, v, beta, log_decay), strict=True))
    if last is not None:
        given = given.at[:, : T - last].set(0)
    options = {"scale": K**-0.5}

    def both(call, cotangents, x):
        return jax.jit(lambda x, c: (lambda out, back: (*out, *back(c)))(*jax.vjp(call, *x)))(x, cotangents)

    kernel = lambda *x: delta_rule(*x, **options)
    with running():
        output, state, *grads = both(kernel, (given, final), tuple(inputs.values()))
    cut = lambda x: x if last is None else np.asarray(x[:, T - last :], np.float64)
    seen = {"output": cut(output), "state": state} | {key: cut(g) for key, g in zip(names, grads, strict=True)}
    if last is None:

        def plain(q, k, v, beta, log_decay):
            output, state = gated_delta_rule(q, k, v, log_decay, beta, implementation="chunkwise", **options)
            return output, state.S

        wide = {key: a.astype(jnp.float32) for key, a in inputs.items()}
        with jax.default_matmul_precision("highest"):
            out = both(plain, (given.astype(jnp.float32), final), tuple(wide.values()))
        wanted = dict(zip(("output", "state", *names), out, strict=True))
    else:
        one = {key: cut(a) for key, a in inputs.items()}
        output, state = reference("gated_delta_rule", one)
        wanted = {"output": output, "state": state["S"]}
        wanted |= gradients("gated_delta_rule", one, None, cut(given), final, **options)
    for key, value in wanted.items():
        judge(seen[key], value, {"output": 5e-3, "state": 5e-3}.get(key, bound(key)), f"{case}: {key}", report)


def bound(key):
    """The limit of a gradient's error."""
    return 8e-3 if key in ("q", "k", "v", "initial_state") else 2e-2


def judge(seen, wanted, limit, what, report):
    """Asserts an error, or prints it."""
    if report:
        seen, wanted = np.asarray(seen, np.float64), np.asarray(wanted, np.float64)
        size = np.linalg.norm(wanted)
        print(f"{what:40s} {np.linalg.norm(seen - wanted) / max(size, 1e-30):.2e} of {size:.2e}")
    else:
        assert_close(seen, wanted, limit, what)


if __name__ == "__main__":
    report = "--report" in sys.argv
    for case in [a for a in sys.argv[1:] if not a.startswith("--")] or CASES:
        (check_large if case in LARGE else check)(case, report)
        print("ok", case, flush=True)
