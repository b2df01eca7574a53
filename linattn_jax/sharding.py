"""The device mesh and the rules, as data, that say where each parameter and batch lies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from linattn_jax.types import UserError

MESH_AXES = ("data", "fsdp")
BATCH_AXES = ("data", "fsdp")

# The first pattern found in a parameter's path gives the names of its last axes; any axis before them
# (the stack of scanned layers) is unnamed. Two names mean a matrix that is multiplied by activations or looked up.
# The parameters of modes are vectors of numbers in this sense, whatever their axes: they stay whole and do not decay.
PARAMETER_AXES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"(^|/)([aA]_log|log_dt|a_imag|(mix|c)_(real|imag)|skip|\w*bias|(\w*_)?scale)$", ("feature",)),
    (r"(^|/)[^/]*norm[^/]*/[^/]+$", ("feature",)),
    (r"(^|/)[^/]*conv[^/]*/(kernel|weight)$", ("tap", "feature")),
    (r"(^|/)contraction/weight$", ("head", "feature")),
    (r"(^|/)(unembed[^/]*|lm_head|head)(/kernel|/weight)?$", ("embed", "vocab")),
    (r"(^|/)embed[^/]*(/embedding|/weight)?$", ("vocab", "embed")),
    (r"(^|/)(o|out|output|down)(_proj)?/(kernel|weight)$", ("hidden", "embed")),
    (r"(^|/)(kernel|weight)$", ("embed", "hidden")),
)

LOGICAL_TO_MESH: dict[str, str | None] = {
    "vocab": None,
    "embed": "fsdp",
    "hidden": None,
    "feature": None,
    "head": None,
    "tap": None,
}


def make_mesh(data: int = -1, fsdp: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of axes (data, fsdp); one of the two sizes may be -1 and then takes the devices that are left.

    Raises:
        UserError: the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    count = len(devices)
    sizes = [data, fsdp]
    if sizes.count(-1) == 2 or any(size < 1 and size != -1 for size in sizes):
        raise UserError(f"mesh sizes must be positive, one of them may be -1; got data={data}, fsdp={fsdp}")
    if -1 in sizes:
        known = sizes[1 - sizes.index(-1)]
        sizes[sizes.index(-1)] = count // known
    if sizes[0] * sizes[1] != count:
        raise UserError(f"mesh data={data}, fsdp={fsdp} does not use exactly the {count} devices there are")
    # Auto axes: the compiler propagates shardings through the model, which names no mesh axis itself.
    return jax.make_mesh(tuple(sizes), MESH_AXES, axis_types=(AxisType.Auto,) * 2, devices=devices)


def path_name(path: tuple[Any, ...]) -> str:
    """A key path of jax.tree_util as `layers/mixer/q/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def logical_axes(name: str) -> tuple[str, ...] | None:
    """Names of the last axes of the parameter at path `name`; None when no rule knows it."""
    for pattern, axes in PARAMETER_AXES:
        if re.search(pattern, name):
            return axes
    return None


def partition_spec(name: str, shape: Sequence[int], mesh: Mesh) -> PartitionSpec:
    """Where the parameter `name` of `shape` lies: an axis that its mesh axis does not divide stays whole."""
    axes = logical_axes(name)
    if axes is None or len(shape) < len(axes):
        return PartitionSpec()
    entries: list[str | None] = [None] * (len(shape) - len(axes))
    for axis, size in zip(axes, shape[-len(axes) :], strict=True):
        target = LOGICAL_TO_MESH[axis]
        entries.append(target if target is not None and size % mesh.shape[target] == 0 else None)
    return PartitionSpec(*entries)


def parameter_shardings(tree: Any, mesh: Mesh) -> Any:
    """NamedShardings for a tree whose paths end in parameter names: parameters or an optimizer's state."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, partition_spec(path_name(path), leaf.shape, mesh)), tree
    )


def batch_sharding(mesh: Mesh, axis: int = 0) -> NamedSharding:
    """Rows over all devices; `axis` is the row axis."""
    return NamedSharding(mesh, PartitionSpec(*(None,) * axis, BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())
