"""The decoder against a float64 forward pass of its own, and what scanning, remat, packing and caches must keep."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_model
from flax import nnx
from tolerances import CONDITIONED, PERTURBATION, assert_close, relative_l2

from linattn_jax.layers import EXPANSION, GROWING
from linattn_jax.models import Decoder, DecoderConfig
from linattn_jax.models.decoder import shortest_period

VOCABULARY, T = 30, 9
SIZES = {"heads": 2, "key_heads": 2, "key_size": 4, "value_size": 6}
HYBRID = ("kla", "softmax")
IDS = np.array([[7, 7, -1, 7, 8, 8, 8, 7, 7], [-1, -1, 0, 0, 5, 5, 5, -4, -4]], np.int32)
LIMIT = 2e-5  # twice the float32 limit of one mixer: there are several


def config(mixers, **fields):
    sizes = {"vocab_size": VOCABULARY, "width": 8, "heads": 2, "head_size": 4, "value_size": 6, "mlp_width": 12}
    return DecoderConfig(mixers=tuple(mixers), **({"layers": len(mixers)} | sizes | fields))


@functools.cache
def build(mixers, **fields):
    """The decoder split in structure and parameters, these moved off their initial values."""
    graph, parameters = nnx.split(Decoder(config(mixers, **fields), rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(1)

    def move(p):
        return p + 0.3 * rng.standard_normal(p.shape).astype(np.float32)

    return graph, jax.tree.map(move, parameters)


@functools.partial(jax.jit, static_argnums=0)
def forward(graph, parameters, tokens, state, ids, first):
    model = nnx.merge(graph, parameters)
    hidden, state = model(tokens, state=state, segment_ids=ids, initial_segment_id=first)
    return hidden, model.logits(hidden), state


@functools.partial(jax.jit, static_argnums=0)
def gradients(graph, parameters, tokens, ids, weights):
    """Of a weighted sum of hidden states, by parameters."""

    def loss(parameters):
        return jnp.sum(weights * nnx.merge(graph, parameters)(tokens, segment_ids=ids)[0])

    return jax.grad(loss)(parameters)


def empty(mixers, **fields):
    return nnx.merge(*build(mixers, **fields)).init_state(2, T)


def inputs(seed=0):
    return np.random.default_rng(seed).integers(0, VOCABULARY, (2, T)).astype(np.int32)


def exact(mixers, tokens, perturbation=0.0, **fields):
    """Hidden states and logits of rows of tokens, float64."""
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), nnx.to_pure_dict(build(mixers, **fields)[1]))
    rng = np.random.default_rng(4)
    p = jax.tree.map(lambda a: a * (1 + perturbation * rng.standard_normal(a.shape)), p)
    names = [mixers[i % len(mixers)] for i in range(fields.get("layers", len(mixers)))]
    sizes = {"vocab_size": VOCABULARY, "eps": fields.get("norm_eps", 1e-6)} | SIZES
    rows = [reference_model.decoder(p, row, names, **sizes) for row in tokens]
    return np.stack([h for h, _ in rows]), np.stack([logits for _, logits in rows])


def check(hidden, logits, mixers, tokens, what="", at=slice(None), **fields):
    """Against the float64 pass over tokens, from `at` on; the limit grows with the model's own conditioning."""
    wanted = [a[:, at] for a in exact(mixers, tokens, **fields)]
    moved = [a[:, at] for a in exact(mixers, tokens, perturbation=PERTURBATION, **fields)]
    for name, seen, a, b in zip(("hidden", "logits"), (hidden, logits), wanted, moved, strict=True):
        if seen is not None:
            assert_close(seen, a, max(LIMIT, CONDITIONED * relative_l2(b, a)), f"{name} {what}")


# Structure ------------------------------------------------------------------------------------------------------------


def test_shortest_period():
    assert shortest_period(("a",)) == 1
    assert shortest_period(("a",) * 6) == 1
    assert shortest_period(("a", "b") * 3) == 2
    assert shortest_period(("a", "b", "a")) == 3
    assert shortest_period(("a", "a", "b", "a", "a", "b")) == 3
    assert shortest_period(("a", "a", "b", "a")) == 4


