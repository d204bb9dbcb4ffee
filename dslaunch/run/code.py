"""Which code a run used: revision and uncommitted changes of the checkout that the script stands in."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from dslaunch.run.folder import write_file
from dslaunch.secrets import hidden

CODE_SCHEMA = "dslaunch.code/1"
_LIMIT_S = 20.0


def record_code(folder: Path, source: Path) -> None:
    """Write code.json, and code.diff where tracked files differ from the revision.

    What looks like a secret in them is left out of code.diff, and code.json says that something was.
    A folder that is no checkout, or a machine without git, gives a code.json whose revision is empty.
    """
    revision = _git(source, "rev-parse", "--verify", "HEAD").strip()
    root = _git(source, "rev-parse", "--show-toplevel").strip()
    diff = _git(source, "diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD")
    untracked = _git(source, "ls-files", "--others", "--exclude-standard", "--full-name", "-z")
    code = {
        "schema": CODE_SCHEMA,
        "checkout": root,
        "revision": revision,
        "changed": bool(diff),
        "hidden": hidden(diff) != diff,
        "untracked": [name for name in untracked.split("\0") if name],
    }
    write_file(folder / "code.json", json.dumps(code, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
    if diff:
        write_file(folder / "code.diff", hidden(diff))


def _git(source: Path, *words: str) -> str:
    """What git prints; empty where it fails: a launch never waits for or fails on its record of the code."""
    try:
        done = subprocess.run(
            ["git", "-C", str(source), *words],
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace") if done.returncode == 0 else ""
