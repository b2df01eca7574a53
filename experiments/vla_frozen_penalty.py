"""VLA with and without its penalty matrix, the ablation that the paper lacks; see configs/vla_frozen_penalty.py.

    python -m experiments.vla_frozen_penalty --run_dir=runs/vla_frozen_penalty
    python -m experiments.vla_frozen_penalty --config=configs/vla_frozen_penalty.py:size=small --run_dir=runs/small

Run again, it goes on where it stopped.
"""

from experiments._main import run
from experiments._study import define, main

define("vla_frozen_penalty")

if __name__ == "__main__":
    run(main)
