"""The watchdog, and where the ranks of a hanging run stand: real processes, stopped and waiting."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dslaunch.planfile import SupervisionPlan
from dslaunch.run.processes import identify
from dslaunch.run.records import read_ranks
from dslaunch.run.stacks import Position, behind, positions
from dslaunch.run.watchdog import Standstill, Watchdog

_TELLS = """
import time
from dslaunch.progress import step
def wait_for_a_batch():
    time.sleep(1000)
step(3)
wait_for_a_batch()
"""
_SILENT = "import time; time.sleep(1000)"
_OWN_HANDLER = "import signal, time; signal.signal(signal.SIGUSR1, print); time.sleep(1000)"
_MINUTE = 1 / 60


def _standstill(dog: Watchdog, limit_s: float = 30.0) -> Standstill | None:
    limit = time.monotonic() + limit_s
    while not (found := dog.look()) and time.monotonic() < limit:
        time.sleep(0.02)
    return found


def _step(folder: Path, rank: int, step: int) -> None:
    (folder / f"{rank}.exit").write_text("running\n")
    (folder / f"{rank}.step").write_text(f"{step} 1 1000.0\n")


def test_steps_that_stand_still_are_a_hang_and_steps_that_move_are_none(tmp_path: Path) -> None:
    dog = Watchdog(tmp_path, SupervisionPlan(watchdog_minutes=_MINUTE))
    for number in range(1, 6):
        _step(tmp_path, 0, number)
        _step(tmp_path, 1, 1)
        assert _standstill(dog, 0.4) is None
    found = _standstill(dog)
    assert found is not None
    assert (found.steps, found.key) == ({0: 5, 1: 1}, "watchdog.minutes")
    assert found.seconds >= found.limit_s == pytest.approx(1.0)


def test_before_the_first_step_there_is_no_limit_unless_one_is_given(tmp_path: Path) -> None:
    assert _standstill(Watchdog(tmp_path, SupervisionPlan(watchdog_minutes=_MINUTE)), 2.0) is None
    found = _standstill(Watchdog(tmp_path, SupervisionPlan(watchdog_start_minutes=_MINUTE)))
    assert found is not None
    assert (found.steps, found.key) == ({}, "watchdog.start_minutes")


def test_while_nobody_looks_nothing_stands_still(tmp_path: Path) -> None:
    """A machine that was suspended, or starved: its ranks could not move either."""
    dog = Watchdog(tmp_path, SupervisionPlan(watchdog_minutes=_MINUTE))
    _step(tmp_path, 0, 1)
    time.sleep(0.1)
    assert dog.look() is None
    time.sleep(1.5)
    assert dog.look() is None


Start = Callable[[int, str], "subprocess.Popen[bytes]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a rank whose records are those that rank.sh writes; ended by its process id."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(rank: int, program: str) -> subprocess.Popen[bytes]:
        folder = tmp_path / "ranks"
        folder.mkdir(exist_ok=True)
        env = {**os.environ, "DSLAUNCH_RUN_DIR": str(tmp_path), "RANK": str(rank)}
        started.append(subprocess.Popen([sys.executable, "-c", program], env=env))
        process = identify(started[-1].pid)
        assert process is not None
        (folder / f"{rank}.pid").write_text(json.dumps({"host": socket.gethostname(), **vars(process)}))
        (folder / f"{rank}.exit").write_text("running\n")
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()


def _positions(folder: Path) -> list[Position]:
    return positions(read_ranks(folder / "ranks"), folder / "ranks")


def _wait_until(there: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not there():
        assert time.monotonic() < limit
        time.sleep(0.02)


def test_a_rank_that_tells_its_steps_tells_its_stack(start: Start, tmp_path: Path) -> None:
    process = start(0, _TELLS)
    _wait_until((tmp_path / "ranks" / "0.step").exists)
    _wait_until(lambda: "S" in Path(f"/proc/{process.pid}/stat").read_text().split()[2])
    (found,) = _positions(tmp_path)
    assert found.step == 3
    assert found.where.startswith("in wait_for_a_batch (")
    assert "rank 0" in str(found)
    assert process.poll() is None


@pytest.mark.parametrize("program", [_SILENT, _OWN_HANDLER])
def test_a_program_that_registered_nothing_is_not_signalled(program: str, start: Start, tmp_path: Path) -> None:
    """SIGUSR1 would end it, or set off what it has for that signal."""
    process = start(0, program)
    _wait_until(lambda: "nanosleep" in Path(f"/proc/{process.pid}/wchan").read_text() or _sleeps(process.pid))
    (found,) = _positions(tmp_path)
    time.sleep(0.2)
    assert process.poll() is None
    assert found.step is None
    assert found.stack


def _sleeps(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "S"


def test_a_stopped_rank_is_the_one_behind(start: Start, tmp_path: Path) -> None:
    start(0, _TELLS)
    stopped = start(1, _TELLS)
    _wait_until(lambda: all((tmp_path / "ranks" / f"{rank}.step").exists() for rank in (0, 1)))
    stopped.send_signal(signal.SIGSTOP)
    _wait_until(lambda: Path(f"/proc/{stopped.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T")
    found = _positions(tmp_path)
    late = behind(found)
    assert late is not None
    assert (late.rank, late.where) == (1, "is stopped (SIGSTOP)")


def _position(rank: int, step: int | None, stack: str = "") -> Position:
    return Position(rank, "n1", step, "S", stack)


_COLLECTIVE = 'Current thread 0x1 (most recent call first):\n  File "torch/distributed/c10d.py", line 2 in wait\n'
_ELSEWHERE = 'Current thread 0x1 (most recent call first):\n  File "data.py", line 9 in read\n'


def test_the_rank_behind_has_fewer_steps_or_is_in_no_collective() -> None:
    assert behind([_position(0, 5), _position(1, 4), _position(2, 5)]) == _position(1, 4)
    waiting, reading = _position(0, 5, _COLLECTIVE), _position(1, 5, _ELSEWHERE)
    assert behind([waiting, reading]) == reading
    assert behind([waiting, _position(1, 5, _COLLECTIVE)]) is None, "nobody can be named"
    assert behind([]) is None
