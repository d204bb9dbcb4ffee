"""The traps of DeepSpeed and its launchers that were collected before the rules were written: each has its answer.

tests/cases/traps/traps.yaml holds one entry for each of them. Most are a case: small files of our own that fall
into the trap, and the finding that says so in its place. The rest name who answers where files can't tell: a rule
about plans and checkpoints, a check of the machines before a launch, or why nothing need be said.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

import pytest
import yaml

from dslaunch.rules import check, rules
from tests.cases.load import FOLDER, read_case

TRAPS: list[dict[str, Any]] = yaml.safe_load((FOLDER / "traps" / "traps.yaml").read_text(encoding="utf-8"))
ANSWERS = ("expect", "rule", "preflight", "machine", "harmless")


@pytest.mark.parametrize("raw", [raw for raw in TRAPS if "expect" in raw], ids=lambda raw: raw["name"])
def test_trap_is_found_in_its_place(raw: dict[str, Any]) -> None:
    case = read_case("trap", raw)
    found = {(finding.rule, finding.where) for finding in check(case.plan, case.fileset(), case.settings)}
    assert case.expect
    assert set(case.expect) <= found, found


def test_each_trap_has_one_answer() -> None:
    for raw in TRAPS:
        assert sum(answer in raw for answer in ANSWERS) == 1, raw["name"]


def test_every_trap_is_there_once() -> None:
    names = [raw["name"] for raw in TRAPS]
    assert len(names) == len(set(names)) == 343


def test_answers_that_are_not_of_files_exist() -> None:
    checks = yaml.safe_load((resources.files("dslaunch.preflight") / "checks.yaml").read_text(encoding="utf-8"))
    assert {raw["preflight"] for raw in TRAPS if "preflight" in raw} <= set(checks)
    assert {raw["rule"] for raw in TRAPS if "rule" in raw} <= set(rules())
