"""Every rule on its cases, and what every rule must have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import dslaunch.rules
from dslaunch.errors import ConfigError
from dslaunch.files.fileset import read_fileset
from dslaunch.rules import check, page, rules
from dslaunch.rules.checking import fails
from dslaunch.rules.known import told
from tests.cases.examples import examples
from tests.cases.load import Case, all_cases

CASES = all_cases()
PAGES = Path(dslaunch.rules.__file__).parent / "pages"


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule}: {case.name}")
def test_case(case: Case) -> None:
    findings = check(case.plan, case.fileset(), case.settings)
    assert sorted((f.rule, f.where) for f in findings) == sorted(case.expect), findings


def test_cases_and_pages_are_those_of_the_rules() -> None:
    assert {case.rule for case in CASES} == set(rules())
    assert {path.stem for path in PAGES.iterdir()} == set(rules())


@pytest.mark.parametrize("rule_id", sorted(rules()))
def test_rule_has_a_failing_and_a_passing_case(rule_id: str) -> None:
    caught = [rule_id in {rule for rule, _ in case.expect} for case in CASES if case.rule == rule_id]
    assert True in caught, "no case that the rule catches"
    assert False in caught, "no case that the rule lets pass"


@pytest.mark.parametrize("rule_id", sorted(rules()))
def test_rule_says_for_which_versions_it_was_verified(rule_id: str) -> None:
    rule = rules()[rule_id]
    assert re.search(r"\d+\.\d+|#\d+|dslaunch's own", rule.evidence), rule.evidence
    assert f"Evidence: {rule.evidence}." in page(rule_id)
    holds = re.search(r"Holds for [\w-]+( since [\d.]+)?,?( until [\d.]+)?\.", page(rule_id))
    assert bool(holds) == bool(rule.since or rule.until)
    assert "DeepSpeed:" not in rule.evidence or rule.since or "Verified on DeepSpeed 0.19.8 only" in page(rule_id)


@pytest.mark.parametrize("rule_id", sorted(rules()))
def test_page_has_its_parts_and_its_examples_are_true(rule_id: str) -> None:
    text = page(rule_id)
    assert text.startswith(f"# {rule_id}\n")
    assert [example.bad for example in examples(rule_id)] == [True, False]
    assert re.search(r"## Sources\n\n- \S", text)
    for example in examples(rule_id):
        files = read_fileset(example.files)
        found = check(None, files, told(files, example.settings)) if example.files else ()
        named = {finding.rule for finding in found}
        assert not example.files or (rule_id in named) == example.bad, (example, named)
        assert example.bad or not fails(found, "wrong"), found


def test_most_examples_are_whole_files() -> None:
    whole = [rule_id for rule_id in rules() if all(example.files for example in examples(rule_id))]
    assert len(whole) >= 215, len(whole)


def test_unknown_rule_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean 'batch\.triangle'"):
        page("batch.triangel")
