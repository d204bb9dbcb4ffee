"""DeepSpeed's universal checkpoint: a script's newest ZeRO checkpoint, converted before a start that loads it so.

A checkpoint of ZeRO 1 to 3 has a file of each rank, and as many ranks read it. `ds_to_universal` merges one into
whole tensors beside it: CHECKPOINTS/latest names what was saved, CHECKPOINTS/latest_universal what was converted.
Under checkpoint.load_universal DeepSpeed's load_checkpoint, called without a tag, reads the latter under any
number of ranks (deepspeed/checkpoint/ds_to_universal.py, deepspeed/runtime/engine.py load_checkpoint, 0.19.8).
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dslaunch.errors import LaunchError
from dslaunch.files.checkpoint import find
from dslaunch.planfile import Plan
from dslaunch.remote import over_ssh
from dslaunch.run.attempts import logs_of
from dslaunch.run.checkpoints import checkpoint_dir, newest_checkpoint
from dslaunch.run.processes import Process
from dslaunch.run.state import append_event, read_events
from dslaunch.run.supervise import supervise

MODE = "universal_checkpoint"
"""Of a plan's engine: its DeepSpeed configuration says checkpoint.load_universal."""
LATEST = "latest_universal"
_SUFFIX = "_universal"
_LOG = "universal.log"
_CONNECT_S = 20.0
_SCRIPT = (
    'if [[ -r "$0/env.sh" ]]; then source "$0/env.sh"; fi; cd -- "$1"; exec "$2" -m '
    'deepspeed.checkpoint.ds_to_universal --input_folder "$3" --output_folder "$4" --inject_missing_state'
)
"""The last option stands in for universal_checkpoint_info, which a plain script's checkpoint does not hold."""


@dataclass(frozen=True)
class Conversion:
    """A checkpoint that is converted, and the folder that it becomes."""

    source: Path
    target: Path

    def describe(self) -> str:
        """For a dry run."""
        return f"convert {self.source} to {self.target} (deepspeed.checkpoint.ds_to_universal)"


def saved_by_deepspeed(plan: Plan, run_dir: Path, work_dir: str) -> Path | None:
    """The folder of the newest checkpoint, where it has ZeRO states of DeepSpeed; None where there is none."""
    saved = newest_checkpoint(checkpoint_dir(plan, run_dir, work_dir))
    found = find(saved.path) if saved else None
    if saved is None or found is None or not found[2].ranks:
        return None
    # Hugging Face's Trainer has a folder a step, with DeepSpeed's `latest` and its folder in it.
    return saved.path if saved.path.name == found[2].tag else saved.path / found[2].tag


def conversion_of(plan: Plan, run_dir: Path, work_dir: str) -> Conversion | None:
    """What a start that loads the newest checkpoint has to be converted first; None where nothing has to be."""
    if MODE not in plan.engine.modes:
        return None
    source = saved_by_deepspeed(plan, run_dir, work_dir)
    if source is None:
        return None
    target = source.with_name(source.name + _SUFFIX)
    return None if _converted(target) else Conversion(source, target)


@dataclass(frozen=True)
class Place:
    """Where the conversion runs, and for which start."""

    run_dir: Path
    attempt: int
    """The one that is about to start."""
    env: Mapping[str, str]
    """Has DSLAUNCH_PYTHON and DSLAUNCH_WORK_DIR, as the ranks get them."""
    host: str = ""
    """Reached over ssh; empty: here."""

    @property
    def log(self) -> Path:
        """What it says."""
        return logs_of(self.run_dir, self.attempt) / _LOG


def convert_newest(
    plan: Plan, place: Place, work_dir: str, echo: Callable[[str], None], begun: Callable[[Process], None]
) -> str:
    """Convert what the attempt loads, where it loads a universal checkpoint and finds none of its newest.

    Args:
        work_dir: what a relative checkpoint.dir starts from.
        begun: is told the started process.

    Returns:
        The name of a stop signal that came meanwhile; empty where none did.

    Raises:
        LaunchError: it failed; what it said stands in the attempt's logs.
    """
    wanted = conversion_of(plan, place.run_dir, work_dir) if place.attempt > 1 else None
    return _convert(wanted, place, echo, begun) if wanted else ""


def _convert(
    wanted: Conversion, place: Place, echo: Callable[[str], None], begun: Callable[[Process], None]
) -> str:
    if wanted.target.exists():  # an earlier conversion that was cut short
        shutil.rmtree(wanted.target)
    began = time.monotonic()
    place.log.parent.mkdir(parents=True, exist_ok=True)
    with open(os.devnull, "wb") as nothing:
        env = {**os.environ, **place.env}
        ended = supervise(_words(wanted, place), place.run_dir, env, place.log, nothing, begun)
    if ended.stopped_by:
        return ended.stopped_by
    if ended.status or not _converted(wanted.target):
        why = _last_line(place.log)
        raise LaunchError(f"{wanted.source} was not converted for other ranks: {why}. All it said: {place.log}")
    seconds = time.monotonic() - began
    _forget_earlier(place.run_dir, wanted)
    append_event(
        place.run_dir, "converted", attempt=place.attempt, source=str(wanted.source), target=str(wanted.target),
        seconds=round(seconds, 1),
    )  # fmt: skip
    echo(f"{wanted.source.name} is converted for other ranks: {wanted.target.name}, {seconds:.0f} s")
    return ""


def _words(wanted: Conversion, place: Place) -> Sequence[str]:
    folders = (str(place.run_dir), place.env["DSLAUNCH_WORK_DIR"], place.env["DSLAUNCH_PYTHON"])
    words = ("bash", "-c", _SCRIPT, *folders, str(wanted.source), str(wanted.target))
    return over_ssh(place.host, words, _CONNECT_S) if place.host else words


def _converted(target: Path) -> bool:
    """`ds_to_universal` writes the name down last."""
    latest = target.with_name(LATEST)
    named = latest.read_text(encoding="utf-8").strip() if latest.is_file() else ""
    return target.is_dir() and named == target.name


def _forget_earlier(run_dir: Path, wanted: Conversion) -> None:
    """Remove what was converted before: nobody loads it any more, and it is as large as a checkpoint."""
    for event in read_events(run_dir):
        if event["kind"] == "converted" and event["details"]["target"] != str(wanted.target):
            shutil.rmtree(event["details"]["target"], ignore_errors=True)


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")

