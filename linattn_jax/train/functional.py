"""A decoder module seen as functions of its parameters, which is what the step and the evaluation work on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from linattn_jax.sharding import parameter_shardings, replicated

Params = dict[Any, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Functional:
    """The structure of a decoder without its parameters."""

    graph: Any
    rest: Any

    def module(self, params: Params) -> Any:
        """The decoder that holds `params`."""
        return nnx.merge(self.graph, params, self.rest)

    def apply(self, params, tokens, *, state=None, segment_ids=None, initial_segment_id=None):
        """(hidden [B, T, D], state) of the decoder's call."""
        return self.module(params)(tokens, state=state, segment_ids=segment_ids, initial_segment_id=initial_segment_id)

    def unembedding(self, params: Params) -> jax.Array:
        """[D, V]."""
        return self.module(params).unembedding()

    def init_state(self, params: Params, batch: int, capacity: int | None = None) -> Any:
        """A state for `batch` rows; `capacity` is the number of positions that growing caches hold."""
        module = self.module(params)
        return module.init_state(batch) if capacity is None else module.init_state(batch, capacity)


def split(module: Any) -> tuple[Functional, Params]:
    """A module as (Functional, parameters as nested dicts of arrays)."""
    parts: Any = nnx.split(module, nnx.Param, ...)
    graph, params, rest = parts
    return Functional(graph, rest), nnx.to_pure_dict(params)


def initialise(build: Callable[[], Any], mesh: Mesh) -> tuple[Functional, Params]:
    """Builds a decoder with each parameter born where it lies on the mesh: no device ever holds all of them."""
    graph: list[Any] = []

    def arrays():
        parts: Any = nnx.split(build(), nnx.Param, ...)
        model_graph, params, rest = parts
        graph[:] = [model_graph]
        return strong_types(nnx.to_pure_dict(params)), rest

    params, rest = jax.eval_shape(arrays)
    where = (parameter_shardings(params, mesh), jax.tree.map(lambda _: replicated(mesh), rest))
    params, rest = jax.jit(arrays, out_shardings=where)()
    return Functional(graph[0], rest), params


def strong_types(tree: Any) -> Any:
    """The same arrays, none weakly typed: a step would compile a second time for what it returns itself."""
    return jax.tree.map(lambda x: jnp.asarray(x, x.dtype), tree)


def batch_axes(make_state: Callable[[int], Any]) -> Any:
    """For each leaf of a state, the axis that counts rows (found by comparing the shapes for 2 and 3 rows).

    Raises:
        ValueError: a leaf has no such axis, so a state cannot be laid over devices.
    """

    def find(path, two, three):
        axes = [i for i, (a, b) in enumerate(zip(two.shape, three.shape, strict=True)) if a != b]
        if len(axes) != 1:
            raise ValueError(f"the state leaf {jax.tree_util.keystr(path)} has no single row axis: shape {two.shape}")
        return axes[0]

    shapes = [jax.eval_shape(lambda rows=rows: make_state(rows)) for rows in (2, 3)]
    return jax.tree_util.tree_map_with_path(find, *shapes)


def has_fixed_size(functional: Functional, params: Params) -> bool:
    """Whether the recurrent state does not grow with length, so that it can be carried without end."""
    sizes = []
    for capacity in (64, 128):
        state = jax.eval_shape(lambda p, c=capacity: functional.init_state(p, 1, c), params)
        sizes.append([leaf.shape for leaf in jax.tree.leaves(state)])
    return sizes[0] == sizes[1]
