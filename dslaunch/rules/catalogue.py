"""Every rule as one page of Markdown: `python -m dslaunch.rules.catalogue > docs/rules.md`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import groupby

from dslaunch.rules.output import versions
from dslaunch.rules.registry import MEANINGS, SEVERITIES, Rule, rules

COMMAND = "python -m dslaunch.rules.catalogue > docs/rules.md"
_PAGES = "../dslaunch/rules/pages"
_PREFACE = f"""Each id links to its page, which `dslaunch explain ID` prints too: why, a bad and a
good example, sources. `--select` and `--ignore` take ids and subjects. A single finding may be reported above or
below the severity that stands here. Where no version stands, the source names those it was read or run at.
[How the rules were tried](rules-tried.md) says what they were compared with.

This page is made by `{COMMAND}`.
"""


def catalogue() -> str:
    """The page: what a severity means, and a table of rules for each subject."""
    every = list(rules().values())
    counts = Counter(rule.severity for rule in every)
    severities = [(name, str(counts[name]), MEANINGS[name]) for name in reversed(SEVERITIES)]
    subjects = [_subject(name, found) for name, found in groupby(every, subject)]
    return (
        f"# The rules of `dslaunch check`\n\n"
        f"{len(every)} rules on {len(subjects)} subjects. {_PREFACE}\n"
        f"{_table(('severity', 'rules', 'meaning'), severities)}\n" + "\n".join(subjects)
    )


def subject(rule: Rule) -> str:
    """The part of the id before the dot."""
    return rule.id.partition(".")[0]


def _subject(name: str, found: Iterable[Rule]) -> str:
    rows = [
        (f"[{rule.id}]({_PAGES}/{rule.id}.md)", rule.severity, rule.summary, versions(rule), rule.evidence)
        for rule in found
    ]
    return f"## {name}\n\n{_table(('rule', 'severity', 'what it finds', 'versions', 'source'), rows)}"


def _table(titles: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [titles, tuple("---" for _ in titles), *rows]
    return "".join(f"| {' | '.join(_cell(text) for text in line)} |\n" for line in lines)


def _cell(text: str) -> str:
    """On one line, with what Markdown would read as the end of a cell or as emphasis told apart."""
    return " ".join(text.split()).replace("|", "\\|").replace("*", "\\*").replace("__", "\\_\\_")


if __name__ == "__main__":
    print(catalogue(), end="")
