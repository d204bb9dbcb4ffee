"""What the pages under docs/ say of the program without running it: figures of verdicts, verbs, options.

tests/real/test_docs.py runs their commands.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dslaunch.arguments import VERBS
from dslaunch.cli import main

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CLAIMS = (DOCS / "claims.md").read_text(encoding="utf-8")
_FIGURE = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?![\w])")
_MENTION = re.compile(r"(?:^ {4}|`)dslaunch ([^`\n\[]+)", re.MULTILINE)


def _claims() -> list[object]:
    """(figure of a verdict, the section that its row links to) of docs/claims.md; counts below ten are words."""
    rows = re.findall(r"^\| \[.*?\]\(#(.*?)\).*?\| (.*?) \|$", CLAIMS, re.MULTILINE)
    found = [(figure, anchor) for anchor, verdict in rows for figure in _FIGURE.findall(verdict)]
    return [(figure, anchor) for figure, anchor in found if "." in figure or float(figure) >= 10]


@pytest.mark.parametrize(("figure", "anchor"), _claims())
def test_the_figures_of_a_verdict_are_outputs_of_its_section(figure: str, anchor: str) -> None:
    sections = {_slug(text.partition("\n")[0]): text for text in re.split(r"^## ", CLAIMS, flags=re.MULTILINE)}
    outputs = re.findall(r"^```text\n(.*?)^```$", sections[anchor], re.MULTILINE | re.DOTALL)
    digits = len(figure.partition(".")[2])
    assert figure in {f"{float(real):.{digits}f}" for text in outputs for real in _FIGURE.findall(text)}


def _slug(heading: str) -> str:
    """The anchor that the site gives a heading."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def _mentions() -> list[str]:
    """What follows `dslaunch ` in the README and all pages, indented or in backquotes."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *DOCS.rglob("*.md"))]
    return [found for text in texts for found in _MENTION.findall(text)]


@pytest.mark.parametrize("words", sorted(set(_mentions())))
def test_verbs_and_options_that_pages_name_exist(words: str) -> None:
    typed = words.partition(" -- ")[0].partition("#")[0].split()
    verb = typed[0] if typed and "=" not in typed[0] and not typed[0].startswith("-") else "launch"
    assert verb in VERBS
    command = main.commands[verb]
    known = {option for each in command.params for option in (*each.opts, *each.secondary_opts)}
    given = {word.partition("=")[0] for word in typed if re.fullmatch(r"--[a-z][a-z-]*(=.*)?|-[a-z]", word)}
    assert given <= known | {"-q", "--quiet", "-v", "--verbose", "-h", "--help", "--version"}
