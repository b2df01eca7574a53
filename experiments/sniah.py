"""KLA's single needle at one to eight times the training length, all mixers; see configs/sniah.py.

    python -m experiments.sniah --run_dir=runs/sniah
    python -m experiments.sniah --config=configs/sniah.py:size=small --run_dir=runs/small

Run again, it goes on where it stopped.
"""

from experiments._main import run
from experiments._study import define, main

define("sniah")

if __name__ == "__main__":
    run(main)
