"""From the text of an error or a log to causes, checks, and the rules that would have told before.

The symptoms stand in symptoms.yaml.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

from dslaunch.rules.registry import rules

_MAX_TEXT = 2_000_000
"""Characters of a log that are looked at: its end, where the error stands."""
_MOST = 3
"""Symptoms that are printed."""
_MOST_VARIABLE = 8
"""Words that may stand where a message has a number, a path or a name."""
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PATH = re.compile(r"(?:[\w.~-]*/)+[\w.-]+")
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+(?:[.:]\d+)*")
_VARIABLE = re.compile(r"'[^'\n]*'|<[^<>\n]*>")
_PUNCTUATION = re.compile(r"[^a-z#_+-]+")
_WORD = re.compile(r"-?[a-z0-9_]+(?:-[a-z0-9_]+)*")


@dataclass(frozen=True)
class Symptom:
    """One thing that users see; the fields are those of symptoms.yaml."""

    id: str
    title: str
    messages: tuple[str, ...]
    words: tuple[tuple[frozenset[str], ...], ...]
    """Rows of which each holds alternatives; a row speaks where every part has a word in the text."""
    causes: tuple[str, ...]
    checks: tuple[str, ...]
    rules: tuple[str, ...]
    source: str


@cache
def symptoms() -> tuple[Symptom, ...]:
    """All of them, in the order of the file."""
    import yaml

    text = (resources.files("dslaunch.rules") / "symptoms.yaml").read_text(encoding="utf-8")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return tuple(_symptom(row) for row in yaml.load(text, Loader=loader))


def _symptom(row: dict[str, list[str]]) -> Symptom:
    words = tuple(tuple(frozenset(part.split("|")) for part in parts) for parts in row["words"])
    lists = {name: tuple(row[name]) for name in ("messages", "causes", "checks", "rules")}
    return Symptom(id=str(row["id"]), title=str(row["title"]), words=words, source=str(row["source"]), **lists)


def matching(text: str) -> list[Symptom]:
    """The symptoms that the text shows, the surest first: the longest message, then the most words."""
    text = text[-_MAX_TEXT:]
    plain = _normal(text)
    words = frozenset(_WORD.findall(text.lower()))
    scored = [(_score(symptom, plain, words), symptom) for symptom in symptoms()]
    found = sorted((pair for pair in scored if pair[0] > 0), key=lambda pair: -pair[0])
    return [symptom for _, symptom in found]


def explained(text: str) -> str:
    """What is printed for `dslaunch explain --symptom TEXT`."""
    found = matching(text)[:_MOST]
    if not found:
        known = "".join(f"  {symptom.title}\n" for symptom in symptoms())
        return f"No symptom that is known fits this text. Give the error's own line. Known are:\n{known}"
    return "\n".join("\n".join(_lines(symptom)) + "\n" for symptom in found)


def _score(symptom: Symptom, plain: str, words: frozenset[str]) -> float:
    """Characters of the longest message that stands in the text; a row of words counts less than any message."""
    messages = [weight for weight, pattern in _patterns(symptom) if pattern.search(plain)]
    rows = [len(row) for row in symptom.words if all(part & words for part in row)]
    return max(messages, default=0) * 10 + max(rows, default=0)


@cache
def _patterns(symptom: Symptom) -> tuple[tuple[int, re.Pattern[str]], ...]:
    """Of each message, its fixed characters and what finds it in a text that went through `_normal`."""
    return tuple(_pattern(message) for message in symptom.messages)


def _pattern(message: str) -> tuple[int, re.Pattern[str]]:
    parts = [part.strip() for part in re.split(r" #(?: #)* ", _normal(message)) if part.strip()]
    joined = rf"(?: \S+){{0,{_MOST_VARIABLE}}}? ".join(re.escape(part) for part in parts)
    return sum(map(len, parts)), re.compile(f" {joined} ")


def _normal(text: str) -> str:
    """Lower case without colours and punctuation; paths, quoted names and words with numbers become `#`."""
    text = _VARIABLE.sub(" # ", _PATH.sub(" # ", _ANSI.sub("", text).lower()))
    words = _PUNCTUATION.sub(" ", _NUMBER.sub("#", text)).split()
    return f" {' '.join('#' if '#' in word else word for word in words)} "


def _lines(symptom: Symptom) -> Iterator[str]:
    yield f"{symptom.title} ({symptom.id})"
    yield from _section("may come from", symptom.causes)
    yield from _section("find out", symptom.checks)
    caught = [f"{rule_id}: {rules()[rule_id].summary}" for rule_id in symptom.rules]
    yield from _section("`dslaunch check` reports", caught)
    yield f"  source: {symptom.source}"


def _section(title: str, items: Sequence[str]) -> Iterator[str]:
    if items:
        yield f"  {title}:"
        yield from (f"    - {item}" for item in items)
