"""torchrun's options: how many nodes, where they meet, and who is who."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dslaunch.errors import nearest
from dslaunch.files.commands import CommandLine, Launcher
from dslaunch.files.fileset import File, FileSet
from dslaunch.files.flags import is_told
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.settings import Settings

_RUN = "pytorch/pytorch:torch/distributed/run.py get_args_parser, config_from_args 2.13"
_RAN = f"{_RUN}, run"
_NAMES = """
    nnodes nproc-per-node rdzv-backend rdzv-endpoint rdzv-id rdzv-conf standalone max-restarts monitor-interval
    start-method event-log-handler role module no-python run-path log-dir redirects tee local-ranks-filter
    node-rank master-addr master-port local-addr logs-specs numa-binding signals-to-handle virtual-local-rank
    help duplicate-stdout-filters duplicate-stderr-filters shutdown-timeout use-env"""
OPTIONS = frozenset(_NAMES.split())
_SHORT = frozenset({"-h", "-m", "-r", "-t"})
_LOCAL = re.compile(r"(?:localhost|127\.0\.0\.1|0\.0\.0\.0)(?::\d+)?")
BACKENDS = ("static", "c10d", "etcd", "etcd-v2")
_OWN_NAME = re.compile(r"\$(?:\{?HOSTNAME\}?|\(hostname[^)]*\))(?::\S*)?|`hostname[^`]*`(?::\S*)?")
"""What each node fills in with its own name."""


def torchruns(files: FileSet) -> Iterator[tuple[File, CommandLine, Launcher]]:
    """Every command that torchrun, or torch.distributed.launch, is part of."""
    for file, command in files.launches():
        launcher = command.launcher("torchrun")
        if launcher is not None:
            yield file, command, launcher


def option(launcher: Launcher, name: str) -> str | None:
    """The value of an option, typed with dashes or underscores; None where it isn't given, or isn't told."""
    value = launcher.options.value(f"--{name}", f"--{name.replace('-', '_')}")
    return value if value is not None and is_told(value) else None


def given(launcher: Launcher, *names: str) -> bool:
    """Whether one of the options is given; True where that isn't told."""
    spelled = [text for name in names for text in (f"--{name}", f"--{name.replace('-', '_')}")]
    return launcher.options.has(*spelled) or not launcher.options.complete


def most_nodes(launcher: Launcher) -> int | None:
    """The larger number of `--nnodes 1:4`; 1 where it isn't given, None where it isn't told."""
    if not given(launcher, "nnodes"):
        return 1
    last = (option(launcher, "nnodes") or "").rpartition(":")[2]
    return int(last) if last.isdecimal() else None


