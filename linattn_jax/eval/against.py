"""A kernel of ours beside other implementations of the same mathematics, at one shape and on the same inputs."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from linattn_jax.eval import peers, timing, torch_peers
from linattn_jax.eval.kernels import FLA, FLASH_QLA, JLA, KERNELS
from linattn_jax.eval.tolerances import limit, relative_l2
from linattn_jax.mixers.dispatch import MIXERS
from linattn_jax.types import Array

OURS, PACKED = "ours", "ours, packed"
DOCUMENT = 512  # tokens of a document of packed rows, on average
TOKENS = 2048  # of the last row are held against float64
LAUNCHES = 20  # of which the median is taken
# Bytes per second that a large copy on the device moves, read and written, by the name that JAX gives the device.
COPY_RATES = {"NVIDIA H200": 4.25e12}

Row = dict[str, Any]


class Comparison(NamedTuple):
    """What is compared.

    against: "peers", "chunkwise" or "packed". smoke: ours is replaced by its chunkwise form, for a CPU.
    """

    op: str
    shape: timing.Shape
    against: str = "peers"
    dtype: str = "bfloat16"
    seed: int = 0
    smoke: bool = False

    def implementations(self) -> tuple[str, ...]:
        """Ours and what it is compared with, in the order in which they are measured."""
        return (
            OURS,
            *{"peers": KERNELS[self.op].peers, "chunkwise": ("chunkwise",), "packed": (PACKED,)}[self.against],
        )

    def settings(self) -> Row:
        """What a row says of the comparison; N and M are of other mixers."""
        sizes = {axis: size for axis, size in self.shape._asdict().items() if axis in ("B", "T", "Hk", "H", "K", "V")}
        return self._asdict() | {"shape": sizes}

    def refused(self, device: Any = None) -> str | None:
        """Why ours does not serve the shape (on a device), or None."""
        axes = MIXERS[self.op].arguments
        sizes = timing.axis_sizes(MIXERS[self.op], self.shape)
        one = lambda name: jax.ShapeDtypeStruct(tuple(sizes[a] for a in axes[name].axes.split()), self.dtype)
        return KERNELS[self.op].supports(one("q"), one("k"), one("v"), device=device)


class Skipped(Exception):
    """Why an implementation cannot be measured here; nothing is wrong with it."""


def floor_bytes(comparison: Comparison) -> dict[str, int]:
    """Bytes that the device's memory has to move, by way: the least, if each pass read and wrote each array once.

    forward: q k v o, and the gates, float32. both: that, then q k v and the gates again with the cotangent of o, and
    the gradients of q k v and the gates. States, and what one pass leaves for the other, are not counted.
    """
    s, arguments = comparison.shape, MIXERS[comparison.op].arguments
    width = jnp.dtype(comparison.dtype).itemsize
    keys, values = s.B * s.T * s.Hk * s.K * width, s.B * s.T * s.H * s.V * width
    gates = 4 * s.B * s.T * s.H * sum(a.kind == "gate" for a in arguments.values())
    forward = 2 * keys + 2 * values + gates
    return {"forward": forward, "both": forward + 4 * keys + 3 * values + 2 * gates}


def measure(comparison: Comparison, names: Sequence[str], write: Callable[[Row], None]) -> None:
    """Measures the implementations `names` and gives each row to `write` as soon as it is known.

    Raises jax.errors.JaxRuntimeError, after the row that says so, where a launch failed: nothing that this process
    would measure after it can be trusted.
    """
    mixer = MIXERS[comparison.op]
    inputs = timing.make_inputs(mixer, comparison.shape, comparison.dtype, comparison.seed)
    wanted: Row = {}
    for name in names:
        row: Row = comparison.settings() | {"implementation": name, "floor_bytes": floor_bytes(comparison)}
        try:
            if name in (FLA, FLASH_QLA):
                _measure_torch(comparison, name, inputs, wanted, row)
            else:
                _measure_jax(comparison, name, inputs, wanted, row)
        except (NotImplementedError, Skipped) as error:
            write(row | {"skipped": str(error)[:300]})
        except Exception as error:
            write(row | {"failed": _brief(error)})
            if isinstance(error, jax.errors.JaxRuntimeError):
                raise
        else:
            write(row)


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:300]


def _find(comparison: Comparison, name: str, row: Row) -> Callable[..., Any]:
    """The implementation as a function of the mixer's arguments by name; what it is goes into the row."""
    mixer = MIXERS[comparison.op]
    if name == JLA:
        call = peers.kernel(comparison.op)
        if call is None:
            raise Skipped(f"{JLA} is not installed")
        row["version"] = importlib.metadata.version(JLA)
        return call
    if name == "chunkwise":
        return partial(mixer.call, implementation="chunkwise")
    op = comparison.op if name in (OURS, PACKED) else name
    if comparison.smoke:
        row["form"] = "chunkwise, in place of the kernel"
        call = partial(MIXERS[op].call, implementation="chunkwise")
    elif reason := comparison.refused(jax.devices()[0]):
        raise Skipped(f"not served: {reason}")
    else:
        row["form"], call = KERNELS[op].name, partial(MIXERS[op].call, implementation=KERNELS[op].name)
    if name == PACKED:
        starts = np.random.default_rng(comparison.seed).random((comparison.shape.B, comparison.shape.T)) < 1 / DOCUMENT
        return partial(call, segment_ids=jnp.asarray(np.cumsum(starts, 1), jnp.int32))
    if name == OURS:
        return call
    # Another mixer of ours on the same arrays, under its own name for the strength of the write.
    return lambda eta, **x: call(beta=eta, **x)


