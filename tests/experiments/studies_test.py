"""The studies in small: the programs run, their records make reports, and the papers' qualitative results appear."""

import importlib
import json
from pathlib import Path

import pytest

from linattn_jax.eval.report import read_trials, summary, verdict
from linattn_jax.layers import LAYERS
from linattn_jax.train.study import parameter_count, plan, protocol, recipe, run_study, variant

ROOT = Path(__file__).parents[2]
STUDIES = sorted(
    path.stem for path in (ROOT / "experiments").glob("*.py") if "_study import define" in path.read_text()
)


def config_of(study, arg=None):
    return importlib.import_module(f"configs.{study}").get_config(arg)


def test_every_config_of_a_study_has_its_program():
    configs = {path.stem for path in (ROOT / "configs").glob("[!_]*.py") if "_studies import" in path.read_text()}
    assert configs == set(STUDIES)
    assert len(STUDIES) == 9


@pytest.mark.parametrize("study", STUDIES)
def test_what_a_config_says_is_measured_is_recorded(study):
    said = importlib.import_module(f"configs.{study}").__doc__
    recorded = (ROOT / "docs" / "results" / study / "trials.jsonl").exists()
    assert (f"docs/results/{study}." in said) == recorded
    assert ("Not measured yet." in " ".join(said.split())) == (not recorded)


@pytest.mark.parametrize("study", STUDIES)
@pytest.mark.parametrize("size", ["full", "small"])
def test_configs_plan_models_and_claims(study, size):
    config = config_of(study, f"size={size}")
    groups = plan(config)
    assert {group.mixer for group in groups} == set(config.mixers)
    columns = set()
    for group in groups:
        made = recipe(config, group.mixer, group.bucket)
        assert made.steps % made.eval_every == 0
        for _, _, setting in group.trials:
            columns |= {column.format(**dict(setting)) for column in made.evaluations}
    assert columns == set(config.columns)
    assert len(config.x) == len(config.columns)
    for label in config.mixers:
        assert variant(config, label)[0] in LAYERS
        assert parameter_count(recipe(config, label, 0)) > 10_000
    # Every term of every check is a mixer and a column that the study measures.
    result = summary(config, [])
    for claim in config.claims:
        assert verdict(claim, result).result == "not measured"
        for check in claim["checks"]:
            terms = [word for word in check.split() if "@" in word]
            assert terms
            assert {term.split("@")[0] for term in terms} <= set(config.mixers), check


@pytest.mark.parametrize("study", STUDIES)
def test_full_studies_compare_seeds_and_rates(study):
    config = config_of(study)
    assert len(config.seeds) >= 3
    assert len(config.learning_rates) >= 3
    assert protocol(config) != protocol(config_of(study, "size=small"))


@pytest.mark.slow  # each takes minutes on two cores
@pytest.mark.parametrize("study", STUDIES)
def test_small_studies_show_what_they_claim(study, tmp_path):
    config = config_of(study, "size=small")
    rows = run_study(config, tmp_path)
    assert {row["status"] for row in rows} == {"done"}
    trials = read_trials(tmp_path / "trials.jsonl", study).trials
    result = summary(config, trials)
    verdicts = [verdict(claim, result) for claim in config.claims]
    assert verdicts
    if study != "ccq_gain":  # a gain on so easy a task would be an accident
        assert [v.result for v in verdicts] == ["holds"] * len(verdicts), json.dumps([r["metrics"] for r in rows])
