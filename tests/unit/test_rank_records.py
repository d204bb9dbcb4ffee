"""A rank that outlives its attempt leaves the records of the next one alone."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from dslaunch import progress
from tests.command import CommandLine

_PROGRAM = '#!/bin/sh\necho $$ >"$DSLAUNCH_WORK_DIR/program"\nexec sleep 60\n'


def test_its_exit_status_stands_with_its_own_attempt(dslaunch: CommandLine, tmp_path: Path) -> None:
    """The records are put aside while it still runs, as they are where its host was cut off."""
    run = tmp_path / "run"
    assert dslaunch("render", "recipe=vla_tiny", "cluster=local", "-o", str(run)).status == 0
    program = tmp_path / "python"
    program.write_text(_PROGRAM)
    program.chmod(0o755)
    place = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "DSLAUNCH_PYTHON": str(program)}
    environ = {**os.environ, **place, "DSLAUNCH_WORK_DIR": str(tmp_path)}
    rank = subprocess.Popen(["bash", str(run / "rank.sh")], env=environ, stdout=subprocess.DEVNULL)
    limit = time.monotonic() + 90
    while not (tmp_path / "program").is_file() or not (tmp_path / "program").read_text():
        assert time.monotonic() < limit
        time.sleep(0.02)
    assert (run / "ranks" / "1.exit").read_text() == "running\n"
    (run / "ranks").rename(run / "ranks.attempt-1")
    (run / "ranks").mkdir()
    os.kill(int((tmp_path / "program").read_text()), signal.SIGKILL)
    assert rank.wait(30) == 137
    assert (run / "ranks.attempt-1" / "1.exit").read_text() == "137\n"
    assert list((run / "ranks").iterdir()) == []


def test_its_steps_stand_with_its_own_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSLAUNCH_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    progress.step(7)
    (tmp_path / "ranks").rename(tmp_path / "ranks.attempt-1")
    progress.step(8)
    assert (tmp_path / "ranks.attempt-1" / "3.step").read_text().split()[0] == "8"
    assert not (tmp_path / "ranks").exists()
