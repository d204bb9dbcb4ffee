"""README.md is right: its files are written, its commands run in order, its tables compared with the program.

`pytest tests/unit/test_readme.py --update-docs` writes the outputs that it shows anew.
"""

from __future__ import annotations

import difflib
import re
import shutil
from pathlib import Path

import pytest

from dslaunch import cli, conffiles
from dslaunch.arguments import VERBS
from dslaunch.launch import LAUNCHERS
from tests.command import CommandLine
from tests.golden.cases import CASES, rendered
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
    assert fresh == README, f"README.md is out of date; `pytest tests/unit/test_readme.py --update-docs`:\n{diff}"


def test_what_is_not_run_stands_in_the_readme() -> None:
    lines = [line for block in bash_blocks(README) for line, _ in commands(block)]
    assert set(NOT_RUN) <= set(lines)
    assert all(any(line.startswith(start) for line in lines) for start in DRY_RUN)


def table(heading: str) -> list[list[str]]:
    """The rows of the table whose first heading this is, as cells without backquotes."""
    lines = README.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    rows: list[list[str]] = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().replace("`", "") for cell in line.strip("|").split("|")])
    return rows


@pytest.mark.parametrize("key", [row[0] for row in table("key")])
def test_key_is_a_key_of_the_schema(key: str, dslaunch: CommandLine) -> None:
    ran = dslaunch("schema", key)
    assert ran.status == 0, ran.err


def test_strategies_are_those_of_conf() -> None:
    (row,) = [row for row in table("key") if row[0] == "strategy"]
    named = set(re.findall(r"[a-z]+[0-9]\w*|ddp|layouts|auto", row[1]))
    assert len(named) > 5
    assert named <= set(conffiles.names("strategy"))


def test_launchers_and_engines_are_those_of_the_program() -> None:
    assert {row[0] for row in table("launcher")} == set(LAUNCHERS)
    assert {row[0] for row in table("engine")} | {"auto"} == set(conffiles.names("engine"))


def test_files_are_those_rendered() -> None:
    found = " ".join(name for words in CASES.values() for name in rendered(*words))
    assert {row[0] for row in table("file")} == set(re.sub(r"(ds_config)\.\w+(?=\.)", r"\1", found).split())


def test_exit_statuses_are_those_of_the_command_line() -> None:
    documented = cli.run.__doc__ or ""
    for status, _ in table("status"):
        assert re.search(rf"(^|;)\s*{status} ", documented, re.MULTILINE), f"{status} is not one of run's"


def test_verbs_in_the_text_exist() -> None:
    assert set(re.findall(r"`dslaunch ([a-z]+)\b(?!=)", README)) <= set(VERBS)
