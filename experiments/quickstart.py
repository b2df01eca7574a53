"""Trains a small KLA language model on this Python's own standard library: real text, on any machine, no download.

    make quickstart                                       or: python -m experiments.quickstart
    python -m experiments.quickstart --mixer=gdn --steps=2000 --run_dir=runs/gdn

Prints the loss on held-out files in bits per byte beside what gzip and xz need for the same files, draws the loss over
time into loss.png, and writes a sample. Killed or stopped, the same command goes on where it was, to the same weights.
For anything else use experiments.train, of which this is one configuration.
"""

import json
from pathlib import Path

from absl import flags

from configs.lm import get_config
from experiments._main import run
from linattn_jax.data import heldout_bytes, open_splits
from linattn_jax.eval.compression import bits_per_byte
from linattn_jax.train import train
from linattn_jax.train.metrics import table

_RUN = flags.DEFINE_string("run_dir", "runs/quickstart", "Where everything is written.")
_MIXER = flags.DEFINE_string("mixer", "kla", "Mixer, or several joined by + (see configs/lm.py).")
_STEPS = flags.DEFINE_integer("steps", 600, "Training steps of 8 x 256 bytes.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of weights and order.")


def main(_) -> None:
    """Trains, compares, points at what was written."""
    config = get_config(f"size=tiny,data=stdlib,batch=8,mixer={_MIXER.value},steps={_STEPS.value},seed={_SEED.value}")
    config.sample.prompt = "def "
    config.eval.every = max(1, config.steps // 4)
    summary = train(config, _RUN.value)
    if summary["stopped"]:
        return
    _, heldout = open_splits(config.data)
    text = heldout_bytes(heldout, config.eval.max_bytes)
    rates = {f"{_MIXER.value} (this run)": summary["heldout_bits_per_byte"], **bits_per_byte(text)}
    print(f"\nHeld out: {len(heldout)} files of the standard library, {len(text):,} bytes. Bits per byte:")
    print(table([(name, f"{rate:.3f}") for name, rate in rates.items()]))
    folder = Path(_RUN.value)
    (folder / "compression.json").write_text(json.dumps({"bytes": len(text), "bits_per_byte": rates}, indent=2) + "\n")
    print(f"\nLoss over time: {folder / 'loss.png'}. More text:")
    print(f"  .venv/bin/python -m experiments.generate --run_dir={folder} --prompt='def main('")


if __name__ == "__main__":
    run(main)
