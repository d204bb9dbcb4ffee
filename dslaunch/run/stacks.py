"""Where each rank of a hanging run stands: its stack, or what the kernel knows of it, and which rank is behind.

A program that called dslaunch.progress writes its own stacks at SIGUSR1 (faulthandler). Of others py-spy tells,
where it is installed. Of every process the kernel tells its state and what it waits for (proc(5): stat, wchan,
syscall). Only recorded processes are looked at, those of other hosts over ssh.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dslaunch.run.processes import Process, is_alive, send
from dslaunch.run.records import RankRecord
from dslaunch.run.stacks_remote import Seen, ask_hosts

_WRITTEN_WITHIN_S = 5.0
"""An agent brings the files of a host that shares no folder every 2 s."""
_PY_SPY_LIMIT_S = 20.0
_WAITING = re.compile(r"torch[/\\.]distributed|deepspeed[/\\.]comm|distributed_c10d")
"""Frames of a rank that waits for others."""
_FRAME = re.compile(r'^\s*File "(.+)", line (\d+),? in (.+)$', re.MULTILINE)
"""faulthandler's: file, line, function; the innermost first."""
_LIBRARY = "/lib/python"
"""In the path of Python's own modules, and of installed ones."""
_PY_SPY_FRAME = re.compile(r"^ +(\S+) \((.+):(\d+)\)$", re.MULTILINE)
"""py-spy's: function, file, line."""


@dataclass(frozen=True)
class Position:
    """Where one rank stands."""

    rank: int
    host: str
    step: int | None
    """Its last completed step; None where it told none."""
    state: str
    """The kernel's letter: R runs, S and D wait, T is stopped; empty where the process is not seen here."""
    stack: str
    """The whole stack, or what there is in place of one; several lines."""

    @property
    def where(self) -> str:
        """In one line: the innermost frame of the user's own code, or else of all; or what the kernel knows."""
        if self.state in ("T", "t"):
            return "is stopped (SIGSTOP)"
        frames = [(name, file, line) for file, line, name in _FRAME.findall(self.stack)]
        frames = frames or _PY_SPY_FRAME.findall(self.stack)
        own = [frame for frame in frames if _LIBRARY not in frame[1]]
        for name, file, line in (own or frames)[:1]:
            return f"in {name} ({file}:{line})"
        return self.stack.splitlines()[0] if self.stack else "on a host that cannot be asked"

    @property
    def waits_for_others(self) -> bool:
        return bool(_WAITING.search(self.stack))

    def __str__(self) -> str:
        step = "no step yet" if self.step is None else f"step {self.step}"
        return f"rank {self.rank}{f' on {self.host}' if self.host else ''}: {step}, {self.where}"


def positions(ranks: Sequence[RankRecord], folder: Path) -> list[Position]:
    """Where every rank stands now.

    Args:
        folder: of the ranks' records.
    """
    here = {
        record.rank: record.process
        for record in ranks
        if record.process and record.host == socket.gethostname() and is_alive(record.process)
    }
    elsewhere = ask_hosts([each for each in ranks if each.rank not in here and each.status is None])
    asked = {rank for rank, process in here.items() if _asked(process, folder / f"{rank}.stacks")} | set(elsewhere)
    deadline = time.monotonic() + _WRITTEN_WITHIN_S
    while time.monotonic() < deadline and any(not _complete(folder / f"{rank}.stacks") for rank in asked):
        time.sleep(0.1)
    return [
        _position(each, here.get(each.rank), folder) or _far_position(each, elsewhere.get(each.rank), folder)
        for each in ranks
    ]


def behind(found: Sequence[Position]) -> Position | None:
    """The rank that the others wait for: stopped, or fewest steps, or the one that is in no collective."""
    stopped = [each for each in found if each.state in ("T", "t")]
    if stopped:
        return stopped[0]
    fewest = min((each.step for each in found if each.step is not None), default=None)
    late = [each for each in found if each.step == fewest]
    if 0 < len(late) < len(found):
        return late[0]
    seen = [each for each in found if each.stack]
    elsewhere = [each for each in seen if not each.waits_for_others]
    return elsewhere[0] if 0 < len(elsewhere) < len(seen) else None


def _asked(process: Process, stacks: Path) -> bool:
    """Ask for the stacks; without a handler of ours SIGUSR1 would end the program."""
    catches = int(_status_field(process.pid, "SigCgt") or "0", 16) >> (signal.SIGUSR1 - 1) & 1
    if not catches or not stacks.exists():
        return False
    send(process, signal.SIGUSR1)
    return True


def _complete(stacks: Path) -> bool:
    """faulthandler writes the thread that runs Python last, as the current one."""
    return bool(_own_stack(stacks))


def _own_stack(stacks: Path) -> str:
    """Of the main thread, which stands last; the others serve it. Empty where nothing was written."""
    text = stacks.read_text(encoding="utf-8", errors="replace") if stacks.exists() else ""
    return text[text.rfind("Current thread") :] if "Current thread" in text else ""


def _position(record: RankRecord, process: Process | None, folder: Path) -> Position | None:
    """None of a process that is not on this host."""
    if process is None:
        return None
    state = (_status_field(process.pid, "State") or " ")[0].strip()
    stack = _own_stack(folder / f"{record.rank}.stacks") or _py_spy(process.pid) or _kernel(process.pid)
    return Position(record.rank, record.host, record.step, state, stack)


def _far_position(record: RankRecord, seen: Seen | None, folder: Path) -> Position:
    if seen is None:
        said = "has ended" if record.status is not None else ""
        return Position(record.rank, record.host, record.step, "", said)
    stack = _own_stack(folder / f"{record.rank}.stacks") or f"state {seen.state}, waits in {seen.waits_in or '?'}"
    return Position(record.rank, record.host, record.step, seen.state, stack)


def _py_spy(pid: int) -> str:
    """The stacks by py-spy; empty where it is not installed, or may not look."""
    program = shutil.which("py-spy")
    if not program:
        return ""
    try:
        done = subprocess.run(
            [program, "dump", "--nonblocking", "--pid", str(pid)],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PY_SPY_LIMIT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _kernel(pid: int) -> str:
    """The state, and what the process waits for in the kernel."""
    waits = _read(pid, "wchan").strip("0") or "?"
    call = (_read(pid, "syscall").split() or ["?"])[0]
    return f"state {_status_field(pid, 'State') or '?'}, waits in {waits}, system call {call}"


def _status_field(pid: int, name: str) -> str:
    found = re.search(rf"^{name}:\s*(.+)$", _read(pid, "status"), re.MULTILINE)
    return found[1] if found else ""


def _read(pid: int, name: str) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_text().strip()
    return ""
