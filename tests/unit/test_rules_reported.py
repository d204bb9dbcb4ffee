"""Problems that users reported to DeepSpeed and its kin: each is caught, by its rule, in its place.

tests/cases/reported/problems.yaml holds the substance of each report in a small file of our own; `expect` names
the findings that say what was wrong, and others may stand beside them.
"""

from __future__ import annotations

import pytest

from dslaunch.files.fileset import read_fileset
from dslaunch.rules import check
from tests.cases.load import FOLDER, Case, read_cases

PROBLEMS = read_cases(FOLDER / "reported" / "problems.yaml")


@pytest.mark.parametrize("case", PROBLEMS, ids=lambda case: case.name)
def test_problem_is_caught_in_its_place(case: Case) -> None:
    found = [
        (finding.rule, finding.where) for finding in check(None, read_fileset(case.files), case.settings)
    ]
    assert set(case.expect) <= set(found), found


def test_there_are_as_many_as_were_collected() -> None:
    assert len(PROBLEMS) == 23
