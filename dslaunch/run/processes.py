"""The processes of a run: found by ancestry, told apart by start time, ended without touching any other.

Facts about /proc are from proc(5): field 22 of /proc/PID/stat is the start time in clock ticks since boot.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
_POLL_S = 0.05
_KILL_LIMIT_S = 30.0


@dataclass(frozen=True)
class Process:
    """One process. A process id is used again after its process ended; with its start time it is unique."""

    pid: int
    pgid: int
    """Its process group."""
    start_time: int
    """Clock ticks since boot."""


@dataclass(frozen=True)
class _Stat:
    process: Process
    parent: int
    zombie: bool


def identify(pid: int) -> Process | None:
    """The process that has this id now."""
    stat = _stat(pid)
    return stat.process if stat else None


def is_alive(process: Process) -> bool:
    """Whether this very process still runs; a zombie does not."""
    stat = _stat(process.pid)
    return stat is not None and not stat.zombie and stat.process.start_time == process.start_time


def children_of(pid: int) -> set[Process]:
    """The children that a process has now, zombies included."""
    return {stat.process for stat in _all() if stat.parent == pid}


class Tree:
    """Everything that descends from this process, without the children it had at the start.

    A process whose parent ends is handed to the nearest subreaper: this process, while `adopting`.
    """

    def __init__(self) -> None:
        self._before = children_of(os.getpid())

    def living(self, *keep: int) -> set[Process]:
        """Running descendants. Ended ones that were handed to this process are reaped, except `keep`."""
        # A look is no snapshot: who starts a child and ends while the others are read is missed with that child.
        return self._look(keep) or self._look(keep)

    def _look(self, keep: tuple[int, ...]) -> set[Process]:
        by_parent: dict[int, list[_Stat]] = {}
        for stat in _all():
            by_parent.setdefault(stat.parent, []).append(stat)
        found: set[Process] = set()
        waiting = [stat for stat in by_parent.get(os.getpid(), []) if stat.process not in self._before]
        for stat in waiting:
            if stat.zombie and stat.process.pid not in keep:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(stat.process.pid, os.WNOHANG)
        while waiting:
            stat = waiting.pop()
            waiting += by_parent.get(stat.process.pid, [])
            if not stat.zombie:
                found.add(stat.process)
        return found


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """Be the parent of every orphan among the descendants (Linux: prctl PR_SET_CHILD_SUBREAPER)."""
    libc = ctypes.CDLL(None, use_errno=True)
    earlier = ctypes.c_int()
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(earlier))
    libc.prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(earlier.value))


def end(living: Callable[[], set[Process]], grace_s: float, hurry: Callable[[], bool]) -> set[Process]:
    """SIGTERM to each living process, SIGKILL after `grace_s` or as soon as `hurry`; returns the survivors.

    A process that SIGKILL does not end within 30 s hangs in the kernel.
    """
    asked: set[Process] = set()
    start = time.monotonic()
    kill_at: float | None = None
    while left := living():
        now = time.monotonic()
        if kill_at is None and (now - start >= grace_s or hurry()):
            kill_at = now
        if kill_at is not None and now - kill_at > _KILL_LIMIT_S:
            break
        for process in left if kill_at is not None else left - asked:
            send(process, signal.SIGTERM if kill_at is None else signal.SIGKILL)
        asked |= left
        time.sleep(_POLL_S)
    return left


def send(process: Process, sign: signal.Signals) -> None:
    """Signal this very process: the file descriptor holds it while its start time is compared."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(process.pid)
        try:
            if is_alive(process):
                signal.pidfd_send_signal(descriptor, sign)
        finally:
            os.close(descriptor)


def _all() -> list[_Stat]:
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [stat for stat in map(_stat, pids) if stat is not None]


def _stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command's name stands in brackets and may hold blanks and brackets itself.
    fields = text[text.rindex(b")") + 2 :].split()
    state, parent, pgid, start = fields[0], int(fields[1]), int(fields[2]), int(fields[19])
    return _Stat(Process(pid, pgid, start), parent, zombie=state in (b"Z", b"X"))
