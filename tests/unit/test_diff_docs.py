"""docs/review.md: its commands run, its tables are the program's."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from dslaunch.planfile import PLAN_SCHEMA, PREDICTION_SCHEMA
from dslaunch.review.classes import KINDS
from dslaunch.review.json_schema import names
from tests.command import CommandLine
from tests.real.parts import need

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "review.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS = [line for kind, text in BLOCK.findall(TEXT) if kind == "bash" for line in text.splitlines()]


@pytest.mark.parametrize("line", COMMANDS)
def test_command_runs(
    line: str, dslaunch: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("vl_convert")
    monkeypatch.chdir(tmp_path)
    program, *words = shlex.split(line)
    assert program == "dslaunch"
    ran = dslaunch(*words)
    assert ran.status == 0, ran.err


def test_the_classes_are_those_of_the_program() -> None:
    rows = [line.split("|")[1].strip() for line in TEXT.splitlines() if line.startswith("| ")]
    assert [row for row in rows if row in KINDS] == list(KINDS)


@pytest.mark.parametrize("schema", sorted(set(names()) - {PLAN_SCHEMA, PREDICTION_SCHEMA}))
def test_each_schema_is_named(schema: str) -> None:
    assert f"`{schema}`" in TEXT


def test_yaml_and_pictures_are_whole() -> None:
    for kind, text in BLOCK.findall(TEXT):
        if kind == "yaml":
            assert yaml.safe_load(text)
    for name in re.findall(r"!\[.*?\]\((.*?)\)", TEXT):
        assert (DOCS / name).is_file()
