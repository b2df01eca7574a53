"""KLA's palindrome task: a text said backwards; see configs/kla_palindrome.py.

    python -m experiments.kla_palindrome --run_dir=runs/kla_palindrome
    python -m experiments.kla_palindrome --config=configs/kla_palindrome.py:size=small --run_dir=runs/small

Run again, it goes on where it stopped.
"""

from experiments._main import run
from experiments._study import define, main

define("kla_palindrome")

if __name__ == "__main__":
    run(main)
