"""Continues a prompt with a trained model, printing text as it is drawn.

    python -m experiments.generate --run_dir=runs/quickstart --prompt="def main("
    python -m experiments.generate --run_dir=runs/125m --prompt_file=story.txt --length=2000 --top_p=0.9

The prompt is read in parallel; tokens are then drawn one by one from the recurrent state, whose size does not depend on
how much has been read (softmax layers cache the whole text). Temperature 0 takes the likeliest token each time.
"""

import sys
import time
from pathlib import Path

import numpy as np
from absl import flags

from experiments._main import run
from linattn_jax.eval.runs import open_run
from linattn_jax.models.generate import TextStream, generate

_RUN = flags.DEFINE_string("run_dir", None, "Run directory with a checkpoint.", required=True)
_PROMPT = flags.DEFINE_string("prompt", "", "Text to continue; empty begins a new document.")
_FILE = flags.DEFINE_string("prompt_file", None, "File whose text to continue, instead of --prompt.")
_LENGTH = flags.DEFINE_integer("length", 256, "Tokens to draw.", lower_bound=0)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.8, "0 is greedy, 1 the model's own distribution.", lower_bound=0)
_TOP_K = flags.DEFINE_integer("top_k", 0, "Draw among the k likeliest tokens; 0 among all.", lower_bound=0)
_TOP_P = flags.DEFINE_float("top_p", 1.0, "Draw among the fewest tokens of this total probability.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the draws.")
_STOP = flags.DEFINE_bool("stop_at_end", True, "Stop where the model ends the document.")


def main(_) -> None:
    """Reads the prompt, draws, prints."""
    opened = open_run(_RUN.value)
    prompt = _PROMPT.value if _FILE.value is None else Path(_FILE.value).read_text()
    tokens = np.concatenate([[opened.tokenizer.eot], opened.tokenizer.encode(prompt)])
    stream, drawn, start = TextStream(opened.tokenizer), 0, time.perf_counter()
    sys.stdout.write(prompt)
    draws = generate(
        opened.model,
        tokens,
        _LENGTH.value,
        seed=_SEED.value,
        temperature=_TEMPERATURE.value,
        top_k=_TOP_K.value,
        top_p=_TOP_P.value,
        stop=opened.tokenizer.eot if _STOP.value else None,
    )
    for block in draws:
        sys.stdout.write(stream.push(block[0]))
        sys.stdout.flush()
        drawn += block.shape[1]
    sys.stdout.write(stream.close() + "\n")
    seconds = time.perf_counter() - start
    print(f"[{len(tokens)} tokens read, {drawn} drawn in {seconds:.1f} s, compilation included]", file=sys.stderr)


if __name__ == "__main__":
    run(main)
