"""Inside a SLURM allocation: one srun step on every node, which hands the program to each node's Python."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from dslaunch.preflight.target import Target
from dslaunch.remote import SSH_FAILED, Answer

_RUN = """
at="$1/$SLURMD_NODENAME"
"$0" - "$SLURMD_NODENAME" >"$at.out" 2>"$at.err" <"$1/program"
echo $? >"$at.status"
"""
"""srun would mix long lines of several tasks, so each node writes files of its own."""


def run_python(target: Target, text: str, limit_s: float) -> dict[str, Answer]:
    """What every node's command came to.

    The files go through the folder that this process stands in (the job's: its run folder), which every node sees.
    """
    with tempfile.TemporaryDirectory(prefix=".preflight-", dir=Path.cwd()) as folder:
        (Path(folder) / "program").write_text(text, encoding="utf-8")
        started = time.monotonic()
        ended, complaint = _step(target, folder, limit_s)
        seconds = time.monotonic() - started
        missing = SSH_FAILED if ended else None
        return {host: _answer(Path(folder), host, seconds, missing, complaint) for host in target.hosts}


def _step(target: Target, folder: str, limit_s: float) -> tuple[bool, str]:
    """Run the step; whether it ended within its limit, and what srun itself complained of."""
    command = ["srun"]
    for at, hosts in enumerate(target.components):
        if hosts:
            command += [":"] if len(command) > 1 else []
            command += [f"--het-group={at}"] if len(target.components) > 1 else []
            command += [*_options(hosts), "sh", "-c", _RUN, target.python, folder]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        _, err = process.communicate(timeout=limit_s)
        return True, err.decode(errors="replace")
    except subprocess.TimeoutExpired:
        # srun ends the step's tasks on SIGTERM.
        process.terminate()
        _, err = process.communicate()
        return False, err.decode(errors="replace")


def _options(hosts: Sequence[str]) -> list[str]:
    nodes = len(hosts)
    return [
        f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", f"--nodelist={','.join(hosts)}",
        "--overlap", "--kill-on-bad-exit=0", "--mpi=none", "--export=ALL", "--input=none", "--cpu-bind=none",
    ]  # fmt: skip


def _answer(folder: Path, host: str, seconds: float, missing: int | None, complaint: str) -> Answer:
    """A node's files.

    Args:
        missing: its status where it left none, for it did not begin, or did not come to an end.
    """
    status = _text(folder / f"{host}.status")
    out, err = _text(folder / f"{host}.out"), _text(folder / f"{host}.err")
    return Answer(host, int(status) if status else missing, out, err or complaint, seconds, heard=0.0)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
