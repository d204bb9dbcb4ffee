"""What a secret looks like: the one list, by name of a variable and by shape of a value.

Shapes are those that their issuers document: Hugging Face, GitHub, GitLab, OpenAI and others (sk-), AWS, Slack,
and a URL with user and password. A value that is expanded from elsewhere (`$NAME`, `<token>`) is none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

_ENDINGS = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "APIKEY", "CREDENTIAL", "CREDENTIALS")
"""Of one word of a name: HF_TOKEN and PGPASSWORD, but not TOKENIZERS_PARALLELISM or MAX_TOKENS."""
_PAIRS = ("API_KEY", "ACCESS_KEY", "PRIVATE_KEY", "AUTH_KEY")
_POINTERS = frozenset({
    "PATH", "FILE", "DIR", "NAME", "ID", "ARG", "LEN", "LENGTH", "COUNT", "SIZE", "TTL", "HEADER", "TYPE", "FIELD",
    "COLUMN", "BUDGET", "DISPATCHER", "LIMIT",
})  # fmt: skip
"""A last word after which the value says where, how many or of what kind, not what."""
_OF_TEXT = re.compile(
    r"(?:^|_)(?:PAD|EOS|BOS|MASK|SEP|CLS|UNK|SPECIAL|UNIQUE|STOP|IMAGE|VIDEO|TRIGGER|CLASS)_TOKEN"
)
"""Tokens that a text is made of."""
SHAPES = re.compile(
    r"(?<![A-Za-z0-9_-])(?:(?:hf|gh[pousr])_(?!(?i:x{8}))[A-Za-z0-9]{30,}"
    r"|github_pat_(?!(?i:x{8}))[A-Za-z0-9_]{30,}"
    r"|glpat-[A-Za-z0-9_-]{20,}|sk-(?=[A-Za-z_-]*[0-9])[A-Za-z0-9_-]{20,}|(?:AKIA|ASIA)[A-Z0-9]{16}"
    r"|xox[abeoprs]-[A-Za-z0-9-]{10,}|[a-z][a-z0-9+.-]*://[^\s/:@'\"]*:[^\s/@$<{'\"]+@)"
)


def is_secret_name(name: str) -> bool:
    """Whether a variable of this name holds a secret, rather than where one is, or how many."""
    words = name.upper().split("_")
    secret_word = any(word.endswith(_ENDINGS) for word in words) or any(pair in name.upper() for pair in _PAIRS)
    return secret_word and words[-1] not in _POINTERS and not _OF_TEXT.search(name.upper())


_GAP = re.compile(
    r"[\[({]?your?\b|[\[({]?your?[_-]|my[_-]|to[_-]be[_-]|(?:[a-z]{2,5}[_-])?x{3,}$|\.{3}|\*{3}|change[_-]?me\b"
    r"|replace[_-]|dummy|fake|redacted|example|todo\b|placeholder|insert[_-]|empty$|token-abc123$|\$\{?\w+\}?$"
    r"|\$\(\w+\)$|\{\{|.*\$\{\w+\}|your(?:key|passw|secret|token)|change[_-]?this|unused$|(?:\w+[_-])?dummy(?:[_-]|$)",
    re.IGNORECASE,
)
"""What documentation writes where a reader is to put a value: your_key, hf_xxxx, ..."""


def may_be_secret(value: str) -> bool:
    """Whether this value of a variable with a secret's name can be one: no number, flag, path or gap to fill."""
    flag = value.isdecimal() or value.lower() in ("", "true", "false", "none")
    return not flag and not value.startswith(("<", "/", "./", "../", "~/")) and not _GAP.match(value)


_DRAWN = re.compile(r"(?=[0-9_+.=-]*[A-Za-z])(?=[A-Za-z_+.=-]*[0-9])[A-Za-z0-9_+.=-]{12,}[A-Za-z0-9_/+.=-]*")
"""What issuers draw: letters and digits. A word such as [PAD] or im_start, or a path, is none."""
_GIVEN = re.compile(rf"(?P<before>\b(?P<name>[A-Za-z_][\w-]*)['\"]?\s*[=:]\s*['\"]?)(?P<value>{_DRAWN.pattern})")
HIDDEN = "<secret>"


def _is_option(word: str) -> bool:
    return word.startswith("--") and is_secret_name(word.lstrip("-").replace("-", "_"))


def in_arguments(words: Sequence[str]) -> Iterator[str]:
    """The options of a command line whose value is drawn, and whose name says that it is a secret."""
    for word, after in pairwise([*words, ""]):
        option, equals, value = word.partition("=")
        if _is_option(option) and _DRAWN.fullmatch(value if equals else after):
            yield option


def hidden(text: str) -> str:
    """`text` with HIDDEN in the place of what has a secret's shape, or is drawn and stands behind its name."""

    def without(found: re.Match[str]) -> str:
        named = is_secret_name(found["name"].replace("-", "_"))
        return found["before"] + HIDDEN if named else found[0]

    return _GIVEN.sub(without, SHAPES.sub(HIDDEN, text))


def shaped(value: Any, key: str = "") -> Iterator[str]:
    """The dotted keys under `key` at which a text, or the name of a key, has a secret's shape."""
    if isinstance(value, str):
        if SHAPES.search(value):
            yield key
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from shaped(str(name), key)
            yield from shaped(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from shaped(item, key)
