"""What must be true before anything is written or started; each fault is a ConfigError."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from dslaunch.errors import ConfigError, LaunchError
from dslaunch.launch.hosts import fitting
from dslaunch.launch.request import LaunchRequest
from dslaunch.launch.stage import check_stage
from dslaunch.planfile import Plan
from dslaunch.render import launch_blocker
from dslaunch.render.slurm import component_blocker
from dslaunch.run.tracking import missing

_COMMANDS = {
    "ssh/ssh": ("ssh",),
    "ssh/pdsh": ("pdsh", "ssh"),
    "openmpi": ("mpirun", "ssh"),
    "kubernetes": ("kubectl",),
}
"""What a launcher starts on this machine."""
_RUNNERS = {
    "local": ("deepspeed", "torchrun"),
    "torchrun": ("torchrun",),
    "ssh/ssh": ("direct", "deepspeed", "torchrun"),
    "ssh/pdsh": ("deepspeed",),
    "openmpi": ("direct",),
    "kubernetes": ("torchrun",),
    "slurm": ("direct", "deepspeed", "torchrun"),
}
_INSTEAD = {
    "ssh": "Install OpenSSH's client, or launch where it is",
    "pdsh": "Install pdsh, or take launcher.transport=ssh, which needs ssh alone",
    "kubectl": "Render with `dslaunch render -o DIR launcher=kubernetes ...`, and type `kubectl create -f "
    "DIR/kubernetes.yaml` where kubectl is",
    "mpirun": "Load Open MPI's module or install it, or take launcher=ssh",
}
_MEGATRON = ("megatron", "megatron_deepspeed")
_SINCE = {"--segment": (24, 5)}
"""Options of sbatch that older ones do not know: SchedMD/slurm:CHANGELOG/slurm-24.05.md."""
_ANSWER_LIMIT_S = 20.0


def check(request: LaunchRequest, launcher: str) -> None:
    """What a dry run checks too: the program, and what the plan asks of `launcher`.

    Raises:
        ConfigError: the first fault found.
    """
    if launcher != "kubernetes":  # there the program stands in the image
        _check_program(request)
    check_hostfile(request.plan, request.work_dir)
    check_stage(request, launcher)
    nodes = request.plan.cluster.nodes
    if request.plan.cluster.slots and launcher not in ("ssh", "slurm", ""):
        raise ConfigError(
            f"launcher.name={launcher}: hosts with unequal numbers of GPUs (cluster.mixed) are launched over ssh "
            "and by SLURM. Use launcher=ssh or launcher=slurm, or as many GPUs on each host: "
            "cluster=NODESxGPUSxTYPE"
        )
    if launcher == "slurm" and (why := component_blocker(request.plan)):
        raise ConfigError(why)
    if launcher == "local" and nodes > 1:
        raise ConfigError(
            f"launcher.name=local: the plan has {nodes} nodes, this machine is one. Use launcher=slurm or "
            "launcher=ssh, or plan for this machine with cluster=local"
        )
    if launcher:
        _check_elastic(request, launcher)
        _check_runner(request, launcher)
        _check_chosen_gpus(request, launcher)
    if launcher in ("local", "torchrun"):
        _check_paths(request)


def check_hostfile(plan: Plan, work_dir: Path) -> None:
    """launcher.hostfile against the plan, where this machine can read it; elsewhere ssh's launch judges it.

    Args:
        work_dir: what a relative path starts from.

    Raises:
        ConfigError: no host, a bad line, a host named twice, or hosts that do not fit the plan.
    """
    named = plan.launcher.hostfile
    if not named:
        return
    try:
        text = (work_dir / Path(named).expanduser()).read_text(encoding="utf-8")
    except OSError:
        return
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"launcher.hostfile: {named} is no UTF-8 text. Its lines are `HOST slots=N`"
        ) from error
    fitting(plan, text, named)


def check_machine(request: LaunchRequest, launcher: str) -> None:
    """What only a launch needs of this machine and shell.

    Raises:
        ConfigError: the first fault found.
        LaunchError: SLURM's sbatch is not here (status 5).
    """
    if launcher:
        _check_data(request.plan)
    _check_environment(request)
    if launcher and request.plan.supervision.wandb and (fault := missing()):
        raise ConfigError(fault)
    if launcher in ("local", "torchrun"):
        check_python(request)
        if request.plan.cluster.nodes == 1:
            _check_port(request.plan.launcher.master_port)
    if launcher == "slurm" and not request.inside_allocation:
        _check_sbatch(request)
    for command in _COMMANDS.get(_way(request, launcher), ()):
        _check_command(request, launcher, command)


def _check_program(request: LaunchRequest) -> None:
    plan = request.plan
    if plan.engine.name in _MEGATRON and not plan.program.script:
        if not plan.engine.path:
            raise ConfigError(
                f"engine.path: empty. The engine {plan.engine.name} runs the pretrain script of a checkout: "
                "give engine.path=FOLDER, or a script of your own with script=FILE"
            )
        script = request.absolute(plan.engine.path) / "pretrain_gpt.py"
        if not script.is_file():
            raise ConfigError(f"engine.path: there is no {script}. Give the folder of the checkout")
    elif plan.program.script:
        _check_script(request.absolute(plan.program.script), plan.program.script)
    if blocker := launch_blocker(plan, plan.engine.extra):
        raise ConfigError(blocker)


def _check_script(path: Path, typed: str) -> None:
    if not path.is_file():
        found = "it is a folder" if path.is_dir() else "there is no such file"
        raise ConfigError(f"script: {typed}: {found} ({path}). Give the path of a Python file")
    if not os.access(path, os.R_OK):
        raise ConfigError(f"script: {typed}: you may not read it ({path}). Change its permissions")


def _check_data(plan: Plan) -> None:
    """The runtime's ranks would stop at their start."""
    path = plan.files.data_path
    if plan.program.module == "dslaunch.runtime" and path != "digits" and ":" not in path:
        raise ConfigError(
            f"data.path: {path or 'empty'}: dslaunch.runtime reads `digits` (scikit-learn's handwritten digits), "
            "or what a function of yours gives. Add data.path=digits or data.path=package.module:function, or "
            "train with a program of yours: script=FILE"
        )


