"""How a training program tells its progress: `from dslaunch.progress import step`, then `step(n)` after step n.

Each rank writes the number of its last completed step to RUN/ranks/RANK.step (and, behind it, the number and the
Unix time of the first that it noted, which give the speed). The watchdog reads it: a run whose steps stand still
hangs, whatever its logs say. The first call also makes SIGUSR1 write the stack of every thread to
RUN/ranks/RANK.stacks, which tells where a rank stands before a hanging job is ended. Rank 0 notes the versions it
runs with in RUN/ranks/versions.json.

Outside a run (no DSLAUNCH_RUN_DIR) nothing is written. Standard library only: it can be imported anywhere.
"""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import platform
import signal
import time
from pathlib import Path
from typing import TextIO

PHASE_BYTES = 256
SAVE = "save.asked"
"""The file in the run folder by which the supervisor asks for a checkpoint."""
VERSIONS = "versions.json"
_PACKAGES = (
    "torch", "deepspeed", "megatron-core", "transformer-engine", "flash-attn", "transformers", "accelerate",
    "peft", "datasets", "triton", "numpy", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
)  # fmt: skip
"""What a training's figures hang on."""
_DRIVER = Path("/proc/driver/nvidia/version")
RANKS = "ranks"
"""The folder of the ranks' records in the run folder."""

_first: list[tuple[int, float]] = []
"""The first step that this process noted, and when."""
_phases: list[mmap.mmap] = []
"""The mapped file of this process's phase."""
_records: dict[str, int] = {}
"""The open folder of the records, by run: a rank that outlives its attempt, on a host that was cut off, goes on
writing to that attempt's folder once it is put aside, and not to the next one's."""
_stacks: list[TextIO] = []
"""The open file that the handler of SIGUSR1 writes to; it must live as long as the process."""


def step(number: int) -> None:
    """Note that this rank completed step `number`; a program that resumes goes on with its own count."""
    folder = _folder()
    if folder is None:
        return
    watch()
    if not _first:
        _first.append((number, time.time()))
    (first, began), rank = _first[0], os.environ["RANK"]
    unfinished = folder / f".{rank}.step"
    unfinished.write_text(f"{number} {first} {began:.3f}\n", encoding="ascii")
    unfinished.replace(folder / f"{rank}.step")


def phase(name: str) -> None:
    """Note what this rank is about to do, in RUN/ranks/RANK.phase: what is told of it when it is killed.

    The file is mapped into memory: a note costs no call of the system, and outlives the process.
    """
    if not _phases:
        folder = _folder()
        if folder is None:
            return
        path = folder / f"{os.environ['RANK']}.phase"
        path.write_bytes(bytes(PHASE_BYTES))
        with path.open("r+b") as file:
            _phases.append(mmap.mmap(file.fileno(), PHASE_BYTES))
    _phases[0][:] = name.encode()[:PHASE_BYTES].ljust(PHASE_BYTES, b"\0")


def watch() -> None:
    """Make SIGUSR1 write every thread's stack to RUN/ranks/RANK.stacks; what `step` does by itself.

    Called at the start of a program, it also tells where a rank stands that never came to its first step.
    """
    folder = _folder()
    if folder is None or _stacks:
        return
    _stacks.append((folder / f"{os.environ['RANK']}.stacks").open("w", encoding="utf-8"))
    faulthandler.register(signal.SIGUSR1, file=_stacks[0], all_threads=True)
    if os.environ["RANK"] == "0":
        text = json.dumps(_versions(), indent=2, sort_keys=True)
        (folder / VERSIONS).write_text(text + "\n", encoding="utf-8")


def resuming() -> bool:
    """Whether this is a later attempt of a run: the program is to load its newest checkpoint, where it has one."""
    return os.environ.get("DSLAUNCH_RESUME") == "1"


def save_asked() -> bool:
    """Whether a checkpoint is asked for that the program's own rhythm does not bring (notify.breach); told once.

    One rank asks after a step and tells the others; it must see the run folder of the launch.
    """
    run = os.environ.get("DSLAUNCH_RUN_DIR")
    asked = Path(run, SAVE) if run else None
    if asked is None or not asked.exists():
        return False
    asked.unlink(missing_ok=True)
    return True


def _versions() -> dict[str, str]:
    """Of this process's Python, its packages, the kernel and NVIDIA's driver; what is not there is left out."""
    from importlib import metadata  # takes 30 ms, on one rank

    found = {"python": platform.python_version(), "linux": platform.release()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if _DRIVER.exists():
        found["nvidia-driver"] = _DRIVER.read_text(encoding="utf-8").splitlines()[0]
    return found


def _folder() -> Path | None:
    """The folder of the ranks' records; None outside a run."""
    run = os.environ.get("DSLAUNCH_RUN_DIR")
    if not run or "RANK" not in os.environ:
        return None
    if run not in _records:
        folder = Path(run, RANKS)
        folder.mkdir(parents=True, exist_ok=True)
        _records[run] = os.open(folder, os.O_RDONLY)
    held = Path(f"/proc/self/fd/{_records[run]}")
    return held if held.exists() else Path(run, RANKS)
