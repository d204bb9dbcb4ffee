"""What `--json` prints is what its JSON Schema says, and `dslaunch schema NAME` prints that schema."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from dslaunch.planfile import JOINED_SCHEMA
from dslaunch.review.json_schema import names
from dslaunch.run.state import State, write_state
from dslaunch.run.sweeps import Sweep, SweepRun, run_folder, write_sweep
from tests.command import RECIPE, CommandLine, make_site, valid

DS_CONFIG = '{"train_batch_size": 64, "zero_optimization": {"stage": 1}, "bf16": {"enabled": true}}'
SIDES = ["recipe=llama3_8b cluster=8xH100", "recipe=llama3_8b cluster=8xH100 training.micro_batch=2"]
VERBS: dict[str, list[str]] = {
    JOINED_SCHEMA: ["plan", "recipe=vla_tiny", "cluster=local", "--explain"],
    "dslaunch.recipes/1": ["recipes"],
    "dslaunch.models/1": ["models"],
    "dslaunch.clusters/1": ["clusters"],
    "dslaunch.keys/1": ["schema", "model.components.llm"],
    "dslaunch.rendered/1": ["render", "recipe=llama3_8b", "-o", "out"],
    "dslaunch.dry-run/1": ["launch", "recipe=vla_tiny", "cluster=local", "--dry-run"],
    "dslaunch.findings/1": ["check", "recipe=vla70b"],
    "dslaunch.diff/1": ["diff", *SIDES],
    "dslaunch.runs/1": ["runs"],
    "dslaunch.rules/1": ["explain", "zero.pp-stage"],
    "dslaunch.symptoms/1": ["explain", "--symptom", "CUDA out of memory. Tried to allocate 2.00 GiB"],
    "dslaunch.imported/1": [
        "import", "deepspeed", "ds_config.json", "model=gpt2", "cluster=8xA100", "training.seq_len=1024",
    ],
}  # fmt: skip
ELSEWHERE = {
    "dslaunch.plan/1": "test_plan_and_prediction_are_what_their_schemas_say",
    "dslaunch.prediction/1": "the same",
    "dslaunch.compare/1": "test_runs.py",
    "dslaunch.report/1": "test_report.py",
    "dslaunch.review/1": "tests/real/test_diff_review.py",
    "dslaunch.status/1": "test_a_run_and_its_machine_are_what_their_schemas_say",
    "dslaunch.sweep-status/1": "the same",
    "dslaunch.logs/1": "the same",
    "dslaunch.stop/1": "the same",
    "dslaunch.frame/1": "the same",
    "dslaunch.preflight-report/1": "the same",
    "dslaunch.calibrated/1": "test_calibrate.py",
    "dslaunch.forms/1": "tests/real/test_export.py",
    "dslaunch.triage/1": "tests/real/test_triage.py",
}
"""Outputs with a test of their own, and where it is."""


def test_every_output_with_a_schema_is_tried() -> None:
    assert set(names()) == set(VERBS) | set(ELSEWHERE)


@pytest.mark.parametrize("name", VERBS)
def test_the_output_is_what_its_schema_says(
    name: str, dslaunch: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds_config.json").write_text(DS_CONFIG)
    ran = dslaunch(*VERBS[name], "--json")
    assert ran.status == 0, ran.err
    assert ran.json["schema"] == name
    valid(ran.json, name, dslaunch)


def test_plan_and_prediction_are_what_their_schemas_say(dslaunch: CommandLine, tmp_path: Path) -> None:
    assert dslaunch("render", "recipe=vla70b", "cluster=64xA100", "-o", str(tmp_path)).status == 0
    for file, name in (("plan.json", "dslaunch.plan/1"), ("prediction.json", "dslaunch.prediction/1")):
        valid(json.loads((tmp_path / file).read_text()), name, dslaunch)


def _sweep_of(folder: Path, run: Path) -> Path:
    """A sweep of a run that was launched, one that was not, and one that was refused."""
    sweep = folder / "runs" / "three"
    runs = (SweepRun(1, ("training.seed=1",)), SweepRun(2, ("training.seed=2",)), SweepRun(3, ("a=b",), "no"))
    write_sweep(sweep, Sweep(runs))
    run_folder(sweep, 1).symlink_to(run)
    return sweep


def test_a_run_and_its_machine_are_what_their_schemas_say(
    dslaunch: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run whose first rank failed, and this machine as preflight finds it."""
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "one"
    dslaunch("render", "recipe=vla_tiny", "cluster=local", "-o", str(run))
    write_state(run, State("one", "local", "failed", exit_status=3, work_dir=str(tmp_path)))
    for folder, file, text in (("ranks", "0.exit", "3\n"), ("logs", "rank-0.log", "it failed\n")):
        (run / folder).mkdir(exist_ok=True)
        (run / folder / file).write_text(text)
    for words, name in (
        (["status", str(run)], "dslaunch.status/1"),
        (["status", str(_sweep_of(tmp_path, run))], "dslaunch.sweep-status/1"),
        (["logs", str(run), "--rank", "0"], "dslaunch.logs/1"),
        (["stop", str(run)], "dslaunch.stop/1"),
        (["watch", str(run)], "dslaunch.frame/1"),
        (["resume", str(run), "--from-scratch", "--dry-run"], "dslaunch.dry-run/1"),
        (
            ["preflight", "recipe=vla_tiny", "cluster=local", "preflight.collective=false"],
            "dslaunch.preflight-report/1",
        ),
    ):
        ran = dslaunch(*words, "--json")
        assert ran.out, ran.err
        valid(ran.json, name, dslaunch)


