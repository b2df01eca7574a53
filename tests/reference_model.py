"""Attention, the short convolution, layers and the decoder in float64 NumPy, written from their papers' definitions."""

import numpy as np
from reference import reference


def documents(segment_ids, length, initial_segment_id=None):
    """The documents of one row: (positions, carried), `carried` where the row's initial state serves the document."""
    if segment_ids is None:
        return [(list(range(length)), True)]
    found, last = [], initial_segment_id
    for t in range(length):
        current = int(segment_ids[t])
        if current < 0:
            continue
        if found and current == last:
            found[-1][0].append(t)
        else:
            found.append(([t], not found and (last is None or current == last)))
        last = current
    return found


def _rows(segment_ids, initial_segment_id, batch, length):
    for b in range(batch):
        ids = None if segment_ids is None else np.asarray(segment_ids)[b]
        first = None if initial_segment_id is None else int(initial_segment_id[b])
        yield b, documents(ids, length, first)


def attention(q, k, v, *, scale=None, window=None, cache=None, segment_ids=None, initial_segment_id=None):
    """Output [B, T, H, V] and, per row, the keys and values of its last document; `cache` is such a list."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    B, T, H, K = q.shape
    group = H // k.shape[2]
    scale = K**-0.5 if scale is None else scale
    output = np.zeros((B, T, H, v.shape[3]))
    caches = []
    for b, found in _rows(segment_ids, initial_segment_id, B, T):
        empty = (k[b, :0], v[b, :0])
        held = empty if cache is None else cache[b]
        for positions, carried in found:
            held = held if carried else empty
            for t in positions:
                held = np.concatenate([held[0], k[b, t][None]]), np.concatenate([held[1], v[b, t][None]])
                seen_k, seen_v = (x if window is None else x[-window:] for x in held)
                for h in range(H):
                    scores = scale * seen_k[:, h // group] @ q[b, t, h]
                    p = np.exp(scores - scores.max())
                    output[b, t, h] = p @ seen_v[:, h // group] / p.sum()
        caches.append(held)
    return output, caches


def convolution(
    x, weight, bias=None, *, initial_state=None, segment_ids=None, initial_segment_id=None, cotangents=None
):
    """Output and history; with cotangents (of both) also the gradients of x, weight, bias and initial_state, a dict."""
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    B, T, D = x.shape
    W = len(weight)
    initial = np.zeros((B, W - 1, D)) if initial_state is None else np.asarray(initial_state, np.float64)
    y, history = np.zeros((B, T, D)), np.zeros((B, W - 1, D))
    g = {"x": np.zeros_like(x), "weight": np.zeros_like(weight), "bias": np.zeros(D), "initial_state": 0 * initial}
    for b, found in _rows(segment_ids, initial_segment_id, B, T):
        # What was read before, oldest first: (its array, its gradient, its place), None before a document's start.
        before = [(initial, g["initial_state"], i) for i in range(W - 1)]
        for positions, carried in found:
            before = before if carried else [None] * (W - 1)
            for t in positions:
                before = [*before, (x, g["x"], t)]
                for tap, source in enumerate(before[len(before) - W :]):
                    if source is None:
                        continue
                    values, gradient, at = source
                    y[b, t] += weight[tap] * values[b, at]
                    if cotangents is not None:
                        gradient[b, at] += weight[tap] * cotangents[0][b, t]
                        g["weight"][tap] += values[b, at] * cotangents[0][b, t]
                if bias is not None:
                    y[b, t] += bias
                if cotangents is not None:
                    g["bias"] += cotangents[0][b, t]
        for i, source in enumerate(before[len(before) - (W - 1) :]):
            if source is not None:
                values, gradient, at = source
                history[b, i] = values[b, at]
                if cotangents is not None:
                    gradient[b, at] += cotangents[1][b, i]
    return (y, history) if cotangents is None else (y, history, g)


# Layers: parameters as nested dicts of arrays, x [T, D] one document --------------------------------------------------


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def rms_norm(x, scale, eps):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * scale


def _project(p, x):
    return x @ p["kernel"] + p.get("bias", 0.0)


def _delta(name, p, x, H, Hk, K, V, eps):
    q, k, v = (_project(p[part], x) for part in ("query", "key", "value"))
    qkv, _ = convolution(np.concatenate([q, k, v], -1)[None], p["convolution"]["weight"])
    q, k, v = np.split(silu(qkv[0]), [Hk * K, 2 * Hk * K], -1)
    inputs = {"q": q.reshape(-1, Hk, K), "k": k.reshape(-1, Hk, K), "v": v.reshape(-1, H, V)}
    strength = sigmoid(_project(p["strength"], x))
    inputs["eta" if name == "kla" else "beta"] = strength
    if name != "deltanet":
        inputs["log_decay"] = -np.exp(p["a_log"]) * np.log1p(np.exp(_project(p["log_decay"], x) + p["dt_bias"]))
    mixer = {"kla": "kaczmarz", "gdn": "gated_delta_rule", "deltanet": "delta_rule"}[name]
    y = reference(mixer, {key: a[None] for key, a in inputs.items()}, normalize_q=True, normalize_k=name != "kla")[0][0]
    y = rms_norm(y, p["norm"]["scale"], eps)
    return y if name == "deltanet" else y * silu(_project(p["gate"], x)).reshape(-1, H, V)


def _gla(p, x, H, Hk, K, V, eps):
    q, k, v = (_project(p[part], x).reshape(len(x), n, -1) for part, n in (("query", Hk), ("key", Hk), ("value", H)))
    g = -np.log1p(np.exp(-_project(p["decay_up"], _project(p["decay_down"], x)))) / 16
    inputs = {"q": q, "k": k, "v": v, "log_decay": g.reshape(-1, Hk, K)}
    y = reference("gla", {key: a[None] for key, a in inputs.items()})[0][0]
    return rms_norm(y, p["norm"]["scale"], eps) * silu(_project(p["gate"], x)).reshape(-1, H, V)


def _linear(p, x, H, Hk, K, V):
    q, k = (_project(p[part], x).reshape(-1, Hk, K) for part in ("query", "key"))
    q, k = (np.where(a > 0, a + 1, np.exp(np.minimum(a, 0))) for a in (q, k))
    group = H // Hk
    v = _project(p["value"], x).reshape(-1, H, V)
    y = np.zeros_like(v)
    for t in range(len(x)):
        for h in range(H):
            weights = k[: t + 1, h // group] @ q[t, h // group]
            y[t, h] = weights @ v[: t + 1, h] / weights.sum()
    return y


def rotate(x, position, theta):
    """Pairs (i, i + size/2) of x [T, heads, size] turned by position * theta^(-2i/size)."""
    half = x.shape[-1] // 2
    turn = np.exp(1j * position[:, None, None] * theta ** (-np.arange(half) / half))
    turned = (x[..., :half] + 1j * x[..., half:]) * turn
    return np.concatenate([turned.real, turned.imag], -1)


def _softmax(p, x, H, Hk, K, V, eps, theta=1e4, window=None):
    q, k = _project(p["query"], x).reshape(-1, H, K), _project(p["key"], x).reshape(-1, Hk, K)
    if "query_norm" in p:
        q, k = rms_norm(q, p["query_norm"]["scale"], eps), rms_norm(k, p["key_norm"]["scale"], eps)
    q, k = (rotate(a, np.arange(len(x)), theta) for a in (q, k))
    return attention(q[None], k[None], _project(p["value"], x).reshape(1, -1, Hk, V), window=window)[0][0]


def layer(name, p, x, *, heads, key_heads, key_size, value_size, eps=1e-5, **options):
    """The layer called `name` on x [T, D]."""
    sizes = (heads, key_heads, key_size, value_size)
    if name in ("kla", "gdn", "deltanet"):
        y = _delta(name, p, x, *sizes, eps)
    elif name == "gla":
        y = _gla(p, x, *sizes, eps)
    elif name == "linear":
        y = _linear(p, x, *sizes)
    else:
        y = _softmax(p, x, *sizes, eps, **options)
    return _project(p["output"], y.reshape(len(x), -1))


def decoder(parameters, tokens, mixers, *, eps, vocab_size, **sizes):
    """Hidden states [T, D] and logits [T, vocab_size] of one document; parameters of a layer hold a leading axis."""
    x = parameters["embedding"][tokens]
    blocks = parameters["stack"]["blocks"]
    for i, name in enumerate(mixers):
        p = _pick(blocks[i % len(blocks)], i // len(blocks))
        size = dict(sizes)
        if name == "gla":
            size["key_size"] //= 2
        x = x + layer(name, p["mixer"], rms_norm(x, p["mixer_norm"]["scale"], eps), eps=eps, **size)
        z = rms_norm(x, p["mlp_norm"]["scale"], eps)
        mlp = p["mlp"]
        x = x + _project(mlp["down"], silu(_project(mlp["gate"], z)) * _project(mlp["up"], z))
    hidden = rms_norm(x, parameters["norm"]["scale"], eps)
    unembedding = parameters["unembed"] if "unembed" in parameters else parameters["embedding"].T
    return hidden, hidden @ unembedding[:, :vocab_size]


def _pick(p, i):
    return {key: _pick(a, i) for key, a in p.items()} if isinstance(p, dict) else p[i]
