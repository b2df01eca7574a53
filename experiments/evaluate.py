"""Measures a trained run on its held-out documents or on another source.

python -m experiments.evaluate --run_dir=runs/first
python -m experiments.evaluate --run_dir=runs/first --data=/path/*.txt --max_bytes=1000000 --json=evaluation.json

Prints the loss in nats per token, bits per byte of text, and perplexity per token. The recurrent state goes from
batch to batch where its size is fixed, so each document is read with all that came before in it.
"""

import json
import math
from pathlib import Path

from absl import flags

from experiments._main import run
from linattn_jax.eval.runs import evaluate_run, open_run
from linattn_jax.train.metrics import table

_RUN_DIR = flags.DEFINE_string("run_dir", None, "Directory of a run.", required=True)
_STEP = flags.DEFINE_integer("step", None, "Checkpoint to take; the newest when not given.", lower_bound=0)
_DATA = flags.DEFINE_string("data", "", "Source, as config.data.train; the run's held-out documents when not given.")
_MAX_BYTES = flags.DEFINE_integer("max_bytes", 0, "About how much text to read; 0 reads all.", lower_bound=0)
_ROWS = flags.DEFINE_integer("rows", 0, "Rows per batch; 0 takes the run's.", lower_bound=0)
_SEQ_LEN = flags.DEFINE_integer("seq_len", 0, "Tokens per row; 0 takes the run's.", lower_bound=0)
_JSON = flags.DEFINE_string("json", "", "File to write the numbers to.")


def main(_):
    """Evaluates and prints."""
    opened = open_run(_RUN_DIR.value, _STEP.value)
    result = evaluate_run(
        opened, data=_DATA.value, rows=_ROWS.value, seq_len=_SEQ_LEN.value, max_bytes=_MAX_BYTES.value
    )
    rows = [
        ("step", f"{opened.step:,}"),
        ("text", f"{result.bytes:,} bytes in {result.tokens:,} tokens"),
        ("loss", f"{result.nats_per_token:.4f} nats/token"),
        ("perplexity", f"{math.exp(result.nats_per_token):.3f} per token"),
        ("bits per byte", f"{result.bits_per_byte:.4f}"),
        ("state", "carried between rows" if result.carried else "context ends with each row"),
    ]
    print(table(rows))
    if _JSON.value:
        Path(_JSON.value).write_text(json.dumps({"step": opened.step, **result._asdict()}, indent=2) + "\n")


if __name__ == "__main__":
    run(main)
