"""From the text of an error or a log to causes, checks, and the rules that would have told before.

The symptoms stand in symptoms.yaml; what DeepSpeed and its kin raise for one rule or two stands in raised.yaml,
and the rules' own pages explain it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from dslaunch.rules.output import introduction
from dslaunch.rules.registry import rules

_MAX_TEXT = 2_000_000
"""Characters of a log that are looked at: its end, where the error stands."""
_MOST = 3
"""Symptoms that are printed."""
_MOST_LINES = 200
"""Lines, the last ones, that are looked at for words without a message."""
_MOST_WORDS = 30
"""Words of such a line: a longer one is a log's, and holds the word for anything that is counted."""
_ENDINGS = ("s", "es", "d", "ed", "ing", "ly")
_MOST_VARIABLE = 8
"""Words that may stand where a message has a number, a path or a name."""
_OF_ITS_OWN = 40
"""Characters that tell a message whatever stands at its variable places; in a shorter one numbers have to."""
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PATH = re.compile(r"(?:[\w.~-]*/)+[\w.-]+")
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+(?:[.:]\d+)*")
_VARIABLE = re.compile(r"(?<!\w)'[^'\n]*'|<[^<>\n]*>")
_PUNCTUATION = re.compile(r"[^a-z#_+-]+")
_DIGITS = re.compile(r"\d+")
_WORD = re.compile(r"-?[a-z0-9_]+(?:-[a-z0-9_]+)*")


@dataclass(frozen=True)
class Symptom:
    """One thing that users see; the fields are those of symptoms.yaml."""

    id: str
    title: str
    messages: tuple[str, ...]
    exact: tuple[str, ...]
    """Texts of which numbers and names count too."""
    words: tuple[tuple[frozenset[str], ...], ...]
    """Rows of which each holds alternatives; a row speaks where every part has a word in one line of the text."""
    causes: tuple[str, ...]
    checks: tuple[str, ...]
    rules: tuple[str, ...]
    source: str
    last: tuple[str, ...] = ()
    """Messages of a healthy run too, which tell where nothing stands behind them."""
    follows: bool = False
    """It comes after another error, which the same text may show: that one goes first."""
    warns: bool = False
    """A run goes on after it: an error that the text shows goes first."""
    ends: bool = False
    """It says no more than that something ended: all others go first."""


@cache
def symptoms() -> tuple[Symptom, ...]:
    """All of them, in the order of the files."""
    return (*seen(), *(_raised(row) for row in _rows("raised.yaml")))


@cache
def seen() -> tuple[Symptom, ...]:
    """Those that have causes of their own, and are no text of one rule."""
    return tuple(_symptom(row) for row in _rows("symptoms.yaml"))


def _rows(name: str) -> list[dict[str, list[str]]]:
    import yaml

    text = (resources.files("dslaunch.rules") / name).read_text(encoding="utf-8")
    found: list[dict[str, list[str]]] = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return found


def _raised(row: dict[str, list[str]]) -> Symptom:
    """What is raised for these rules, as the first one's page and its fellows' explain it."""
    first = rules()[row["rules"][0]]
    causes = [" ".join(introduction(rule_id).split()) for rule_id in row["rules"]]
    checks = [
        "`dslaunch check` on the files names the key and its place",
        *(f"`dslaunch explain {rule_id}` shows a bad and a good example" for rule_id in row["rules"]),
    ]
    words = {"id": first.id, "title": first.summary.rstrip("."), "source": first.evidence, "words": []}
    return _symptom({**row, **words, "causes": causes, "checks": checks})


def _symptom(row: Mapping[str, Any]) -> Symptom:
    words = tuple(tuple(frozenset(part.split("|")) for part in parts) for parts in row["words"])
    given: dict[str, Any] = {name: str(row[name]) for name in ("id", "title", "source")}
    lists = ("messages", "exact", "last", "causes", "checks", "rules")
    given |= {name: tuple(row.get(name, ())) for name in lists}
    given |= {name: bool(row.get(name)) for name in ("follows", "warns", "ends")}
    return Symptom(words=words, **given)


def matching(text: str) -> list[Symptom]:
    """The symptoms that the text shows, the surest first: the longest message, then the most words."""
    text = text[-_MAX_TEXT:]
    plain = _normal(text)
    lower = text.lower()
    lines = {_words(line) for line in lower.splitlines()[-_MOST_LINES:]}
    end = _normal(text.rstrip().rpartition("\n")[2])
    scored = [(_score(symptom, lower, plain, lines, end), symptom) for symptom in symptoms()]
    found = sorted((pair for pair in scored if pair[0] > 0), key=lambda pair: (pair[1].ends, -pair[0]))
    return [symptom for _, symptom in found]


def explained(text: str) -> str:
    """What is printed for `dslaunch explain --symptom TEXT`."""
    found = matching(text)[:_MOST]
    if not found:
        known = "".join(f"  {symptom.title}\n" for symptom in seen())
        return (
            "No symptom that is known fits this text. Give the error's own line. Known are what DeepSpeed raises "
            f"for {len(symptoms()) - len(seen())} mistakes of a configuration, and:\n{known}"
        )
    return "\n".join("\n".join(_lines(symptom)) + "\n" for symptom in found)


def _words(line: str) -> frozenset[str]:
    """The words of a line, and what they come from: hangs, corrupted, zero_pp_rank_3."""
    found = _WORD.findall(line)
    typed = frozenset(found if len(found) <= _MOST_WORDS else ())
    stems = {word.removesuffix(end) for word in typed for end in _ENDINGS if len(word) > len(end) + 2}
    return typed | stems | {_DIGITS.sub("#", word) for word in typed if "_" in word}


def _score(symptom: Symptom, lower: str, plain: str, lines: set[frozenset[str]], end: str) -> float:
    """Characters of the longest message that stands in the text; a row of words counts less than any message.

    Args:
        end: the text's last line.
    """
    messages = [*_found(symptom.messages, plain), *_found(symptom.last, end)]
    messages += [
        2 * len(exact)
        for exact in symptom.exact
        if all(word in lower for word in exact.lower().split()) and _exactly(exact.lower()).search(lower)
    ]
    rows = [len(row) for row in symptom.words for words in lines if all(part & words for part in row)]
    weight = 0.005 if symptom.warns else 1 if symptom.follows else 10
    return max(messages, default=0) * weight + max(rows, default=0)


def _found(messages: Sequence[str], plain: str) -> Iterator[int]:
    """The characters of each message that stands in a text that went through `_normal`."""
    for parts, pattern in map(_pattern, messages):
        # Whether a word stands in a long text is told many times faster than whether a pattern does.
        if all(part in plain for part in parts) and pattern.search(plain):
            yield sum(map(len, parts))


@cache
def _exactly(text: str) -> re.Pattern[str]:
    words = r"\s+".join(re.escape(word) for word in text.split())
    return re.compile(rf"(?<!\w){words}(?!\w)")


@cache
def _pattern(message: str) -> tuple[Sequence[str], re.Pattern[str]]:
    """The fixed parts of a message, and what finds it in a text that went through `_normal`."""
    parts = [part.strip() for part in re.split(r" #(?: #)* ", _normal(message)) if part.strip()]
    between = r"\S+" if sum(map(len, parts)) >= _OF_ITS_OWN else "#"
    joined = rf"(?: {between}){{0,{_MOST_VARIABLE}}}? ".join(re.escape(part) for part in parts)
    return parts, re.compile(f" {joined} ")


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
