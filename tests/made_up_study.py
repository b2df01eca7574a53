"""A made-up study with its records, for tests of reports."""

import json
import struct
from pathlib import Path

from linattn_jax.eval.report import summary

CONFIG = """
from ml_collections import ConfigDict

def get_config(arg=None):
    config = ConfigDict()
    config.title = "Pairs"
    config.paper = "Someone 2026"
    config.columns = ("n=4", "n=64")
    config.x, config.x_label, config.chance = (4, 64), "pairs n", 0.1
    config.mixers = ("vla", "linear")
    config.published = {"vla": {"n=4": 0.9835}, "linear": {"n=64": 0.2}}
    config.claims = ({"text": "VLA recalls.", "checks": ("vla@n=4 >= 0.98", "vla@n=4 > linear@n=4 + 0.5")},)
    config.notes = ("A note.",)
    return config
"""


def config(**fields):
    namespace = {}
    exec(CONFIG, namespace)
    made = namespace["get_config"]()
    for name, value in fields.items():
        del made[name]
        made[name] = value
    return made


def trial(mixer="vla", seed=0, metrics=None, **fields):
    row = {"study": "pairs", "mixer": mixer, "layer": mixer, "options": {}, "seed": seed, "learning_rate": 1e-3}
    row |= {"setting": {}, "stage": "report", "status": "done", "metrics": metrics or {"n=4": 0.5, "n=64": 0.25}}
    row |= {"validation": 0.5, "loss": 0.1, "steps": 1500, "stopped": "steps", "parameters": 12345, "tokens": 1000}
    row |= {"seconds": 2.0, "protocol": "p1", "commit": "a" * 40, "dirty": False, "versions": {"jax": "0.12"}}
    row |= {"devices": {"platform": "cpu", "kind": "cpu", "count": 1, "cores": 2}, "started": "2026-01-01T00:00:00Z"}
    return row | fields


def three(mixer, values, column="n=4", **fields):
    return [trial(mixer, seed, {column: value}, **fields) for seed, value in enumerate(values)]


SUMMARY = summary(config(), [*three("vla", (0.9, 0.8, 0.7)), *three("linear", (0.3, 0.3, 0.3))])


def write(path, rows, end=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + end)
    return path


def rows_of(text):
    """{mixer: cells} of a table."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return {line[0].strip("`"): line[1:] for line in lines}


def png_size(path):
    data = Path(path).read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert data.endswith(b"IEND\xaeB`\x82")
    assert len(data) > 10_000
    return struct.unpack(">II", data[16:24])
