"""Asks a trained run for needles in texts of several lengths: RULER's S-NIAH-1, 2 and 3 in words of our own.

    python -m experiments.needles --run_dir=runs/quickstart --lengths=256,512,1024 --output=runs/quickstart/needles.json

Prints, for each kind and length, the share of greedy answers that are right, of the answer's tokens that are right
given those before, nats per such token, and right answers by depth. The essays are the run's held-out documents or
--data. `linattn_jax.data.needles` says what differs from RULER. Cost: each length is compiled once for numbers and once
for UUIDs. A model of text alone has not been taught to answer.
"""

import json
from pathlib import Path

from absl import flags

from experiments._main import run
from linattn_jax.data.needles import KINDS
from linattn_jax.eval.needles import evaluate_needles, needles_for
from linattn_jax.eval.runs import open_run
from linattn_jax.provenance import facts
from linattn_jax.train.metrics import Console, table
from linattn_jax.types import UserError

_RUN_DIR = flags.DEFINE_string("run_dir", None, "Directory of a run.", required=True)
_STEP = flags.DEFINE_integer("step", None, "Checkpoint to take; the newest when not given.", lower_bound=0)
_KINDS = flags.DEFINE_list("kinds", list(KINDS), "Of passkey, number, uuid.")
_LENGTHS = flags.DEFINE_list("lengths", "256,512,1024", "Tokens of a prompt and its answer.")
_EXAMPLES = flags.DEFINE_integer("examples", 32, "Examples of each kind and length.", lower_bound=1)
_ROWS = flags.DEFINE_integer("rows", 8, "Rows per batch, a multiple of the devices.", lower_bound=1)
_DEPTHS = flags.DEFINE_integer("depths", 5, "Depths from 0 to 1.", lower_bound=2)
_DATA = flags.DEFINE_string("data", "", "Source of essays; the run's held-out documents when not given.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the examples.", lower_bound=0)
_OUTPUT = flags.DEFINE_string("output", "", "JSON file to write.")


def main(_) -> None:
    """Evaluates and prints."""
    if not all(length.isdecimal() for length in _LENGTHS.value):
        raise UserError(f"--lengths must be whole numbers, got {','.join(_LENGTHS.value)}")
    record, opened, rows = facts(_SEED.value), open_run(_RUN_DIR.value, _STEP.value), []
    lengths, depths = list(map(int, _LENGTHS.value)), _DEPTHS.value
    wanted = needles_for(opened, _KINDS.value, lengths, data=_DATA.value, grid=depths, seed=_SEED.value)
    console = Console(len(wanted) * -(-_EXAMPLES.value // _ROWS.value), 0)
    record |= {"step": opened.step, "data": _DATA.value or "held out", "scores": []}
    for needle in wanted:
        sizes = {"examples": _EXAMPLES.value, "rows": _ROWS.value, "bins": depths}
        scores = evaluate_needles(opened, needle, **sizes, progress=console.advance)
        rows.append((f"{needle.kind} {needle.length:,}", str(scores)))
        console.say(f"{rows[-1][0]}: {scores}")
        record["scores"].append(scores.record())
    console.close()
    print(table(rows))
    if _OUTPUT.value:
        Path(_OUTPUT.value).parent.mkdir(parents=True, exist_ok=True)
        Path(_OUTPUT.value).write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    run(main)