def _slices(comparison: Comparison, axes: str) -> tuple[slice, ...]:
    """Where what is checked lies in an array of such axes: the first tokens of the last row and key head."""
    tokens = min(comparison.shape.T, TOKENS)
    groups = comparison.shape.H // comparison.shape.Hk
    where = {"B": slice(-1, None), "T": slice(tokens), "Hk": slice(-1, None), "H": slice(-groups, None)}
    return tuple(where.get(axis, slice(None)) for axis in axes.split())


def _exact(comparison: Comparison, inputs: tuple[dict[str, Array], Array]) -> Row:
    """Output, state and gradients of the checked tokens by the token loop in float64, on the CPU."""
    mixer = MIXERS[comparison.op]
    cut = {name: inputs[0][name][_slices(comparison, a.axes)] for name, a in mixer.arguments.items()}
    narrow = jax.tree.map(np.asarray, (cut, inputs[1][_slices(comparison, mixer.output)]))
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        wide = jax.tree.map(lambda x: jnp.asarray(x.astype(np.float64)), narrow)
        output, state, grads = timing.both(*wide, mixer.call, (("implementation", "recurrent"),))
        exact = {"output": output, "state": state.S, **{f"d{name}": grads[name] for name in mixer.arguments}}
        return jax.tree.map(np.asarray, exact)


def checked_inputs(comparison: Comparison, inputs: tuple[dict[str, Array], Array]) -> tuple[dict[str, Array], Array]:
    """The inputs as they are on the tokens that are checked; what is after them counts for nothing.

    There the cotangent is zero, so that no gradient comes back from there, and so are the gates that `quiet` names, so
    that the final state is the one after the checked tokens. q, k and v stay: reading ahead would be seen.
    """
    tokens = min(comparison.shape.T, TOKENS)
    if tokens == comparison.shape.T:
        return inputs
    silence = lambda x: x.at[:, tokens:].set(0)
    quiet = KERNELS[comparison.op].quiet
    return {name: silence(x) if name in quiet else x for name, x in inputs[0].items()}, silence(inputs[1])


def _judge(row: Row, wanted: Row, seen: Row, dtype: str) -> None:
    """Relative L2 errors of what was seen, and whether all are in limits, into the row."""
    row["errors"] = {name: relative_l2(x, wanted[name]) for name, x in seen.items()}
    within = lambda name, error: error <= limit(name.removeprefix("d"), dtype, gradient=name.startswith("d"))
    row["within_limits"] = all(within(name, error) for name, error in row["errors"].items())


_all_finite = jax.jit(lambda tree: jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]).all())


