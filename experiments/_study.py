"""What the programs of studies share: flags, and running a study to its end or to the end of the time given."""

from __future__ import annotations

from pathlib import Path

from absl import flags

from experiments._main import define_config
from linattn_jax.train.study import OutOfTime, run_study, variant
from linattn_jax.types import UserError

flags.disclaim_key_flags()  # they are those of the program that calls define, whose --help shows them

_HOLDERS: dict[str, flags.FlagHolder] = {}


def define(study: str) -> None:
    """Defines the flags of a study's program, whose config is configs/<study>.py."""
    _HOLDERS["config"] = define_config(f"configs/{study}.py")
    _HOLDERS["run_dir"] = flags.DEFINE_string("run_dir", f"runs/{study}", "Where records go; run again to go on.")
    _HOLDERS["mixers"] = flags.DEFINE_list("mixers", [], "Only these mixers of the study; default all.")
    _HOLDERS["minutes"] = flags.DEFINE_float("time_limit_minutes", 0.0, "Stop in good order after this; 0 for never.")


def main(_) -> None:
    """Runs what is missing of the study; several processes with one --run_dir share the mixers between them."""
    config, run_dir = _HOLDERS["config"].value, _HOLDERS["run_dir"].value
    if mixers := _HOLDERS["mixers"].value:
        for mixer in mixers:
            variant(config, mixer)
        config.mixers = tuple(mixers)
    try:
        rows = run_study(config, run_dir, time_limit_minutes=_HOLDERS["minutes"].value)
    except OutOfTime as end:
        print(end)
        return
    failed = sorted({row["mixer"] for row in rows if row["status"] == "failed"})
    print(f"{len(rows)} trials in {run_dir}/trials.jsonl" + (f"; failed: {', '.join(failed)}" if failed else ""))
    if Path(run_dir).name == config.study:
        where = Path(run_dir).parent
        print(f"a report: python -m experiments.report --records={where} --studies={config.study}")
    if failed:
        raise UserError(f"trials of {', '.join(failed)} failed; run the same command again to try them anew")
