"""A comparison as Markdown, for a comment on a pull request."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from dslaunch.planfile import Finding
from dslaunch.review.changes import FileChange, figures, layout_words
from dslaunch.review.difference import Difference
from dslaunch.review.figures_text import amount, change_of, name_of, value
from dslaunch.review.side import Side

_MOST_LINES = 200
"""Of a file's diff; a comment on GitHub holds 65,536 characters."""


def markdown(found: Difference) -> str:
    """The whole comparison; the diffs of files are folded."""
    return "\n".join(_blocks(found)) + "\n"


def markdown_alone(side: Side, why: str) -> str:
    """A plan that there is nothing to compare with: its layout, figures and findings."""
    return "\n".join(_alone(side, why)) + "\n"


def _alone(side: Side, why: str) -> Iterator[str]:
    yield f"### `{_code(side.title)}`\n"
    yield f"{_text(why)}\n"
    layouts = [(_text(name), layout_words(each)) for name, each in side.plan.components.items()]
    yield from _table(("component", "layout"), layouts)
    yield from _table(
        ("predicted", "", ""),
        [(_text(name_of(f)), amount(f.after, f.unit), change_of(f)) for f in figures(side, side)],
    )
    yield from _findings("Findings", side.findings)


def _blocks(found: Difference) -> Iterator[str]:
    yield f"### `{_code(found.before)}` -> `{_code(found.after)}`\n"
    if not found.kinds:
        yield "Nothing differs: same plan, same files."
        return
    yield f"Classes of change: {', '.join(f'**{kind}**' for kind in found.kinds)}\n"
    if found.questions:
        yield "**A reviewer should ask**\n"
        yield from (f"- {_text(question)}" for question in found.questions)
        yield ""
    yield from _table(
        ("class", "key", "before", "after"),
        [(c.kind, f"`{_code(c.key)}`", _text(value(c.before)), _text(value(c.after))) for c in found.keys],
    )
    yield from _table(
        ("component", "layout before", "after"),
        [(_text(c.component), c.before or "none", c.after or "none") for c in found.layouts],
    )
    yield from _table(
        ("predicted", "before", "after", ""),
        [
            (_text(name_of(f)), amount(f.before, f.unit), amount(f.after, f.unit), change_of(f))
            for f in found.figures
        ],
    )
    yield from _findings("New findings", found.new_findings)
    yield from _findings("Gone findings", found.gone_findings)
    for change in found.files:
        yield from _file(change)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    if not rows:
        return
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def _findings(title: str, findings: Sequence[Finding]) -> Iterator[str]:
    if not findings:
        return
    yield f"**{title}**\n"
    for finding in findings:
        yield f"- {finding.severity} `{finding.rule}`: {_text(finding.said)}"
    yield ""


def _file(change: FileChange) -> Iterator[str]:
    shown = list(change.diff[:_MOST_LINES])
    if left := len(change.diff) - len(shown):
        shown.append(f"... {left} more lines")
    fence = "`" * max(3, 1 + max((len(run) for line in shown for run in re.findall("`+", line)), default=0))
    yield f"<details><summary>{_text(change.name)} ({change.status}, {change.kind})</summary>\n"
    yield from (f"{fence}diff", *shown, fence, "\n</details>\n")


def _code(text: str) -> str:
    return text.replace("`", "'").replace("|", "\\|").replace("\n", " ")


def _text(text: str) -> str:
    """Plain words: what a recipe's author typed is shown, not interpreted."""
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", " ".join(text.split()))
