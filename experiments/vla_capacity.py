"""VLA's capacity study: accuracy of recall against the number of pairs, all mixers; see configs/vla_capacity.py.

    python -m experiments.vla_capacity --run_dir=runs/vla_capacity
    python -m experiments.vla_capacity --config=configs/vla_capacity.py:size=small --run_dir=runs/small

Run again, it goes on where it stopped.
"""

from experiments._main import run
from experiments._study import define, main

define("vla_capacity")

if __name__ == "__main__":
    run(main)
