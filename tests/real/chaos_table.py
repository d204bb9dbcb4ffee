"""The table of faults and launchers in docs/reliability.md, from what the tests found."""

from __future__ import annotations

from pathlib import Path

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
_found: dict[tuple[str, str], tuple[int, float]] = {}
"""By fault and launcher: runs that ended as they should, and the longest of them in seconds."""


def note(fault: Fault, launcher: str, seconds: float) -> None:
    """Remember a run that ended as the policy says."""
    runs, longest = _found.get((fault.name, launcher), (0, 0.0))
    _found[fault.name, launcher] = (runs + 1, max(longest, seconds))


def write_table() -> None:
    """Put the table into the page, between its marks; what was not run this time stays as it was."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    old, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n{_table(_cells(old))}{END}{after}", encoding="utf-8")


def _cells(text: str) -> dict[tuple[str, str], str]:
    """By fault and launcher, of a table that was written before."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.strip().splitlines()]
    named = rows[0][3:]
    return {
        (row[0], launcher): cell for row in rows[2:] for launcher, cell in zip(named, row[3:], strict=True)
    }


def _table(known: dict[tuple[str, str], str]) -> str:
    """One row a fault, one column a launcher."""
    rows = [f"| fault | cause | then | {' | '.join(LAUNCHERS)} |", f"|---|---|---|{'---|' * len(LAUNCHERS)}"]
    for fault in (*FAULTS, HOST_LOST, *ELASTIC_FAULTS, *SLURM_FAULTS):
        cause = f"`{fault.cause}`" if fault.cause in policies() else _UNJUDGED.get(fault.name, "(SLURM's own)")
        cells = [_cell(fault, launcher) or known.get((fault.name, launcher), "not run") for launcher in LAUNCHERS]
        rows.append(f"| {fault.name} | {cause} | {_WORDS[fault.outcome]} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _cell(fault: Fault, launcher: str) -> str:
    if launcher not in fault.launchers:
        return "cannot be"
    runs, longest = _found.get((fault.name, launcher), (0, 0.0))
    return f"{runs} of {runs} ({longest:.0f} s)" if runs else ""