def _check_environment(request: LaunchRequest) -> None:
    missing = [name for name in request.plan.launcher.pass_env if name not in request.environ]
    if missing:
        raise ConfigError(
            f"launcher.pass_env: {', '.join(missing)} is not set in this shell. Export it, or take the "
            "name out of launcher.pass_env"
        )
    webhook = request.plan.supervision.webhook
    if webhook and webhook not in request.environ:
        raise ConfigError(
            f"notify.webhook: {webhook} is not set in this shell. Export it with the address, or take "
            "notify.webhook out"
        )


def check_python(request: LaunchRequest) -> None:
    """Raises ConfigError where the interpreter of the training is not on this machine."""
    python = request.plan.launcher.python or sys.executable
    name = str(request.absolute(python)) if "/" in python else python
    if not shutil.which(name, path=request.environ.get("PATH")):
        raise ConfigError(
            f"launcher.python: {python} is no program on this machine. Give the interpreter of the training "
            "environment, such as launcher.python=/path/to/venv/bin/python"
        )


def _check_paths(request: LaunchRequest) -> None:
    files = request.plan.files
    parts = request.plan.model["components"].items()
    for key, value in (
        *((f"model.components.{name}.weights", spec.get("weights", "")) for name, spec in parts),
        ("data.path", files.data_path),
        ("data.tokenizer", files.tokenizer),
        ("model.weights", files.weights),
        ("checkpoint.load", files.checkpoint_load),
    ):
        # Hub names and URLs are the program's to resolve; Megatron's data sets are prefixes of .bin files.
        if value.startswith(("/", "./", "../", "~")):
            path = request.absolute(value)
            if not path.exists() and not path.with_name(path.name + ".bin").exists():
                raise ConfigError(
                    f"{key}: {value} does not exist on this machine ({path}). Give a path that does"
                )


