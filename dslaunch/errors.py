"""The errors a user can cause, and how they are worded.

Every message names the key or file, what was found, what is allowed, and the next thing to do. The class
decides the exit status; a bug of ours is an AssertionError and shows its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DslaunchError(ValueError):
    """A problem that the user can solve; `status` is the exit status of the command line."""

    status = 2


class ConfigError(DslaunchError):
    """A mistake in configuration or command line (exit status 2)."""

    status = 2


class PlanError(DslaunchError):
    """No legal plan fits (exit status 3)."""

    status = 3


class LaunchError(DslaunchError):
    """The launched job failed (exit status 1), or nothing was launched (exit status 5)."""

    status = 1

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


def nearest(name: str, valid: Iterable[str]) -> str:
    """` Did you mean 'x'?`, or an empty string where nothing valid is near to `name`."""
    by_lower = {candidate.lower(): candidate for candidate in valid}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return f" Did you mean '{by_lower[close[0]]}'?" if close else ""


def listed(names: Iterable[object], limit: int = 40) -> str:
    """Names in one line for a message, cut after `limit`."""
    all_names = [str(name) for name in names]
    tail = f", ... ({len(all_names)} in all)" if len(all_names) > limit else ""
    return ", ".join(all_names[:limit]) + tail
