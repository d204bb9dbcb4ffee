"""The tables of README.md are compared with the program; tests/real/test_readme.py runs its commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dslaunch import cli, conffiles
from dslaunch.arguments import VERBS
from dslaunch.launch import LAUNCHERS
from tests.command import CommandLine
from tests.golden.cases import CASES, rendered

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


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
