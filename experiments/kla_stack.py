"""KLA's stack task: sixty-four stacks at once; see configs/kla_stack.py.

    python -m experiments.kla_stack --run_dir=runs/kla_stack
    python -m experiments.kla_stack --config=configs/kla_stack.py:size=small --run_dir=runs/small

Run again, it goes on where it stopped.
"""

from experiments._main import run
from experiments._study import define, main

define("kla_stack")

if __name__ == "__main__":
    run(main)
