"""Sizes by name: parameters counted by hand, overrides, and what is refused."""

import dataclasses
import json

import jax
import pytest
from flax import nnx
from ml_collections import ConfigDict

from linattn_jax.layers import LAYERS
from linattn_jax.models import PRESETS, Decoder, DecoderConfig, decoder_config
from linattn_jax.types import UserError


def gated_delta(D, H, K, V):
    """KLA: q, k, v, gate, output; convolution of 4 taps; eta with bias; decay with A_log and dt_bias; the norm."""
    return D * (2 * H * K + 3 * H * V) + 4 * H * (2 * K + V) + D * H + H + D * H + 2 * H + V


def by_hand(vocabulary, layers, D, H, K, V, mlp, tied):
    block = gated_delta(D, H, K, V) + 3 * D * mlp + 2 * D
    return vocabulary * D * (1 if tied else 2) + layers * block + D


SIZES = {  # layers, D, H, K, V, SwiGLU, tied; parameters with 32,000 tokens, in millions
    "tiny": ((4, 128, 2, 64, 64, 384, True), 5.0),
    "30m": ((8, 512, 4, 128, 128, 1536, True), 45.8),
    "125m": ((12, 768, 6, 128, 128, 2048, True), 116.8),
    "350m": ((24, 1024, 8, 128, 128, 2816, True), 367.0),
    "kla400m": ((11, 1536, 12, 96, 192, 6144, True), 516.9),
    "1.3b": ((24, 2048, 16, 128, 128, 5632, False), 1467.1),
}


