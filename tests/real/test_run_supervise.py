"""Supervision of real processes: output, exit status, and what is ended with the command, and what is not."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dslaunch.errors import LaunchError
from dslaunch.run import processes
from dslaunch.run.processes import Process, Tree, identify, is_alive, send
from dslaunch.run.supervise import Ended, supervise

_LAUNCH = """
import json, os, sys
from pathlib import Path
from dslaunch.run.supervise import supervise
ended = supervise(["bash", "job.sh"], Path.cwd(), os.environ, Path("log"), sys.stdout.buffer,
                  lambda process: Path("pid").write_text(str(process.pid)), grace_s=1.0)
print(json.dumps([ended.status, ended.stopped_by, ended.left_over]))
"""
_TREE = """
trap '' TERM
sleep 1001 &
setsid sleep 1002 &
setsid bash -c 'trap "" TERM; sleep 1003 & echo $! > stubborn; wait; sleep 1004' &
(setsid sleep 1005 & echo $! > orphan)
echo $$ > ready
wait
sleep 1006
"""


def _run(folder: Path, script: str, out: io.BytesIO | None = None) -> Ended:
    log, sink = folder / "log", out or io.BytesIO()
    return supervise(["bash", "-c", script], folder, os.environ, log, sink, lambda _: None, grace_s=1.0)


@pytest.mark.parametrize(("script", "status"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137)])
def test_the_exit_status_comes_back(script: str, status: int, tmp_path: Path) -> None:
    assert _run(tmp_path, script) == Ended(status, "", 0, ())


def test_a_command_that_does_not_exist_is_a_launch_error(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="no-such-command: cannot be started"):
        supervise(["no-such-command"], tmp_path, os.environ, tmp_path / "log", io.BytesIO(), lambda _: None)


def test_output_arrives_byte_for_byte(tmp_path: Path) -> None:
    data = bytes(range(256)) * 4096 + b"half a line\rprogress 1\rprogress 2"
    (tmp_path / "data").write_bytes(data)
    out = io.BytesIO()
    _run(tmp_path, "cat data; printf error >&2", out)
    assert out.getvalue() == data + b"error"
    assert (tmp_path / "log").read_bytes() == data + b"error"


def test_output_arrives_at_once(tmp_path: Path) -> None:
    """The command goes on only when its unfinished line is in the log."""
    ended = _run(tmp_path, "printf 'step 1\\r'; until grep -q 'step 1' log; do sleep 0.05; done; printf done")
    assert ended.status == 0
    assert (tmp_path / "log").read_bytes() == b"step 1\rdone"


def test_a_closed_terminal_does_not_stop_the_job(tmp_path: Path) -> None:
    closed = io.BytesIO()
    closed.close()
    assert _run(tmp_path, "for i in 1 2 3; do echo $i; sleep 0.05; done", closed).status == 0
    assert (tmp_path / "log").read_bytes() == b"1\n2\n3\n"


def test_what_the_command_leaves_is_ended(tmp_path: Path) -> None:
    ended = _run(tmp_path, "setsid sleep 1000 & echo $! > left; exit 0")
    assert (ended.status, ended.left_over) == (0, 1)
    assert not Path(f"/proc/{(tmp_path / 'left').read_text().strip()}").exists()


def test_helpers_that_end_by_themselves_are_not_left_over(tmp_path: Path) -> None:
    ended = _run(tmp_path, "setsid bash -c 'sleep 0.2; echo end > ended' & exit 0")
    assert ended.left_over == 0
    assert (tmp_path / "ended").exists()


def _start(folder: Path) -> subprocess.Popen[bytes]:
    (folder / "job.sh").write_text(_TREE)
    supervisor = subprocess.Popen(
        [sys.executable, "-c", _LAUNCH], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    _wait_for(*(folder / name for name in ("ready", "stubborn", "orphan", "pid")))
    return supervisor


def _wait_for(*files: Path) -> None:
    limit = time.monotonic() + 60
    while not all(file.exists() for file in files):
        assert time.monotonic() < limit
        time.sleep(0.05)


def _descendants(pid: int) -> set[Process]:
    listed = subprocess.check_output(["ps", "-eo", "pid=,ppid="], text=True)
    rows = [row.split() for row in listed.splitlines()]
    found, waiting = set(), [pid]
    while waiting:
        parent = waiting.pop()
        for child in [int(row[0]) for row in rows if int(row[1]) == parent]:
            process = identify(child)
            if process is not None:
                found.add(process)
                waiting.append(child)
    return found


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_whole_tree_and_nothing_else(sign: signal.Signals, tmp_path: Path) -> None:
    bystander = subprocess.Popen(["sleep", "1000"], cwd=tmp_path)
    supervisor = _start(tmp_path)
    tree = _descendants(supervisor.pid)
    try:
        assert len(tree) == 7
        supervisor.send_signal(sign)
        output, errors = supervisor.communicate(timeout=60)
        assert output.decode().splitlines()[-1] == f'[137, "{sign.name}", 0]', errors.decode()
        assert not [process for process in tree if is_alive(process)]
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
        supervisor.kill()
        for process in tree:
            send(process, signal.SIGKILL)


def test_the_tree_ends_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    bystander = subprocess.Popen(["sleep", "1000"], cwd=tmp_path)
    supervisor = _start(tmp_path)
    tree = _descendants(supervisor.pid)
    try:
        supervisor.kill()
        supervisor.communicate(timeout=60)
        limit = time.monotonic() + 60
        while [process for process in tree if is_alive(process)]:
            assert time.monotonic() < limit
            time.sleep(0.1)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
        for process in tree:
            send(process, signal.SIGKILL)


def test_the_watch_ends_the_tree(tmp_path: Path) -> None:
    asked: list[int] = []

    def watch() -> bool:
        asked.append(1)
        return len(asked) > 2

    log, out = tmp_path / "log", io.BytesIO()
    argv = ["bash", "-c", "sleep 1000 & echo $! > helper; sleep 1001; exit $?"]  # 143, whoever ends first
    ended = supervise(argv, tmp_path, os.environ, log, out, lambda _: None, grace_s=1.0, watch=watch)
    assert (ended.status, ended.stopped_by, ended.left_over) == (143, "", 0)
    assert not Path(f"/proc/{(tmp_path / 'helper').read_text().strip()}").exists()


def test_a_terminals_ctrl_c_reaches_the_job_as_one_sigterm(tmp_path: Path) -> None:
    """A terminal signals its whole foreground group; the job is in none, and may save before it ends."""
    traps = "trap 'echo int >>got' INT; trap 'echo term >>got; exit 4' TERM"
    (tmp_path / "job.sh").write_text(f"{traps}; echo > ready; while :; do sleep 0.1; done")
    slow = _LAUNCH.replace("grace_s=1.0", "grace_s=60.0")
    supervisor = subprocess.Popen(
        [sys.executable, "-c", slow], cwd=tmp_path, stdout=subprocess.PIPE, start_new_session=True
    )
    _wait_for(tmp_path / "ready")
    os.killpg(supervisor.pid, signal.SIGINT)
    output, _ = supervisor.communicate(timeout=60)
    assert output.decode().splitlines()[-1] == '[4, "SIGINT", 0]'
    assert (tmp_path / "got").read_text() == "term\n"


def test_a_second_signal_does_not_wait_for_the_grace_time(tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text("trap '' TERM; echo > ready; while :; do sleep 1; done")
    slow = _LAUNCH.replace("grace_s=1.0", "grace_s=60.0")
    supervisor = subprocess.Popen([sys.executable, "-c", slow], cwd=tmp_path, stdout=subprocess.DEVNULL)
    _wait_for(tmp_path / "ready")
    supervisor.send_signal(signal.SIGINT)
    time.sleep(1)
    assert supervisor.poll() is None
    supervisor.send_signal(signal.SIGINT)
    assert supervisor.wait(timeout=50) == 0


def test_a_process_that_one_look_misses_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a parent which ended before it was looked at itself, behind the list of all processes."""
    tree, every = Tree(), processes._all
    child = subprocess.Popen(["sleep", "1000"])
    looks: Iterator[Callable[[], list[processes._Stat]]] = iter([list])
    try:
        monkeypatch.setattr(processes, "_all", lambda: next(looks, every)())
        assert [process.pid for process in tree.living()] == [child.pid]
    finally:
        child.kill()
        child.wait()


def test_a_recycled_process_id_is_another_process() -> None:
    process = identify(os.getpid())
    assert process is not None
    assert is_alive(process)
    assert not is_alive(Process(process.pid, process.pgid, process.start_time + 1))
    assert identify(2**22 + 1) is None
