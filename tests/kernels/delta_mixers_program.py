"""Runs the mixers on their kernels, on the cases named by the arguments, against their token scan in float32.

On a CPU the kernels run interpreted, on a GPU as they are. A program of its own for the reason that
`delta_rule_program` gives.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from cases import call
from delta_rule_program import INSIDE, draw, running
from tolerances import assert_close, limit


def ids(*runs):
    """A row of segment ids from (id, tokens)."""
    return np.concatenate([np.full(tokens, i, np.int32) for i, tokens in runs])


# Documents that begin inside a chunk, with one, and of one token; padding before, between and behind.
PLAIN_ROW = ids((0, 40), (1, 24), (2, 1), (3, 65))
PADDED_ROW = ids((-1, 3), (7, 61), (-2, 5), (7, 20), (1, 35), (-1, 6))
PACKED = {"segment_ids": np.stack([PLAIN_ROW, PADDED_ROW])}
FIRST_DIFFERS = PACKED | {"initial_segment_id": np.array([5, 7], np.int32)}
SHORT = FIRST_DIFFERS | {"segment_ids": PACKED["segment_ids"][:, :70]}
ROWS, ODD = {"B": 2, "T": 130}, {"B": 2, "T": 70, "K": 48, "V": 80, "H": 2, "Hk": 1, "state": True}

# The mixer, what is drawn, options of the mixer (arrays are traced), how it is transformed.
CASES = {
    "packed, odd sizes": ("kaczmarz", ODD, SHORT, ()),
    "packed": ("gated_delta_rule", ROWS | {"state": True, "H": 2, "Hk": 1}, FIRST_DIFFERS, ()),
    "packed, no decay": ("delta_rule", ROWS, PACKED, ()),
    "odd sizes": ("kaczmarz", {"T": 70, "K": 48, "V": 80, "state": True, "keys": "long"}, INSIDE, ()),
    "mapped": ("gated_delta_rule", {"B": 2, "T": 64}, {"scale": np.array([0.3, -2.0], np.float32)}, ("vmap",)),
    "packed, zero keys": ("kaczmarz", ROWS | {"state": True, "keys": "zero"}, PACKED | {"eps": 0.0}, ()),
    "state carried on": ("delta_rule", ROWS | {"state": True}, FIRST_DIFFERS, ()),
    "one packed row in two": ("gated_delta_rule", ROWS | {"state": True}, FIRST_DIFFERS, ("split",)),
    "small keys": ("gated_delta_rule", {"T": 70, "K": 24, "V": 96}, {"scale": 0.5, "chunk_size": 64}, ()),
    "mapped, packed": ("kaczmarz", ROWS | {"K": 80, "H": 2, "Hk": 1}, PACKED, ("vmap",)),
    "float16": ("delta_rule", {"T": 100, "K": 96, "V": 40, "dtype": "float16", "state": True}, {}, ()),
    "narrow gates": ("gated_delta_rule", ROWS | {"gates": "bfloat16"}, PACKED, ()),
    "strong, packed": ("gated_delta_rule", ROWS | {"decay": -100.0}, PACKED, ()),
}


def mixed(name, how, implementation, given):
    """Output and state of mixer `name`, transformed as `how` says."""
    x, arrays, static = given
    run = lambda x, arrays: call(name, x, **arrays, **static, implementation=implementation)
    if "split" in how:
        whole = run

        def run(x, arrays):
            cut = 77
            seen = arrays["segment_ids"]
            first = {**arrays, "segment_ids": seen[:, :cut]}
            head, state = whole({key: a[:, :cut] for key, a in x.items()}, first)
            newest = jnp.array([seen[0, cut - 1], seen[1, cut - 1]])
            rest = {"initial_state": state, "segment_ids": seen[:, cut:], "initial_segment_id": newest}
            tail, state = whole({key: a[:, cut:] for key, a in x.items()}, rest)
            return jnp.concatenate([head, tail], 1), state

    if "vmap" in how:
        row = lambda tree: jax.tree.map(lambda a: a if a.ndim == 1 else a[:, None], tree)
        out = jax.vmap(run)(*map(row, (x, arrays)))
        return jax.tree.map(lambda a: a[:, 0], out)
    return run(x, arrays)


def check(case):
    """Asserts output, final state and the gradients of everything that has some."""
    name, drawn, options, how = CASES[case]
    gates = (drawn := dict(drawn)).pop("gates", "float32")
    inputs, state = draw(name, **drawn)
    inputs = {key: jnp.asarray(a, None if key in "qkv" else gates) for key, a in inputs.items()}
    arrays = {key: jnp.asarray(a) for key, a in options.items() if isinstance(a, np.ndarray)}
    static = {key: a for key, a in options.items() if key not in arrays}
    if state is not None:
        arrays["initial_state"] = state
    wide = {key: a.astype(jnp.float32) for key, a in inputs.items()}
    valid = np.ones(inputs["v"].shape[:2], bool)
    if "segment_ids" in arrays:
        valid = np.asarray(arrays["segment_ids"] >= 0)
        inputs = {
            key: jnp.where(valid.reshape(*valid.shape, *[1] * (a.ndim - 2)), a, jnp.nan) for key, a in inputs.items()
        }

    def everything(implementation, x, cotangents):
        moving = {key: a for key, a in arrays.items() if key in ("initial_state", "scale")}
        still = {key: a for key, a in arrays.items() if key not in moving}
        f = lambda x, moving: mixed(name, how, implementation, (x, moving | still, static))

        @jax.jit
        def run(x, moving, cotangents):
            (output, final), back = jax.vjp(f, x, moving)
            return output, final.S, back((cotangents[0].astype(output.dtype), type(final)(cotangents[1])))

        return run(x, moving, cotangents)

    random = np.random.default_rng(7)
    shape = inputs["v"].shape
    sizes = (shape[0], shape[2], inputs["k"].shape[3], shape[3])
    cotangents = [
        jnp.asarray(jnp.asarray(random.normal(size=s), inputs["q"].dtype), jnp.float32) for s in (shape, sizes)
    ]
    with running():
        output, final, gradients = everything("mosaic_gpu", inputs, cotangents)
    with jax.default_matmul_precision("highest"):
        wanted, last, exact = everything("recurrent", wide, cotangents)
    dtype = str(inputs["q"].dtype)
    assert output.dtype == inputs["v"].dtype
    assert final.dtype == jnp.float32
    assert not np.asarray(output)[~valid].any(), f"{case}: output of padding"
    assert_close(output, wanted, limit("output", dtype), f"{case}: output")
    assert_close(final, last, limit("state", dtype), f"{case}: final state")
    for ours, theirs in zip(gradients, exact, strict=True):
        for key, grad in theirs.items():
            seen, grad = (jax.tree.leaves(a[key])[0] for a in (ours, theirs))
            assert_close(seen, grad, limit(key, dtype, gradient=True), f"{case}: gradient of {key}")
            if key in inputs:
                assert not np.asarray(seen)[~valid].any(), f"{case}: gradient of padding's {key}"
    if "initial_segment_id" in arrays and state is not None:
        assert not np.asarray(gradients[1]["initial_state"].S[0]).any(), f"{case}: gradient of the dropped state"


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        check(case)
        print("ok", case, flush=True)