@pytest.mark.parametrize(
    ("mixers", "layers", "period"), [(("linear",), 3, 1), (("linear", "softmax"), 4, 2), (("linear", "softmax"), 3, 3)]
)
def test_layers_are_stacked_by_period(mixers, layers, period):
    model = nnx.eval_shape(lambda: Decoder(config(mixers, layers=layers), rngs=nnx.Rngs(0)))
    stack = nnx.to_pure_dict(nnx.state(model.stack, nnx.Param))
    assert len(stack["blocks"]) == model.period == period
    assert {p.shape[0] for p in jax.tree.leaves(stack)} == {layers // period}
    assert model.fixed_state == ("softmax" not in mixers)


def test_sizes_that_papers_expand():
    assert EXPANSION == reference_model.EXPANSION


@pytest.mark.parametrize("growing", sorted(GROWING))
def test_implementations_of_one_kind_of_layer_leave_the_other_alone(growing):
    """A hybrid takes the name of a softmax implementation and that of a mixer's, each for the layers that know it."""
    tokens = inputs()
    for implementation in ("recurrent", "xla"):
        model = Decoder(config(("linear", growing), implementation=implementation), rngs=nnx.Rngs(0))
        own = [block.mixer.implementation for block in model.stack.blocks]
        assert own == ([implementation, None] if implementation == "recurrent" else [None, implementation])
        assert jax.eval_shape(lambda model=model: model(tokens)[0]).shape == (2, T, 8)


def test_initial_parameters():
    """Embedding N(0, 0.02^2); the MLP's last kernel divided by sqrt(2 layers); no two layers alike; all float32."""
    model = Decoder(config(("linear",), layers=3, width=64, mlp_width=96, tie_embeddings=False), rngs=nnx.Rngs(0))
    p = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    assert {a.dtype for a in jax.tree.leaves(p)} == {np.dtype("float32")}
    assert p["embedding"].shape == (128, 64)
    assert 0.019 < np.std(p["embedding"]) < 0.021
    assert p["unembed"].shape == (64, 128)
    assert 0.95 * 64**-0.5 < np.max(np.abs(p["unembed"])) <= 64**-0.5
    mlp = p["stack"]["blocks"][0]["mlp"]
    for name, bound in (("gate", 64**-0.5), ("up", 64**-0.5), ("down", 96**-0.5 * 6**-0.5)):
        kernel = np.asarray(mlp[name]["kernel"])
        assert 0.95 * bound < np.max(np.abs(kernel)) <= bound, name
        assert not np.array_equal(kernel[0], kernel[1])
    assert np.all(p["norm"]["scale"] == 1)


# Values ---------------------------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize(
    ("mixers", "fields"),
    [(HYBRID, {"layers": 4}), (("linear",), {"layers": 2, "tie_embeddings": False, "norm_eps": 1e-2})],
)
def test_values(mixers, fields):
    tokens = inputs()
    graph, parameters = build(mixers, **fields)
    hidden, logits, state = forward(graph, parameters, tokens, None, None, None)
    assert hidden.dtype == logits.dtype == np.float32
    check(hidden, logits, mixers, tokens, **fields)
    assert ("unembed" in nnx.to_pure_dict(parameters)) != fields.get("tie_embeddings", True)
    assert nnx.merge(graph, parameters).unembedding().shape == (8, VOCABULARY)
    assert mixers != HYBRID or state[1] is None  # no cache unless one is given


def test_scan_equals_a_loop_over_layers():
    graph, parameters = build(HYBRID, layers=4)
    tokens = inputs()

    @jax.jit
    def loop(parameters, tokens):
        model = nnx.merge(graph, parameters)
        stack, stacked = nnx.split(model.stack)
        x = model.embedding[...][tokens]
        for i in range(2):
            period = nnx.merge(stack, jax.tree.map(lambda p, i=i: p[i], stacked))
            x, _ = period(x, None, {"segment_ids": None, "initial_segment_id": None})
        return model.norm(x)

    assert_close(forward(graph, parameters, tokens, None, None, None)[0], loop(parameters, tokens), 2e-6)


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_remat_changes_nothing(remat):
    tokens, weights = inputs(), np.random.default_rng(2).standard_normal((2, T, 8)).astype(np.float32)
    graph, parameters = build(("linear",), layers=2)
    wanted = gradients(graph, parameters, tokens, IDS, weights)
    seen = gradients(build(("linear",), layers=2, remat=remat)[0], parameters, tokens, IDS, weights)
    for (path, g), w in zip(jax.tree.leaves_with_path(seen), jax.tree.leaves(wanted), strict=True):
        assert_close(g, w, 1e-5, jax.tree_util.keystr(path))


def test_remat_saves_less():
    """What is kept for the backward pass shrinks from none to dots to full."""
    tokens = np.zeros((2, T), np.int32)

    def kept(remat):
        graph, parameters = build(HYBRID, layers=4, remat=remat)

        def f(p):
            return jnp.sum(nnx.merge(graph, p)(tokens)[0])

        _, pullback = jax.eval_shape(lambda p: jax.vjp(f, p), parameters)
        return sum(x.size for x in jax.tree.leaves(pullback))

    none, dots, full = (kept(remat) for remat in ("none", "dots", "full"))
    assert none > dots > full


