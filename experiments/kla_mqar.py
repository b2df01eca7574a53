"""KLA's multi-query recall at one to eight times the training length, all mixers; see configs/kla_mqar.py.

    python -m experiments.kla_mqar --run_dir=runs/kla_mqar
    python -m experiments.kla_mqar --config=configs/kla_mqar.py:size=small --run_dir=runs/small

Run again, it goes on where it stopped.
"""

from experiments._main import run
from experiments._study import define, main

define("kla_mqar")

if __name__ == "__main__":
    run(main)
