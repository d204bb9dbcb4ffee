"""A checkout of Megatron's that says in a process of its own what it thinks of a command line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.real.megatron_lines import Line


@contextmanager
def judging(worker: str, folder: str) -> Iterator[Callable[[Line], dict[str, Any]]]:
    """What `worker`, a script beside this one, answers about one command line after another."""
    with subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name(worker)), folder],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, bufsize=1,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "ready"

        def judge(line: Line) -> dict[str, Any]:
            assert process.stdin is not None
            assert process.stdout is not None
            job = {"world": line.world, "argv": line.words, "environ": dict(line.environ)}
            process.stdin.write(json.dumps(job) + "\n")
            found: dict[str, Any] = json.loads(process.stdout.readline())
            return found

        yield judge
        process.stdin.close()
