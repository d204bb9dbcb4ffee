"""The pages under docs/ are right: their commands run in order, and print what is shown.

`pytest tests/unit/test_docs.py --update-docs` writes outputs and figures anew.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest

from dslaunch.arguments import VERBS
from dslaunch.cli import main
from tests.command import CommandLine
from tests.pages import Folder, bash_blocks, commands, refreshed

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    path
    for part in (".", "howto", "why")
    for path in sorted((DOCS / part).glob("*.md"))
    if any(bash_blocks(path.read_text(encoding="utf-8")))
]
ELSEWHERE = {"review.md": "test_diff_docs.py"}
"""Pages that another test runs."""
SLOW = {path.relative_to(DOCS).as_posix() for path in (DOCS / "why").glob("*.md")}
"""Pages of many plans."""
NOT_RUN = {
    "git clone": "needs a network",
    "cd dslaunch": "the same",
    "python3 -m venv": "makes an environment: `make demo` does",
    ". .venv/bin/activate": "the same",
    "pip install": "installs packages: `make demo` does",
    "sbatch ": "needs SLURM: tests/real/test_slurm_launch.py submits",
}
DRY_RUN = {
    "dslaunch recipe=vla_tiny cluster=local": "trains for a minute: tests/real/test_training.py does it",
    "dslaunch launch ": "needs a cluster: tests/real/test_slurm_launch.py submits",
}
CLAIMS = (DOCS / "claims.md").read_text(encoding="utf-8")
_FIGURE = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?![\w])")
_MENTION = re.compile(r"(?:^ {4}|`)dslaunch ([^`\n\[]+)", re.MULTILINE)


def _params() -> list[object]:
    names = [(path, path.relative_to(DOCS).as_posix()) for path in PAGES]
    return [
        pytest.param(path, id=name, marks=[pytest.mark.slow] if name in SLOW else [])
        for path, name in names
        if name not in ELSEWHERE
    ]


@pytest.mark.parametrize("page", _params())
def test_page_shows_what_comes_out(
    page: Path, dslaunch: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, update_docs: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    for name in ("benchmarks", "templates"):  # what a checkout has
        (tmp_path / name).symlink_to(ROOT / name)
    text = page.read_text(encoding="utf-8")
    fresh = refreshed(text, Folder(tmp_path, dslaunch, NOT_RUN, DRY_RUN))
    if update_docs:
        page.write_text(fresh, encoding="utf-8")
        return
    diff = "\n".join(difflib.unified_diff(text.splitlines(), fresh.splitlines(), "shown", "real", lineterm=""))
    assert fresh == text, f"{page.name} is out of date; `pytest tests/unit/test_docs.py --update-docs`:\n{diff}"


def _lines() -> list[str]:
    """The commands of all pages."""
    blocks = [block for path in PAGES for block in bash_blocks(path.read_text(encoding="utf-8"))]
    return [line for block in blocks for line, _ in commands(block)]


def test_no_list_names_what_no_page_has() -> None:
    lines = _lines()
    for start in (*NOT_RUN, *DRY_RUN):
        assert any(line.startswith(start) for line in lines), start
    names = {path.relative_to(DOCS).as_posix() for path in PAGES}
    assert names >= SLOW | set(ELSEWHERE)


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
