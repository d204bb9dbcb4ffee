"""Assignments that hold only where the environment gives nothing: `if [ -z "$X" ]; then X=...; fi`."""

from __future__ import annotations

import re

from dslaunch.files.position import lines_of

_UNSET = re.compile(r"""-z\s+["']?\$|!\s+-[nv]\s|!\s*\[\[?\s+-[nv]\s|\$\{\w+\+\w*\}""")
_SET = re.compile(r"""\s-[nv]\s""")
_TURN = re.compile(r"(?:else|elif)\b")


def is_default(text: str, line: int) -> bool:
    """Whether what stands in this line (from 1) is done only where a variable is empty or not set."""
    lines = lines_of(text)
    if _UNSET.search(lines[line - 1]):
        return True
    depth, turned = 0, False
    for each in reversed(lines[: line - 1]):
        words = each.strip()
        if re.match(r"fi\b", words):
            depth += 1
        elif re.match(r"if\b", words) and not re.search(r"(?:^|[\s;])fi\s*$", words):
            if depth:
                depth -= 1
            elif (_SET if turned else _UNSET).search(words):
                return True
            else:
                turned = False
        elif not depth and _TURN.match(words):
            if words.startswith("elif") and not turned and _UNSET.search(words):
                return True
            turned = True
    return False
