"""Trains a language model, or goes on with the run in --run_dir.

python -m experiments.train --config=configs/lm.py:mixer=kla,size=125m,data=/path/*.txt --run_dir=runs/first

The part after the colon chooses mixer, size, corpus and the like (see configs/lm.py, or name a wrong key to get the
list); any field of the config is set with --config.x.y=value, for example --config.optimizer.weight_decay=0.05.
The run directory gets config.json, run.json, metrics.jsonl, tensorboard/, checkpoints/, loss.png, summary.json.
Stop with Ctrl-C or SIGTERM: the step is saved, and the same command goes on from it.
"""

from absl import flags

from experiments._main import define_config, run
from linattn_jax.train import train

_CONFIG = define_config("configs/lm.py")
_RUN_DIR = flags.DEFINE_string("run_dir", None, "Where the run's files go; an existing run is resumed.", required=True)


def main(_):
    """Trains."""
    train(_CONFIG.value, _RUN_DIR.value)


if __name__ == "__main__":
    run(main)
