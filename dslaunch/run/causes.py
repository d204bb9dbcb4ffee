"""Why an attempt ended, told from evidence: who stopped it, the kernel, the first rank's exit, the logs' text.

The evidence is quoted. What each cause is known by stands in causes.yaml.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dslaunch.run.policy import Policy, policies
from dslaunch.run.records import RankRecord, first_failed

_TAIL_BYTES = 4 * 2**20
"""Of each log; what ended an attempt stands at its end."""
_LINE = 400
_JUDGED_RANKS = 16
"""Ranks whose logs are read, of those that failed by themselves, the first ones."""
_SIGNAL = 128
"""A shell reports signal N as 128 + N."""
_SSH_FAILED = 255
_SAID_LAST = ("program", "configuration", "wrong_program")
"""Causes that a rank's exit status names, and the last line of its log explains."""
_STOPPED_BY = {"SIGINT": " (Ctrl-C)", "SIGHUP": " (its terminal is gone)"}
_TERMINATED, _KILLED = 128 + signal.SIGTERM, 128 + signal.SIGKILL
_KERNEL_CAUSES = {
    "host_memory": re.compile(r"oom-kill|out of memory: Killed process", re.IGNORECASE),
    "gpu_fault": re.compile("NVRM: Xid"),
}


@dataclass(frozen=True)
class Evidence:
    """One observation."""

    where: str
    """A log with its line, the kernel of a host, a rank."""
    line: str
    """As it was found."""

    def __str__(self) -> str:
        return f"{self.where}: {self.line}"


@dataclass(frozen=True)
class Ending:
    """Why an attempt did not succeed."""

    cause: str
    evidence: tuple[Evidence, ...]
    rank: int | None = None
    """Where it began, as far as that is known."""
    host: str = ""
    """That rank's host."""

    @property
    def why(self) -> str:
        """One line for the user."""
        return "; ".join([policies()[self.cause].says, *map(str, self.evidence)])


@dataclass(frozen=True)
class Facts:
    """What is known of an attempt that ended."""

    launcher_status: int
    """Exit status of the launcher; 128 + N where signal N ended it."""
    stopped_by: str
    """The signal by which a user stopped it; empty: nobody did."""
    kernel: tuple[Evidence, ...]
    """What the kernel of this host said meanwhile: out of memory, Xid."""
    ranks: Sequence[RankRecord]
    logs: Path
    """The folder of the attempt's logs."""
    missing: str = ""
    """What the records lack where no rank failed, such as ranks that were never started."""
    disks: tuple[Evidence, ...] = ()
    """Disks of the run that are full: what a rank wrote last need not have come to its log."""


def judge(facts: Facts) -> Ending:
    """The cause of an attempt's end; the first kind of evidence that there is decides. (Hangs: the watchdog.)"""
    if facts.stopped_by:
        by = _STOPPED_BY.get(facts.stopped_by, "")
        return Ending("user", (Evidence("the supervisor", f"got {facts.stopped_by}{by}"),))
    first, cause, line = _where_it_began(facts)
    exits = _exit_evidence(first, facts)
    rank, host = (first.rank, first.host) if first else (None, "")
    for by_kernel, said in _KERNEL_CAUSES.items():
        if found := [each for each in facts.kernel if said.search(each.line)]:
            return Ending(by_kernel, (*found[:1], *exits), rank, host)
    if facts.disks and cause != "disk_full":
        return Ending("disk_full", (*facts.disks[:1], *exits), rank, host)
    return Ending(cause, (*([line] if line else []), *exits), rank, host)


def _where_it_began(facts: Facts) -> tuple[RankRecord | None, str, Evidence | None]:
    """The rank, its cause, and the line of a log that says so.

    Of the ranks that failed by themselves it is the first that did not merely lose its peers.
    """
    failed = first_failed(facts.ranks)
    own = [each for each in failed if each.status != _TERMINATED][:_JUDGED_RANKS]
    judged = [(each, *_by_its_log(each, facts.logs)) for each in own]
    if judged:
        return next((each for each in judged if each[1] != "communication"), judged[0])
    silent = [each for each in facts.ranks if each.status is None]
    first = next(iter([*silent, *failed]), None)
    status = facts.launcher_status
    if first and (status <= _SIGNAL or status == _TERMINATED):
        status = _KILLED if first.status is None else first.status
    cause, line = _from_text(status, log_lines(facts.logs)) or (_from_status(status), None)
    # The ranks of a lost host are ended like those of the others; its name stands in the line.
    return None if cause == "host_lost" else first, cause, line


