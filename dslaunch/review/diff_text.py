"""A comparison as a page for the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from dslaunch.planfile import Finding
from dslaunch.review.changes import FileChange, LayoutChange
from dslaunch.review.columns import lines, width
from dslaunch.review.difference import Difference
from dslaunch.review.figures_text import amount, change_of, name_of, value

Line = tuple[str, str]
"""(rich's style, text)."""
_DIFF_STYLES = {"+": "green", "-": "red", "@": "cyan"}


class _Page(Console):
    """A console that leaves a closed output to the command line."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def show(found: Difference) -> None:
    """Print the page; plain where the output is no terminal, or NO_COLOR is set."""
    console = _Page(file=sys.stdout, highlight=False, soft_wrap=True)
    for style, line in page(found, width()):
        console.print(Text(line, style=style), soft_wrap=True)


def page(found: Difference, wide: int | None) -> Iterator[Line]:
    """The page, line by line; tables are folded to `wide` characters, where that is known."""
    yield "bold", f"{found.before} -> {found.after}"
    if not found.kinds:
        yield "", "Nothing differs: same plan, same files."
        return
    yield "bold", f"Classes of change: {', '.join(found.kinds)}"
    rows = [(c.kind, c.key, value(c.before), "->", value(c.after)) for c in found.keys]
    yield from _table("Plan", rows, wide)
    layouts = [row for c in found.layouts for row in _layout(c)]
    yield from _table("Layout", layouts, wide)
    figures = [
        (name_of(f), amount(f.before, f.unit), "->", amount(f.after, f.unit), change_of(f))
        for f in found.figures
    ]
    yield from _table("Predicted", figures, wide)
    for finding in found.new_findings:
        yield from _finding("New finding", finding, wide)
    for finding in found.gone_findings:
        yield from _finding("Gone finding", finding, wide)
    for change in found.files:
        yield from _file(change)
    if found.questions:
        yield from (("", ""), ("bold", "Ask"))
    for question in found.questions:
        yield from (("", line) for line in lines([("-", question)], wide))


def _table(title: str, rows: Sequence[tuple[str, ...]], wide: int | None) -> Iterator[Line]:
    if rows:
        yield from (("", ""), ("bold", title))
        yield from (("", line) for line in lines(rows, wide))


def _layout(change: LayoutChange) -> Iterator[tuple[str, ...]]:
    """Before over after, so that what differs stands one above the other."""
    yield change.component, "", change.before or "(none)"
    yield "", "->", change.after or "(none)"


def _finding(title: str, finding: Finding, wide: int | None) -> Iterator[Line]:
    yield "", ""
    yield "bold", f"{title}: {finding.severity} [{finding.rule}]"
    said = f"{finding.where}: {finding.message}" if finding.where else finding.message
    yield from (("", line) for line in lines([(said,)], wide))
    if finding.fix:
        yield from (("", line) for line in lines([("  fix:", finding.fix)], wide))


def _file(change: FileChange) -> Iterator[Line]:
    yield "", ""
    yield "bold", f"{change.name} ({change.status}, {change.kind})"
    yield from ((_DIFF_STYLES.get(line[:1], ""), line) for line in change.diff)
