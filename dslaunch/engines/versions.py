"""Which version of a framework `engine.version` names."""

from __future__ import annotations

from collections.abc import Sequence

from dslaunch.engines.deepspeed_keys import release


def named(wanted: str, versions: Sequence[str]) -> str:
    """`wanted` where it is one of `versions`, else the newest of its series: 0.18 names the newest 0.18.x.

    What names none of them comes back as it is, for the caller to refuse.
    """
    series = [version for version in versions if version.startswith(f"{wanted}.")]
    return wanted if wanted in versions or not series else max(series, key=release)
