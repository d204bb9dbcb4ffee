"""Which launcher `launcher=auto` is, on this machine and now."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping

from dslaunch.planfile import Plan

_ANSWER_LIMIT_S = 5.0


def choose(plan: Plan, environ: Mapping[str, str]) -> str:
    """local | torchrun | ssh | slurm, or an empty string where nothing here can launch the plan."""
    if plan.launcher.name != "auto":
        return plan.launcher.name
    if plan.cluster.local:
        return "local"
    if environ.get("SLURM_JOB_ID"):
        return "slurm"
    if plan.launcher.finds_hosts or plan.cluster.hosts:
        return "ssh"
    return "slurm" if controller_answers(environ) else ""


def controller_answers(environ: Mapping[str, str]) -> bool:
    """Whether sbatch is installed and a SLURM controller answers within 5 seconds."""
    path = environ.get("PATH")
    scontrol = shutil.which("scontrol", path=path)
    if not scontrol or not shutil.which("sbatch", path=path):
        return False
    try:
        done = subprocess.run(
            [scontrol, "ping"],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_ANSWER_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and b"UP" in done.stdout
