"""What a caller gets: order, waivers, thresholds, text, JSON, and what it costs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dslaunch.errors import ConfigError
from dslaunch.files.fileset import read_fileset
from dslaunch.planfile import to_json
from dslaunch.rules import (
    Settings,
    check,
    check_paths,
    check_rendered,
    fails,
    format_json,
    format_text,
    waive,
)
from dslaunch.rules.settings import of_plan
from tests.cases.load import small_plan

BAD = {
    "b.json": '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": true}',
    "a/ds_config.json": '{"train_micro_batch_size_per_gpu": 1,\n'
    ' "zero_optimization": {"stage": 4, "sate": 1},\n "bf61": {}}',
}  # fmt: skip


def test_the_gravest_come_first_then_file_and_line() -> None:
    findings = check(None, read_fileset(BAD), Settings(world_size=8))
    assert [(f.severity, f.where) for f in findings] == [
        ("error", "a/ds_config.json:2:24"), ("error", "a/ds_config.json:2:36"), ("wrong", "a/ds_config.json:3:2"),
        ("deprecated", "b.json:1:39"),
    ]  # fmt: skip
    assert all(finding.fix and finding.message for finding in findings)


def test_a_waived_rule_no_longer_stands() -> None:
    findings = check(None, read_fileset(BAD), Settings(world_size=8))
    stand, waived = waive(findings, ["key.unknown"])
    assert {f.rule for f in stand} == {"key.range", "key.deprecated"}
    assert [f.rule for f in waived] == ["key.unknown", "key.unknown"]
    with pytest.raises(ConfigError, match=r"Did you mean 'key\.unknown'"):
        waive(findings, ["key.unknwon"])


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [("info", True), ("deprecated", True), ("slow", False), ("memory", False), ("wrong", False), ("error", False)],
)
def test_threshold(threshold: str, expected: bool) -> None:
    findings = check(None, read_fileset({"b.json": BAD["b.json"]}), Settings(world_size=8))
    assert fails(findings, threshold) is expected
    with pytest.raises(ConfigError, match="--fail-on 'worse'"):
        fails(findings, "worse")


def test_text_names_place_rule_and_fix() -> None:
    findings = check(None, read_fileset(BAD), Settings(world_size=8))
    lines = format_text(findings).splitlines()
    assert lines[0].startswith("a/ds_config.json:2:24: error: ")
    assert lines[0].endswith("[key.range]")
    assert lines[1] == "    fix: Write 0 | 1 | 2 | 3."
    assert lines[-1] == "findings: 2 error, 1 wrong, 1 deprecated"
    assert lines[2].startswith("    why: Verified on DeepSpeed 0.19.8 only. Source: deepspeedai/DeepSpeed:")
    assert format_text(()) == "no findings\n"


def test_json_carries_its_schema() -> None:
    data = json.loads(format_json(check(None, read_fileset(BAD), Settings(world_size=8))))
    assert data["schema"] == "dslaunch.findings/1"
    assert data["findings"][0]["where"] == "a/ds_config.json:2:24"


def test_rendered_files_are_checked_against_their_plan() -> None:
    plan = small_plan("deepspeed", 16, {"llm": {"dp": 16}})
    text = '{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}'
    (finding,) = check_rendered(plan, {"ds_config.json": text})
    assert (finding.rule, finding.where) == ("batch.triangle", "ds_config.json:1:2")
    assert of_plan(plan) == Settings("0.19.8", world_size=16, nodes=2, ranks_per_node=8, huggingface=False)


def test_paths_are_named_as_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("it's here").mkdir()
    Path("it's here/ds_config.json").write_text('{"fp16": 1}', encoding="utf-8")
    found = check_paths([Path("it's here/ds_config.json")], Settings())
    assert {finding.where for finding in found} == {"it's here/ds_config.json:1:1", "it's here/ds_config.json:1:2"}


def test_a_plan_among_the_files_says_how_many_ranks_there_are(tmp_path: Path) -> None:
    plan, config = tmp_path / "plan.json", tmp_path / "ds_config.json"
    plan.write_text(to_json(small_plan("deepspeed", 16, {"llm": {"dp": 16}})), encoding="utf-8")
    config.write_text('{"train_batch_size": 24}', encoding="utf-8")
    assert [f.rule for f in check_paths([config], Settings())] == ["check.world-size"]
    (finding,) = check_paths([config, plan], Settings())
    assert (finding.rule, finding.where) == ("batch.divisible", f"{config}:1:2")
    with pytest.raises(ConfigError, match=r"--world-size 8, but .*plan\.json is for 16 ranks"):
        check_paths([config, plan], Settings(world_size=8))
    (tmp_path / "other.json").write_text(plan.read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.raises(ConfigError, match="2 plans, and one is needed"):
        check_paths([plan, tmp_path / "other.json"], Settings())


def test_arguments_of_the_trainer_say_that_it_reads_the_file() -> None:
    plan = small_plan("deepspeed", 16, {"llm": {"dp": 16}})
    files = {"ds_config.json": '{"train_micro_batch_size_per_gpu": "auto"}'}
    assert [f.rule for f in check_rendered(plan, files)] == ["json.auto"]
    assert check_rendered(plan, {**files, "hf_args.json": '{"per_device_train_batch_size": 1}'}) == ()


@pytest.mark.parametrize("version", ["", "0.19.x", "new"])
def test_a_version_is_numbers_and_dots(version: str) -> None:
    with pytest.raises(ConfigError, match="DeepSpeed version"):
        Settings(version)


def test_a_world_has_a_rank() -> None:
    with pytest.raises(ConfigError, match="world_size is 0"):
        Settings(world_size=0)


def test_the_rules_import_little_and_nothing_heavy() -> None:
    code = (
        "import sys, dslaunch.rules;"
        "heavy = {'torch', 'deepspeed', 'hydra', 'omegaconf', 'pydantic', 'yaml', 'jinja2'};"
        "print(sorted(heavy & set(sys.modules)), 'dslaunch.rules.deepspeed.keys' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] False"


def test_the_whole_catalogue_takes_milliseconds() -> None:
    files, settings = read_fileset(BAD), Settings(world_size=8)
    check(None, files, settings)
    tries = []
    for _ in range(20):
        started = time.process_time()
        check(None, files, settings)
        tries.append(time.process_time() - started)
    assert min(tries) < 0.02


def test_folders_in_which_there_is_nothing_to_check_do_not_pass(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no file\. Name another"):
        check_paths([tmp_path], Settings())
    job = tmp_path / "first job"
    job.mkdir()
    with pytest.raises(ConfigError, match=r"a job of its own: name one, such as .*first job"):
        check_paths([tmp_path], Settings())
    (job / "hostfile").write_text("n1 slots=8\n")
    assert check_paths([tmp_path, job], Settings()) == ()
