"""First run of the delta rule's forward kernel on a Hopper GPU: values, determinism, times, ptxas notes, one JSON.

    python3 tests/kernels/hopper_probe.py [--out probe.json] [--only NAME,NAME] [--seconds 170]

Each configuration runs in a process of its own (a failed launch spoils the CUDA context, a hang has to be killed); the
rest goes on after a failure. Stops starting new ones after --seconds. A table last.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

A, ROW, SMALL, LONG = (
    (8, 2048, 16, 16, 128, 128),
    (1, 16384, 16, 16, 128, 128),
    (8, 2048, 16, 16, 64, 64),
    (1, 65536, 8, 8, 128, 128),
)
# name: kind, shape (B,T,Hk,H,K,V), Config arguments or None, extra. In the order of what one wants to know first.
CASES = {
    "small plain 64": ("delta", (2, 300, 2, 2, 64, 64), None, {}),
    "small gated 128": ("gated", (2, 300, 2, 4, 128, 128), None, {"state": True}),
    "A gated": ("gated", A, None, {"chunkwise": True}),
    "A gated one tile": ("gated", A, dict(tiles=1), {}),
    "A gated launch registers": ("gated", A, dict(tiles=2), {}),
    "A gated 192/120": ("gated", A, dict(tiles=2, state_registers=192, prepare_registers=120), {}),
    "A no inverse": ("gated", A, None, {"ablate": "inverse"}),
    "A no state products": ("gated", A, None, {"ablate": "advance"}),
    "A no preparation": ("gated", A, None, {"ablate": "prepare"}),
    "A kla": ("kla", A, None, {}),
    "A delta": ("delta", A, None, {}),
    "A kla normalized": ("kla", A, None, {"normalize": True}),
    "row gated": ("gated", ROW, None, {}),
    "row gated one tile": ("gated", ROW, dict(tiles=1), {}),
    "64 gated": ("gated", SMALL, None, {}),
    "A states": ("gated", A, None, {"states": True}),
    "long gated": ("gated", LONG, None, {}),
    "A tail": ("gated", (8, 2000, 16, 16, 128, 128), None, {}),
    "small odd": ("gated", (1, 77, 1, 1, 128, 64), None, {"state": True}),
}


def child(name, compile_only=None):
    import jax
    import jax.numpy as jnp
    import numpy as np

    from pallas_kernels.delta_rule import api
    from pallas_kernels.delta_rule import mosaic_gpu as m
    from pallas_kernels.delta_rule.tuning import Config

    if os.environ.get("PROBE_INTERPRET"):
        import pallas_kernels

        pallas_kernels._interpreted.set(True)
    kind, (B, T, Hk, H, K, V), config, extra = CASES[name]
    ablate = extra.get("ablate")
    load = m.plgpu.load
    if ablate == "inverse":
        m._inverse = lambda product, a, x: load(a, layout=m._TILE).astype(jnp.float32)
    if ablate == "prepare":

        def prepare(product, variant, scale, x):
            for key in ("value", "write", "read", "erase", "start"):
                if key in x:
                    x[key][...] = m.plgpu.layout_cast(jnp.full((64,), 0.5, jnp.float32), m._ROW)
            for key in ("solve", "scores"):
                x[key][...] = m.plgpu.layout_cast(jnp.full((64, 64), 0.01, jnp.float32), m._TILE).astype(x[key].dtype)
            m.plgpu.commit_smem()

        m._prepare = prepare
    if ablate == "advance":

        def advance(product, variant, state, x, wait):
            wait()
            return load(x["v"].T, layout=m._TILE).astype(jnp.float32), state

        m._advance = advance

    seed = int(time.time()) % 100000
    keys = jax.random.split(jax.random.key(seed), 6)
    normal = lambda key, *shape: jax.random.normal(key, shape, jnp.float32)
    unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    q, k = unit(normal(keys[0], B, T, Hk, K)), unit(normal(keys[1], B, T, Hk, K))
    k = 3 * k if kind == "kla" else k
    v = normal(keys[2], B, T, H, V)
    q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
    beta = jax.nn.sigmoid(normal(keys[3], B, T, H)) * (2 if kind == "delta" else 1)
    g = None if kind == "delta" else jax.nn.log_sigmoid(normal(keys[4], B, T, H) + 2)
    s0 = 0.3 * normal(keys[5], B, H, K, V) if extra.get("state") else None
    scale, eps, norm = K**-0.5, (1e-6 if kind == "kla" else None), bool(extra.get("normalize"))
    call = jax.jit(
        lambda q, k, v, b, g, s: api.delta_rule_forward(
            q,
            k,
            v,
            b,
            g,
            scale=scale,
            initial_state=s,
            eps=eps,
            normalize_q=norm,
            normalize_k=norm,
            save_states=bool(extra.get("states")),
            config=None if config is None else Config(**config),
        )
    )
    args = (q, k, v, beta, g, s0)
    if compile_only is not None:
        return compile_only(call, *args)
    row = {
        "case": name,
        "kind": kind,
        "shape": [B, T, Hk, H, K, V],
        "config": config,
        "seed": seed,
        "jax": jax.__version__,
    }
    row["device"] = str(jax.devices()[0])
    start = time.perf_counter()
    compiled = call.lower(*args).compile()
    row["compile_s"] = round(time.perf_counter() - start, 2)
    out = jax.block_until_ready(compiled(*args))
    emit(row | {"stage": "ran"})

    if ablate is None:
        again = compiled(*args)
        row["same_bits"] = all(
            bool(jnp.array_equal(a, b)) for a, b in zip(jax.tree.leaves(out), jax.tree.leaves(again), strict=True)
        )
        rng = np.random.default_rng(seed)
        errors = []
        for _ in range(2):
            b, h = int(rng.integers(B)), int(rng.integers(H))
            n = min(T, 4096)
            wide = lambda x: np.asarray(x, np.float64)
            Q, Kk = wide(q[b, :n, h // (H // Hk)]), wide(k[b, :n, h // (H // Hk)])
            if norm:
                Q, Kk = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (Q, Kk))
            Vv, be = wide(v[b, :n, h]), wide(beta[b, :n, h])
            be = be if eps is None else be / ((Kk * Kk).sum(-1) + eps)
            G = np.zeros(n) if g is None else wide(g[b, :n, h])
            S = np.zeros((K, V)) if s0 is None else wide(s0[b, h])
            o = np.zeros((n, V))
            for t in range(n):
                S = np.exp(G[t]) * S
                S = S + be[t] * np.outer(Kk[t], Vv[t] - Kk[t] @ S)
                o[t] = scale * Q[t] @ S
            rel = lambda x, y: float(np.linalg.norm(wide(x) - y) / np.linalg.norm(y))
            seen = wide(out[0][b, :n, h])
            per = [rel(seen[i : i + 64], o[i : i + 64]) for i in range(0, n, 64)]
            item = {
                "b": b,
                "h": h,
                "o": rel(seen, o),
                "worst_chunk": max(per),
                "at": int(np.argmax(per)),
                "first": per[0],
            }
            if n == T:
                item["state"] = rel(out[1][b, h], S)
            errors.append(item)
        row["errors"] = errors
        row["finite"] = bool(jnp.isfinite(out[0].astype(jnp.float32)).all())
        row["ok"] = (
            row["finite"] and row["same_bits"] and all(e["o"] <= 5e-3 and e.get("state", 0) <= 5e-3 for e in errors)
        )
        emit(row | {"stage": "checked"})
    if jax.default_backend() == "cpu":
        return None
    try:
        from jax.experimental.mosaic.gpu import profiler

        _, times = profiler.measure(compiled, aggregate=False, iterations=20)(*args)
        names = {}
        for launch in times:
            for kernel, ms in launch:
                names.setdefault(kernel, []).append(ms)
        row["kernels_ms"] = {key: float(np.median(x)) for key, x in names.items()}
        row["device_ms"] = float(np.median([sum(ms for _, ms in launch) for launch in times]))
        main = max(row["kernels_ms"], key=row["kernels_ms"].get)
        row["kernel_ms"] = row["kernels_ms"][main]
        row["kernel_spread_ms"] = [float(np.min(names[main])), float(np.max(names[main]))]
    except Exception as error:
        row["profiler_error"] = repr(error)[:300]
    wall = []
    for _ in range(7):
        start = time.perf_counter()
        for _ in range(50):
            out = compiled(*args)
        jax.block_until_ready(out)
        wall.append((time.perf_counter() - start) / 50 * 1e3)
    row["wall_ms"] = float(np.median(wall))
    emit(row | {"stage": "timed"})
    if extra.get("chunkwise"):
        from linattn_jax import gated_delta_rule

        f = jax.jit(lambda q, k, v, g, b: gated_delta_rule(q, k, v, g, b, implementation="chunkwise", chunk_size=64))
        plain, state = f(q.astype(jnp.float32), k.astype(jnp.float32), v.astype(jnp.float32), g, beta)
        difference = lambda x, y: float(
            jnp.linalg.norm((x.astype(jnp.float32) - y).ravel()) / jnp.linalg.norm(y.ravel())
        )
        row["against_chunkwise"] = {"o": difference(out[0], plain), "state": difference(out[1], state.S)}
    emit(row | {"stage": "timed"})
    return None


def emit(row):
    print("ROW " + json.dumps(row), flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=os.path.join(os.environ.get("OUT", "."), "probe_delta.json"))
    parser.add_argument("--only")
    parser.add_argument("--child")
    parser.add_argument("--seconds", type=float, default=170)
    options = parser.parse_args()
    if options.child:
        child(options.child)
        return
    wanted = options.only.split(",") if options.only else list(CASES)
    start, rows = time.time(), []
    for name in wanted:
        left = options.seconds - (time.time() - start)
        if left < 8:
            rows.append({"case": name, "stage": "not started: time is up"})
            continue
        environment = {
            **os.environ,
            "MOSAIC_GPU_DUMP_PTXAS": "1",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "TF_CPP_MIN_LOG_LEVEL": "1",
        }
        with tempfile.TemporaryFile("w+") as log:
            process = subprocess.Popen(
                [sys.executable, __file__, "--child", name], stdout=log, stderr=subprocess.STDOUT, env=environment
            )
            try:
                code = process.wait(timeout=min(40, left))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                code = "killed: hung or too slow"
            log.seek(0)
            text = log.read()
        lines = [line[4:] for line in text.splitlines() if line.startswith("ROW ")]
        row = json.loads(lines[-1]) if lines else {"case": name, "stage": "failed before it ran"}
        row["exit"] = code
        row["ptxas"] = [
            line.strip() for line in text.splitlines() if "registers" in line or "spill" in line or "C75" in line
        ][:8]
        if code != 0:
            errors = [line for line in text.splitlines() if "rror" in line or "CUDA" in line]
            row["log"] = errors[-6:] + text.splitlines()[-12:]
        rows.append(row)
        Path(options.out).write_text(json.dumps(rows, indent=1))
        print(f"{name:28s} {row['stage']:8s} exit {code} {time.time() - start:5.0f} s", flush=True)
        if code != 0:
            print("   " + "\n   ".join(x[:240] for x in row["log"][:10]), flush=True)
    heads = ("ok", "o", "state", "kernel ms", "device ms", "wall ms")
    print("\n" + " ".join(["case".ljust(28), *(head.rjust(9) for head in heads)]), " registers, spills")
    for row in rows:
        errors = row.get("errors") or [{}]
        worst = [f"{max(e.get(key, float('nan')) for e in errors):9.1e}" for key in ("o", "state")]
        times = [row.get(key, float("nan")) for key in ("kernel_ms", "device_ms", "wall_ms")]
        notes = "; ".join(line.replace("ptxas info    : ", "") for line in row.get("ptxas", []))[:110]
        numbers = [str(row.get("ok", "-")).rjust(9), *worst, *(f"{time:9.4f}" for time in times)]
        print(" ".join([row["case"].ljust(28), *numbers]), "", notes)


if __name__ == "__main__":
    main()
