"""Which rules speak, and how loud: --select and --ignore, a site's settings, and comments in the files."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from dslaunch.errors import ConfigError, listed, nearest
from dslaunch.files.fileset import File, FileSet
from dslaunch.files.position import Position
from dslaunch.rules.registry import Hit, Rule, Severity, rules

_COMMENT = r"(?:#|//|/\*)\s*dslaunch:\s*ignore\[(?P<rules>[^\]\n]*)\]"
_QUOTED = r"\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|\\."
_IN_PYTHON = re.compile(_COMMENT)
_IN_JSON = re.compile(rf"'''[\s\S]*?'''|{_QUOTED}|{_COMMENT}")
_ELSEWHERE = re.compile(f"{_QUOTED}|{_COMMENT}")
_ALONE = re.compile(r"\s*(?:#(?!SBATCH|PBS|!)|//|/\*(?!.*\*/.*\S)|$)")
"""A line that holds nothing but a comment, or nothing; a scheduler reads some that begin as comments do."""
_WITH_COMMENTS = frozenset({
    "accelerate", "deepspeed_json", "env", "hf_arguments", "hostfile", "json", "megatron_args", "python", "shell",
    "yaml",
})  # fmt: skip
"""Kinds whose reader passes over comments; DeepSpeed reads its JSON as hjson."""
_UNREAD = frozenset({"file.syntax", "file.unread"})
"""Who says that a file was not checked: whichever rules --select names, they had nothing to judge."""


@dataclass(frozen=True)
class Selection:
    """Rules by id or by the part of it before the dot."""

    select: frozenset[str] = frozenset()
    """Ids that speak; empty: all do."""
    ignore: frozenset[str] = frozenset()
    severities: Mapping[str, Severity] = field(default_factory=dict)
    """By rule, what a site takes its findings for."""

    def takes(self, rule: Rule) -> bool:
        """Whether the rule is asked at all."""
        selected = not self.select or rule.id in self.select or rule.id in _UNREAD
        return selected and rule.id not in self.ignore


EVERY_RULE = Selection()


def named(words: Iterable[str], option: str) -> frozenset[str]:
    """The rules that words such as `zero.pp-stage`, `batch` or `key.type,key.range` mean.

    Raises:
        ConfigError: a word that is neither a rule nor the first part of one.
    """
    subjects = {rule_id.partition(".")[0] for rule_id in rules()}
    found: set[str] = set()
    for word in (part.strip() for text in words for part in text.split(",")):
        if word in rules():
            found.add(word)
        elif word.removesuffix(".*") in subjects:
            found |= {rule_id for rule_id in rules() if rule_id.startswith(f"{word.removesuffix('.*')}.")}
        else:
            near = nearest(word, [*rules(), *subjects])
            raise ConfigError(
                f"{option} {word}: no rule or subject is called so.{near} Subjects: {listed(sorted(subjects))}; "
                "`dslaunch explain` lists the rules."
            )
    return frozenset(found)


@dataclass(frozen=True)
class Comment:
    """`dslaunch: ignore[RULE, ...]` in a file."""

    rules: tuple[str, ...]
    at: Position
    first: int
    last: int
    """The lines it is about."""


def comments(file: File) -> Iterator[Comment]:
    """The comments of a file; one on a line of its own is about the next command or line."""
    if file.kind not in _WITH_COMMENTS or "dslaunch:" not in file.text:
        return
    lines = file.lines
    for at, names in _marked(file):
        first = at.line
        while first <= len(lines) and _ALONE.match(lines[first - 1]):
            first += 1
        last = first
        while last <= len(lines) and lines[last - 1].endswith("\\"):
            last += 1
        yield Comment(tuple(name.strip() for name in names.split(",")), at, first, last)


def _marked(file: File) -> Iterator[tuple[Position, str]]:
    """Each comment's place, and the rules that it names; what stands in a string is none."""
    if file.kind == "python":
        yield from _marked_in_python(file.text)
        return
    pattern = _IN_JSON if file.kind in ("deepspeed_json", "json") else _ELSEWHERE
    for match in pattern.finditer(file.text):
        if match["rules"] is not None:
            yield file.places.position(match.start()), match["rules"]


def _marked_in_python(text: str) -> Iterator[tuple[Position, str]]:
    try:
        for token in tokenize.generate_tokens(io.StringIO(text, newline="").readline):
            if token.type == tokenize.COMMENT and (match := _IN_PYTHON.search(token.string)):
                yield Position(token.start[0], token.start[1] + match.start() + 1), match["rules"]
    except (tokenize.TokenError, SyntaxError):
        return  # no Python, which file.syntax tells


def silenced(files: FileSet) -> Mapping[str, list[Comment]]:
    """The comments by file name."""
    found = {file.name: list(comments(file)) for file in files.files}
    return {name: all_of_it for name, all_of_it in found.items() if all_of_it}


def is_silenced(rule: Rule, hit: Hit, by_file: Mapping[str, list[Comment]]) -> bool:
    """Whether a comment in the file names this rule for this line."""
    return hit.at is not None and any(
        rule.id in comment.rules and comment.first <= hit.at.line <= comment.last
        for comment in by_file.get(hit.name, ())
    )
