"""Preflight, as a launch asks for it: which hosts, over which way, and what happens to what is found."""

from __future__ import annotations

import shlex
import socket
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace

from dslaunch.errors import LaunchError
from dslaunch.launch.hosts import hosts_of
from dslaunch.launch.request import LaunchRequest
from dslaunch.planfile import prediction_from_json, preflight_from_json
from dslaunch.preflight import Report, Target, Way, preflight
from dslaunch.preflight.catalogue import checks
from dslaunch.preflight.report import fixes, table

PREFLIGHT = "preflight.json"
_WAYS: dict[str, Way] = {"local": "here", "torchrun": "here", "ssh": "ssh", "openmpi": "ssh", "slurm": "srun"}
"""How the hosts of a launcher are asked; those of another one cannot be."""
_FAILED = 4
"""Exit status of a preflight that failed."""
_GROUPS = {
    "host": "the machine", "gpu": "GPUs", "version": "versions", "code": "the code",
    "folder": "the checkpoint folder", "net": "the network", "torch": "torch's locks",
    "collective": "a collective",
}  # fmt: skip


def before_launch(
    request: LaunchRequest, launcher: str, echo: Callable[[str], None], *, skip: bool
) -> None:
    """Ask the hosts of a launch on this machine or over ssh; under SLURM the job does it, as its first step.

    Raises:
        LaunchError: a finding stops the launch (status 4).
    """
    if launcher not in _WAYS or PREFLIGHT not in request.files:
        return
    if skip:
        echo(f"preflight is left out; not checked: {', '.join(_GROUPS.values())}")
    if skip or _WAYS[launcher] == "srun":
        return
    target = target_of(request, launcher)
    if not target.preflight.enabled:
        return
    report, _ = preflight(target, collective=target.preflight.collective and target.way != "here")
    if report.blocking:
        raise LaunchError(f"preflight: nothing was launched.\n{failure(report, target)}", status=_FAILED)
    if target.way == "here":
        lines = table(replace(report, hosts=(), unseen=()))
    else:
        lines = [*table(report), f"preflight: {len(target.hosts)} hosts, {report.seconds:.1f} s"]
    for line in lines:
        echo(line)


def step_of(request: LaunchRequest, launcher: str) -> str:
    """What a dry run prints of it; empty where it does nothing."""
    if _WAYS.get(launcher, "srun") == "srun" or PREFLIGHT not in request.files:
        return ""
    target = target_of(request, launcher)
    if not target.preflight.enabled:
        return ""
    how = "on this machine" if target.way == "here" else f"on {len(target.hosts)} hosts over ssh"
    return f"preflight: {len(checks())} checks {how}, with {shlex.quote(target.python)}"


def can_ask(launcher: str, environ: Mapping[str, str]) -> bool:
    """Whether this process reaches the hosts that a launcher would start ranks on."""
    way = _WAYS.get(launcher)
    return way is not None and (way != "srun" or "SLURM_JOB_ID" in environ)


def target_of(request: LaunchRequest, launcher: str) -> Target:
    """What preflight is asked about.

    Raises:
        ConfigError: no hostfile, or one that does not fit the plan.
    """
    plan, text = request.plan, request.files[PREFLIGHT]
    way = _WAYS[launcher]
    python = request.variables(local_python=way == "here")["DSLAUNCH_PYTHON"]
    port = str(plan.launcher.master_port)
    if way == "srun":
        # As the job has it, which knows more than the plan: its number makes the port.
        python = request.environ.get("DSLAUNCH_PYTHON", python)
        port = request.environ.get("MASTER_PORT", port)
    script, per_part = plan.program.script, plan.cluster.gpus_per_node
    folder = plan.files.checkpoint_dir
    hosts = _hosts(request, way)
    return Target(
        plan=plan,
        preflight=preflight_from_json(text),
        way=way,
        hosts=hosts,
        python=python,
        script=str(request.absolute(script)) if script and not plan.launcher.stage_to else "",
        checkpoint_dir=str(request.absolute(folder) if folder else request.run_dir / "checkpoints"),
        port=int(port),
        launch_hosts=hosts,
        host_memory_gib=_host_memory(request.files) * max(plan.cluster.by_host) / per_part,
    )


def _hosts(request: LaunchRequest, way: Way) -> tuple[str, ...]:
    if way == "here":
        return (socket.gethostname(),)
    if way == "ssh":
        return hosts_of(request)
    nodes = ",".join(_components(request.environ)) or request.environ["SLURM_JOB_NODELIST"]
    words = ["scontrol", "show", "hostnames", nodes]
    listed = subprocess.run(words, env=dict(request.environ), capture_output=True, text=True, check=True)
    return tuple(listed.stdout.split())


def _components(environ: Mapping[str, str]) -> list[str]:
    """The nodes of each component of a heterogeneous job, as SLURM writes them; none in another job."""
    count = int(environ.get("SLURM_HET_SIZE", "0"))
    return [environ[f"SLURM_JOB_NODELIST_HET_GROUP_{at}"] for at in range(count)]


def _host_memory(files: Mapping[str, str]) -> float:
    text = files.get("prediction.json")
    return prediction_from_json(text).host_memory_gib if text else 0.0


def failure(report: Report, target: Target) -> str:
    """The table, what to do about what stops, and the hosts to leave out."""
    lines = [*table(report), "", *fixes(report)]
    if report.excluded:
        slurm = target.way == "srun"
        names = ("," if slurm else "@").join(report.excluded)
        key = "launcher.slurm.exclude" if slurm else "launcher.exclude"
        lines += ["", f"To leave out what failed: {key}={names}"]
    lines.append("A check that may fail: preflight.ignore=[CHECK]; all of them: --skip-preflight")
    return "\n".join(lines)
