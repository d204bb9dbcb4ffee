"""The pages under docs/ are right: their commands run in order, and print what is shown.

`pytest tests/real/test_docs.py --update-docs` writes outputs and figures anew.
"""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

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
ELSEWHERE = {"review.md": "tests/unit/test_diff_docs.py"}
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
    assert fresh == text, f"{page.name} is out of date; `pytest tests/real/test_docs.py --update-docs`:\n{diff}"


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
