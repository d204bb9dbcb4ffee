"""What each verb imports: the help nothing heavy, `plan` and `render` no training framework."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {"hydra", "omegaconf", "pydantic", "jinja2", "rich"}
TRAINING = {"torch", "deepspeed", "transformers", "megatron", "numpy", "accelerate"}
VLA70B = ["recipe=vla70b", "cluster=64xA100"]


def _imported(folder: Path, *words: str) -> set[str]:
    """Top-level modules that `python -m dslaunch WORDS` imports; the command has to succeed."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "dslaunch", *words],
        cwd=folder, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return {line.rsplit("|", 1)[1].strip().split(".")[0] for line in lines}


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["plan", "--help"], ["completion", "bash"]])
def test_help_imports_nothing_heavy(tmp_path: Path, words: list[str]) -> None:
    imported = _imported(tmp_path, *words)
    assert {"click", "dslaunch"} <= imported
    assert not imported & (HEAVY | TRAINING)


@pytest.mark.parametrize(
    "words",
    [
        ["plan", *VLA70B],
        ["plan", *VLA70B, "--json"],
        ["render", *VLA70B, "-o", "out"],
        ["check", *VLA70B],
        ["recipe=vla_tiny", "cluster=local", f"launcher.python={sys.executable}", "--dry-run"],
    ],
    ids=lambda words: " ".join(words[:1]),
)
def test_planning_and_rendering_import_no_training_framework(tmp_path: Path, words: list[str]) -> None:
    imported = _imported(tmp_path, *words)
    assert {"hydra", "pydantic", "dslaunch"} <= imported
    assert not imported & TRAINING