@rule("torchrun.unknown-option", severity="error", raised_by="torchrun", evidence=_RAN)
def unknown(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """An option that torchrun doesn't have: it prints its usage and exits."""
    for file, _, launcher in torchruns(files):
        for flag in launcher.options.flags:
            name = flag.name.removeprefix("--").replace("_", "-")
            if " " in flag.name:
                message = f"torchrun takes {flag.name!r}, one word with a blank in it, for the script."
                yield Hit(file.name, flag.at, message, "Make two words of it.")
                break
            short = not flag.name.startswith("--")
            if (flag.name in _SHORT if short else _abbreviates(flag.name)) or not is_told(flag.name):
                continue
            if not short and any(each.startswith(name) for each in OPTIONS):
                message = f"{flag.name} begins several options, or both spellings of one; torchrun exits."
                full = sorted(each for each in OPTIONS if each.startswith(name))
                yield Hit(file.name, flag.at, message, f"Write it out: --{full[0]}.")
                continue
            near = nearest(name, OPTIONS)
            yield Hit(
                file.name, flag.at, f"torchrun has no option {flag.name}; it exits.", f"Take it out.{near}"
            )


def _abbreviates(flag: str) -> bool:
    """argparse takes a name cut short where only one begins like it, and each has two spellings."""
    name = flag.removeprefix("--")
    spelled = {text for each in OPTIONS for text in (each, each.replace("-", "_"))}
    return name in spelled or sum(each.startswith(name) for each in spelled) == 1


@rule("torchrun.standalone", severity="hang", raised_by="nobody", evidence=_RAN)
def standalone(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """--standalone on several nodes: each opens a meeting point of its own and waits there."""
    for file, _, launcher in torchruns(files):
        nodes = most_nodes(launcher)
        if launcher.options.has("--standalone") and nodes is not None and nodes > 1:
            message = f"--standalone with {nodes} nodes: each waits at its own localhost for the others."
            fix = "Use --rdzv-backend c10d --rdzv-endpoint FIRST_HOST:PORT instead."
            yield Hit(file.name, launcher.options.position("--standalone"), message, fix)


@rule("torchrun.endpoint", severity="hang", raised_by="nobody", evidence=_RAN)
def endpoint(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """Several nodes and no common meeting point: each waits at its own."""
    for file, command, launcher in torchruns(files):
        nodes = most_nodes(launcher)
        if nodes is None or nodes < 2 or launcher.options.has("--standalone"):
            continue
        fix = "Name the first host: --rdzv-backend c10d --rdzv-endpoint FIRST_HOST:PORT."
        by_environment = any(each.name.startswith(("MASTER_", "PET_")) for each in command.environment)
        if not given(launcher, "rdzv-endpoint", "master-addr") and not by_environment:
            message = (
                f"{nodes} nodes without --rdzv-endpoint or --master-addr: each meets itself at 127.0.0.1."
            )
            yield Hit(file.name, launcher.at, message, fix)
        dynamic = option(launcher, "rdzv-backend") not in (None, "static") and launcher.options.complete
        if dynamic and given(launcher, "master-addr") and not given(launcher, "rdzv-endpoint"):
            message = "--master-addr is for the static rendezvous: without --rdzv-endpoint each node meets itself."
            yield Hit(file.name, launcher.options.position("--master-addr", "--master_addr"), message, fix)
            continue
        for name in ("rdzv-endpoint", "master-addr"):
            where = launcher.options.value(f"--{name}", f"--{name.replace('-', '_')}") or ""
            own = _OWN_NAME.fullmatch(where) and not command.launcher("srun") and "#SBATCH" not in file.text
            if own or (is_told(where) and _LOCAL.fullmatch(where)):
                at = launcher.options.position(f"--{name}", f"--{name.replace('-', '_')}")
                first = not dynamic and option(launcher, "node-rank") == "0" and not command.launcher("srun")
                message = f"--{name} {where} on {nodes} nodes: each meets itself."
                if first:
                    message = f"--{name} {where} is right for node 0 alone: the other {nodes - 1} need its name."
                yield Hit(file.name, at, message, fix, "info" if first else None)


@rule("torchrun.node-rank", severity="hang", raised_by="nobody", evidence=_RAN)
def node_rank(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """Several nodes that all say they are the same one."""
    for file, command, launcher in torchruns(files):
        nodes = most_nodes(launcher)
        static = option(launcher, "rdzv-backend") in (None, "static") and not given(launcher, "rdzv-backend")
        if nodes is None or nodes < 2 or not static or launcher.options.has("--standalone"):
            continue
        rank = option(launcher, "node-rank")
        if not given(launcher, "node-rank") and not any(
            each.name == "PET_NODE_RANK" for each in command.environment
        ):
            message = f"{nodes} nodes with the static rendezvous, and no --node-rank: all are node 0."
            yield Hit(
                file.name, launcher.at, message, "Give each node its --node-rank, or use --rdzv-backend c10d."
            )
        elif rank is not None and command.launcher("srun"):
            at = launcher.options.position("--node-rank", "--node_rank")
            message = f"--node-rank {rank} under srun is the same on every node."
            yield Hit(file.name, at, message, "Use --rdzv-backend c10d, which numbers the nodes itself.")
        elif rank is not None and rank.isdecimal() and int(rank) >= nodes:
            at = launcher.options.position("--node-rank", "--node_rank")
            yield Hit(
                file.name,
                at,
                f"--node-rank {rank} of {nodes} nodes: they count from 0.",
                f"Use 0 to {nodes - 1}.",
            )


@rule("torchrun.options-after-script", severity="wrong", raised_by="nobody", evidence=_RAN)
def after_script(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """torchrun's options behind the script are the script's."""
    names = (
        "nnodes",
        "nproc-per-node",
        "rdzv-backend",
        "rdzv-endpoint",
        "node-rank",
        "master-addr",
        "master-port",
    )
    spelled = {text for name in names for text in (f"--{name}", f"--{name.replace('-', '_')}")}
    for file, command, launcher in torchruns(files):
        starts_python = command.script is not None and command.script.text.endswith(".py")
        for flag in command.arguments.flags if starts_python else ():
            if flag.name in spelled and not given(launcher, flag.name.removeprefix("--")):
                message = f"{flag.name} stands behind the script: torchrun doesn't read it."
                yield Hit(file.name, flag.at, message, "Move it in front of the script.")


@rule(
    "torchrun.launch-module",
    severity="deprecated",
    raised_by="nobody",
    evidence="torch/distributed/launch.py 2.13",
)
def launch_module(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """torch.distributed.launch is deprecated, and hands the script a --local-rank."""
    for file, _, launcher in torchruns(files):
        if launcher.spelled == "torch.distributed.launch":
            own = launcher.options.has("--use-env", "--use_env")
            more = "" if own else ", and gives the script --local-rank (since torch 2.0)"
            fix = "Use torchrun." if own else "Use torchrun, and read LOCAL_RANK in the script."
            yield Hit(file.name, launcher.at, f"torch.distributed.launch is deprecated{more}.", fix)
