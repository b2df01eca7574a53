"""Runs the delta rule's forward kernel on a Hopper GPU: values against float64, determinism, times, ptxas's notes.

    python tests/kernels/hopper_probe.py --out probe.json --seconds 170

Each case runs in a process of its own, as a failed launch spoils the CUDA context and a hang has to be killed; the rest
goes on, none is started after --seconds. What `delta_rule_program` checks interpreted is drawn and called here the same
way. Times are the profiler's, of the device alone, and of the wall; `linattn_jax.eval.timing` serves mixers only.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

A = {"B": 8, "T": 2048, "H": 16, "K": 128, "V": 128}
ROW, LONG = A | {"B": 1, "T": 16384}, A | {"B": 1, "T": 65536, "H": 8}
# Name: mixer, sizes and arguments of `draw`, options of `forward`; what one wants to know first comes first.
CASES = {
    "small plain": ("delta_rule", {"B": 2, "T": 300, "H": 2}, {}),
    "small gated": ("gated_delta_rule", {"B": 2, "T": 300, "H": 4, "Hk": 2, "K": 128, "V": 128, "state": True}, {}),
    "gated": ("gated_delta_rule", A, {"tiles": 2}),
    "gated, registers of the launch": ("gated_delta_rule", A, {"tiles": 2, "plain": True}),
    "gated, one tile": ("gated_delta_rule", A, {"tiles": 1}),
    "kaczmarz": ("kaczmarz", A | {"keys": "long"}, {"tiles": 2}),
    "plain": ("delta_rule", A | {"double": True}, {"tiles": 2}),
    "gated, one row": ("gated_delta_rule", ROW, {"tiles": 2}),
    "gated, one row, one tile": ("gated_delta_rule", ROW, {"tiles": 1}),
    "gated, 64": ("gated_delta_rule", A | {"K": 64, "V": 64}, {}),
    "gated, tail": ("gated_delta_rule", A | {"T": 2000}, {"tiles": 2}),
    "gated, long row": ("gated_delta_rule", LONG, {"tiles": 2}),
}
CHECKED = 4096  # tokens of a row that are held against float64


def child(name: str) -> None:
    """Runs a case and prints what is known of it after each stage, the last line counting."""
    import delta_rule_program as program
    import jax
    import jax.numpy as jnp
    import numpy as np
    from reference import reference

    import pallas_kernels
    from pallas_kernels.delta_rule.tuning import Config, forward_config

    mixer, drawn, options = CASES[name]
    options = dict(options)
    tiles, plain = options.pop("tiles", 1), options.pop("plain", False)
    options["config"] = Config(tiles=tiles) if plain or tiles == 1 else forward_config(64 * tiles)
    inputs, state = program.draw(mixer, **drawn)
    call, arguments = program.forward(mixer, inputs, state, **options)
    row = {"case": name, "mixer": mixer, "drawn": drawn, "jax": jax.__version__, "device": str(jax.devices()[0])}
    if jax.default_backend() == "cpu":
        pallas_kernels._interpreted.set(True)
    started = time.perf_counter()
    compiled = call.lower(*arguments).compile()
    row["compile_s"] = round(time.perf_counter() - started, 2)
    first, again = (jax.block_until_ready(compiled(*arguments)) for _ in range(2))
    row["same_bits"] = all(bool(jnp.array_equal(a, b)) for a, b in zip(first, again, strict=True))
    emit(row | {"stage": "ran"})

    b, h = inputs["v"].shape[0] - 1, inputs["v"].shape[2] - 1
    T = min(inputs["v"].shape[1], CHECKED)
    one = {key: np.asarray(a)[b : b + 1, :T, -1:] for key, a in inputs.items()}
    start = None if state is None else type(state)(*(np.asarray(s)[b : b + 1, -1:] for s in state))
    wanted, last = reference(mixer, one, initial_state=start)
    relative = lambda x, y: float(np.linalg.norm(np.asarray(x, np.float64) - y) / np.linalg.norm(y))
    row["output"] = relative(first[0][b : b + 1, :T, h : h + 1], wanted)
    if inputs["v"].shape[1] == T:
        row["state"] = relative(first[1][b : b + 1, h : h + 1], last["S"])
    row["finite"] = all(bool(jnp.isfinite(x).all()) for x in first)
    emit(row | {"stage": "checked"})
    if jax.default_backend() == "cpu":
        return

    from jax.experimental.mosaic.gpu import profiler

    _, launches = profiler.measure(compiled, aggregate=False, iterations=20)(*arguments)
    row["device_ms"] = float(np.median([sum(ms for _, ms in launch) for launch in launches]))
    medians = [(launches[0][i][0], float(np.median([launch[i][1] for launch in launches]))) for i in range(len(launches[0]))]
    row["kernel_ms"] = [ms for name, ms in medians if "mosaic" in name]
    started = time.perf_counter()
    for _ in range(100):
        out = compiled(*arguments)
    jax.block_until_ready(out)
    row["wall_ms"] = (time.perf_counter() - started) * 10
    emit(row | {"stage": "timed"})


def emit(row: dict) -> None:
    """Prints a row for the parent to read."""
    print("ROW " + json.dumps(row), flush=True)


def run(name: str, seconds: float) -> dict:
    """A case's last row, with its exit code, the compiler's notes and, where it failed, the end of its output."""
    command = [sys.executable, __file__, "--child", name]
    environment = os.environ | {"MOSAIC_GPU_DUMP_PTXAS": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            code: int | str = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = "killed"
        log.seek(0)
        lines = log.read().splitlines()
    rows = [line.removeprefix("ROW ") for line in lines if line.startswith("ROW ")]
    row = json.loads(rows[-1]) if rows else {"case": name, "stage": "failed"}
    notes = [line.strip() for line in lines if "registers" in line or "spill" in line or "C75" in line]
    return row | {"exit": code, "ptxas": notes[:8]} | ({} if code == 0 else {"log": lines[-20:]})


def main() -> None:
    """Runs the cases, writes the JSON after each and prints a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="probe.json")
    parser.add_argument("--only", help="cases, separated by semicolons")
    parser.add_argument("--seconds", type=float, default=170)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child)
        return
    started, rows = time.monotonic(), []
    for name in options.only.split(";") if options.only else CASES:
        left = options.seconds - (time.monotonic() - started)
        rows.append(run(name, min(60, left)) if left > 8 else {"case": name, "stage": "not started"})
        Path(options.out).write_text(json.dumps(rows, indent=1) + "\n")
        shown = {key: rows[-1].get(key) for key in ("stage", "same_bits", "output", "state", "kernel_ms", "device_ms")}
        print(f"{name:32s}", ", ".join(f"{key} {value}" for key, value in shown.items()), flush=True)
        print("\n".join(f"    {line[:200]}" for line in rows[-1].get("log", rows[-1].get("ptxas", []))), flush=True)


if __name__ == "__main__":
    main()
