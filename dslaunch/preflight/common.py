"""What several checks need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping


def most_common(found: Mapping[str, str]) -> str:
    """The value that most hosts have; of two that are as frequent the earlier host's."""
    return Counter(found.values()).most_common(1)[0][0]
