"""Nobody reads the output any more: no traceback, and the status that a shell gives such a program."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.golden.cases import rendered, written

LLAMA = ["recipe=llama3_8b", "cluster=8xA100"]
VERBS = {
    "models": ["models"],
    "clusters": ["clusters"],
    "recipes": ["recipes"],
    "schema": ["schema", "training"],
    "rules": ["explain"],
    "page of a rule": ["explain", "key.unknown"],
    "plan": ["plan", *LLAMA],
    "plan as JSON": ["plan", *LLAMA, "--json"],
    "check": ["check", *LLAMA],
    "render": ["render", *LLAMA, "-o", "out"],
    "dry run": ["launch", *LLAMA, "script=train.py", "training.grad_accum_dtype=bf16", "--dry-run"],
    "help": ["--help"],
    "help of a verb": ["plan", "--help"],
    "version": ["--version"],
    "completion": ["completion", "bash"],
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_closed_output_ends_each_verb_quietly(verb: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    ends_quietly(["dslaunch", *VERBS[verb]], tmp_path)


def test_a_closed_output_ends_the_drawing_of_a_plan_quietly(tmp_path: Path) -> None:
    out = written(tmp_path / "out", rendered("recipe=vla_tiny", "cluster=local", "strategy=hetero"))
    ends_quietly(["dslaunch.runtime", "--plan", str(out / "plan.json"), "--show"], tmp_path)


def ends_quietly(words: list[str], folder: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=folder, stdout=writing, stderr=subprocess.PIPE,
        text=True, timeout=300, check=False, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    os.close(writing)
    assert done.returncode == 141
    assert not [line for line in done.stderr.splitlines() if "Traceback" in line or "Error" in line]
