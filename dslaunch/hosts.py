"""Names of hosts, as ssh and pdsh take them."""

from __future__ import annotations

import re

_WORD = "[A-Za-z0-9_][A-Za-z0-9_.-]*"
_HOST = re.compile(rf"({_WORD}@)?({_WORD}|[0-9A-Fa-f:]+(%[A-Za-z0-9]+)?)")
HOST_FIX = "Name hosts as ssh takes them: letters, digits, dots and dashes, no dash first; or an address"


def is_host(name: str) -> bool:
    """Whether `name` is a host, USER@HOST or an IP address: nothing that ssh would read as an option, and no
    comma or bracket, which pdsh reads as several hosts."""
    return _HOST.fullmatch(name) is not None
