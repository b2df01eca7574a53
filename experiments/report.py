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
from linattn_jax.eval.report import newest_protocol, read_trials, summary, verdict
from linattn_jax.eval.report_figure import figure
from linattn_jax.eval.report_page import overview, page
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
    known = sorted(path.parent.name for path in records.glob("*/trials.jsonl"))
    chosen = _STUDIES.value or known
    if unknown := [study for study in chosen if study not in known]:
        raise UserError(f"no {records}/{unknown[0]}/trials.jsonl; studies with records: {', '.join(known) or 'none'}")
    if not chosen:
        raise UserError(f"there is no trials.jsonl in a folder of {records}")
    told = {}
    for study in chosen:
        config, found = config_of(study), read_trials(records / study / "trials.jsonl", study)
        results = summary(config, newest_protocol(found.trials)[0])
        told[study] = config, [verdict(claim, results) for claim in config.get("claims", ())]
        (output / study).mkdir(parents=True, exist_ok=True)
        (output / study / "README.md").write_text(page(study, config, found, results, told[study][1]))
        figure(config, results, output / study / f"{study}.png")
        print(f"{study}:", *(f"\n  {each.result}: {each.text}" for each in told[study][1]))
    if set(known) <= set(chosen):
        (output / "studies.md").write_text(overview(told))
    print(f"written to {output}" + ("" if set(known) <= set(chosen) else "; studies.md left as it is"))


if __name__ == "__main__":
    run(main)
