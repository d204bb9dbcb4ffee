"""What `dcgmi diag -r 1` prints: a table of tests and their results.

The table is made in NVIDIA/DCGM dcgmi/Diag.cpp; a long text goes on in rows without a name.
"""

from __future__ import annotations

import re

_ROW = re.compile(r"^\|\s(.{25})\s\|\s(.{46})\s\|$")


def failed(text: str) -> tuple[str, ...]:
    """The tests that failed, each with what is said about it."""
    found: list[str] = []
    open_row = False
    for line in text.splitlines():
        row = _ROW.match(line.rstrip())
        if not row:
            open_row = False
            continue
        name, said = row[1].strip(), row[2].rstrip()
        if said.lower().startswith("fail"):
            found.append(name)
            open_row = False
        elif name in ("Error", "Warning") and found:
            found[-1] += f": {said}"
            open_row = True
        elif not name and open_row:
            # Words are cut where the column ends.
            found[-1] += said
        else:
            open_row = False
    return tuple(re.sub(r"\s+", " ", each) for each in found)
