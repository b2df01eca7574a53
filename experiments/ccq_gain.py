"""Each backbone with and without a curvature-conditioned query; see configs/ccq_gain.py.

    python -m experiments.ccq_gain --run_dir=runs/ccq_gain
    python -m experiments.ccq_gain --config=configs/ccq_gain.py:size=small --run_dir=runs/small

Run again, it goes on where it stopped.
"""

from experiments._main import run
from experiments._study import define, main

define("ccq_gain")

if __name__ == "__main__":
    run(main)
