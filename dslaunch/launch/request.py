"""What a launcher is asked for."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dslaunch.planfile import Plan
from dslaunch.run.attempts import logs_of


@dataclass(frozen=True)
class LaunchRequest:
    """One launch of one rendered plan."""

    plan: Plan
    files: Mapping[str, str]
    """The rendered files, name: text."""
    run_dir: Path
    """The run folder, absolute."""
    work_dir: Path
    """Where the user stands: what a relative script or path starts from."""
    environ: Mapping[str, str]
    """The environment of the launching shell."""
    wait: bool
    """Follow a submitted job to its end."""
    attempt: int = 1
    """Starts of these files in this run folder, this one included."""
    preflight: bool = True
    """A SLURM job asks its nodes how they are, before it starts the ranks."""

    @property
    def logs(self) -> Path:
        """Where this attempt's logs go."""
        return logs_of(self.run_dir, self.attempt)

    @property
    def inside_allocation(self) -> bool:
        """Whether the launching shell is in a SLURM allocation."""
        return bool(self.environ.get("SLURM_JOB_ID"))

    @property
    def hostfile(self) -> str:
        """The hostfile's absolute path: the user's, or the rendered one; empty where there is none."""
        if self.plan.launcher.hostfile:
            return str(self.absolute(self.plan.launcher.hostfile))
        return str(self.run_dir / "hostfile") if "hostfile" in self.files else ""

    def absolute(self, path: str) -> Path:
        """A path as the user typed it, from where the user stands."""
        return Path(os.path.normpath(self.work_dir / Path(path).expanduser()))

    def variables(self, *, local_python: bool) -> dict[str, str]:
        """The variables that every rendered script reads.

        Args:
            local_python: whether the interpreter is this machine's: dslaunch's own where none is named.
                Elsewhere a bare name such as `python3` is looked up there, after the modules are loaded.
        """
        megatron = self.plan.engine.path
        python = self.plan.launcher.python or (sys.executable if local_python else "python3")
        found = shutil.which(python, path=self.environ.get("PATH")) if local_python else None
        if "/" in python:
            python = str(self.absolute(python))
        elif found:
            python = os.path.abspath(found)
        return {
            "DSLAUNCH_RUN_DIR": str(self.run_dir),
            "DSLAUNCH_WORK_DIR": str(self.work_dir),
            "DSLAUNCH_PYTHON": python,
            **({"DSLAUNCH_ATTEMPT": str(self.attempt)} if self.attempt > 1 else {}),
            **({"DSLAUNCH_MEGATRON_PATH": str(self.absolute(megatron))} if megatron else {}),
        }
