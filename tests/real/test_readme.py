"""README.md is right: its files are written, its commands run in order, its outputs are those that it shows.

`pytest tests/real/test_readme.py --update-docs` writes the outputs anew.
"""

from __future__ import annotations

import difflib
import shutil
from pathlib import Path

import pytest

from tests.command import CommandLine
from tests.pages import Folder, bash_blocks, commands, refreshed

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")

NOT_RUN = {
    "make demo": ".ci/run does",
    "make test": "this is it",
    "pip install .": "installs packages: .ci/run installs the wheel",
    "pip install '.[runtime]'": "installs packages: `make demo` installs them",
}
DRY_RUN = {
    "dslaunch recipe=vla_tiny cluster=local": "trains for a minute: tests/real/test_training.py does it",
    "dslaunch recipe=vla_tiny cluster=local launcher=torchrun": "the same",
    "dslaunch recipe=my_vla --config-dir site launcher=ssh": "needs two hosts",
    "dslaunch recipe=my_vla --config-dir site launcher=slurm": "needs SLURM: test_slurm_launch.py submits",
    "dslaunch launch mine launcher=slurm --wait": "the same",
}
"""How a launch begins that is run with --dry-run, and why."""


def test_commands_run_in_order_and_print_what_is_shown(
    dslaunch: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, update_docs: bool
) -> None:
    """In a folder with what a checkout has, and the README's own files."""
    shutil.copytree(ROOT / "templates", tmp_path / "templates")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    fresh = refreshed(README, Folder(tmp_path, dslaunch, NOT_RUN, DRY_RUN))
    if update_docs:
        (ROOT / "README.md").write_text(fresh, encoding="utf-8")
        return
    diff = "\n".join(difflib.unified_diff(README.splitlines(), fresh.splitlines(), "shown", "real", lineterm=""))
    assert fresh == README, f"README.md is out of date; `pytest tests/real/test_readme.py --update-docs`:\n{diff}"


def test_what_is_not_run_stands_in_the_readme() -> None:
    lines = [line for block in bash_blocks(README) for line, _ in commands(block)]
    assert set(NOT_RUN) <= set(lines)
    assert all(any(line.startswith(start) for line in lines) for start in DRY_RUN)
