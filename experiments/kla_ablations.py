"""KLA's ablations on multi-query recall: step, norms, gates, sequence factor, values; see configs/kla_ablations.py.

    python -m experiments.kla_ablations --run_dir=runs/kla_ablations
    python -m experiments.kla_ablations --config=configs/kla_ablations.py:size=small --run_dir=runs/small

Run again, it goes on where it stopped.
"""

from experiments._main import run
from experiments._study import define, main

define("kla_ablations")

if __name__ == "__main__":
    run(main)
