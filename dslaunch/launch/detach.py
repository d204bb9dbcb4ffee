"""A supervisor that goes on without the shell that started it."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from dslaunch.errors import ConfigError, DslaunchError
from dslaunch.launch.execute import execute
from dslaunch.launch.steps import Step, Submit
from dslaunch.run.attempts import attempt_of, logs_of
from dslaunch.run.find import word_for
from dslaunch.run.now import look

Echo = Callable[[str], None]
LOG = "supervisor.log"
_POLL_S = 0.1
_LIMIT_S = 60.0
_SAID = 20
"""Lines of the log that are shown where the supervisor ends at once."""


def check_detached(detach: bool, steps: Sequence[Step]) -> None:
    """Raises ConfigError where `--detach` has nothing to detach."""
    if detach and any(isinstance(step, Submit) for step in steps):
        raise ConfigError("--detach: a job that SLURM runs goes on without this shell. Leave --detach out")


def run_steps(steps: Sequence[Step], folder: Path, launcher: str, echo: Echo, *, detach: bool) -> int:
    """Execute the steps here, or in a process that goes on without this shell; returns the exit status."""
    if detach:
        return _detached(lambda say: execute(steps, folder, launcher, say), folder, echo)
    return execute(steps, folder, launcher, echo)


def _detached(supervising: Callable[[Echo], int], folder: Path, echo: Echo) -> int:
    """Call `supervising` in a process with a session of its own, and return once the job runs.

    What it would say goes to supervisor.log beside the launcher's log, what the job says to its logs alone.

    Returns:
        0 where the job runs; where it ended before this was seen, its exit status.
    """
    log = logs_of(folder, attempt_of(folder)) / LOG
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    pid = os.fork()
    if pid == 0:
        _go_on(supervising, log)
    status = _started(pid, folder)
    if status is None:
        name = word_for(folder)
        echo(
            f"process {pid} supervises it from here on; this shell may end\n"
            f"  dslaunch status {name} | logs {name} --follow | watch {name} | stop {name}"
        )
        return 0
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines()[-_SAID:]:
        echo(line)
    return status


def _go_on(supervising: Callable[[Echo], int], log: Path) -> NoReturn:
    """The child's whole life. It never returns into the code of its parent."""
    status = 1
    try:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        for source, target in ((nothing, 0), (nothing, 1), (said, 2)):
            os.dup2(source, target)
        status = supervising(_say)
    except DslaunchError as error:
        _say(str(error))
        status = error.status
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _started(pid: int, folder: Path) -> int | None:
    """None once the job runs, or after a minute; else the exit status of a supervisor that has ended."""
    limit = time.monotonic() + _LIMIT_S
    while time.monotonic() < limit and not _runs(folder):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(_POLL_S)
    return None


def _runs(folder: Path) -> bool:
    try:
        return look(folder).standing == "running"
    except ConfigError:
        return False  # state.json is not written yet
