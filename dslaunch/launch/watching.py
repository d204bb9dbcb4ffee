"""What a supervisor looks at while an attempt runs: thresholds, the watchdog, and what is told outside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dslaunch.planfile import Plan
from dslaunch.progress import SAVE
from dslaunch.run.attempts import logs_of
from dslaunch.run.causes import Ending, Evidence
from dslaunch.run.disk import give_back
from dslaunch.run.notify import Notifier
from dslaunch.run.records import read_ranks
from dslaunch.run.stacks import behind, positions
from dslaunch.run.state import append_event
from dslaunch.run.thresholds import Breach, Vitals
from dslaunch.run.watchdog import Standstill, Watchdog

_QUOTED_RANKS = 8
"""Ranks whose place a message tells; the event and the log have all."""


class Watch:
    """Of one attempt; `look` is asked several times a second."""

    def __init__(self, run_dir: Path, plan: Plan, number: int, outside: Notifier) -> None:
        self.given_up: Ending | None = None
        """Why the attempt is to be ended."""
        self._run_dir, self._wanted, self._number, self._outside = run_dir, plan.supervision, number, outside
        self._watchdog, self._vitals = Watchdog(run_dir / "ranks", plan.supervision), Vitals(run_dir)

    def look(self) -> bool:
        """Whether the attempt is to be ended."""
        for breach in self._vitals.look():
            self._breached(breach)
        while self._vitals.unseen:
            why = self._vitals.unseen.pop(0)
            self._note("not_watched", why=why)
            self._outside.echo(f"not watched: {why}")
        self._outside.write()
        standstill = self._watchdog.look()
        if standstill:
            give_back(self._run_dir)
            self.given_up = _hang(self._run_dir, self._number, standstill)
            self._outside.tell("hang", self.given_up.why, attempt=self._number)
        return self.given_up is not None

    def _breached(self, breach: Breach) -> None:
        """Tell it, and do what notify.breach says."""
        name, said = breach.threshold.name, breach.describe()
        self._note("breach", threshold=name, **breach.figures())
        self._outside.echo(said)
        self._outside.tell("breach", said, threshold=name, **breach.figures())
        if name in self._wanted.saving_breaches:
            self._ask_for_a_checkpoint(name)
        if name in self._wanted.stopping_breaches:
            self.given_up = Ending("breach", (Evidence("notify.breach", said),))

    def _ask_for_a_checkpoint(self, threshold: str) -> None:
        try:
            (self._run_dir / SAVE).touch()
        except OSError as error:
            self._outside.echo(f"{self._run_dir / SAVE}: {error.strerror}; no checkpoint is asked for")
        else:
            self._note("save_asked", threshold=threshold)

    def _note(self, kind: str, **details: Any) -> None:
        try:
            append_event(self._run_dir, kind, attempt=self._number, **details)
        except OSError as error:  # a full disk, at which the job itself may go on
            where = self._run_dir / "events.jsonl"
            self._outside.echo(f"{where}: {error.strerror}; the event {kind} is not in it")


def _hang(run_dir: Path, number: int, standstill: Standstill) -> Ending:
    """Where every rank stands, before the attempt is ended for it."""
    ranks = read_ranks(run_dir / "ranks")
    found = positions(ranks, run_dir / "ranks")
    late = behind(found)
    append_event(
        run_dir, "hang", attempt=number, seconds=round(standstill.seconds), key=standstill.key,
        behind=late.rank if late else None, ranks=[str(each) for each in found],
    )  # fmt: skip
    text = "\n\n".join(f"{each}\n{each.stack}" for each in found)
    (logs_of(run_dir, number) / "stacks.txt").write_text(text + "\n", encoding="utf-8")
    told = sorted(found, key=lambda each: each is not late)[:_QUOTED_RANKS]
    said = f"no step for {standstill.seconds:.0f} s, the limit is {standstill.limit_s:.0f} s"
    stand = [Evidence("behind" if each is late else "waits", str(each)) for each in told]
    rank, host = (late.rank, late.host) if late else (None, "")
    return Ending("hang", (Evidence(standstill.key, said), *stand), rank, host)
