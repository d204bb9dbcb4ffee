"""A later attempt of a Megatron run loads its own newest checkpoint: rank.sh, run with a stand-in for Python."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parents[1] / "golden" / "llama3_70b_megatron"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """The rendered files, and a program that notes its arguments."""
    folder = tmp_path / "a run"
    shutil.copytree(GOLDEN, folder)
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@" >"$DSLAUNCH_RUN_DIR/words"\n')
    python.chmod(0o755)
    return folder


def _words(run_dir: Path, attempt: int) -> list[str]:
    env = {
        **os.environ,
        "RANK": "0",
        "WORLD_SIZE": "64",
        "DSLAUNCH_RUN_DIR": str(run_dir),
        "DSLAUNCH_PYTHON": str(run_dir.parent / "python"),
        "DSLAUNCH_MEGATRON_PATH": str(run_dir),
        "DSLAUNCH_ATTEMPT": str(attempt),
    }
    subprocess.run(["bash", str(run_dir / "rank.sh")], env=env, cwd=run_dir, check=True, timeout=180)
    return (run_dir / "words").read_text().splitlines()


def test_a_restart_loads_what_the_run_saved_once_there_is_something(run_dir: Path) -> None:
    first = _words(run_dir, 1)
    assert "--load" not in first
    assert _words(run_dir, 2) == first, "nothing was saved yet"
    checkpoints = run_dir / "checkpoints"
    checkpoints.mkdir()
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("500")
    assert _words(run_dir, 3) == [*first, "--load", str(checkpoints)]
    assert _words(run_dir, 1) == first, "a first attempt starts as planned"


def test_weights_alone_are_loaded_at_the_start_and_never_again(run_dir: Path) -> None:
    arguments = run_dir / "megatron_args.txt"
    arguments.write_text(arguments.read_text() + "--load /weights\n--finetune\n")
    (run_dir / "checkpoints").mkdir()
    (run_dir / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("500")
    assert _words(run_dir, 1)[-3:] == ["--load", "/weights", "--finetune"]
    later = _words(run_dir, 2)
    assert "--finetune" not in later
    assert later[-4:] == ["--load", "/weights", "--load", str(run_dir / "checkpoints")]
