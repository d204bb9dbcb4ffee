"""What this host's kernel says while an attempt runs: processes killed for memory, GPU faults (Xid).

From /dev/kmsg where it may be read (Documentation/ABI/testing/dev-kmsg), and from the counter `oom_kill` of this
process's memory cgroup (Documentation/admin-guide/cgroup-v2.rst, memory.events; v1: memory.oom_control). What
other hosts' kernels say is not seen here.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection
from pathlib import Path

from dslaunch.run.causes import Evidence

_RECORD_BYTES = 8192
"""The kernel hands out one record a read, and refuses a smaller buffer than it needs."""
_WANTED = re.compile(r"Killed process (\d+)|NVRM: Xid")
_COUNTER = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class Kernel:
    """The kernel's log and counters from now on."""

    def __init__(self) -> None:
        self._log: int | None = None
        with contextlib.suppress(OSError):
            self._log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._log, 0, os.SEEK_END)
        self._counter = _counter()
        self._killed = _killed(self._counter)

    def said(self, pids: Collection[int]) -> tuple[Evidence, ...]:
        """What it said since the start of GPUs, and of these processes' deaths by memory; can be asked once."""
        found = [Evidence("this host's kernel log", line) for line in self._new_lines() if _concerns(line, pids)]
        killed = _killed(self._counter) - self._killed
        if killed and self._counter:
            found.append(Evidence(str(self._counter), f"oom-kill of {killed} processes of this cgroup"))
        return tuple(found)

    def _new_lines(self) -> list[str]:
        lines: list[str] = []
        if self._log is None:
            return lines
        while True:
            try:
                record = os.read(self._log, _RECORD_BYTES).decode(errors="replace")
            except BrokenPipeError:  # Records that were overwritten meanwhile.
                continue
            except OSError:
                os.close(self._log)
                self._log = None
                return lines
            lines.append(record.split(";", 1)[-1].splitlines()[0])


def _concerns(line: str, pids: Collection[int]) -> bool:
    match = _WANTED.search(line)
    return match is not None and (match[1] is None or int(match[1]) in pids)


def _counter() -> Path | None:
    """The file that counts this cgroup's processes killed for memory."""
    for row in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = row.split(":", 2)
        v2, v1 = Path("/sys/fs/cgroup" + path), Path("/sys/fs/cgroup/memory" + path)
        if controllers == "" and (v2 / "memory.events").exists():
            return v2 / "memory.events"
        if controllers == "memory":
            # In a container the file system shows the container's own group at its root.
            for folder in (v1, Path("/sys/fs/cgroup/memory")):
                if (folder / "memory.oom_control").exists():
                    return folder / "memory.oom_control"
    return None


def _killed(counter: Path | None) -> int:
    match = _COUNTER.search(counter.read_text()) if counter else None
    return int(match[1]) if match else 0
