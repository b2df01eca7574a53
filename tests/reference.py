"""Token loops in float64 NumPy, written from the mixers' definitions alone: the oracle of every test of values."""

import numpy as np


def _heads(x: np.ndarray, heads: int) -> np.ndarray:
    """[T, Hk, ...] to [T, H, ...]: value head h reads key head h // (H // Hk)."""
    return np.repeat(x, heads // x.shape[1], axis=1)


def _write_linear(S, z, q, k, v, gates, options):
    S = S + k[:, :, None] * v[:, None, :]
    z = z + k
    o = np.einsum("hk,hkv->hv", q, S)
    if options.get("normalize_output"):
        o = o / np.maximum(np.sum(q * z, -1), options.get("eps", 1e-6))[:, None]
    return o, S, z


def _write_simple(S, z, q, k, v, gates, options):
    S = np.exp(gates["log_decay"])[:, None, None] * S + k[:, :, None] * v[:, None, :]
    return np.einsum("hk,hkv->hv", q, S), S, z


def _write_gla(S, z, q, k, v, gates, options):
    S = np.exp(gates["log_decay"])[:, :, None] * S + k[:, :, None] * v[:, None, :]
    return np.einsum("hk,hkv->hv", q, S), S, z


def _write_delta(S, z, q, k, v, gates, options):
    if "log_decay" in gates:
        S = np.exp(gates["log_decay"])[:, None, None] * S
    if "eta" in gates:
        beta = gates["eta"] / (np.sum(k * k, -1) + options.get("eps", 1e-6))
    else:
        beta = gates["beta"]
    residual = v - np.einsum("hk,hkv->hv", k, S)
    S = S + beta[:, None, None] * k[:, :, None] * residual[:, None, :]
    return np.einsum("hk,hkv->hv", q, S), S, z


WRITES = {
    "linear_attention": _write_linear,
    "simple_gla": _write_simple,
    "gla": _write_gla,
    "delta_rule": _write_delta,
    "gated_delta_rule": _write_delta,
    "kaczmarz": _write_delta,
}


def _normalized(x):
    return x / np.sqrt(np.sum(x * x, -1, keepdims=True) + 1e-6)


def reference(name, inputs, *, scale=None, initial_state=None, segment_ids=None, initial_segment_id=None, **options):
    """Output [B, T, H, V] and the final state as a dict of fields, float64, of `inputs` (q, k, v and gates by name)."""
    x = {key: np.asarray(a, np.float64) for key, a in inputs.items()}
    q, k, v = x["q"], x["k"], x["v"]
    B, T, Hk, K = q.shape
    H, V = v.shape[2:]
    scale = K**-0.5 if scale is None else scale
    output = np.zeros((B, T, H, V))
    final = {"S": np.zeros((B, H, K, V)), "z": np.zeros((B, H, K))}
    if initial_state is not None:
        for field, a in initial_state._asdict().items():
            a = np.asarray(a, np.float64)
            final[field] = a.copy() if field == "S" else _heads(a, H)
    for b in range(B):
        S, z = final["S"][b], final["z"][b]
        last = None if initial_segment_id is None else int(initial_segment_id[b])
        for t in range(T):
            if segment_ids is not None:
                current = int(segment_ids[b, t])
                if current < 0:
                    continue
                if last is not None and current != last:
                    S, z = np.zeros_like(S), np.zeros_like(z)
                last = current
            qt, kt = q[b, t], k[b, t]
            if options.get("normalize_q"):
                qt = _normalized(qt)
            if options.get("normalize_k"):
                kt = _normalized(kt)
            gates = {}
            for gate in x.keys() - {"q", "k", "v"}:
                g = x[gate][b, t]
                gates[gate] = np.repeat(g, H // g.shape[0], axis=0)
            qt, kt = (np.repeat(a, H // Hk, axis=0) for a in (scale * qt, kt))
            output[b, t], S, z = WRITES[name](S, z, qt, kt, v[b, t], gates, options)
        final["S"][b], final["z"][b] = S, z
    final["z"] = final["z"][:, :: H // Hk]
    return output, final
