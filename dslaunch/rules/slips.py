"""Whether a name is another one with a slip of the pen in it, and not a name of its own."""

from __future__ import annotations

import difflib
import re

_WORDS = re.compile(r"[^-_]+")
_SLIP = 0.4
"""The part of a word's letters that may be wrong."""
_SHORT = 3


def is_slip(typed: str, name: str) -> bool:
    """Whether letters of one word differ; a word left out, put in or replaced makes another name."""
    words, others = _WORDS.findall(typed), _WORDS.findall(name)
    if len(words) != len(others):
        return "".join(words) == "".join(others)
    pairs = [(a, b) for a, b in zip(words, others, strict=True) if a != b]
    return not pairs or (len(pairs) == 1 and _letters(*pairs[0]) <= _SLIP * len(pairs[0][1]))


def _letters(a: str, b: str) -> int:
    """How many letters are to be changed, put in or taken out, exchanged ones counting as one.

    Another first letter makes another word, unless it was left out; so does any letter of three: mpi isn't mup.
    """
    if a[0] != b[0] and not a.endswith(b) and not b.endswith(a):
        return max(len(a), len(b))
    if len(a) == len(b) <= _SHORT and sorted(a) != sorted(b):
        return len(b)
    blocks = difflib.SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()
    kept = sum(block.size for block in blocks)
    return 1 if sorted(a) == sorted(b) else max(len(a), len(b)) - kept
