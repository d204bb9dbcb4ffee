"""docs/rules.md is the catalogue's, and every id in it is explained."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from dslaunch.rules import page, rules
from dslaunch.rules.catalogue import COMMAND

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "rules.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| \[([\w.-]+)\]\(([^)]+)\) \|", TEXT, re.MULTILINE))


def test_the_page_is_what_its_command_makes() -> None:
    assert COMMAND in TEXT
    words = COMMAND.partition(" >")[0].split()
    assert words[0] == "python"
    made = subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True, check=True)
    assert made.stdout == TEXT, f"run: {COMMAND}"


def test_every_rule_stands_in_the_page_with_its_own_page() -> None:
    assert list(ROWS) == list(rules())
    for rule_id, link in ROWS.items():
        assert (DOCS / link).is_file(), link
        assert page(rule_id).startswith(f"# {rule_id}\n")


def test_each_line_has_five_cells() -> None:
    lines = [line for line in TEXT.splitlines() if line.startswith("| [")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {6}


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_the_page_is_found_from_where_a_user_looks(name: str) -> None:
    assert "docs/rules.md" in (DOCS.parent / name).read_text(encoding="utf-8")