def test_a_dry_run_holds_the_files_and_steps_that_it_prints(dslaunch: CommandLine) -> None:
    words = ["recipe=vla_tiny", "cluster=local", "--dry-run"]
    found, printed = dslaunch(*words, "--json").json, dslaunch(*words).out
    assert all(f"==> {name}\n{text}" in printed for name, text in found["files"].items())
    assert [line for line in found["steps"] if line.startswith("write ")]
    launched = dslaunch("recipe=vla_tiny", "cluster=local", "--json")
    assert (launched.status, "belongs to --dry-run" in launched.err) == (2, True)
    resumed = dslaunch("resume", "one", "--json")
    assert (resumed.status, "belongs to --dry-run" in resumed.err) == (2, True)


def test_a_key_that_is_not_in_the_schema_is_not_valid(dslaunch: CommandLine) -> None:
    value = dslaunch("recipes", "--json").json
    value["recipes"][0]["surprise"] = 1
    with pytest.raises(jsonschema.ValidationError, match="surprise"):
        valid(value, "dslaunch.recipes/1", dslaunch)


def test_a_name_that_no_output_has_is_answered_with_the_nearest(dslaunch: CommandLine) -> None:
    ran = dslaunch("schema", "dslaunch.plam/1")
    assert (ran.status, "dslaunch.plan/1" in ran.err) == (2, True)


def test_a_models_figures_are_numbers(dslaunch: CommandLine) -> None:
    rows = {row["name"]: row for row in dslaunch("models", "--json").json["models"]}
    assert rows["llama2_7b"]["parameters"] == 6_738_415_616


def test_a_sites_own_are_listed(dslaunch: CommandLine, tmp_path: Path) -> None:
    site = make_site(tmp_path / "site", RECIPE, broken="gpu: {}\n", twin="defaults: [H100]\n")
    clusters = {r["name"]: r for r in dslaunch("clusters", "--json", "--config-dir", str(site)).json["clusters"]}
    assert "not valid" in clusters["broken"]["problem"]
    assert clusters["twin"]["same_as"] == "H100"


def test_units_come_from_the_ends_of_keys(dslaunch: CommandLine) -> None:
    units = {row["key"]: row["unit"] for row in dslaunch("schema", "cluster.gpu", "--json").json["keys"]}
    assert units["cluster.gpu.memory_gib"] == "GiB (2**30 bytes)"
    assert units["cluster.gpu.name"] == ""