def test_bfloat16():
    fields = {"layers": 4, "dtype": "bfloat16"}
    graph, parameters = build(HYBRID, **fields)
    tokens = inputs()
    hidden, logits, state = forward(graph, parameters, tokens, empty(HYBRID, **fields), None, None)
    wanted = exact(HYBRID, tokens, **fields)
    assert hidden.dtype == jnp.bfloat16
    assert logits.dtype == np.float32
    assert {a.dtype for a in jax.tree.leaves(parameters)} == {np.dtype("float32")}
    assert state[0].memory.S.dtype == np.float32
    assert state[1].k.dtype == jnp.bfloat16
    assert_close(np.asarray(hidden, np.float32), wanted[0], 5e-2, "hidden")
    assert_close(logits, wanted[1], 5e-2, "logits")


def test_every_parameter_learns():
    """Finite gradients, nonzero for every parameter of every layer."""
    graph, parameters = build(HYBRID, layers=4)
    weights = np.random.default_rng(2).standard_normal((2, T, 8)).astype(np.float32)
    for path, g in jax.tree.leaves_with_path(gradients(graph, parameters, inputs(), IDS, weights)):
        assert np.all(np.isfinite(g)), jax.tree_util.keystr(path)
        assert np.any(g), jax.tree_util.keystr(path)


# State ----------------------------------------------------------------------------------------------------------------


def check_splits(mixers, tokens, prefill, **fields):
    for split in range(tokens.shape[1]):
        logits, state = prefill(split)
        outputs = [logits]
        for t in range(split, tokens.shape[1]):
            _, logits, state = forward(*build(mixers, **fields), tokens[:, t : t + 1], state, None, None)
            outputs.append(logits)
        check(None, np.concatenate(outputs, 1), mixers, tokens, f"with split {split}", **fields)


# One of each kind of state and of sizes; the layers' own tests are over all.
@pytest.mark.parametrize("mixer", ["softmax", "gla", "ccq_gla", "ccq_mamba2", "retention", "interdomain", "longhorn"])
def test_prefill_and_decode(mixer):
    """Logits of a padded prefill and one token at a time equal those of one float64 pass, at every split."""
    mixers, tokens, fields = (mixer,), inputs(), {"implementation": "recurrent"}

    def prefill(split):
        ids = np.where(np.arange(T) < split, 0, -1)[None].repeat(2, 0).astype(np.int32)
        _, logits, state = forward(*build(mixers, **fields), tokens, empty(mixers, **fields), ids, None)
        return logits[:, :split], state

    check_splits(mixers, tokens, prefill, **fields)


@pytest.mark.core
def test_prefill_and_decode_a_hybrid():
    """As above, in the default form and with prefills of just the prompt's length."""
    mixers, tokens = HYBRID, inputs()[:, :6]

    def prefill(split):
        if split == 0:
            return np.zeros((2, 0, VOCABULARY)), empty(mixers)
        _, logits, state = forward(*build(mixers), tokens[:, :split], empty(mixers), None, None)
        return logits, state

    check_splits(mixers, tokens, prefill)


def test_no_tokens():
    mixers = ("gla", "softmax")
    model = nnx.merge(*build(mixers))
    hidden, state = model(jnp.zeros((2, 0), jnp.int32), state=empty(mixers))
    assert model.logits(hidden).shape == (2, 0, VOCABULARY)
    jax.tree.map(np.testing.assert_array_equal, state, empty(mixers))


# Packing and causality ------------------------------------------------------------------------------------------------


def test_packed_rows_equal_separate_rows():
    """Documents, one under a name seen before, and padding whose tokens are no tokens at all."""
    tokens = np.where(IDS < 0, 10**6, inputs()).astype(np.int32)
    hidden, logits, _ = forward(*build(HYBRID, layers=4), tokens, None, IDS, None)
    for b in range(2):
        for positions, _ in reference_model.documents(IDS[b], T):
            seen = hidden[b : b + 1, positions], logits[b : b + 1, positions]
            check(*seen, HYBRID, tokens[b : b + 1, positions], f"of row {b}, {positions}", layers=4)


def test_carried_state_is_dropped_where_the_document_is_another():
    tokens, before = inputs(), inputs(5)
    both = np.concatenate([before, tokens], 1)
    graph, parameters = build(HYBRID, layers=4)
    model = nnx.merge(graph, parameters)
    ids, first = np.full((2, T), 3, np.int32), np.array([3, 2], np.int32)
    _, _, state = forward(graph, parameters, before, model.init_state(2, 2 * T), ids, first)
    hidden, _, _ = forward(graph, parameters, tokens, state, ids, first)
    check(hidden[:1], None, HYBRID, both[:1], "of the same document", np.s_[T:], layers=4)
    check(hidden[1:], None, HYBRID, tokens[1:], "of another document", layers=4)


