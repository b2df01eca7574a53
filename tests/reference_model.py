"""Attention, the short convolution, layers and the decoder in float64 NumPy, written from their papers' definitions."""

import math

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


def elu_plus_one(x):
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def gelu(x):
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / np.sqrt(2)))


def unit(x):
    return x / np.sqrt(np.sum(x * x, -1, keepdims=True) + 1e-6)


def _project(p, x):
    return x @ p["kernel"] + p.get("bias", 0.0)


def _convolve(p, *parts):
    y, _ = convolution(np.concatenate(parts, -1)[None], p["weight"], p.get("bias"))
    return np.split(y[0], np.cumsum([part.shape[-1] for part in parts[:-1]]), -1)


def _qkv(p, x, Hk, H):
    return [_project(p[part], x).reshape(len(x), n, -1) for part, n in (("query", Hk), ("key", Hk), ("value", H))]


def _mixer(name, **inputs):
    return reference(name, {key: a[None] for key, a in inputs.items()})[0][0]


def _mamba_decay(p, x):
    return -np.exp(p["a_log"]) * np.log1p(np.exp(_project(p["log_decay"], x) + p["dt_bias"]))


def _logsigmoid_decay(x):
    return -np.log1p(np.exp(-x)) / 16


def _contracted(p, q, k, g, *, decay="none", normalize_keys=True, gain=1.0):
    """CCQ: (I - gain lambda Sigma) q; Sigma_t is the covariance of keys up to t, of weights e^{G_t - G_j} or all alike.

    The weights' log decay g [T, Hk, ...] is averaged over what one key head has of it.
    """
    gate = sigmoid(np.einsum("thk,hk->th", q, p["weight"]) + p["bias"])
    keys = unit(k) if normalize_keys else k
    total = np.cumsum(np.mean(g.reshape(*k.shape[:2], -1), -1), 0) * (decay == "backbone")
    y = np.zeros_like(q)
    for t in range(len(q)):
        for h in range(q.shape[1]):
            weights = np.exp(total[t, h] - total[: t + 1, h])
            sigma = np.cov(keys[: t + 1, h].T, aweights=weights, ddof=0)
            y[t, h] = q[t, h] - gain * gate[t, h] * sigma @ q[t, h]
    return y


# KLA's coefficient of a write, of eta, ||k||^2, softplus(s) and the token's number from 1, and what multiplies it.
KLA_STEPS = {
    "relaxed": lambda eta, square, scale, t: eta / (square + 1e-6),
    "exact": lambda eta, square, scale, t: 1 / (square + 1e-6),
    "sigmoid": lambda eta, square, scale, t: eta,
    "learned": lambda eta, square, scale, t: eta / (scale * square + 1e-6),
    "sequence": lambda eta, square, scale, t: 0 * square + 1 / t,
}
KLA_FACTORS = {
    None: lambda t: 1.0,
    "1/t": lambda t: 1 / t,
    "1/sqrt(t)": lambda t: 1 / np.sqrt(t),
    "1/log(t+1)": lambda t: np.where(t == 1, 1.0, 1 / np.log(t + 1)),
}


def _kla_write(p, x, k, step="relaxed", sequence_factor=None, single_gate=False, normalize_q=True, normalize_k=False):
    """k, log decay and beta, k [T, H, K] repeated for every value head."""
    k = unit(k) if normalize_k else k
    t = np.arange(1.0, len(x) + 1)[:, None]
    eta = sigmoid(_project(p["strength"], x)) if "strength" in p else None
    scale = np.log1p(np.exp(p["square_scale"])) if "square_scale" in p else None
    beta = KLA_STEPS[step](eta, np.sum(k * k, -1), scale, t) * KLA_FACTORS[sequence_factor](t)
    return k, np.log(1 - eta) if single_gate else _mamba_decay(p, x), beta