def _measure_jax(comparison: Comparison, name: str, inputs: Any, wanted: Row, row: Row) -> None:
    call, mixer = _find(comparison, name, row), MIXERS[comparison.op]
    wanted.update(wanted or _exact(comparison, inputs))
    both = timing.both.lower(*inputs, call=call, options=()).compile()
    output, state, grads = both(*checked_inputs(comparison, inputs))
    seen = {"output": output[_slices(comparison, mixer.output)]}
    if state is not None:
        seen["state"] = state.S[_slices(comparison, "B H K V")]
    seen |= {f"d{n}": grads[n][_slices(comparison, a.axes)] for n, a in mixer.arguments.items()}
    if name not in (PACKED, *MIXERS):  # which have other values
        _judge(row, wanted, seen, comparison.dtype)
    del output, state, grads, seen
    row["finite"] = bool(_all_finite(both(*inputs)))
    if name == OURS and not (row["within_limits"] and row["finite"]):
        return
    forward = timing.forward.lower(inputs[0], call=call, options=()).compile()
    for way, compiled, arguments in (("forward", forward, inputs[:1]), ("both", both, inputs)):
        row[way] = {"wall_ms": timing.time_calls(compiled, *arguments, seconds=0.3)["median_ms"]}
        row[way]["temporary"] = timing.memory(compiled).get("temporary")
        if jax.devices()[0].platform == "gpu":
            row[way] |= device_times(compiled, *arguments)
        _add_floor(row, way)


def _add_floor(row: Row, way: str) -> None:
    rate = COPY_RATES.get(jax.devices()[0].device_kind)
    if rate:
        floor = row["floor_bytes"][way] / rate * 1e3
        row[way] |= {"floor_ms": floor, "of_floor": floor / row[way].get("device_ms", row[way]["wall_ms"])}


def device_times(compiled: Any, *arguments: Any) -> Row:
    """Milliseconds of all kernels of a call together, by the GPU's own clock, over launches; the longest kernels."""
    from jax.experimental.mosaic.gpu import profiler

    try:
        _, launches = profiler.measure(compiled, aggregate=False, iterations=LAUNCHES)(*arguments)
    except RuntimeError as error:
        if isinstance(error, jax.errors.JaxRuntimeError):
            raise
        return {"device_error": _brief(error)}
    if not launches:
        return {"device_error": "the profiler saw no kernel"}
    totals = [sum(ms for _, ms in launch) for launch in launches]
    kernels: dict[str, float] = {}
    for launch in launches:
        for kernel, ms in launch:
            kernels[kernel[:80]] = kernels.get(kernel[:80], 0) + ms / len(launches)
    longest = sorted(kernels.items(), key=lambda item: -item[1])[:8]
    times = {"device_ms": float(np.median(totals)), "least_ms": min(totals), "most_ms": max(totals)}
    return times | {"kernels": dict(longest), "launched": len(launches[0])}


def _measure_torch(comparison: Comparison, name: str, inputs: Any, wanted: Row, row: Row) -> None:
    """As `_measure_jax`, in a process of its own, to which the arrays go through files."""
    if comparison.smoke:
        raise Skipped(f"{name} runs on a GPU alone")
    if missing := [package for package in ("torch", name) if importlib.util.find_spec(package) is None]:
        raise Skipped(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed")
    wanted.update(wanted or _exact(comparison, inputs))
    arguments = MIXERS[comparison.op].arguments
    groups = comparison.shape.H // comparison.shape.Hk
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        for key, x in (*inputs[0].items(), ("cotangent", inputs[1])):
            bits = np.asarray(x)
            np.save(folder / f"{key}.npy", bits if bits.dtype == np.float32 else bits.view(np.int16))
        job = {
            "op": comparison.op,
            "implementation": name,
            "dtype": comparison.dtype,
            "arguments": {key: str(inputs[0][key].dtype) for key in arguments},
            "quiet": KERNELS[comparison.op].quiet,
            "tokens": min(comparison.shape.T, TOKENS),
            "heads": {key: 1 if "Hk" in a.axes.split() else groups for key, a in arguments.items()}
            | {"output": groups},
            "launches": LAUNCHES,
        }
        (folder / "job.json").write_text(json.dumps(job))
        command = [sys.executable, "-P", torch_peers.__file__, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(done.stderr[-2000:], file=sys.stderr, flush=True)
            raise RuntimeError(
                f"ended with code {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1][:250]}"
            )
        result = json.loads((folder / "result.json").read_text())
        seen = {key: np.load(folder / f"{key}.npy") for key in ("output", *(f"d{n}" for n in arguments))}
    _judge(row, wanted, seen, comparison.dtype)
    row |= result
    for way in ("forward", "both"):
        with contextlib.suppress(KeyError):
            _add_floor(row, way)
