"""Runs and times one torch implementation on arrays in a folder, in a process of its own that knows nothing of JAX.

    python -P torch_peers.py FOLDER

FOLDER has job.json, with the names of the mixer and of the implementation, the arguments' names, the number of tokens
that are checked and of heads, and a .npy for each argument and for the cotangent (16-bit types as their bits). The
result is written to result.json there; checked slices of output and gradients to .npy files, in float32.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

DISTRIBUTIONS = {"fla": "flash-linear-attention", "flash_qla": "flash-qla"}


def find(implementation: str, op: str) -> Callable[..., Any]:
    """The package's function with the arguments of our mixer `op`; ImportError without the package."""
    if implementation == "flash_qla":
        from flash_qla import chunk_gated_delta_rule as gated

        return lambda q, k, v, log_decay, beta: _first(gated(q, k, v, log_decay, beta))
    from fla.ops.delta_rule import chunk_delta_rule
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    def call(q: Any, k: Any, v: Any, beta: Any, log_decay: Any = None) -> Any:
        # It wants as many key heads as value heads.
        groups = v.shape[2] // k.shape[2]
        q, k = (x.repeat_interleave(groups, dim=2) if groups > 1 else x for x in (q, k))
        if op == "delta_rule":
            return _first(chunk_delta_rule(q, k, v, beta))
        return _first(chunk_gated_delta_rule(q, k, v, log_decay, beta))

    return call


def _first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


def load(folder: Path, name: str, dtype: str, device: str) -> Any:
    """The array of that name as a tensor of the type that its bits are of."""
    import torch

    x = torch.from_numpy(np.load(folder / f"{name}.npy"))
    kind = getattr(torch, dtype)
    return (x if x.dtype == kind else x.view(kind)).to(device)


def device_times(call: Callable[[], Any], launches: int) -> list[float]:
    """Milliseconds of all kernels of a call, for each of several calls."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    times = []
    for _ in range(launches):
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            call()
            torch.cuda.synchronize()
        spans = [
            event.time_range.elapsed_us()
            for event in profiled.events()
            if event.device_type == DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset"))
        ]
        times.append(sum(spans) / 1e3)
    return times


def wall_time(call: Callable[[], Any], seconds: float = 0.3) -> float:
    """Milliseconds of a call by CUDA events around calls that fill the device, the median of five such."""
    import torch

    started = time.perf_counter()
    call()
    torch.cuda.synchronize()
    calls = max(3, int(seconds / 5 / max(time.perf_counter() - started, 1e-5)))
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / calls)
    return statistics.median(times)


def work(folder: Path) -> dict[str, Any]:
    """Checked slices into the folder, and what is measured."""
    import torch

    job = json.loads((folder / "job.json").read_text())
    call = find(job["implementation"], job["op"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inputs = {name: load(folder, name, dtype, device) for name, dtype in job["arguments"].items()}
    cotangent = load(folder, "cotangent", job["dtype"], device)
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}

    def both(inputs: dict[str, Any], cotangent: Any) -> tuple[Any, Any]:
        output = call(**inputs)
        return output, torch.autograd.grad(output, list(inputs.values()), cotangent)

    tokens = job["tokens"]
    quiet = {name: x.detach().clone() for name, x in inputs.items()}
    for name in job["quiet"]:
        quiet[name][:, tokens:] = 0
    given = cotangent.clone()
    given[:, tokens:] = 0
    output, grads = both({name: x.requires_grad_() for name, x in quiet.items()}, given)
    for name, x in {"output": output, **dict(zip((f"d{n}" for n in quiet), grads, strict=True))}.items():
        heads = job["heads"][name.removeprefix("d")]
        np.save(folder / f"{name}.npy", x[-1:, :tokens, -heads:].detach().float().cpu().numpy())
    del quiet, given, output, grads
    result: dict[str, Any] = {"version": None, "device": device}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        result["version"] = importlib.metadata.version(DISTRIBUTIONS[job["implementation"]])
    result["torch"] = torch.__version__
    if device == "cpu":
        return result

    def forward() -> None:
        with torch.no_grad():
            call(**inputs)

    for way, run in (("forward", forward), ("both", lambda: both(leaves, cotangent))):
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        result[way] = {"wall_ms": wall_time(run), "peak_over_arguments": torch.cuda.max_memory_allocated() - held}
        times = device_times(run, job["launches"])
        if not all(times):
            result[way]["device_error"] = "the profiler saw no kernel"
            continue
        result[way] |= {"device_ms": statistics.median(times), "least_ms": min(times), "most_ms": max(times)}
    return result


if __name__ == "__main__":
    where = Path(sys.argv[1])
    (where / "result.json").write_text(json.dumps(work(where)))
