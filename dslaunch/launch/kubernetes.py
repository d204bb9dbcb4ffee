"""On Kubernetes: kubectl creates what kubernetes.yaml holds, one pod a node."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from dslaunch.errors import ConfigError, LaunchError
from dslaunch.launch.request import LaunchRequest
from dslaunch.launch.steps import Create, Step
from dslaunch.render.kubernetes import FILE
from dslaunch.run.find import word_for
from dslaunch.run.state import append_event, update_state

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
    if request.attempt == 1:
        return [Create(("kubectl", "create", "-f", FILE), request.run_dir)]
    text = _numbered(request.files[FILE], request.attempt)
    gone = ("kubectl", "delete", "-f", FILE, "--ignore-not-found", "--wait")
    return [Create(("kubectl", "create", "-f", "-"), request.run_dir, text, gone)]


def _numbered(manifest: str, attempt: int) -> str:
    """The manifest whose pods know which attempt they are: rank.sh tells the program to resume by it."""
    documents = list(yaml.safe_load_all(manifest))
    for spec in _pod_specs(documents):
        for container in spec["containers"]:
            container["env"].append({"name": "DSLAUNCH_ATTEMPT", "value": str(attempt)})
    return str(yaml.safe_dump_all(documents, sort_keys=False, allow_unicode=True))


def _pod_specs(value: object) -> Iterator[dict[str, Any]]:
    """Every pod's in the documents."""
    if isinstance(value, dict):
        if "containers" in value:
            yield value
        else:
            for each in value.values():
                yield from _pod_specs(each)
    elif isinstance(value, list):
        for each in value:
            yield from _pod_specs(each)


def create(step: Create, run_dir: Path, echo: Callable[[str], None]) -> None:
    """Hand the manifest to Kubernetes.

    Raises:
        ConfigError: it was refused; a run folder that was made for it is gone.
        LaunchError: no API server answers (status 5; the folder is gone likewise).
    """
    if step.first:
        done = _kubectl(step.first, "", step.cwd, run_dir)
        if done.returncode:
            update_state(run_dir, status="failed")
            raise LaunchError(f"{done.stderr.strip()}\nThe earlier attempt's objects stay; nothing was started")
    done = _kubectl(step.argv, step.text, step.cwd, run_dir)
    if done.returncode:
        if step.fresh:
            shutil.rmtree(run_dir)
        else:
            update_state(run_dir, status="failed")
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
    name = word_for(run_dir)
    echo(f"{done.stdout.strip()}\n  dslaunch status {name} | logs {name} --follow | stop {name}")


def _kubectl(
    argv: Sequence[str], text: str, cwd: Path, run_dir: Path
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            argv, cwd=cwd, input=text, capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        update_state(run_dir, status="failed")
        raise LaunchError(f"kubectl: {error}. Ask `kubectl get pods` whether the job is there") from error