def test_gradients_do_not_cross_documents_or_touch_padding():
    """Each token is used once, so that the embedding's gradient tells which positions a loss reaches."""
    graph, parameters = build(HYBRID, layers=4)
    tokens = np.arange(2 * T, dtype=np.int32).reshape(2, T)
    weights = np.random.default_rng(2).standard_normal((2, T, 8)).astype(np.float32)
    for positions, _ in reference_model.documents(IDS[0], T):
        only = np.zeros_like(weights)
        only[0, positions] = weights[0, positions]
        g = np.asarray(gradients(graph, parameters, tokens, IDS, only)["embedding"][...])
        assert sorted(np.flatnonzero(np.any(g, axis=1))) == positions
    wanted = gradients(graph, parameters, tokens, IDS, np.where((IDS < 0)[..., None], 0, weights))
    spoilt = np.where(IDS < 0, 10**6, tokens).astype(np.int32)
    for padded in (tokens, spoilt):
        seen = gradients(graph, parameters, padded, IDS, weights)
        for (path, g), w in zip(jax.tree.leaves_with_path(seen), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(g, w, err_msg=jax.tree_util.keystr(path))


def test_causality():
    """Tokens from P on change neither hidden states before P nor the gradients of a loss on them, to the last bit."""
    graph, parameters = build(HYBRID, layers=4)
    tokens, cut = inputs(), 5
    changed = np.where(np.arange(T) < cut, tokens, (tokens + 11) % VOCABULARY)
    ids = np.zeros((2, T), np.int32)
    for packing in (None, ids):
        first, second = (forward(graph, parameters, x, None, packing, None) for x in (tokens, changed))
        np.testing.assert_array_equal(first[0][:, :cut], second[0][:, :cut])
        np.testing.assert_array_equal(first[1][:, :cut], second[1][:, :cut])
        assert np.any(first[0][:, cut:] != second[0][:, cut:])
    weights = np.random.default_rng(2).standard_normal((2, T, 8)).astype(np.float32)
    weights[:, cut:] = 0
    first, second = (gradients(graph, parameters, x, ids, weights) for x in (tokens, changed))
    for (path, g), w in zip(jax.tree.leaves_with_path(second), jax.tree.leaves(first), strict=True):
        np.testing.assert_array_equal(g, w, err_msg=jax.tree_util.keystr(path))


def test_boundaries_do_not_recompile():
    graph, parameters = build(("linear",))
    traces = []

    @jax.jit
    def f(ids):
        traces.append(1)
        return nnx.merge(graph, parameters)(np.zeros((2, T), np.int32), segment_ids=ids)[0]

    for ids in (IDS, np.zeros_like(IDS), -np.ones_like(IDS)):
        f(ids)
    assert len(traces) == 1


def test_bad_input_is_named():
    model = nnx.merge(*build(HYBRID))
    tokens, good = inputs(), empty(HYBRID)
    one_layer = jax.tree.map(lambda s: s[0], good)
    for error, match, arguments in (
        (TypeError, "tokens: dtype float32", {"tokens": tokens.astype(np.float32)}),
        (TypeError, "tokens: list given", {"tokens": [1]}),
        (ValueError, r"tokens: shape \(9,\) given, wanted \[B, T\]", {"tokens": tokens[0]}),
        (ValueError, r"segment_ids: shape \(2, 5\) given, wanted \[B, T\] = \(2, 9\)", {"segment_ids": IDS[:, :5]}),
        (ValueError, "initial_segment_id: given without segment_ids", {"initial_segment_id": IDS[:, 0]}),
        (TypeError, "tokens: dtype bool", {"tokens": tokens > 3}),
        (TypeError, "state: tuple given, wanted 2 layer states", {"state": good[:1]}),
        (TypeError, "state: LayerState given, wanted 2 layer states", {"state": good[0]}),
        (TypeError, "state: KVCache given, wanted LayerState", {"state": good[::-1]}),
        (ValueError, r"state\[0\].convolution: shape \(2, .* wanted 1 layers along axis 0", {"state": one_layer}),
        (ValueError, r"state.convolution: shape \(2, .* given, wanted \(1, ", {"tokens": tokens[:1], "state": good}),
    ):
        with pytest.raises(error, match=match):
            model(**({"tokens": tokens} | arguments))
    with pytest.raises(ValueError, match="capacity: None given, wanted the number of tokens"):
        model.init_state(2)
