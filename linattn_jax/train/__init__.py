"""The training step, optimizer, loop, checkpoints and metrics; reads no flags."""

from __future__ import annotations

import os
from typing import Any


def train(config: Any, run_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """Trains the language model that `config` describes in `run_dir`, or goes on with the run that is there.

    Args:
        config: a ConfigDict with the fields of configs/lm.py.
        run_dir: where the run's files go; made if absent.
    Returns:
        The summary, as written to summary.json.
    Raises:
        UserError: a mistake in the config, a checkpoint of another config, too many non-finite steps in a row, or a
            disk too full to save the last step. What was saved before is kept.
    """
    from linattn_jax.train import loop  # here, because linattn_jax.eval uses the modules of this package

    return loop.train(config, run_dir)
