"""Makes the pages of recorded studies: a table, a figure and a verdict on every claim, from the records alone.

    python -m experiments.report --records=docs/results --output=docs/results --studies=vla_capacity

Every folder of the records that has a trials.jsonl is a study, and configs/<study>.py says how to show it. Writes
<study>/README.md and <study>/<study>.png under the output and, when no study is left out, studies.md, the overview.
Cost: about a second a study.
"""

import runpy
from pathlib import Path

from absl import flags

from experiments._main import run
from linattn_jax.eval.report_page import write_reports
from linattn_jax.types import UserError

_RECORDS = flags.DEFINE_string("records", "docs/results", "Folder of folders with trials.jsonl.")
_OUTPUT = flags.DEFINE_string("output", None, "Folder to write to; default that of the records.")
_STUDIES = flags.DEFINE_list("studies", None, "Studies to report; default all that have records.")


def config_of(study: str):
    """The study's config, of the working directory or else of the package."""
    for root in (Path(), Path(__file__).resolve().parent.parent):
        if (root / "configs" / f"{study}.py").is_file():
            return runpy.run_path(str(root / "configs" / f"{study}.py"))["get_config"]()
    raise UserError(f"the study {study} has records but no configs/{study}.py")


def main(_) -> None:
    """Reads the records, writes the pages, prints the verdicts."""
    records, output = Path(_RECORDS.value), Path(_OUTPUT.value or _RECORDS.value)
    for sentence in write_reports(records, output, _STUDIES.value, config_of):
        print(sentence)


if __name__ == "__main__":
    run(main)
