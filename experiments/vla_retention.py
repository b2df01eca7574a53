"""VLA's retention study: eight pairs and ever longer texts, all mixers; see configs/vla_retention.py.

    python -m experiments.vla_retention --run_dir=runs/vla_retention
    python -m experiments.vla_retention --config=configs/vla_retention.py:size=small --run_dir=runs/small

Run again, it goes on where it stopped.
"""

from experiments._main import run
from experiments._study import define, main

define("vla_retention")

if __name__ == "__main__":
    run(main)