def _by_its_log(rank: RankRecord, logs: Path) -> tuple[str, Evidence | None]:
    """What a rank's own log says of its end, or else its exit status: what others print of it does not count.

    Of a killed rank only others can tell.
    """
    assert rank.status is not None
    path = logs / f"rank-{rank.rank}.log"
    lines = list(_tail(path, logs)) if path.exists() and rank.status != _KILLED else log_lines(logs)
    if found := _from_text(rank.status, lines):
        return found
    # ssh's own failure has this status too, but a rank that gives it is a program that says `exit(-1)`.
    cause = "program" if rank.status == _SSH_FAILED else _from_status(rank.status)
    return cause, lines[-1] if lines and cause in _SAID_LAST else None


def _exit_evidence(first: RankRecord | None, facts: Facts) -> tuple[Evidence, ...]:
    launcher_status = facts.launcher_status
    if first is None and launcher_status == 0:
        return (Evidence("ranks", facts.missing),)
    if first is None:
        return (Evidence("the launcher", f"exits {launcher_status}{_signal_name(launcher_status)}"),)
    where = first.host or "ranks"
    if first.status is None:
        line = f"rank {first.rank} was killed before it could record its exit status{_while(first)}"
        return (Evidence(where, line),)
    if first.status == _TERMINATED and launcher_status > _SIGNAL:
        return (Evidence("the launcher", f"exits {launcher_status}{_signal_name(launcher_status)}"),)
    return (Evidence(where, f"rank {first.rank} exits {first.status}{_signal_name(first.status)}{_while(first)}"),)


def _while(rank: RankRecord) -> str:
    return f" while {rank.phase}" if rank.phase else ""


def _signal_name(status: int) -> str:
    known = status - _SIGNAL in set(signal.Signals)
    return f" ({signal.Signals(status - _SIGNAL).name})" if known else ""


def _from_status(status: int) -> str:
    return next((each.cause for each in policies().values() if status in each.exits), "program")


def _from_text(status: int, lines: Sequence[Evidence]) -> tuple[str, Evidence] | None:
    """The first cause in causes.yaml whose text stands in the logs and does not belie the status."""
    named = policies()[_from_status(status)]
    for policy in policies().values():
        if policy.text and _may_explain(policy, named, status):
            pattern = re.compile("|".join(f"(?:{text})" for text in policy.text))
            for line in lines:
                if pattern.search(line.line):
                    return policy.cause, line
    return None


def _may_explain(policy: Policy, named: Policy, status: int) -> bool:
    """A killed process printed nothing: what others print of it is no cause, unless it says who killed it."""
    if status == _KILLED:
        return policy.cause in ("host_memory", "preempted", "host_lost")
    if named.cause in ("configuration", "preempted"):
        return policy.cause in (named.cause, "host_lost", "wrong_program", "port_taken", "disk_full")
    return True


def log_lines(folder: Path) -> list[Evidence]:
    """The lines at the end of each log of an attempt, with where they stand; other attempts' logs are below."""
    return [line for path in sorted(_logs(folder)) for line in _tail(path, folder)]


def _logs(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        inner = path.relative_to(folder).parts
        if path.is_file() and path.suffix in (".log", ".out", ".err") and not inner[0].startswith("attempt-"):
            yield path


def _tail(path: Path, folder: Path) -> Iterator[Evidence]:
    with path.open("rb") as stream:
        skipped = max(0, path.stat().st_size - _TAIL_BYTES)
        stream.seek(skipped)
        text = stream.read().decode(errors="replace")
    name = str(path.relative_to(folder))
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield Evidence(name if skipped else f"{name}:{number}", line.strip()[:_LINE])
