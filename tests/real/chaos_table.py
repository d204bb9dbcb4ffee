"""The table of faults and launchers in docs/reliability.md, from what the tests found.

`DSLAUNCH_CHAOS_TABLE=FILE pytest tests/real -k "chaos or elastic"` adds a line to FILE for each run, and writes
the table. Runs that FILE says went well are skipped, so what was interrupted goes on.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from dslaunch.run.policy import policies
from tests.real.chaos import ELASTIC_FAULTS, FAULTS, HOST_LOST, SLURM_FAULTS, Fault

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- chaos: begin -->", "<!-- chaos: end -->"
LAUNCHERS = ("local", "torchrun", "ssh", "slurm")
_WORDS = {
    "restarted": "goes on by itself",
    "stopped": "stops; `dslaunch resume` goes on",
    "ended": "stops",
    "unharmed": "goes on unharmed",
    "shrunk": "is planned anew for fewer hosts, and goes on",
    "grown": "is planned anew for more hosts, and goes on",
}
_UNJUDGED = {"supervisor killed": "(its guard ends the job)", "slow rank": "(none)"}


@dataclass(frozen=True)
class Result:
    """How one run with one fault ended."""

    fault: str
    launcher: str
    seed: int
    passed: bool
    """As the policy says."""
    seconds: float
    """From the command to its end."""


class Trial:
    """One run, whose time is taken; whatever does not come to `passes` has failed."""

    def __init__(self) -> None:
        self.began, self.seconds, self.passed = 0.0, 0.0, False

    def starts(self) -> None:
        """The command is given."""
        self.began = time.monotonic()

    def ends(self) -> None:
        """The command has ended."""
        self.seconds = time.monotonic() - self.began

    def passes(self) -> None:
        """All is as the policy says."""
        self.passed = True


@pytest.fixture
def trial(fault: Fault, launcher: str, seed: int) -> Iterator[Trial]:
    """Of the test's fault, launcher and seed; a test names it before what it starts."""
    file = os.environ.get("DSLAUNCH_CHAOS_TABLE", "")
    if any(each.passed for each in _of(_results(file), fault.name, launcher) if each.seed == seed):
        pytest.skip(f"went well before, as {file} says")
    made = Trial()
    yield made
    if file and made.began:
        _note(Path(file), Result(fault.name, launcher, seed, made.passed, round(made.seconds, 1)))


def _note(file: Path, result: Result) -> None:
    """Add the result to the file, and bring the page's table up to date."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)  # tests run in several processes
        stream.write(json.dumps(asdict(result)) + "\n")
        stream.flush()
        write_table(_results(str(file)))


def _results(file: str) -> list[Result]:
    """Of every run in the file, its newest."""
    lines = Path(file).read_text(encoding="utf-8").splitlines() if file and Path(file).exists() else []
    found = [Result(**json.loads(line)) for line in lines]
    return list({(each.fault, each.launcher, each.seed): each for each in found}.values())


def _of(results: list[Result], fault: str, launcher: str) -> list[Result]:
    return [each for each in results if (each.fault, each.launcher) == (fault, launcher)]


def write_table(results: list[Result]) -> None:
    """Put the table into the page, between its marks; a cell of which nothing is in `results` stays as it was."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    old, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n{_table(_cells(old), results)}{END}{after}", encoding="utf-8")


def _cells(text: str) -> dict[tuple[str, str], str]:
    """By fault and launcher, of a table that was written before; what was run."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.strip().splitlines()]
    named = rows[0][3:]
    cells = {
        (row[0], launcher): cell for row in rows[2:] for launcher, cell in zip(named, row[3:], strict=True)
    }
    return {place: cell for place, cell in cells.items() if " of " in cell}


def _table(known: dict[tuple[str, str], str], results: list[Result]) -> str:
    """One row a fault, one column a launcher."""
    rows = [f"| fault | cause | then | {' | '.join(LAUNCHERS)} |", f"|---|---|---|{'---|' * len(LAUNCHERS)}"]
    for fault in (*FAULTS, HOST_LOST, *ELASTIC_FAULTS, *SLURM_FAULTS):
        cause = f"`{fault.cause}`" if fault.cause in policies() else _UNJUDGED.get(fault.name, "(SLURM's own)")
        cells = [
            _cell(fault, launcher, results) or known.get((fault.name, launcher), "not run")
            for launcher in LAUNCHERS
        ]
        rows.append(f"| {fault.name} | {cause} | {_WORDS[fault.outcome]} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _cell(fault: Fault, launcher: str, results: list[Result]) -> str:
    """How many ended as they should, and the longest of them; empty where none was run."""
    if launcher not in fault.launchers:
        return "cannot be"
    runs = _of(results, fault.name, launcher)
    longest = max((each.seconds for each in runs if each.passed), default=0.0)
    return f"{sum(each.passed for each in runs)} of {len(runs)} ({longest:.0f} s)" if runs else ""
