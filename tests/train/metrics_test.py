"""Peaks, counts, the lines a person reads, and files that are cut back on resume."""

from __future__ import annotations

import contextlib
import io
import json
import time

import jax
import numpy as np
import pytest
from flax import nnx
from matplotlib.image import imread

from linattn_jax.layers import LAYERS
from linattn_jax.models.decoder import Decoder
from linattn_jax.models.presets import DecoderConfig
from linattn_jax.sharding import logical_axes, path_name
from linattn_jax.train import metrics as m
from linattn_jax.train.functional import split
from linattn_jax.train.optimizer import decay_mask, muon_mask
from linattn_jax.train.plot import plot_loss, smoothed


@pytest.mark.parametrize(
    ("kind", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("TPU v4", 275),
        ("TPU v5 lite", 197),
        ("TPU v5e", 197),
        ("TPU v5p", 459),
        ("TPU v5", 459),
        ("TPU v6 lite", 918),
        ("TPU v6e", 918),
        ("TPU7x", 2307),
        ("cpu", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_peaks_by_device_kind(kind, tera):
    assert m.peak_flops(kind) == (None if tera is None else tera * 1e12)


def _shapes(mixer, tied):
    config = DecoderConfig(
        vocab_size=257, layers=4, width=32, heads=2, head_size=16, mlp_width=64, tie_embeddings=tied,
        mixers=(mixer, mixer, mixer, "softmax"),
    )  # fmt: skip
    return jax.eval_shape(lambda: split(Decoder(config, rngs=nnx.Rngs(0)))[1])


# Numbers for each head, channel and mode, that are no matrices though they have two axes or three.
PER_HEAD = {"a_log", "a_imag", "mix_real", "mix_imag", "c_real", "c_imag", "key_bias", "value_bias"}


@pytest.mark.parametrize("mixer", sorted(LAYERS))
def test_every_parameter_of_the_decoder_has_a_rule(mixer):
    params = _shapes(mixer, tied=False)
    decays = {path_name(p): on for p, on in jax.tree_util.tree_leaves_with_path(decay_mask(params))}
    muon = {path_name(p): on for p, on in jax.tree_util.tree_leaves_with_path(muon_mask(params))}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = path_name(path)
        stacked = name.startswith("stack/")
        axes = logical_axes(name)
        assert axes is not None, name
        kind = name.split("/")[-1]
        assert len(axes) == (2 if kind in ("kernel", "weight", "embedding", "unembed") else 1), name
        assert len(axes) <= leaf.ndim - stacked, name
        assert len(axes) == leaf.ndim - stacked or kind in PER_HEAD, name
        matrix = len(axes) == 2 and "convolution" not in name
        assert decays[name] == matrix, name
        assert muon[name] == (matrix and stacked and "contraction" not in name), name


def test_only_what_multiplies_counts_as_operations():
    tied, untied = (m.count_parameters(_shapes("kla", tied)) for tied in (True, False))
    table = 384 * 32  # rows padded to a multiple of 128
    assert tied["multiplying"] == tied["total"] == untied["total"] - table == untied["multiplying"]
    assert m.flops_per_token(_shapes("kla", True), mixer_flops=5.0) == 6 * tied["total"] + 5


def test_lines_of_lost_steps_go_and_whole_ones_stay(tmp_path):
    log = m.MetricsLog(tmp_path, 0)
    for step in (1, 2, 3):
        log.write({"step": step, "loss": float(step), "grad_norm": float("nan"), "mfu": None})
    log.close()
    with log.path.open("a") as file:
        file.write('{"step": 4, "lo')
    again = m.MetricsLog(tmp_path, 2)
    again.write({"step": 3, "loss": np.float32(7.0)})
    again.close()
    lines = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert [(r["step"], r["loss"]) for r in lines] == [(1, 1.0), (2, 2.0), (3, 7.0)]
    assert lines[0]["grad_norm"] is None
    fresh = m.MetricsLog(tmp_path, 0)
    fresh.close()
    assert m.read_metrics(log.path) == []


def _events(folder):
    import struct

    from tensorboardX.proto.event_pb2 import Event

    for path in sorted(folder.iterdir(), key=lambda p: p.stat().st_mtime_ns):
        data = path.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            yield Event.FromString(data[12 : 12 + size])
            data = data[12 + size + 4 :]


def test_tensorboard_gets_the_numbers_and_drops_the_lost_ones(tmp_path):
    log = m.MetricsLog(tmp_path, 0)
    log.write({"step": 1, "loss": 2.5})
    log.close()
    time.sleep(1.1)  # the events' file name has whole seconds
    log = m.MetricsLog(tmp_path, 1)
    log.write({"step": 2, "heldout_bits_per_byte": 1.5})
    log.close()
    events = list(_events(tmp_path / "tensorboard"))
    values = [(e.step, v.tag, v.simple_value) for e in events for v in e.summary.value]
    assert values == [(1, "train/loss", 2.5), (2, "heldout/bits_per_byte", 1.5)]
    assert [e.step for e in events if e.HasField("session_log")] == [2]


def test_the_progress_line():
    record = {"step": 100, "loss": 1.25, "bits_per_byte": 1.8034, "tokens_per_second": 12345.0, "mfu": 0.4105}
    record |= {"step_ms": 1000.0, "skipped": 2}
    line = m.progress_line(record, 1000)
    assert line == "loss 1.2500 nats (1.803 bits/byte)  12.3k tokens/s  MFU 41.0 %  2 skipped  15 min left"
    assert m.progress_line({"step": 1, "loss": float("nan")}, 2) == "loss not finite nats"


@pytest.mark.parametrize(
    ("seconds", "text"), [(5, "5 s"), (300, "5 min"), (7500, "2 h 05 min"), (7170, "2 h 00 min"), (273600, "3 d 4 h")]
)
def test_durations_as_people_say_them(seconds, text):
    assert m.duration(seconds) == text


def test_plain_lines_where_there_is_no_terminal():
    stream = io.StringIO()
    console = m.Console(10, 0, stream)
    console.advance()
    console.show({"step": 1, "loss": 2.0})
    console.say("a sentence")
    console.close()
    assert stream.getvalue() == "step 1/10  loss 2.0000 nats\na sentence\n"


def test_a_bar_on_a_terminal():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    console = m.Console(10, 4, stream)
    console.advance()
    console.show({"step": 5, "loss": 2.0})
    console.say("a sentence")
    console.close()
    shown = stream.getvalue()
    assert "5/10" in shown
    assert "loss 2.0000 nats" in shown
    assert "a sentence\n" in shown


def test_the_clock_counts_only_what_it_is_told_to(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(m.time, "perf_counter", lambda: now[0])
    clock = m.Clock()
    now[0] = 5.0
    clock.start()
    now[0] = 7.0
    clock.stop()
    now[0] = 100.0
    clock.start()
    now[0] = 101.0
    assert clock.reset() == 3.0
    now[0] = 101.5
    assert clock.seconds() == 0.5


def test_smoothing_starts_without_bias():
    np.testing.assert_allclose(smoothed(np.full(5, 3.0), 10), 3.0)
    np.testing.assert_allclose(smoothed(np.array([0.0, 1.0]), 2), [0.0, 2 / 3])


def test_a_full_disk_costs_lines_not_the_run(small_disk):
    said = []
    log = m.MetricsLog(small_disk, 0, said.append)
    log.write({"step": 1, "loss": 1.0})
    with (small_disk / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 256)
    for step in range(2, 300):
        log.write({"step": step, **{f"number{i}": 1.0 for i in range(20)}})
    log.close()
    assert len([text for text in said if "were not written" in text]) == 1
    assert "No space left on device" in said[0]
    lines = log.path.read_text().splitlines()
    assert json.loads(lines[0]) == {"step": 1, "loss": 1.0}
    assert [json.loads(line)["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert len(lines) < 299


@pytest.mark.parametrize("count", [0, 1, 300])
def test_the_picture_is_drawn(tmp_path, count):
    rng = np.random.default_rng(0)
    records = [{"step": 10 * i + 10, "loss": 2 + 3 * np.exp(-i / 30) + 0.1 * rng.normal()} for i in range(count)]
    records += [{"step": i, "heldout_nats_per_token": 2.1, "heldout_bits_per_byte": 3.0} for i in range(0, count, 100)]
    records.append({"step": 9, "loss": None})
    plot_loss(tmp_path / "loss.png", records, "kla")
    picture = imread(tmp_path / "loss.png")
    assert picture.shape[:2] == (720, 1200)
    blue = (np.abs(picture[..., :3] - np.array([8, 81, 156]) / 255) < 0.02).all(-1)
    assert (blue.sum() > 500) == (count >= 20)
