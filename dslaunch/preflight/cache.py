"""SLURM: which nodes were in order lately, so that a job that starts again on them loses no time.

Kept under run.root, in one hidden file. It holds the last passes; a job whose nodes were all in order in one of
them, asked about the same things, is not asked again.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dslaunch.preflight.target import Target
from dslaunch.run.folder import write_file

FILE = ".preflight.json"
_SCHEMA = "dslaunch.preflight-passed/1"
_KEPT = 50


def passed_lately(root: Path, target: Target) -> float | None:
    """Seconds since these nodes passed together; None where they did not within preflight.cache_minutes."""
    now, hosts, key = time.time(), set(target.hosts), _key(target)
    ages = [now - each["time"] for each in _passes(root) if each["key"] == key and hosts <= set(each["hosts"])]
    limit = target.preflight.cache_minutes * 60
    return min((age for age in ages if 0 <= age < limit), default=None)


def remember(root: Path, target: Target) -> None:
    """Note that these nodes passed now."""
    passes = [*_passes(root), {"time": time.time(), "key": _key(target), "hosts": list(target.hosts)}]
    write_file(root / FILE, json.dumps({"schema": _SCHEMA, "passes": passes[-_KEPT:]}) + "\n")


def _passes(root: Path) -> list[dict[str, Any]]:
    """Earlier passes; none where the file is missing, or of another version of dslaunch."""
    try:
        data = json.loads((root / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    passes: list[dict[str, Any]] = data["passes"] if data.get("schema") == _SCHEMA else []
    return passes


def _key(target: Target) -> str:
    """Of all that the nodes are asked and held against, but for who they are, and the port."""
    asked = [
        asdict(target.preflight), target.plan.cluster.gpu, target.plan.cluster.gpus_per_node,
        target.plan.engine.name, target.python, target.script, target.plan.files.checkpoint_dir,
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
