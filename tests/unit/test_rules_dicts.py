"""Configurations that a script holds itself: read as a DeepSpeed JSON with the same content is, and no further."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from dslaunch.files.fileset import read_fileset
from dslaunch.rules import check
from tests.cases.load import Case, all_cases

CASES = [
    case for case in all_cases()
    if list(case.files) == ["ds_config.json"] and case.plan is None and not case.settings.huggingface
    and case.checkpoint is None and "ignore[" not in case.files["ds_config.json"]
    and isinstance(case.fileset().files[0].value, dict) and not case.fileset().files[0].problems
]  # fmt: skip
OPEN = object()


def written(value: Any) -> str:
    """A value as Python writes it, with a call where it is open."""
    if value is OPEN:
        return "made(arguments)"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {written(item)}" for key, item in value.items()) + "}"
    return repr(value)


def found(case: Case, value: Any) -> set[tuple[str, str]]:
    """Rule and severity of each finding on a script that holds this configuration."""
    text = f"import deepspeed\n\nconfig = {written(value)}\nmade = deepspeed.initialize(model=m, config=config)\n"
    findings = check(None, read_fileset({"train.py": text}), case.settings)
    assert {finding.where.split(":")[1] for finding in findings if "train.py" in finding.where} <= {"3"}
    return {(finding.rule, finding.severity) for finding in findings}


def in_json(case: Case) -> set[tuple[str, str]]:
    settings = replace(case.settings, huggingface=False)
    return {(finding.rule, finding.severity) for finding in check(None, case.fileset(), settings)}


def test_a_dictionary_is_judged_as_the_file_is() -> None:
    wrong = [case for case in CASES[::3] if found(case, case.fileset().files[0].value) != in_json(case)]
    assert wrong == []


@pytest.mark.slow
def test_every_dictionary_is_judged_as_the_file_is() -> None:
    wrong = [case for case in CASES if found(case, case.fileset().files[0].value) != in_json(case)]
    assert wrong == []


def opened(value: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The configuration with one value after the other made open."""
    for key, item in value.items():
        yield {**value, key: OPEN}
        if isinstance(item, dict):
            yield from ({**value, key: inner} for inner in opened(item))


def of_their_own(cases: list[Case]) -> tuple[int, list[Any]]:
    """Configurations with one value open: how many, and those with a finding that the whole one doesn't have."""
    tried, wrong = set(), []
    for case in cases:
        right = in_json(case) | {("check.computed", "info")}
        for value in opened(case.fileset().files[0].value):
            if (same := (written(value), case.settings)) in tried:
                continue
            tried.add(same)
            if more := found(case, value) - right:
                wrong.append((case.rule, case.name, written(value), more))
    print(f"{len(tried)} configurations with one value open, {len(wrong)} with a finding of their own")
    return len(tried), wrong


def test_what_is_open_leads_to_no_finding_of_its_own() -> None:
    tried, wrong = of_their_own(CASES[::20])
    assert wrong == []
    assert tried > 80


@pytest.mark.slow
def test_no_value_that_is_open_leads_to_a_finding_of_its_own() -> None:
    tried, wrong = of_their_own(CASES)
    assert wrong == []
    assert tried > 1500


BAD, GOOD = "{'train_batch_size': 8, 'unknown': 1}", "{'train_batch_size': 8}"
READ = "deepspeed.initialize(model=m, config=config)"


@pytest.mark.parametrize(
    ("lines", "found_at"),
    [
        ([f"if deep: config = {BAD}", f"else: config = {BAD}", READ], {2, 3}),
        ([f"config = {GOOD}", "if deep:", f"    config = {BAD}", READ], {4}),
        ([f"config = {BAD}", f"config = {GOOD}", READ], set()),
        ([f"config = {BAD}", "config = merged(config)", READ], set()),
        ([f"config = {GOOD}", READ, f"config = {BAD}"], set()),
        (["if deep:", f"    config = {BAD}", f"    config = {GOOD}", READ], set()),
        (["try:", f"    config = {BAD}", "except OSError:", f"    config = {GOOD}", READ], {3}),
        (["def one():", f"    config = {BAD}", f"    {READ}", f"def two(config={GOOD}):", f"    {READ}"], {3}),
        (["def one(config):", f"    {READ}", f"config = {BAD}"], set()),
        ([f"config = {GOOD}", "def one():", f"    {READ}", f"config = {BAD}", "one()"], {5}),
        (["def made():", "    if deep:", f"        return {BAD}", f"    return {GOOD}",
          "deepspeed.initialize(model=m, config=made())"], {4}),
        ([f"config: dict[str, Any] = {BAD}", READ], {2}),
        ([f"config = {BAD}", "config |= more", READ], set()),
        ([f"config = {BAD}", READ, READ], {2}),
    ],
)  # fmt: skip
def test_each_dictionary_that_may_reach_the_call_is_read(lines: list[str], found_at: set[int]) -> None:
    text = "\n".join(["import deepspeed", *lines]) + "\n"
    findings = check(None, read_fileset({"train.py": text}), CASES[0].settings)
    unknown = [int(finding.where.split(":")[1]) for finding in findings if finding.rule == "key.unknown"]
    assert sorted(unknown) == sorted(found_at), findings


def test_a_script_of_very_many_configurations_is_read_in_part() -> None:
    made = "deepspeed.initialize(model=m, config={'train_batch_size': 8, 'unknown': 1})\n"
    findings = check(None, read_fileset({"train.py": f"import deepspeed\n{made * 500}"}), CASES[0].settings)
    assert len([finding for finding in findings if finding.rule == "key.unknown"]) == 20
