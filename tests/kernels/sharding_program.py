"""What is to be shared out by rows over four devices gives the numbers of one, and brings no rows together."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_kernels.sharding import by_rows, plainly_typed


def function(x):
    """Rows apart; s and "twice" have two pieces for each."""
    pieces = x["s"].reshape(x["q"].shape[0], 2, -1)
    y = jnp.cumsum(x["q"] * pieces[:, :1, :1], 1)
    return (y, y.sum((1, 2))), {"twice": jnp.repeat(y, 2, axis=0)}


x = {"q": jnp.arange(8 * 6 * 4.0).reshape(8, 6, 4), "s": jnp.arange(16 * 5.0).reshape(16, 5)}
mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
call = jax.jit(lambda x: by_rows(function)(x))


def put(array, *spec):
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))


def check(out, x):
    for seen, wanted in zip(jax.tree.leaves(out), jax.tree.leaves(function(x)), strict=True):
        np.testing.assert_array_equal(seen, wanted)


for rows in ("data", ("data", "model"), None):
    split = {name: put(a, rows) for name, a in x.items()}
    out = call(split)
    check(out, x)
    assert all(tuple(a.sharding.spec)[:1] in ((rows,), ()) for a in jax.tree.leaves(out))
    assert all(
        a.sharding.shard_shape(a.shape)[0] * (1 if rows is None else mesh.size if rows != "data" else 2) == a.shape[0]
        for a in jax.tree.leaves(out)
    )
    assert "all-gather" not in call.lower(split).compile().as_text()
for specs in (((None, "model"), ("data",)), (("data", None, "model"), ())):
    out = call({name: put(a, *spec) for (name, a), spec in zip(x.items(), specs, strict=True)})
    check(out, x)
    assert {a.sharding.shard_shape(a.shape)[0] * 2 == a.shape[0] for a in jax.tree.leaves(out)} == {True}
uneven = {"q": x["q"][:6], "s": x["s"][:12]}
everywhere = NamedSharding(mesh, PartitionSpec(("data", "model")))
constrained = lambda x: by_rows(function)(x | {"q": jax.lax.with_sharding_constraint(x["q"], everywhere)})
check(jax.jit(constrained)(uneven), uneven)

spec = PartitionSpec("data")
unaware = lambda x: plainly_typed(by_rows(function))(x)
check(jax.jit(jax.shard_map(unaware, mesh=mesh, in_specs=spec, out_specs=spec))(x), x)
print("ok")
