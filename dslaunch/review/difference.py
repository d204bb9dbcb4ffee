"""Two sides compared: everything that `dslaunch diff` prints, as one value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dslaunch.errors import ConfigError, listed, nearest
from dslaunch.planfile import Finding
from dslaunch.review.changes import (
    Figure,
    FileChange,
    KeyChange,
    LayoutChange,
    figures,
    file_changes,
    finding_changes,
    key_changes,
    layout_changes,
)
from dslaunch.review.classes import KINDS, Kind
from dslaunch.review.questions import questions
from dslaunch.review.side import Side
from dslaunch.rules.checking import fails
from dslaunch.rules.registry import SEVERITIES

DIFF_SCHEMA = "dslaunch.diff/1"


@dataclass(frozen=True)
class Difference:
    """What changes from `before` to `after`. Printed by `--format json` as it is."""

    before: str
    """As the user named it."""
    after: str
    kinds: tuple[Kind, ...]
    """The classes that changes have, the gravest first; empty: nothing differs."""
    keys: tuple[KeyChange, ...]
    layouts: tuple[LayoutChange, ...]
    figures: tuple[Figure, ...]
    files: tuple[FileChange, ...]
    new_findings: tuple[Finding, ...]
    gone_findings: tuple[Finding, ...]
    questions: tuple[str, ...]
    schema: str = DIFF_SCHEMA


def compare(before: Side, after: Side) -> Difference:
    """What changes from `before` to `after`."""
    keys = tuple(sorted(key_changes(before.plan, after.plan), key=lambda change: KINDS.index(change.kind)))
    files = file_changes(before, after, keys)
    kinds = {change.kind for change in keys} | {change.kind for change in files}
    new, gone = finding_changes(before, after)
    return Difference(
        before=before.title,
        after=after.title,
        kinds=tuple(kind for kind in KINDS if kind in kinds),
        keys=keys,
        layouts=layout_changes(before.plan, after.plan),
        figures=figures(before, after),
        files=files,
        new_findings=new,
        gone_findings=gone,
        questions=questions(before, after, keys, files),
    )


def thresholds(text: str) -> tuple[str, ...]:
    """The words of `--fail-on`: classes of change, and a severity that new findings must stay below.

    Raises:
        ConfigError: a word that is neither.
    """
    words = tuple(word.strip() for word in text.split(",") if word.strip())
    allowed = (*KINDS, *SEVERITIES)
    for word in words:
        if word not in allowed:
            raise ConfigError(
                f"--fail-on {word}: no class of change and no severity. Allowed: {listed(allowed)}, joined by "
                f"commas.{nearest(word, allowed)}"
            )
    return words


def stops(found: Difference, words: Sequence[str]) -> bool:
    """Whether a change has one of these classes, or a new finding reaches one of these severities."""
    severities = [word for word in words if word in SEVERITIES]
    return bool(set(words) & set(found.kinds)) or any(fails(found.new_findings, s) for s in severities)
