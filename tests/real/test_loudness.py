"""-q, -v, and progress: what is said beside a result, and where."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import CommandLine

NOTED = ["render", "recipe=vla70b", "cluster=64xA100", "-o", "out"]
SLOW = """
import sys, time
from dslaunch.output import bar, step
with step("something slow"):
    time.sleep(float(sys.argv[1]))
with bar("three things", 3) as advance:
    for each in range(3):
        with step("one of them"):
            time.sleep(float(sys.argv[1]) / 2)
        advance(each)
print("the result")
"""


def test_quiet_leaves_the_result(
    dslaunch: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    usual = dslaunch(*NOTED)
    quiet = dslaunch(*NOTED, "-q")
    assert "recompute.selective" in usual.err
    assert (quiet.out, quiet.err, quiet.status) == (usual.out, "", 0)
    assert "no such recipe" in dslaunch("--quiet", "plan", "recipe=nosuch").err


def test_verbose_says_the_steps_with_their_seconds(dslaunch: CommandLine) -> None:
    said = dslaunch("-v", "plan", "recipe=llama3_8b").err.splitlines()
    steps = [line.removeprefix("dslaunch: ").partition(":")[0] for line in said]
    assert steps == ["compose and validate", "plan", "render", "check"]
    assert all(line.endswith(" s") for line in said)


def test_both_are_refused_and_a_scripts_own_are_its_own(dslaunch: CommandLine) -> None:
    assert "-q and -v are both given" in dslaunch("plan", "recipe=llama3_8b", "-q", "-v").err
    ran = dslaunch("plan", "recipe=llama3_8b", "script=train.py", "--json", "--", "-q", "-v")
    assert ran.json["program"]["args"] == ["-q", "-v"]
    assert ran.err == ""


def _on_a_terminal(seconds: float) -> tuple[str, str]:
    """(standard output, what a terminal at standard error got)."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", SLOW, str(seconds)]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env=environment) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                shown += os.read(ours, 65536)
            except OSError:  # how Linux says that the other end is closed
                break
        assert process.stdout
        out = process.stdout.read()
    os.close(ours)
    return out.decode(), shown.decode()


def test_progress_shows_on_a_terminal_what_takes_longer_than_a_second() -> None:
    out, shown = _on_a_terminal(1.5)
    assert out == "the result\n"
    assert "something slow" in shown
    assert "three things" in shown
    assert "2/3" in shown
    assert "one of them" not in shown
    assert shown.rstrip().endswith("\x1b[2K") or "\x1b[2K" in shown.splitlines()[-1]  # and is taken away


def test_what_is_done_at_once_shows_nothing() -> None:
    assert _on_a_terminal(0.0) == ("the result\n", "")


def test_no_terminal_gets_no_progress() -> None:
    command = [sys.executable, "-c", SLOW, "1.2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=180)
    assert (done.stdout, done.stderr) == ("the result\n", "")