@pytest.mark.parametrize("preset", PRESETS)
def test_parameter_counts(preset):
    sizes, millions = SIZES[preset]
    config = decoder_config({"preset": preset}, vocab_size=32000, dtype="float32")
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    count = sum(p.size for p in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert count == by_hand(32000, *sizes)
    assert round(count / 1e6, 1) == millions


def test_overrides():
    config = decoder_config(
        ConfigDict({"preset": "30m", "mixers": ("kla", "kla", "softmax"), "layers": 6, "value_size": None}),
        257,
        "bfloat16",
    )
    assert config == DecoderConfig(
        vocab_size=257, layers=6, width=512, heads=4, mixers=("kla", "kla", "softmax"), dtype="bfloat16"
    )
    assert config.layer_mixers == ("kla", "kla", "softmax") * 2
    assert config.mlp_channels == 1536
    assert decoder_config({"mixers": "gdn"}, 257, "float32").mixers == ("gdn",)
    assert decoder_config({"mixers": ["gla", "gdn"], "layers": 3}, 9, "float32").layer_mixers == ("gla", "gdn", "gla")
    assert DecoderConfig(9, 1, 8, 1, mixers="kla") == DecoderConfig(9, 1, 8, 1, mixers=["kla"])
    assert decoder_config({}, 257, "float32").width == PRESETS["tiny"]["width"]
    assert decoder_config({"mlp_width": 40}, 257, "float32").mlp_channels == 40


def test_options_reach_the_layers_that_have_them():
    """Through a hybrid's config as JSON keeps it; None is the layer's default; the config can still be hashed."""
    options = {"vla": {"penalty": 2}, "interdomain": {"basis": 6, "rope": None}, "linear": {}, "longhorn": {"rank": 3}}
    sizes = {"layers": 3, "width": 16, "heads": 2, "head_size": 4, "mlp_width": 8}
    mixers = ("vla", "interdomain", "ccq_kla")
    asked = ConfigDict(sizes | {"mixers": mixers, "options": options | {"ccq_kla": {"gain": 0.5, "conv_width": 2}}})
    config = decoder_config(ConfigDict(json.loads(asked.to_json())), 9, "float32")
    layers = [block.mixer for block in Decoder(config, rngs=nnx.Rngs(0)).stack.blocks]
    assert (layers[0].penalty, layers[1].size, layers[1].rope) == (2, 3, False)
    assert (layers[2].contraction.gain, layers[2].convolution.weight.shape) == (0.5, (1, 2, 24))
    assert layers[0].init_state(1).M[0, 0, 0, 0] == 2
    same = DecoderConfig(vocab_size=9, **(asked.to_dict() | {"options": config.options}))
    assert same == config
    assert hash(same) == hash(config)
    assert same != dataclasses.replace(config, options={})
    options["longhorn"]["rank"] = 4
    assert config.options["longhorn"] == {"rank": 3}


def test_every_option_is_a_keyword_of_its_layer():
    """Of the layer's `build`, and through `**options`, but no further, of what stands behind it."""
    assert set(LAYERS["ccq_mamba2"].option_types()) == {
        "decay", "normalize_keys", "gain", "gate_bias", "head_dim", "conv_width",
    }  # fmt: skip
    assert LAYERS["deltanet_kla"].option_types() == {"conv_width": int}
    assert LAYERS["softmax_vla"].option_types() == {"window": int | None, "qk_norm": bool}
    assert LAYERS["linear"].option_types() == {}


@pytest.mark.parametrize(
    ("model", "match"),
    [
        ({"preset": "7b"}, r"size '7b' is not known; known are tiny, 30m, 125m, 350m, kla400m, 1\.3b\."),
        ({"mixers": ("kla", "rwkv")}, rf"mixer 'rwkv' is not known; known are {', '.join(sorted(LAYERS))}\."),
        ({"mixers": ()}, r"model\.mixers is empty"),
        ({"depth": 3}, r"model\.depth is not known; known are preset, chunk_size, .*layers.*width\."),
        ({"dtype": "float32"}, r"model\.dtype is not known; known are preset"),
        ({"remat": "some"}, r"model\.remat 'some' is not known; known are none, dots, full\."),
        ({"init": "xavier"}, r"model\.init 'xavier' is not known; known are fan_in_uniform, normal_002\."),
        ({"implementation": "cuda"}, r"model\.implementation 'cuda' is not known; known are .*chunkwise.*"),
        ({"layers": 0}, r"model\.layers is 0, wanted an integer of at least 1\."),
        ({"width": -1}, r"model\.width is -1, wanted an integer of at least 1\."),
        ({"key_heads": -2}, r"model\.key_heads is -2, wanted an integer of at least 0\."),
        ({"mlp_width": -1}, r"model\.mlp_width is -1, wanted an integer of at least 0\."),
        ({"mlp_width": True}, r"model\.mlp_width is True, wanted an integer of at least 0\."),
        ({"width": 64.0}, r"model\.width is 64\.0, wanted an integer of at least 1\."),
        ({"layers": "4"}, r"model\.layers is '4', wanted an integer of at least 1\."),
        ({"norm_eps": -1e-6}, r"model\.norm_eps is -1e-06, wanted a positive number\."),
        ({"norm_eps": float("nan")}, r"model\.norm_eps is nan, wanted a positive number\."),
        ({"norm_eps": "1e-6"}, r"model\.norm_eps is '1e-6', wanted a positive number\."),
        ({"mixers": 3}, r"model\.mixers is 3, wanted names of mixers\."),
        ({"mixers": [["kla"]]}, r"mixer \['kla'\] is not known"),
        ({"options": 3}, r"model\.options is 3, wanted options by name of mixer\."),
        ({"options": {"rwkv": {}}}, rf"model\.options\.rwkv is of no mixer; known are {', '.join(sorted(LAYERS))}\."),
        ({"options": {"vla": 1.0}}, r"model\.options\.vla is 1\.0, wanted values by name of option\."),
        ({"options": {"s4d": {"basis": 3}}}, r"model\.options\.s4d\.basis is not known; known are state_size\."),
        (
            {"options": {"ccq_gla": {"gian": 2.0}}},
            r"ccq_gla\.gian is not known; known are decay, decay_rank, gain, gate_bias, normalize_keys\.",
        ),
        ({"options": {"linear": {"basis": 3}}}, r"model\.options\.linear\.basis is not known; the layer has none\."),
        ({"options": {"s4d": {"state_size": "8"}}}, r"model\.options\.s4d\.state_size is '8', wanted int\."),
        ({"options": {"s4d": {"state_size": True}}}, r"model\.options\.s4d\.state_size is True, wanted int\."),
        ({"options": {"longhorn": {"rank": 1.5}}}, r"model\.options\.longhorn\.rank is 1\.5, wanted int \| None\."),
        ({"heads": 6, "key_heads": 4}, r"model\.heads 6 is not a multiple of model\.key_heads 4\."),
    ],
)
def test_refused(model, match):
    with pytest.raises(UserError, match=match):
        decoder_config(model, 257, "float32")


def test_refused_dtype():
    with pytest.raises(UserError, match=r"model\.dtype 'float16' is not known; known are float32, bfloat16\."):
        decoder_config({}, 257, "float16")
