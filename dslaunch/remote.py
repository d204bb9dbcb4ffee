"""One command on each of many hosts at the same time, each with its own time limit."""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

_OPEN_FILES_EACH = 4
"""Two pipes and the process's descriptor, and one more while it is started."""
_OPEN_FILES_OURS = 128
_OUTPUT_LIMIT = 4 * 2**20
"""Bytes kept of what one host says; the rest is read and dropped."""
SSH_FAILED = 255
"""Exit status of ssh's own failures (ssh(1), EXIT STATUS)."""


@dataclass(frozen=True)
class Answer:
    """What one host's command came to."""

    host: str
    status: int | None
    """Exit status, -N where signal N ended it; None: no end within the limit."""
    out: str
    err: str
    seconds: float
    """From its start to its end."""
    heard: float
    """This machine's clock (seconds since 1970) when the last of `out` arrived; 0.0: nothing did."""

    @property
    def why(self) -> str:
        """The last line that it complained with; its exit status where it said nothing."""
        lines = [line.strip() for line in self.err.splitlines() if line.strip()]
        if self.status is None:
            return f"no answer within {self.seconds:.0f} s"
        return lines[-1] if lines else f"exit status {self.status}"


def over_ssh(host: str, words: Sequence[str], connect_s: float) -> tuple[str, ...]:
    """The ssh command that runs `words` on `host`, and never asks for a password.

    Args:
        connect_s: limit of the connection, seconds.
    """
    options = ("-o", "BatchMode=yes", "-o", f"ConnectTimeout={max(1, round(connect_s))}", "-T", "-x")
    return ("ssh", *options, "--", host, f"exec {shlex.join(words)}")


def on_all(
    commands: Mapping[str, Sequence[str]], stdin: str | Path, limit_s: float
) -> dict[str, Answer]:
    """Run each host's command, all at once, with `stdin` as input; the answers by host, in the order given.

    Args:
        stdin: a text, or the file that each reads.

    As many run at a time as this process may hold files open. A command that has not ended `limit_s` seconds
    after its start is ended with its process group.
    """
    needed = len(commands) * _OPEN_FILES_EACH + _OPEN_FILES_OURS
    with tempfile.TemporaryFile() as text, _open_files(needed) as allowed:
        if isinstance(stdin, str):
            text.write(stdin.encode())
            text.flush()
        fan = _Fan(f"/proc/self/fd/{text.fileno()}" if isinstance(stdin, str) else str(stdin), limit_s)
        width = max(1, (allowed - _OPEN_FILES_OURS) // _OPEN_FILES_EACH)
        try:
            return fan.run(commands, width)
        finally:
            fan.close()


@dataclass
class _Child:
    host: str
    process: subprocess.Popen[bytes]
    pidfd: int
    started: float
    out: bytearray = field(default_factory=bytearray)
    err: bytearray = field(default_factory=bytearray)
    heard: float = 0.0

    def pipes(self) -> Iterator[tuple[IO[bytes], bytearray]]:
        assert self.process.stdout
        assert self.process.stderr
        yield self.process.stdout, self.out
        yield self.process.stderr, self.err


class _Fan:
    """The running commands, in the order in which their limits end."""

    def __init__(self, input_path: str, limit_s: float) -> None:
        self._input_path, self._limit_s = input_path, limit_s
        self._selector = selectors.DefaultSelector()
        self._running: dict[str, _Child] = {}

    def run(self, commands: Mapping[str, Sequence[str]], width: int) -> dict[str, Answer]:
        waiting = list(reversed(list(commands)))
        answers: dict[str, Answer] = {}
        while waiting or self._running:
            while waiting and len(self._running) < width:
                host = waiting.pop()
                self._start(host, commands[host])
            for child in self._ended():
                answers[child.host] = self._finish(child)
        return {host: answers[host] for host in commands}

    def close(self) -> None:
        """End what still runs: after an interrupt."""
        for child in list(self._running.values()):
            _kill(child.process)
            self._finish(child)
        self._selector.close()

    def _start(self, host: str, command: Sequence[str]) -> None:
        with open(self._input_path, "rb") as stdin:
            process = subprocess.Popen(
                command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
            )
        child = _Child(host, process, os.pidfd_open(process.pid), time.monotonic())
        self._running[host] = child
        for pipe, kept in child.pipes():
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, selectors.EVENT_READ, (child, kept))
        # Not the pipes' end: a shared connection's master (ControlPersist) holds them open after ssh ended.
        self._selector.register(child.pidfd, selectors.EVENT_READ, (child, None))

    def _ended(self) -> list[_Child]:
        """Wait for what comes next; the commands that ended, or had to be."""
        oldest = next(iter(self._running.values()))
        left = oldest.started + self._limit_s - time.monotonic()
        ended: dict[str, _Child] = {}
        for key, _ in self._selector.select(max(0.0, left)):
            child, kept = key.data
            if kept is None:
                ended[child.host] = child
            elif not _read(child, key.fd, kept):
                self._selector.unregister(key.fileobj)
        return [*ended.values(), *self._overdue(ended)]

    def _overdue(self, ended: Mapping[str, _Child]) -> Iterator[_Child]:
        now = time.monotonic()
        for child in list(self._running.values()):
            if now - child.started < self._limit_s:
                return
            if child.host not in ended:
                _kill(child.process)
                yield child

    def _finish(self, child: _Child) -> Answer:
        del self._running[child.host]
        watched = self._selector.get_map()
        for pipe, kept in child.pipes():
            if pipe.fileno() in watched:
                while _read(child, pipe.fileno(), kept):
                    pass
                self._selector.unregister(pipe)
            pipe.close()
        self._selector.unregister(child.pidfd)
        os.close(child.pidfd)
        seconds = time.monotonic() - child.started
        status = child.process.wait()
        late = seconds >= self._limit_s and status == -signal.SIGKILL
        return Answer(
            child.host,
            None if late else status,
            child.out.decode(errors="replace"),
            child.err.decode(errors="replace"),
            seconds,
            child.heard,
        )


def _read(child: _Child, descriptor: int, kept: bytearray) -> bool:
    """Keep what there is to read; whether there may be more."""
    try:
        data = os.read(descriptor, 65536)
    except BlockingIOError:
        return False
    if data and kept is child.out:
        child.heard = time.time()
    kept += data[: max(0, _OUTPUT_LIMIT - len(kept))]
    return bool(data)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a command with what it started here: it leads a process group, and is not reaped yet."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def _open_files(wanted: int) -> Iterator[int]:
    """As many open files as wanted, or as the hard limit allows; yields how many. Where the limit is high enough
    it stays as it is, for the commands inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft == resource.RLIM_INFINITY or soft >= most:
        yield wanted if soft == resource.RLIM_INFINITY else soft
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        yield most
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
