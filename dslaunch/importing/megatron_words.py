"""The argument line of a shell script that starts Megatron: read, with its variables filled in; nothing is run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from dslaunch.errors import ConfigError
from dslaunch.importing.megatron_shell import Branches, computed, simple_statements

_ASSIGNMENT = re.compile(r"\s*(?:export\s+|local\s+|declare\s+)?([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_REFERENCE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*|\d)(?:\[[@*]\])?(?::?-([^{}]*))?\})")
_FLAG_AND_VALUE = re.compile(r"--[\w-]+\s")
"""One element of an array, `"--split 99,1,0"`, which an unquoted ${ARRAY[@]} parts."""
_SBATCH_LINE = re.compile(r"^#SBATCH\s+(.*)$", re.MULTILINE)
_SBATCH = re.compile(r"(?<!\S)(--[\w-]+|-N)[=\s]+(?!-)(\S+)")
_OPERATORS = {"&", "&&", "|", "||", ";", ">", ">>", "2>&1", "&>", "2>", "done", "fi"}


@dataclass(frozen=True)
class CommandLine:
    """What starts Megatron."""

    launcher: tuple[str, ...]
    """Words before the script: torchrun and its options."""
    script: str
    """Such as pretrain_gpt.py; empty where the text was an argument line alone."""
    arguments: tuple[str, ...]
    """Words after it, variables filled in where the script sets them."""
    sbatch: tuple[tuple[str, str], ...]
    """#SBATCH options with a value."""
    doubts: tuple[str, ...] = ()
    """Conditions on the way to a variable that the script does not tell; taken as true."""


def command_line(text: str, where: str) -> CommandLine:
    """The command of a script, or an argument line.

    Raises:
        ConfigError: quotes that are not closed, or no Python script with arguments.
    """
    variables: dict[str, str] = {}
    found: tuple[list[str], int] | None = None
    bare: list[str] = []
    branches = Branches(lambda words: _filled(words, variables))
    doubts: dict[str, None] = {}
    for line in simple_statements(_statements(text)):
        statement = branches.step(line)
        if not statement or not branches.reads:
            continue
        match = _ASSIGNMENT.fullmatch(statement)
        if match and not _command_follows(match[3]):
            _assign(variables, match[1], match[3], more=bool(match[2]))
            doubts |= dict.fromkeys(branches.doubts)
            continue
        words = _expanded(_split(computed(statement, variables), where), variables)
        words = [part for word in words for part in (_split(word, where) if ".py " in word else [word])]
        at = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
        if at is not None:
            found = (words, at)
        elif words and words[0].startswith("--"):
            bare += words
    sbatch = tuple(option for line in _SBATCH_LINE.findall(text) for option in _SBATCH.findall(line))
    if found is None and bare:
        found = (["", *bare], 0)
    if found is None:
        raise ConfigError(
            f"{where}: no command `... SCRIPT.py --num-layers ...` in it. Give the script that starts it."
        )
    words, at = found
    arguments = tuple(_until_operator(words[at + 1 :]))
    return CommandLine(tuple(words[:at]), words[at], arguments, sbatch, tuple(doubts))


def _statements(text: str) -> Iterator[str]:
    """Logical lines and what `;` parts in them; comments are dropped.

    A newline or `;` in quotes or in parentheses, and a newline after a backslash, ends none.
    """
    text = text.replace("\r\n", "\n").replace("\\\n", " ")
    start, depth, quote, position = 0, 0, "", 0
    kept: list[str] = []
    while position < len(text):
        letter = text[position]
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter == "#" and (position == 0 or text[position - 1] in " \t\n(;"):
            kept.append(text[start:position])
            position = text.find("\n", position) if "\n" in text[position:] else len(text)
            start = position
            continue
        elif letter in "()":
            depth = max(0, depth + (1 if letter == "(" else -1))
        elif depth == 0 and (letter == "\n" or (letter == ";" and ";" not in _beside(text, position))):
            kept.append(text[start:position])
            yield "".join(kept).strip()
            kept, start = [], position + 1
        position += 1
    yield "".join([*kept, text[start:]]).strip()


def _beside(text: str, position: int) -> str:
    """The letters before and after the one at `position`."""
    return text[max(0, position - 1) : position] + text[position + 1 : position + 2]


def _command_follows(value: str) -> bool:
    """`CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun ...`: an assignment for one command is no statement of its own."""
    return not value.startswith(("(", '"', "'", "$(", "`")) and ".py" in value and " " in value.strip()


def _assign(variables: dict[str, str], name: str, raw: str, *, more: bool) -> None:
    value = raw.strip()
    if len(value) > 1 and value[0] + value[-1] in ("()", '""', "''"):
        value = value[1:-1].strip()
    else:
        value = value.partition(";")[0].strip()
    variables[name] = f"{variables.get(name, '')} {value}".strip() if more else _filled(value, variables)


def _split(text: str, where: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError as error:
        raise ConfigError(f"{where}: {error} in `{text[:60]}`. Close the quotes.") from error


def _expanded(words: list[str], variables: dict[str, str]) -> list[str]:
    """Variables filled in; a word that is one variable becomes the words of its value."""
    result: list[str] = []
    for word in words:
        filled = _filled(word, variables)
        if filled != word and _REFERENCE.fullmatch(word) and (" " in filled or "\n" in filled):
            result += _expanded(shlex.split(filled, comments=True), variables)
        elif not filled and word:
            continue
        elif _FLAG_AND_VALUE.match(filled):
            result += shlex.split(filled)
        else:
            result.append(filled)
    return result


def _filled(text: str, variables: dict[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        known = variables.get(name)
        default = match[3].strip("\"'") if match[3] is not None else match[0]
        return default if known is None else known

    for _ in range(5):
        filled = computed(_REFERENCE.sub(value, text), variables)
        if filled == text:
            break
        text = filled
    return text


def _until_operator(words: list[str]) -> Iterator[str]:
    for word in words:
        if word in _OPERATORS or word.startswith((">", "2>", "|")):
            return
        yield word.removesuffix(";")
