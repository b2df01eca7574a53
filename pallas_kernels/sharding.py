"""Kernels on several devices, where the compiler decides what lies where: each device gets its rows.

Inside `jax.shard_map` there is nothing to decide, and what the caller has split stays so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

Pytree = Any


def by_rows(function: Callable[[Pytree], Pytree]) -> Callable[[Pytree], Pytree]:
    """`function` of arrays to arrays, for all of which the first axis holds rows, or a number of pieces of each row.

    It treats rows alike and apart. Sharded over other axes arrays are brought together: to the compiler a kernel is a
    call that it cannot split, and of which by default every device computes everything.
    """

    def call(x: Pytree) -> Pytree:
        arrays, tree = jax.tree.flatten(x)
        results, result_tree = jax.tree.flatten(jax.eval_shape(function, x))
        rows = min(a.shape[0] for a in arrays)

        def flat(*arrays: Any) -> tuple[Any, ...]:
            return tuple(jax.tree.leaves(function(jax.tree.unflatten(tree, arrays))))

        def partition(mesh: Any, arguments: Any, results: Any) -> Any:
            axis = next((a.sharding.spec[0] for a in arguments if a.shape[0] == rows), None)
            names = axis if isinstance(axis, tuple) else (axis,) if axis is not None else ()
            count = 1
            for name in names:
                count *= mesh.shape[name]
            spec = NamedSharding(mesh, PartitionSpec(None if rows % count else axis))
            return mesh, flat, tuple(spec for _ in results), tuple(spec for _ in arguments)

        names, factors = [], []
        sizes: dict[str, int] = {}
        for i, a in enumerate((*arrays, *results)):
            pieces = a.shape[0] // rows
            sizes |= {f"p{pieces}": pieces} if pieces > 1 else {}
            own = [f"a{i}d{j}" for j in range(1, len(a.shape))]
            factors += own
            names.append(" ".join([f"(b p{pieces})" if pieces > 1 else "b", *own]))
        split = custom_partitioning(flat)
        split.def_partition(
            partition,
            sharding_rule=f"{', '.join(names[: len(arrays)])} -> {', '.join(names[len(arrays) :])}",
            need_replication_factors=tuple(factors),
            **sizes,
        )
        return jax.tree.unflatten(result_tree, split(*arrays))

    return call


def plainly_typed(function: Callable[[Pytree], Pytree]) -> Callable[[Pytree], Pytree]:
    """`function` inside `jax.shard_map` that tells what differs over which mesh axes: kernels know nothing of that.

    It is traced with arrays of no such type; what comes out is said to differ where anything that went in does.
    """

    def call(x: Pytree) -> Pytree:
        arrays, tree = jax.tree.flatten(x)
        axes = tuple(sorted(frozenset[str]().union(*map(_varying, arrays))))
        if not axes:
            return function(x)
        plain = jax.tree.unflatten(tree, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays])
        traced, types = jax.make_jaxpr(function, return_shape=True)(plain)
        out = [jax.lax.pcast(a, axes, to="varying") for a in _traced_p.bind(*arrays, traced=traced)]
        return jax.tree.unflatten(jax.tree.structure(types), out)

    return call


def _varying(a: Any) -> frozenset[str]:
    return getattr(getattr(jax.typeof(a), "manual_axis_type", None), "varying", frozenset())


_traced_p = Primitive("traced")
_traced_p.multiple_results = True
_traced_p.def_impl(lambda *arrays, traced: jaxpr_as_fun(traced)(*arrays))
_traced_p.def_abstract_eval(lambda *arrays, traced: traced.out_avals)


def _lower_traced(context: Any, *values: Any, traced: Any) -> Any:
    plain = context.replace(avals_in=traced.in_avals, avals_out=traced.out_avals)
    return mlir.lower_fun(jaxpr_as_fun(traced), multiple_results=True)(plain, *values)


mlir.register_lowering(_traced_p, _lower_traced)