def _check_sbatch(request: LaunchRequest) -> None:
    if not shutil.which("sbatch", path=request.environ.get("PATH")):
        raise LaunchError(
            "launcher.name=slurm: nothing was launched: sbatch is not on this machine's PATH. Render with "
            "`dslaunch render -o DIR`, and type `dslaunch launch DIR` on a login node of the cluster",
            status=5,
        )
    for option in sorted({line.partition("=")[0] for line in request.plan.launcher.placement} & set(_SINCE)):
        installed, since = _sbatch_version(request), _SINCE[option]
        if installed and installed < since:
            raise ConfigError(
                f"launcher.slurm.{option.removeprefix('--')}: sbatch knows {option} from SLURM {_number(since)} "
                f"on, and the one here is {_number(installed)}. Take it out; launcher.slurm.switches asks for "
                "nodes near one another in older ones too"
            )


def _sbatch_version(request: LaunchRequest) -> tuple[int, int] | None:
    """Of the installed SLURM, which says `slurm-wlm 22.05.8` or `slurm 24.05.2`; None where it says nothing."""
    try:
        done = subprocess.run(
            ("sbatch", "--version"),
            env=dict(request.environ), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=_ANSWER_LIMIT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"(\d+)\.(\d+)\.", done.stdout)
    return (int(found[1]), int(found[2])) if found else None


def _number(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]:02d}"


def _check_elastic(request: LaunchRequest, launcher: str) -> None:
    if request.plan.supervision.elastic_min_nodes and _way(request, launcher) not in ("ssh/ssh", "slurm"):
        over_pdsh = " with launcher.transport=pdsh" if launcher == "ssh" else ""
        raise ConfigError(
            f"restart.elastic: true, and launcher={launcher}{over_pdsh} does not start a run on other hosts. Take "
            "launcher=ssh or launcher=slurm, which do, or leave restart.elastic out"
        )


def _check_runner(request: LaunchRequest, launcher: str) -> None:
    runner, allowed = request.plan.launcher.runner, _RUNNERS[_way(request, launcher)]
    if runner not in ("auto", *allowed):
        transport = f" with launcher.transport={request.plan.launcher.transport}" if launcher == "ssh" else ""
        raise ConfigError(
            f"launcher.runner: {runner} does not start ranks under launcher={launcher}{transport}; allowed are "
            f"auto, {', '.join(allowed)}. Change it, or take another launcher"
        )


def _check_chosen_gpus(request: LaunchRequest, launcher: str) -> None:
    """DeepSpeed's launcher of a host and mpirun take the first GPUs, whatever a filter says."""
    given = request.plan.launcher.include or request.plan.launcher.exclude
    deepspeed = request.plan.launcher.runner == "deepspeed" or request.plan.launcher.transport == "pdsh"
    if ":" in given and (launcher == "openmpi" or (launcher == "ssh" and deepspeed)):
        raise ConfigError(
            f"launcher.include or exclude: {given!r} chooses GPUs, which is not handed on here. Name whole "
            "hosts, or take launcher=ssh launcher.runner=direct"
        )


def _way(request: LaunchRequest, launcher: str) -> str:
    return f"{launcher}/{request.plan.launcher.transport}" if launcher == "ssh" else launcher


def _check_command(request: LaunchRequest, launcher: str, command: str) -> None:
    if not shutil.which(command, path=request.environ.get("PATH")):
        raise LaunchError(
            f"launcher.name={launcher}: nothing was launched: {command} is not on this machine's PATH. "
            f"{_INSTEAD[command]}",
            status=5,
        )


def _check_port(port: int) -> None:
    if not port:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ConfigError(
                f"launcher.master_port: {port} cannot be used on this machine: {error.strerror}. Give another "
                "port, or leave it out: a free one is chosen at launch"
            ) from error
