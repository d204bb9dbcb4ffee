"""What a killed rank was about to do is told: its note outlives it."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from dslaunch.run.causes import Facts, judge
from dslaunch.run.records import read_ranks

_DIES = """
import os, signal
from dslaunch.progress import phase
phase("a longer name of what it did before: " + "x" * 300)
phase("saving step 4")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_rank_is_told_with_what_it_was_about_to_do(tmp_path: Path) -> None:
    environment = {**os.environ, "DSLAUNCH_RUN_DIR": str(tmp_path), "RANK": "3"}
    done = subprocess.run([sys.executable, "-c", _DIES], env=environment, timeout=180)
    assert done.returncode == -signal.SIGKILL
    (tmp_path / "ranks" / "3.exit").write_text("137\n")
    (rank,) = read_ranks(tmp_path / "ranks")
    assert rank.phase == "saving step 4"
    ending = judge(Facts(1, "", (), [rank], tmp_path / "logs"))
    assert str(ending.evidence[-1]) == "ranks: rank 3 exits 137 (SIGKILL) while saving step 4"


def test_one_rank_notes_the_versions_that_it_runs_with(tmp_path: Path) -> None:
    for rank in ("0", "3"):
        environment = {**os.environ, "DSLAUNCH_RUN_DIR": str(tmp_path / rank), "RANK": rank}
        code = "from dslaunch.progress import watch; watch()"
        subprocess.run([sys.executable, "-c", code], env=environment, timeout=180, check=True)
    found = json.loads((tmp_path / "0" / "ranks" / "versions.json").read_text())
    assert found["python"] == platform.python_version()
    assert found["numpy"] == metadata.version("numpy")
    assert "0.stacks" in [path.name for path in (tmp_path / "0" / "ranks").iterdir()]
    assert [path.name for path in (tmp_path / "3" / "ranks").iterdir()] == ["3.stacks"]


def test_outside_a_run_nothing_is_written(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "DSLAUNCH_RUN_DIR"}
    code = _DIES.replace("os.kill", "print")
    subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, timeout=180, check=True)
    assert not list(tmp_path.iterdir())
