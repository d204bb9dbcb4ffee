"""Run one command to its end: its output to the terminal and a log, its process tree ended with it."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from dslaunch.errors import LaunchError
from dslaunch.run.processes import Process, Tree, adopting, end, identify

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL_MS = 200
_LINGER_S = 2.0
_CHUNK = 1 << 16
_GUARD = (sys.executable, "-P", "-m", "dslaunch.run.guard")


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    status: int
    """Exit status; 128 + N where signal N ended it."""
    stopped_by: str
    """Name of the signal that the user stopped it with; empty where it ended by itself."""
    left_over: int
    """Processes that were still running when the command itself had ended, and were ended then."""
    survivors: tuple[int, ...]
    """Process ids that even SIGKILL did not end."""


def supervise(
    argv: Sequence[str],
    cwd: Path,
    env: Mapping[str, str],
    log: Path,
    out: BinaryIO,
    started: Callable[[Process], None],
    grace_s: float = 15.0,
    watch: Callable[[], bool] = lambda: False,
) -> Ended:
    """Run `argv`, under a guard in a session of its own, until it and all its descendants have ended.

    Ctrl-C, SIGTERM and SIGHUP (unless ignored, as under nohup) end the whole tree: SIGTERM, and SIGKILL after
    `grace_s` seconds or at a second signal. Where this process itself is killed, the guard ends the tree.

    Args:
        watch: asked several times a second; where it says True, the tree is ended likewise.

    Raises:
        LaunchError: the command cannot be started.
    """
    with noted_signals() as signals, adopting(), log.open("ab", buffering=0) as log_stream:
        tree = Tree()
        alive, ours = os.pipe()
        child = _start([*_GUARD, str(alive), *argv], cwd, env, alive)
        process = identify(child.pid)
        assert process is not None
        assert child.stdout is not None
        copier = threading.Thread(target=_copy, args=(child.stdout.fileno(), [log_stream, out]), daemon=True)
        copier.start()
        left: set[Process] = set()
        given_up = False
        try:
            started(process)
            given_up = _wait(child.pid, signals, watch)
            left = set() if signals or given_up else _settled(tree, child.pid)
        finally:
            stopped_by = signals[0].name if signals else ""
            survivors = end(lambda: tree.living(child.pid), grace_s, hurry=lambda: len(signals) > 1)
        status = child.poll()
        copier.join(_LINGER_S)
        os.close(ours)
    if status is None:
        status = -signal.SIGKILL
    return Ended(
        status=status if status >= 0 else 128 - status,
        stopped_by=stopped_by,
        left_over=len(left),
        survivors=tuple(sorted(each.pid for each in survivors)),
    )


def _start(argv: Sequence[str], cwd: Path, env: Mapping[str, str], alive: int) -> subprocess.Popen[bytes]:
    """The guard of the command; `alive` is the end of the pipe that it watches, and is closed here."""
    command = argv[len(_GUARD) + 1]
    if not shutil.which(command, path=env.get("PATH")):
        raise LaunchError(f"{command}: cannot be started: there is no such program. Is it installed?")
    child = subprocess.Popen(
        argv,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=[alive],
        start_new_session=True,
    )
    os.close(alive)
    return child


@contextlib.contextmanager
def noted_signals() -> Iterator[list[signal.Signals]]:
    """The stop signals that arrive meanwhile, in order; one that is ignored stays ignored."""
    noted: list[signal.Signals] = []

    def note(number: int, _frame: FrameType | None) -> None:
        noted.append(signal.Signals(number))

    earlier = {sign: signal.getsignal(sign) for sign in _STOP_SIGNALS}
    for sign in _STOP_SIGNALS:
        if earlier[sign] is not signal.SIG_IGN:
            signal.signal(sign, note)
    try:
        yield noted
    finally:
        for sign, handler in earlier.items():
            signal.signal(sign, handler)


def pause(seconds: float) -> str:
    """Wait; returns the name of the stop signal that cut it short, or an empty text."""
    with noted_signals() as signals:
        limit = time.monotonic() + seconds
        while not signals and time.monotonic() < limit:
            time.sleep(_POLL_MS / 1000)
        return signals[0].name if signals else ""


def _wait(pid: int, signals: list[signal.Signals], watch: Callable[[], bool]) -> bool:
    """Until the process ended, a stop signal came, or `watch` says True; whether it was that."""
    descriptor = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while not signals and not poll.poll(_POLL_MS):
            if watch():
                return True
        return False
    finally:
        os.close(descriptor)


def _settled(tree: Tree, keep: int) -> set[Process]:
    """The descendants that are still there after a short wait.

    Helpers such as Python's resource tracker end by themselves a moment after the process they serve.
    """
    limit = time.monotonic() + _LINGER_S
    while (left := tree.living(keep)) and time.monotonic() < limit:
        time.sleep(_POLL_MS / 1000)
    return left


def _copy(source: int, sinks: list[BinaryIO]) -> None:
    """Each byte to each sink as soon as it arrives; a sink that fails (closed, disk full) is given up."""
    while chunk := os.read(source, _CHUNK):
        for sink in list(sinks):
            try:
                sink.write(chunk)
                sink.flush()
            except (OSError, ValueError):
                sinks.remove(sink)
