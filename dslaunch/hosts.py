"""Names of hosts, as ssh and pdsh take them; several of them in brackets, as SLURM writes them."""

from __future__ import annotations

import re
from collections.abc import Iterator

_WORD = "[A-Za-z0-9_][A-Za-z0-9_.-]*"
_HOST = re.compile(rf"({_WORD}@)?({_WORD}|[0-9A-Fa-f:]+(%[A-Za-z0-9]+)?)")
HOST_FIX = "Name hosts as ssh takes them: letters, digits, dots and dashes, no dash first; or an address"


def is_host(name: str) -> bool:
    """Whether `name` is a host, USER@HOST or an IP address: nothing that ssh would read as an option, and no
    comma or bracket, which pdsh reads as several hosts."""
    return _HOST.fullmatch(name) is not None


_BRACKET = re.compile(r"([^\[\]]*)\[([0-9,-]+)\](.*)")


def expanded(pattern: str) -> Iterator[str]:
    """The names that a pattern such as n[1-3,07-10] stands for, in its order; zeros in front are kept.

    Raises:
        ValueError: a bracket or a range that cannot be read.
    """
    match = _BRACKET.fullmatch(pattern)
    if not match:
        if "[" in pattern or "]" in pattern:
            raise ValueError(f"{pattern!r} has a bracket that cannot be read. Write such as n[1-8,12]")
        yield pattern
        return
    before, ranges, after = match.groups()
    for part in ranges.split(","):
        first, dash, last = part.partition("-")
        if not first or (dash and not last) or (dash and int(last) < int(first)):
            raise ValueError(f"{pattern!r}: {part!r} is no range. Write such as n[1-8,12]")
        for number in range(int(first), int(last or first) + 1):
            yield from expanded(f"{before}{number:0{len(first)}}{after}")


def leaf_of(switches: dict[str, tuple[str, ...]]) -> dict[str, int]:
    """By host the place of its leaf switch among `switches`, which name each leaf's hosts or patterns of them."""
    names = enumerate(switches.values())
    return {host: leaf for leaf, patterns in names for pattern in patterns for host in expanded(pattern)}
