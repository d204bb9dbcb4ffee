"""What a run said: the launcher's log, a rank's own, or that of the rank that failed first."""

from __future__ import annotations

import io
import shlex
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from dslaunch.errors import ConfigError, LaunchError, listed
from dslaunch.run import kube
from dslaunch.run.attempts import attempt_of, logs_of
from dslaunch.run.find import word_for
from dslaunch.run.now import ENDED, KUBERNETES, look
from dslaunch.run.records import RankRecord, first_failed, read_ranks
from dslaunch.run.state import read_state
from dslaunch.run.status import run_plan

LOGS_SCHEMA = "dslaunch.logs/1"
_POLL_S = 0.5
_CHUNK = 1 << 16
_TAIL_BYTES = 64 << 20
"""More of a log's end is not searched for lines."""


@dataclass(frozen=True)
class Log:
    """One log, and whose it is."""

    path: Path
    whose: str
    """Such as `rank 3`."""
    failures: tuple[RankRecord, ...] = ()
    """The ranks that failed, the first to fail first, where that one's log was asked for."""


def find_log(
    folder: Path, attempt: int | None, rank: int | None, first_error: bool, *, follow: bool = False
) -> Log:
    """The log that was asked for: a rank's, the first failed rank's, or all ranks' together.

    Args:
        attempt: counted from 1; None: the newest.
        follow: wait for a rank that has not started yet, while the run goes on.

    Raises:
        ConfigError: there is none.
    """
    newest = attempt_of(folder)
    chosen = newest if attempt is None else attempt
    if not 1 <= chosen <= newest:
        raise ConfigError(f"--attempt {attempt}: {folder.name} has attempts 1 to {newest}.")
    logs = logs_of(folder, chosen)
    failures = _failures(folder, chosen, newest) if first_error else ()
    if failures:
        rank = failures[0].rank
    if rank is None:
        return Log(_common(logs), "all ranks")
    path = logs / f"rank-{rank}.log"
    while follow and rank < run_plan(folder).world_size and not path.is_file():
        if look(folder).standing in ENDED:
            break
        time.sleep(_POLL_S)
    if not path.is_file():
        ranks = sorted(int(each.stem.removeprefix("rank-")) for each in logs.glob("rank-*.log"))
        raise ConfigError(
            f"rank {rank}: {path} does not exist; ranks with a log there: {listed(ranks, limit=16) or 'none'}."
        )
    return Log(path, f"rank {rank}", failures)


def log_object(folder: Path, log: Log, lines: int) -> dict[str, Any]:
    """`{"schema": "dslaunch.logs/1", ...}` with the log's last `lines` lines (0: all)."""
    text = io.BytesIO()
    show(log, lines, text)
    return {
        "schema": LOGS_SCHEMA,
        "run": str(folder),
        "path": str(log.path),
        "whose": log.whose,
        "failed_ranks": [each.rank for each in log.failures],
        "lines": text.getvalue().decode(errors="replace").splitlines(),
    }


def of_kubernetes(folder: Path) -> bool:
    """Whether the run's pods have its logs: until `dslaunch stop` takes them away, and keeps what they said."""
    state = read_state(folder)
    return state.launcher == KUBERNETES and state.status != "stopped"


def kubernetes_logs(
    folder: Path, attempt: int | None, rank: int | None, lines: int, *, first_error: bool, follow: bool
) -> list[str]:
    """The kubectl command that shows what was asked for; a rank's log is that of all ranks of its node.

    Raises:
        ConfigError: there is no such pod, or an earlier attempt is asked for, whose pods are gone.
    """
    newest = attempt_of(folder)
    if attempt not in (None, newest):
        raise ConfigError(f"--attempt {attempt}: Kubernetes has the pods of attempt {newest} alone.")
    per_node = run_plan(folder).cluster.gpus_per_node
    job = kube.job_of(folder)
    return kube.logs_command(job, rank, per_node, lines, first_error=first_error, follow=follow)


def command_object(folder: Path, command: Sequence[str]) -> dict[str, Any]:
    """As `log_object`, of what a command prints; raises LaunchError where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise LaunchError(f"{shlex.join(command)}: {done.stderr.strip()}")
    whose = "a node" if "--prefix" not in command else "all ranks"
    return {
        "schema": LOGS_SCHEMA,
        "run": str(folder),
        "path": shlex.join(command),
        "whose": whose,
        "failed_ranks": [],
        "lines": done.stdout.splitlines(),
    }


def show(log: Log, lines: int, out: BinaryIO) -> int:
    """Write the log's last `lines` lines (0: all of it); returns how many bytes of the log were there."""
    with log.path.open("rb") as stream:
        size = stream.seek(0, 2)
        stream.seek(_start_of(stream, size, lines))
        while chunk := stream.read(min(_CHUNK, size - stream.tell())):
            out.write(chunk)
    out.flush()
    return size


def follow_log(folder: Path, log: Log, shown: int, out: BinaryIO) -> None:
    """Write what the log gains after its first `shown` bytes, until the run has ended."""
    ended = False
    while not ended:
        ended = look(folder).standing in ENDED
        with log.path.open("rb") as stream:
            stream.seek(shown)
            while chunk := stream.read(_CHUNK):
                out.write(chunk)
                shown += len(chunk)
        out.flush()
        if not ended:
            time.sleep(_POLL_S)


def _failures(folder: Path, attempt: int, newest: int) -> tuple[RankRecord, ...]:
    ranks = "ranks" if attempt == newest else f"ranks.attempt-{attempt}"
    failed = first_failed(read_ranks(folder / ranks))
    if not failed:
        raise ConfigError(
            f"{folder.name}: no rank recorded a failure in attempt {attempt}. What the launcher said: "
            f"dslaunch logs {word_for(folder)}"
        )
    return tuple(failed)


def _common(logs: Path) -> Path:
    """launcher.log, or the newest output of a SLURM job (an array of attempts writes on into the same file)."""
    found = [path for path in (logs / "launcher.log", *logs.glob("slurm-*.out")) if path.is_file()]
    if not found and logs.name != "logs":
        return _common(logs.parent)
    if not found:
        raise ConfigError(f"{logs}: no log yet: nothing of the run has started.")
    return max(found, key=lambda path: path.stat().st_mtime_ns)


def _start_of(stream: BinaryIO, size: int, lines: int) -> int:
    """Where the last `lines` lines begin."""
    if lines == 0:
        return 0
    first = max(0, size - _TAIL_BYTES)
    stream.seek(first)
    tail = stream.read(size - first)
    at = len(tail)
    if tail.endswith(b"\n"):
        at -= 1
    for _ in range(lines):
        at = tail.rfind(b"\n", 0, at)
        if at < 0:
            return first
    return first + at + 1
