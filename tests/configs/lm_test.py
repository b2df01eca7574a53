"""The argument string: typed, quoted, and a sentence for each mistake; every size makes a decoder."""

from __future__ import annotations

import doctest
import sys

import pytest
from absl import flags
from ml_collections import config_flags

from configs import common, lm
from linattn_jax.layers import LAYERS
from linattn_jax.models.presets import PRESETS, decoder_config
from linattn_jax.train.checkpoints import check_same_config
from linattn_jax.train.rundir import config_as_json
from linattn_jax.types import UserError


def test_the_example_of_the_docstring():
    assert doctest.testmod(common).failed == 0


def test_keys_reach_their_fields():
    config = lm.get_config(
        "mixer=kla+kla+softmax,size=30m,data='/a/*.txt,/b',seq_len=512,batch=8,steps=2_000,lr=1e-3,carry=true,"
        "optimizer=muon,accumulate=2,seed=7,heldout=/c,tokenizer=/t.json,dtype=bfloat16,remat=full,init_from=runs/x"
    )
    assert config.model.mixers == ("kla", "kla", "softmax")
    assert (config.model.preset, config.model.width, config.model.remat) == ("30m", 512, "full")
    assert (config.data.train, config.data.heldout, config.data.tokenizer) == ("/a/*.txt,/b", "/c", "/t.json")
    assert (config.data.seq_len, config.batch_size, config.steps, config.accumulate) == (512, 8, 2000, 2)
    assert (config.optimizer.learning_rate, config.optimizer.name, config.seed) == (1e-3, "muon", 7)
    assert (config.carry_state, config.data.layout, config.compute_dtype) == (True, "contiguous", "bfloat16")
    assert config.init_from == "runs/x"


def test_options_of_layers_are_fields(monkeypatch):
    """As the docstring says; what is not given is null, which an older run's config without the field equals."""
    arguments = ["x", "--config.model.options.vla.penalty=1", "--config.model.options.interdomain.rope=true"]
    monkeypatch.setattr(sys, "argv", arguments)
    found = flags.FlagValues()
    given = config_flags.DEFINE_config_dict("config", lm.get_config("mixer=vla+interdomain"), flag_values=found)
    found(arguments)
    assert arguments[1].removesuffix("=1") in lm.__doc__
    config = given.value
    decoder = decoder_config(config.model, 257, "float32")
    assert decoder.options == {"vla": {"penalty": 1.0}, "interdomain": {"rope": True}}
    plain = config_as_json(lm.get_config("mixer=vla+interdomain"))
    options = plain["model"].pop("options")
    assert set(options["interdomain"]) == set(LAYERS["interdomain"].option_types())
    check_same_config(plain, plain | {"model": plain["model"] | {"options": options}}, "runs/x")
    with pytest.raises(UserError, match=r"model\.options\.vla\.penalty was 'absent' and is now 1\.0"):
        check_same_config(plain, config_as_json(config), "runs/x")


@pytest.mark.parametrize("mixer", LAYERS)
def test_every_mixer_has_fields_for_its_options(mixer):
    config = lm.get_config(f"mixer={mixer}")
    assert set(config.model.options[mixer]) == set(LAYERS[mixer].option_types())
    assert decoder_config(config.model, 257, "float32").options == {}


@pytest.mark.parametrize("size", list(PRESETS))
def test_every_size_has_defaults_and_makes_a_decoder(size):
    config = lm.get_config(f"size={size}")
    decoder = decoder_config(config.model, 257, "float32")
    assert {k: getattr(decoder, k) for k in PRESETS[size]} == PRESETS[size]
    assert config.optimizer.warmup_steps < config.steps
    assert config.batch_size * config.data.seq_len >= 4096
    assert size in lm.__doc__


def test_the_papers_settings():
    config = lm.get_config("size=kla400m")
    optimizer = config.optimizer
    assert (optimizer.learning_rate, optimizer.final_fraction, optimizer.weight_decay) == (1e-4, 0.1, 0.1)
    assert (optimizer.beta1, optimizer.beta2, optimizer.clip_norm) == (0.9, 0.95, 1.0)
    assert (config.batch_size, config.data.seq_len, config.steps) == (512, 4096, 477)
    assert optimizer.warmup_steps == 4  # 1 % of the tokens


def test_modes_learn_at_a_tenth_of_the_rate():
    assert lm.get_config().optimizer.modes_rate == 0.1
    assert "--config.optimizer.modes_rate, 0.1 of the learning rate" in lm.__doc__


def test_lion_gets_a_rate_of_its_own():
    assert lm.get_config("optimizer=lion").optimizer.learning_rate == pytest.approx(6e-4)
    assert lm.get_config("optimizer=lion,lr=1e-3").optimizer.learning_rate == 1e-3
    assert lm.get_config("lr=0").optimizer.learning_rate == 0.0


@pytest.mark.parametrize(
    ("arg", "message"),
    [
        ("mixr=kla", r"unknown key 'mixr' in the config's argument; did you mean mixer\? Known: mixer, size, data"),
        ("quux=1", r"unknown key 'quux' in the config's argument; known: mixer"),
        ("steps", r"steps in the config's argument needs a value"),
        ("steps=1.5", r"steps in the config's argument must be a whole number, got '1.5'"),
        ("steps=many", r"steps in the config's argument must be a whole number, got 'many'"),
        ("lr=fast", r"lr in the config's argument must be a number, got 'fast'"),
        ("carry=maybe", r"carry in the config's argument must be true or false, got 'maybe'"),
        ("seed=1,seed=2", r"seed is given twice"),
        ("data='/a,b", r"has an open ' in"),
        ("size=7b", r"unknown size '7b'; known: tiny, 30m"),
        ("mixer=kla+mamba9", r"unknown mixer 'mamba9'; known: ccq_deltanet, ccq_gdn"),
        ("layout=loose", r"unknown layout 'loose'"),
        ("steps=inf", r"steps in the config's argument must be a whole number, got 'inf'"),
    ],
)
def test_mistakes_are_named(arg, message):
    with pytest.raises(UserError, match=message):
        lm.get_config(arg)
