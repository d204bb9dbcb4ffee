"""What the rules say, held against the real thing over generated examples: seeded, shrunk where they differ."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

Example = TypeVar("Example")
Judged = tuple[str | None, list[str]]
"""What the real thing raises, and what we call an error."""


def agree(
    drawn: st.SearchStrategy[Example],
    judged: Callable[[Example], Judged | None],
    examples: int,
    first_seed: int,
    *,
    share: int,
) -> None:
    """Judge as many examples, print how many were accepted and refused, and fail where the two disagree.

    DSLAUNCH_EXAMPLES and DSLAUNCH_SEED ask for more of them, or for others. `judged` is None for an example that
    can't be compared. At least one in `share` must be accepted, and one refused: else nothing was tried.
    """
    examples = int(os.environ.get("DSLAUNCH_EXAMPLES", examples))
    first_seed = int(os.environ.get("DSLAUNCH_SEED", first_seed))
    seen: Counter[bool] = Counter()

    @seed(first_seed)
    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(drawn)
    def compare(example: Example) -> None:
        if (both := judged(example)) is None:
            return
        raised, ours = both
        seen[raised is None] += 1
        assert bool(ours) == (raised is not None), f"the real thing {raised!r:.300}, dslaunch {ours}"

    compare()
    print(
        f"{seen.total()} generated (seed {first_seed}): {seen[True]} accepted, {seen[False]} refused by both, "
        "0 disagreements"
    )
    assert min(seen[True], seen[False]) > seen.total() // share
