"""Run by loop_test.py: trains, and kills itself without warning while a checkpoint is being written."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import ml_collections
from conftest import use_standin  # type: ignore[import-not-found]

from linattn_jax.train import loop
from linattn_jax.train.checkpoints import Checkpoints

if __name__ == "__main__":
    use_standin(setattr)
    save = Checkpoints.save

    def save_and_die(self, step, *args):
        save(self, step, *args)
        if step == 8:
            os.kill(os.getpid(), signal.SIGKILL)

    Checkpoints.save = save_and_die  # type: ignore[method-assign]
    config = ml_collections.ConfigDict(json.loads(pathlib.Path(sys.argv[1]).read_text()))
    config.model.mixers = tuple(config.model.mixers)
    loop.train(config, sys.argv[2])
