"""The tables of docs/reliability.md are those of the program's data."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dslaunch.run.policy import policies
from dslaunch.run.thresholds import Threshold, thresholds
from tests.real.chaos import ELASTIC_FAULTS, FAULTS, HOST_LOST, SLURM_FAULTS

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"


def _causes() -> str:
    rows = ["| cause | what it says | by default | after that |", "|---|---|---|---|"]
    for each in policies().values():
        limit = "" if each.limit is None else f", {each.limit} in a row"
        rows.append(f"| `{each.cause}` | {each.says} | {each.action}{limit} | {each.next} |")
    return "\n".join(rows)


def _limit(each: Threshold) -> str:
    if each.sigma is not None:
        return f"above the mean of the last {each.steps} by {each.sigma:g} standard deviations"
    if each.of_plan is not None:
        return f"median of {each.steps} above the upper end of the plan's error band"
    if each.deviation:
        return f"standard deviation of {each.steps} above {each.above:g}"
    sides = {"below": each.below, "above": each.above}
    limits = " or ".join(f"{side} {limit:g}" for side, limit in sides.items() if limit is not None)
    return f"median of {each.steps} {limits}" if each.median else limits


def _thresholds() -> str:
    rows = ["| figure | threshold | likely | source |", "|---|---|---|---|"]
    rows += [
        f"| `{each.figure}` | {_limit(each)} | {'; '.join(each.causes)} | {each.source} |" for each in thresholds()
    ]
    return "\n".join(rows)


@pytest.mark.parametrize(("name", "table"), [("causes", _causes()), ("thresholds", _thresholds())])
def test_a_table_is_the_programs_own(name: str, table: str) -> None:
    """DSLAUNCH_WRITE_DOCS=1 writes it."""
    text = PAGE.read_text(encoding="utf-8")
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    before, rest = text.split(begin)
    _, after = rest.split(end)
    expected = f"{before}{begin}{table}\n{end}{after}"
    if os.environ.get("DSLAUNCH_WRITE_DOCS"):
        PAGE.write_text(expected, encoding="utf-8")
        text = expected
    assert text == expected


def test_every_fault_is_in_the_table_that_the_chaos_wrote() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for fault in (*FAULTS, HOST_LOST, *ELASTIC_FAULTS, *SLURM_FAULTS):
        assert f"| {fault.name} |" in text