def _kla(p, x, H, Hk, K, V, eps, **options):
    q, k, v = _convolve(p["convolution"], *(_project(p[part], x) for part in ("query", "key", "value")))
    q, k = (np.repeat(silu(a).reshape(-1, Hk, K), H // Hk, 1) for a in (q, k))
    q = unit(q) if options.get("normalize_q", True) else q
    k, g, beta = _kla_write(p, x, k, **options)
    y = _mixer("gated_delta_rule", q=q, k=k, v=silu(v).reshape(-1, H, V), log_decay=g, beta=beta)
    return rms_norm(y, p["norm"]["scale"], eps) * silu(_project(p["gate"], x)).reshape(-1, H, V)


def _delta(name, p, x, H, Hk, K, V, eps, **contraction):
    """The delta-rule layers, all as a gated delta rule on q and k that are normalised here."""
    q, k, v = _convolve(p["convolution"], *(_project(p[part], x) for part in ("query", "key", "value")))
    q, k, v = q.reshape(-1, Hk, K), k.reshape(-1, Hk, K), silu(v).reshape(-1, H, V)
    beta = sigmoid(_project(p["strength"], x))
    backbone = name.removeprefix("ccq_")
    if backbone == "deltanet_kla":
        q, k = (np.exp(a) / np.sum(np.exp(a), -1, keepdims=True) for a in (q, k))
        g = _logsigmoid_decay(_project(p["log_decay"], x))
    else:
        q, k = silu(q), silu(k)
        g = np.zeros_like(beta) if backbone == "deltanet" else _mamba_decay(p, x)
    square = np.repeat(np.sum(k * k, -1), H // Hk, 1)
    if backbone == "kla":
        q, beta = unit(q), beta / (square + 1e-6)
    elif backbone == "longhorn_kla":
        beta = beta / (1 + beta * square)
    elif backbone in ("gdn", "deltanet"):
        q, k = unit(q), unit(k)
    if name.startswith("ccq"):
        q = _contracted(p["contraction"], q, k, g, **contraction)
    y = rms_norm(_mixer("gated_delta_rule", q=q, k=k, v=v, log_decay=g, beta=beta), p["norm"]["scale"], eps)
    return y if backbone == "deltanet" else y * silu(_project(p["gate"], x)).reshape(-1, H, V)


def _deltanet_vla(p, x, H, Hk, K, V):
    """S <- diag(g) S + (v - S k) k^T per head, S [V, K]: the residual is against the state before its decay."""
    q, k, v = _qkv(p, x, Hk, H)
    q, k, g = elu_plus_one(q), unit(k), sigmoid(_project(p["gate"], x)).reshape(-1, H, V)
    y = np.zeros_like(v)
    for h in range(H):
        S, j = np.zeros((V, K)), h // (H // Hk)
        for t in range(len(x)):
            S = g[t, h][:, None] * S + np.outer(v[t, h] - S @ k[t, j], k[t, j])
            y[t, h] = S @ q[t, j]
    return y


def _gla(name, p, x, H, Hk, K, V, eps, **contraction):
    q, k, v = _qkv(p, x, Hk, H)
    g = _logsigmoid_decay(_project(p["decay_up"], _project(p["decay_down"], x))).reshape(-1, Hk, K)
    if name == "ccq_gla":
        q = _contracted(p["contraction"], q, k, g, **contraction)
    y = _mixer("gla", q=q, k=k, v=v, log_decay=g)
    return rms_norm(y, p["norm"]["scale"], eps) * silu(_project(p["gate"], x)).reshape(-1, H, V)


def _decayed(q, k, v, log_decay):
    """The sum over j <= t of e^{G_t - G_j} (q_t . k_j) v_j, G being the sum of log decays [T, H] so far."""
    q, k = (np.repeat(a, v.shape[1] // a.shape[1], 1) for a in (q, k))
    total = np.cumsum(log_decay, 0)
    weights = np.exp(np.minimum(total[:, None] - total, 0)) * np.tri(len(v))[:, :, None]
    return np.einsum("tjh,tjh,jhv->thv", weights, np.einsum("thk,jhk->tjh", q, k), v)


def _rotated(p, x, Hk, H, theta=1e4):
    q, k, v = _qkv(p, x, Hk, H)
    return *(rotate(a, np.arange(len(x)), theta) for a in (q, k)), v


def _retention(p, x, H, Hk, K, V, eps):
    q, k, v = _rotated(p, x, Hk, H)
    g = np.broadcast_to(np.log(1 - 2.0 ** (-5 - np.arange(H))), (len(x), H))
    y = rms_norm(K**-0.5 * _decayed(q, k, v, g), p["norm"]["scale"], eps)
    return y * silu(_project(p["gate"], x)).reshape(-1, H, V)


def _gla_kla(p, x, H, Hk, K, V):
    q, k, v = _rotated(p, x, Hk, H)
    return K**-0.5 * _decayed(unit(q), unit(k), v, _logsigmoid_decay(_project(p["log_decay"], x)))


def _mamba2(name, p, x, Hk, K, eps, **contraction):
    """As many heads as there are steps."""
    H = p["a_log"].size
    C, B, u = (
        silu(a).reshape(len(x), n, -1)
        for a, n in zip(
            _convolve(p["convolution"], *(_project(p[part], x) for part in ("query", "key", "value"))),
            (Hk, Hk, H),
            strict=True,
        )
    )
    dt = np.log1p(np.exp(_project(p["step"], x) + p["dt_bias"]))
    g = -np.exp(p["a_log"]) * dt
    if name == "ccq_mamba2":
        C = _contracted(p["contraction"], C, B, g, **contraction)
    y = _decayed(C, B, dt[..., None] * u, g) + p["skip"][:, None] * u
    return rms_norm(y.reshape(len(x), -1) * silu(_project(p["gate"], x)), p["norm"]["scale"], eps)


def _vla(p, x, H, K, V, eps, penalty=0.1):
    q, raw, v = _qkv(p, x, H, H)
    u = np.zeros_like(raw)
    if "direction" in p:
        u = unit(_project(p["direction"], _project(p["key"], x)).reshape(-1, H, K)) / np.sqrt(K)
    q, k = elu_plus_one(q), elu_plus_one(raw)
    y = np.zeros_like(v)
    for h in range(H):
        M, S, z = penalty * np.eye(K), np.zeros((V, K)), np.zeros(K)
        for t in range(len(x)):
            M = M + np.outer(u[t, h], u[t, h])
            key = unit(k[t, h])
            write = np.linalg.solve(M, key)
            S = S + np.outer(v[t, h] - S @ key, write / np.linalg.norm(write))
            z = z + k[t, h]
            y[t, h] = S @ q[t, h] / max(z @ q[t, h], 1e-4)
    y = y.reshape(len(x), -1)
    y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + eps)
    return y * p["norm"]["scale"] + p["norm"]["bias"]


def _mode_powers(p, length):
    """b a^tau of the discretised modes, complex [H, N, length]."""
    A = -np.exp(p["a_log"]) + 1j * p["a_imag"]
    dt_A = np.exp(p["log_dt"])[:, None] * A
    return ((np.exp(dt_A) - 1) / A)[..., None] * np.exp(dt_A[..., None] * np.arange(length))


def _lagged(kernels):
    """kernels [..., length] by lag to [..., t, j], 0 for j > t."""
    length = kernels.shape[-1]
    lag = np.subtract.outer(np.arange(length), np.arange(length))
    return kernels[..., np.maximum(lag, 0)] * (lag >= 0)


def _interdomain(p, x, H, K, V, eps, rope=False):
    """Scores of queries and keys, mixed by the position kernel of each basis function, read values through the same."""
    q, k = (
        unit(silu(a).reshape(-1, H, K))
        for a in _convolve(p["convolution"], _project(p["query"], x), _project(p["key"], x))
    )
    if rope:
        q, k = (rotate(a, np.arange(len(x)), 1e4) for a in (q, k))
    k = rms_norm(k, p["key_norm"]["scale"], eps) + p["key_bias"]
    v = rms_norm(_project(p["value"], x).reshape(-1, H, V), p["value_norm"]["scale"], eps) + p["value_bias"]
    powers = _mode_powers(p["modes"], len(x))
    if "mix_real" not in p:
        kernels = np.concatenate([powers.real, powers.imag], 1)
    else:
        c = p["mix_real"] + 1j * p["mix_imag"]
        kernels = 2 * np.real(c[..., None] * powers if c.ndim == 2 else np.einsum("hmn,hnl->hml", c, powers))
    kernels = _lagged(kernels)
    mixed = np.einsum("hmtj,thk,jhk->tmh", kernels, q, k, optimize=True)
    y = np.einsum("tmh,hmtj,jhv->thv", mixed, kernels, v, optimize=True)
    return rms_norm(y, p["output_norm"]["scale"], eps) if "output_norm" in p else y


def _s4d_read(p, powers, x):
    """2 Re (c . modes driven by x), x [T, channels], powers [channels, N, T]."""
    kernels = 2 * np.real(np.einsum("dn,dnl->dl", p["c_real"] + 1j * p["c_imag"], powers))
    return np.einsum("dtj,jd->td", _lagged(kernels), x)


def _s4d(p, x):
    return gelu(_s4d_read(p, _mode_powers(p["modes"], len(x)), x) + p["skip"] * x)


def _s4d_interdomain(p, x, H, V, eps):
    v = rms_norm(_project(p["value"], x).reshape(-1, H, V), p["value_norm"]["scale"], eps) + p["value_bias"]
    powers = np.repeat(_mode_powers(p["modes"], len(x)), V, 0)
    y = _s4d_read(p, powers, v.reshape(len(x), -1)).reshape(-1, H, V)
    return rms_norm(y, p["output_norm"]["scale"], eps) if "output_norm" in p else y


def _longhorn(p, x):
    (u,) = _convolve(p["convolution"], _project(p["value"], x))
    u = silu(u)
    k, q = _project(p["key"], u), _project(p["query"], u)
    beta = sigmoid(_project(p["step_up"], _project(p["step_down"], u)))
    S, y = np.zeros((u.shape[1], k.shape[1])), np.zeros_like(u)
    for t in range(len(x)):
        step = beta[t] / (1 + beta[t] * np.sum(k[t] ** 2))
        S = (1 - np.outer(step, k[t] ** 2)) * S + np.outer(step * u[t], k[t])
        y[t] = S @ q[t] + p["skip"] * u[t]
    return y * silu(_project(p["gate"], x))


def _linear(p, x, H, Hk, K, V):
    q, k, v = _qkv(p, x, Hk, H)
    q, k = elu_plus_one(q), elu_plus_one(k)
    group = H // Hk
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
    """Without rotary positions where `theta` is None."""
    q, k = _project(p["query"], x).reshape(-1, H, K), _project(p["key"], x).reshape(-1, Hk, K)
    if "query_norm" in p:
        q, k = rms_norm(q, p["query_norm"]["scale"], eps), rms_norm(k, p["key_norm"]["scale"], eps)
    if theta is not None:
        q, k = (rotate(a, np.arange(len(x)), theta) for a in (q, k))
    return attention(q[None], k[None], _project(p["value"], x).reshape(1, -1, Hk, V), window=window)[0][0]


def layer(name, p, x, *, heads, key_heads, key_size, value_size, eps=1e-5, **options):
    """The layer called `name` on x [T, D]."""
    H, Hk, K, V = heads, key_heads, key_size, value_size
    if name == "softmax":
        y = _softmax(p, x, H, Hk, K, V, eps, **options)
    elif name == "softmax_vla":
        y = _softmax(p, x, H, Hk, K, V, eps, theta=None, **options)
    elif name == "linear":
        y = _linear(p, x, H, Hk, K, V)
    elif name == "retention":
        y = _retention(p, x, H, Hk, K, V, eps)
    elif name == "gla_kla":
        y = _gla_kla(p, x, H, Hk, K, V)
    elif name == "kla":
        y = _kla(p, x, H, Hk, K, V, eps, **options)
    elif name in ("gla", "ccq_gla"):
        y = _gla(name, p, x, H, Hk, K, V, eps, **options)
    elif name in ("mamba2", "ccq_mamba2"):
        y = _mamba2(name, p, x, Hk, K, eps, **options)
    elif name == "deltanet_vla":
        y = _deltanet_vla(p, x, H, Hk, K, V)
    elif name == "vla":
        y = _vla(p, x, H, K, V, eps, **options)
    elif name == "interdomain":
        y = _interdomain(p, x, H, K, V, eps, **options)
    elif name == "s4d":
        y = _s4d(p, x)
    elif name == "s4d_interdomain":
        y = _s4d_interdomain(p, x, H, V, eps)
    elif name == "longhorn":
        y = _longhorn(p, x)
    else:
        y = _delta(name, p, x, H, Hk, K, V, eps, **options)
    y = _project(p["output"], y.reshape(len(x), -1))
    if name == "s4d":
        first, second = np.split(y, 2, -1)
        y = first * sigmoid(second)
    return y


# key_size and value_size over the decoder's, where a layer's definition departs from 1.
EXPANSION = {
    "gla": (0.5, 1),
    "ccq_gla": (0.5, 1),
    "retention": (1, 2),
    "mamba2": (1, 2),
    "ccq_mamba2": (1, 2),
    "longhorn": (1, 2),
}


def decoder(parameters, tokens, mixers, *, eps, vocab_size, **sizes):
    """Hidden states [T, D] and logits [T, vocab_size] of one document; parameters of a layer hold a leading axis."""
    x = parameters["embedding"][tokens]
    blocks = parameters["stack"]["blocks"]
    for i, name in enumerate(mixers):
        p = _pick(blocks[i % len(blocks)], i // len(blocks))
        keys, values = EXPANSION.get(name, (1, 1))
        size = sizes | {"key_size": int(keys * sizes["key_size"]), "value_size": values * sizes["value_size"]}
        if name in ("mamba2", "ccq_mamba2"):
            size["key_heads"] = 1  # one group
        x = x + layer(name, p["mixer"], rms_norm(x, p["mixer_norm"]["scale"], eps), eps=eps, **size)
        z = rms_norm(x, p["mlp_norm"]["scale"], eps)
        mlp = p["mlp"]
        x = x + _project(mlp["down"], silu(_project(mlp["gate"], z)) * _project(mlp["up"], z))
    hidden = rms_norm(x, parameters["norm"]["scale"], eps)
    unembedding = parameters["unembed"] if "unembed" in parameters else parameters["embedding"].T
    return hidden, hidden @ unembedding[:, :vocab_size]


def _pick(p, i):
    return {key: _pick(a, i) for key, a in p.items()} if isinstance(p, dict) else p[i]
