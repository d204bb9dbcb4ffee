"""On Kubernetes: kubectl creates what kubernetes.yaml holds, one pod a node."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from dslaunch.errors import ConfigError, LaunchError
from dslaunch.launch.request import LaunchRequest
from dslaunch.launch.steps import Create, Step
from dslaunch.run.state import append_event, update_state

FILE = "kubernetes.yaml"
_LIMIT_S = 120.0
_NO_SERVER = re.compile(
    r"connection refused|was refused|unable to connect|no such host|i/o timeout", re.IGNORECASE
)
"""What kubectl says where no API server answers (1.32)."""


def prepare(request: LaunchRequest) -> list[Step]:
    """Create the job.

    Raises:
        ConfigError: the files were rendered for another launcher.
    """
    if FILE not in request.files:
        raise ConfigError(
            f"launcher.name=kubernetes: there is no {FILE} among the files, which are for another launcher. "
            "Render again with launcher=kubernetes launcher.kubernetes.image=IMAGE"
        )
    # `create`, for `apply` would change a job of the same name, or do nothing where that one has ended.
    return [Create(("kubectl", "create", "-f", FILE), request.run_dir)]


def create(step: Create, run_dir: Path, echo: Callable[[str], None]) -> None:
    """Hand the manifest to Kubernetes.

    Raises:
        ConfigError: it was refused; the run folder is gone.
        LaunchError: no API server answers (status 5; the run folder is gone).
    """
    try:
        done = subprocess.run(
            step.argv,
            cwd=step.cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        update_state(run_dir, status="failed")
        raise LaunchError(f"kubectl: {error}. Ask `kubectl get pods` whether the job is there") from error
    if done.returncode:
        shutil.rmtree(run_dir)
        if _NO_SERVER.search(done.stderr):
            raise LaunchError(
                f"nothing was launched: kubectl reaches no API server: {done.stderr.strip()}\n"
                "Look at `kubectl config current-context`, or launch where the cluster is reached",
                status=5,
            )
        made = " ".join(line.split()[0] for line in done.stdout.splitlines() if line.endswith(" created"))
        undo = (
            f"Take back what was created before that: kubectl delete {made}"
            if made
            else "Nothing was created"
        )
        raise ConfigError(
            f"{done.stderr.strip()}\nKubernetes refused the job. {undo}. Where a job of this name is there, end "
            "it or give name=ANOTHER; else change launcher.kubernetes.*"
        )
    update_state(run_dir, status="submitted")
    append_event(run_dir, "submitted", created=done.stdout.split("\n"))
    echo(f"{done.stdout.strip()}\nfollow it with: kubectl get pods; kubectl logs -f POD\n"
         f"end it with: kubectl delete -f {run_dir / FILE}")  # fmt: skip
