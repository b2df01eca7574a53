"""Token loops in float64 NumPy, written from the mixers' definitions alone: the oracle of every test of values.

Each mixer is a function of one token of one row: token(state, x, options) -> output, with `state` a dict of arrays
(changed in place), and an empty state. Arrays are those of the mixer's arguments without B and T.
"""

import numpy as np


def _grouped(x, heads):
    """[Hk, ...] to [heads, ...]: value head h reads key head h // (heads // Hk)."""
    return np.repeat(x, heads // x.shape[0], axis=0)


def _normalized(x):
    return x / np.sqrt(np.sum(x * x, -1, keepdims=True) + 1e-6)


def _read(q, S):
    return np.einsum("hk,hkv->hv", q, S)


def _outer(k, v):
    return k[:, :, None] * v[:, None, :]


def _matrix(size, options):
    return {"S": np.zeros((size["H"], size["K"], size["V"]))}


def _matrix_and_sum(size, options):
    return {"S": np.zeros((size["H"], size["K"], size["V"])), "z": np.zeros((size["Hk"], size["K"]))}


def _linear(state, x, options):
    q, k = (_grouped(x[name], len(x["v"])) for name in ("q", "k"))
    state["S"] = state["S"] + _outer(k, x["v"])
    state["z"] = state["z"] + x["k"]
    o = _read(q, state["S"])
    if options.get("normalize_output"):
        o = o / np.maximum(np.sum(q * _grouped(state["z"], len(q)), -1), options.get("eps", 1e-6))[:, None]
    return o


def _simple(state, x, options):
    q, k = (_grouped(x[name], len(x["v"])) for name in ("q", "k"))
    state["S"] = np.exp(x["log_decay"])[:, None, None] * state["S"] + _outer(k, x["v"])
    return _read(q, state["S"])


def _gla(state, x, options):
    q, k, g = (_grouped(x[name], len(x["v"])) for name in ("q", "k", "log_decay"))
    state["S"] = np.exp(g)[:, :, None] * state["S"] + _outer(k, x["v"])
    return _read(q, state["S"])


def _delta(state, x, options):
    q, k = (_grouped(x[name], len(x["v"])) for name in ("q", "k"))
    q = _normalized(q) if options.get("normalize_q") else q
    k = _normalized(k) if options.get("normalize_k") else k
    if "log_decay" in x:
        state["S"] = np.exp(x["log_decay"])[:, None, None] * state["S"]
    beta = x["beta"] if "beta" in x else x["eta"] / (np.sum(k * k, -1) + options.get("eps", 1e-6))
    state["S"] = state["S"] + beta[:, None, None] * _outer(k, x["v"] - _read(k, state["S"]))
    return options["scale"] * _read(q, state["S"])


def _variational_empty(size, options):
    H, K, penalty = size["H"], size["K"], options.get("penalty", 0.1)
    eye = np.broadcast_to(np.eye(K), (H, K, K))
    return {
        "M": penalty * eye,
        "A": eye / penalty,
        "S": np.zeros((H, K, size["V"])),
        "z": np.zeros((H, K)),
    }


def _variational(state, x, options):
    u, k = x["penalty_direction"], x["k"]
    state["M"] = state["M"] + _outer(u, u)
    state["A"] = np.linalg.inv(state["M"])
    unit = _normalized(k)
    write = np.einsum("hij,hj->hi", state["A"], unit)
    if options.get("normalize_write", True):
        norm = np.linalg.norm(write, axis=-1, keepdims=True)
        write = np.where(norm > 0, write / np.where(norm > 0, norm, 1), 0)
    state["S"] = state["S"] + _outer(write, x["v"] - _read(unit, state["S"]))
    state["z"] = state["z"] + k
    o = _read(x["q"], state["S"])
    if options.get("normalize_output", True):
        o = o / np.maximum(np.sum(x["q"] * state["z"], -1), options.get("eps", 1e-4))[:, None]
    return o


def _curvature_empty(size, options):
    Hk, K = size["Hk"], size["K"]
    return {"count": np.zeros(Hk), "mean": np.zeros((Hk, K)), "scatter": np.zeros((Hk, K, K))}


def _curvature(state, x, options):
    """Welford's update; the weights of earlier tokens decay where there is a log decay."""
    k = _normalized(x["k"]) if options.get("normalize_keys", True) else x["k"]
    if "log_decay" in x:
        decay = np.exp(x["log_decay"])
        state["count"], state["scatter"] = decay * state["count"], decay[:, None, None] * state["scatter"]
    before = k - state["mean"]
    state["count"] = state["count"] + 1
    state["mean"] = state["mean"] + before / state["count"][:, None]
    state["scatter"] = state["scatter"] + _outer(before, k - state["mean"])
    contraction = np.einsum("hij,hj->hi", state["scatter"] / state["count"][:, None, None], x["q"])
    return x["q"] - (options.get("gain", 1.0) * x["gate"])[:, None] * contraction


def _conditioned(memory_empty, memory_token, name):
    """CCQ: the backbone's read by the contracted query."""

    def empty(size, options):
        query = {f"query.{field}": a for field, a in _curvature_empty(size, options).items()}
        return query | {f"memory.{field}": a for field, a in memory_empty(size, options).items()}

    def token(state, x, options):
        q = _normalized(x["q"]) if options.get("normalize_q") else x["q"]
        k = _normalized(x["k"]) if options.get("normalize_k") else x["k"]
        seen = {"q": q, "k": k, "gate": x["gate"]}
        if options.get("decay", "none") == "backbone":
            g = x["log_decay"]
            seen["log_decay"] = np.mean(g, -1) if name == "gla" else np.mean(g.reshape(len(q), -1), -1)
        query = {field: state[f"query.{field}"] for field in ("count", "mean", "scatter")}
        q = _curvature(query, seen, options)
        memory = {"S": state["memory.S"]}
        scale = {} if name == "delta" else {"q": options["scale"] * q}
        o = memory_token(memory, x | {"q": q, "k": k} | scale, {**options, "normalize_q": False, "normalize_k": False})
        state.update({f"query.{field}": a for field, a in query.items()} | {"memory.S": memory["S"]})
        return o

    return empty, token


def _interdomain_empty(size, options):
    return {"x": np.zeros((size["H"], size["N"], size["K"] + size["V"]), complex)}


def _interdomain(state, x, options):
    K = x["q"].shape[-1]
    kv = np.concatenate([x["k"], x["v"]], -1)
    state["x"] = np.exp(x["log_a"])[..., None] * state["x"] + x["b"][..., None] * kv[:, None, :]
    coefficients = 2 * np.real(np.einsum("hmn,hnd->hmd", x["c"], state["x"]))
    weights = np.einsum("hk,hmk->hm", options["scale"] * x["q"], coefficients[..., :K])
    return np.einsum("hm,hmv->hv", weights, coefficients[..., K:])


def _s4d_empty(size, options):
    return {"h": np.zeros((size["H"], size["N"]), complex)}


def _s4d(state, x, options):
    state["h"] = np.exp(x["log_a"]) * state["h"] + x["b"] * x["x"][:, None]
    return 2 * np.real(np.sum(x["c"] * state["h"], -1)) + x["d"] * x["x"]


def _longhorn_empty(size, options):
    return {"h": np.zeros((size["D"], size["N"]))}


def _longhorn(state, x, options):
    k, delta = x["k"], x["delta"]
    step = delta / (1 + delta * np.sum(k * k))
    state["h"] = (1 - step[:, None] * k**2) * state["h"] + (step * x["x"])[:, None] * k
    return state["h"] @ x["q"]


TOKENS = {
    "linear_attention": (_matrix_and_sum, _linear),
    "simple_gla": (_matrix, _simple),
    "gla": (_matrix, _gla),
    "delta_rule": (_matrix, _delta),
    "gated_delta_rule": (_matrix, _delta),
    "kaczmarz": (_matrix, _delta),
    "variational": (_variational_empty, _variational),
    "curvature_query": (_curvature_empty, _curvature),
    "ccq_gla": _conditioned(_matrix, _gla, "gla"),
    "ccq_gated_delta_rule": _conditioned(_matrix, _delta, "delta"),
    "ccq_kaczmarz": _conditioned(_matrix, _delta, "delta"),
    "interdomain": (_interdomain_empty, _interdomain),
    "s4d": (_s4d_empty, _s4d),
    "longhorn": (_longhorn_empty, _longhorn),
}

# Where `scale` multiplies q before anything else; the delta rule normalises q first, CCQ contracts it first.
SCALED_FIRST = ("linear_attention", "simple_gla", "gla")
UNSCALED = ("variational", "curvature_query", "interdomain", "s4d", "longhorn")


def fields(state, prefix=""):
    """A state's arrays by name; the fields of a state within are `outer.inner`."""
    flat = {}
    for name, x in state._asdict().items():
        flat |= fields(x, f"{prefix}{name}.") if hasattr(x, "_fields") else {prefix + name: x}
    return flat


def reference(name, inputs, *, scale=None, initial_state=None, segment_ids=None, initial_segment_id=None, **options):
    """Output [B, T, ...] and the final state as a dict of fields, in float64, of `inputs` (arrays by argument name)."""
    from linattn_jax.mixers.dispatch import MIXERS

    arguments = MIXERS[name].arguments
    wide = lambda a: np.asarray(a, np.complex128 if np.iscomplexobj(np.asarray(a)) else np.float64)
    x = {key: wide(a) for key, a in inputs.items()}
    size = {axis: n for key, a in x.items() for axis, n in zip(arguments[key].axes.split(), a.shape, strict=True)}
    options["scale"] = (1.0 if name in UNSCALED else size["K"] ** -0.5) if scale is None else scale
    if name in SCALED_FIRST:
        x["q"] = options["scale"] * x["q"]
    empty, token = TOKENS[name]
    output = np.zeros([size[axis] for axis in MIXERS[name].output.split()])
    starts = None if initial_state is None else {key: wide(a) for key, a in fields(initial_state).items()}
    finals = []
    for b in range(size["B"]):
        state = empty(size, options) if starts is None else {key: a[b].copy() for key, a in starts.items()}
        last = None if initial_segment_id is None else int(initial_segment_id[b])
        for t in range(size["T"]):
            if segment_ids is not None:
                current = int(segment_ids[b, t])
                if current < 0:
                    continue
                if last is not None and current != last:
                    state = empty(size, options)
                last = current
            at = {key: a[b, t] if arguments[key].axes.startswith("B T") else a for key, a in x.items()}
            output[b, t] = token(state, at, options)
        finals.append(state)
    shapes = empty(size, options)
    final = {key: np.array([state[key] for state in finals]).reshape(-1, *a.shape) for key, a in shapes.items()}
    return output, final
