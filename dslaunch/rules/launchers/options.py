"""Command lines of DeepSpeed's launcher: options that it refuses, ignores, or never sees."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dslaunch.engines.deepspeed_keys import release
from dslaunch.errors import listed, nearest
from dslaunch.files.commands import CommandLine
from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.launchers.hosts import EXCLUDE, GPUS, HOSTFILE, INCLUDE, NODES, Launch, launches, slots_of
from dslaunch.rules.megatron.run import WITHOUT_TRAINING
from dslaunch.rules.registry import Hit, Severity, rule
from dslaunch.rules.scripts.launched import started
from dslaunch.rules.settings import Settings

_RUNNER = "deepspeedai/DeepSpeed:deepspeed/launcher/runner.py 0.19.8, run"
_MULTI = "deepspeedai/DeepSpeed:deepspeed/launcher/runner.py, multinode_runner.py 0.19.8, run"
_OPTIONS = frozenset({
    "--hostfile", "--include", "--exclude", "--num_nodes", "--num_gpus",
    "--num_accelerators", "--master_port",
    "--master_addr", "--node_rank", "--launcher", "--launcher_args", "--module", "--no_python",
    "--no_local_rank", "--no_ssh", "--no_ssh_check", "--force_multi", "--save_pid", "--enable_each_rank_log",
    "--autotuning", "--bind_cores_to_rank", "--bind_core_list", "--ssh_port", "--venv_script", "--log_level",
    "--quiet", "--help", "-H", "-i", "-e", "-q", "-h",
})  # fmt: skip
_ELASTIC = frozenset({"--elastic_training", "--min_elastic_nodes", "--max_elastic_nodes"})
_BACKENDS = ("pdsh", "openmpi", "mvapich", "slurm", "mpich", "impi")
_OWN_ONLY = frozenset({
    "--num_nodes", "--num_gpus", "--num_accelerators", "--hostfile",
    "--master_port", "--master_addr", "--no_ssh",
    "--launcher_args", "--force_multi", "--no_local_rank", "--enable_each_rank_log", "--bind_cores_to_rank",
})  # fmt: skip
"""Options that scripts rarely have themselves."""


@rule("launcher.option", severity="error", raised_by="deepspeed launcher", evidence=_RUNNER)
def option(_plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """An option, or a choice, that the launcher doesn't have."""
    for launch in launches(files):
        for flag in launch.launcher.options.flags:
            if flag.name in _ELASTIC:
                if release(settings.deepspeed_version) >= release("0.19.8"):
                    message = f"{flag.name} was removed in DeepSpeed 0.19.8: unrecognized arguments."
                    yield launch.hit((flag.name,), message, "Delete it.")
            elif flag.name not in _OPTIONS and not any(known.startswith(flag.name) for known in _OPTIONS):
                message = f"the deepspeed launcher has no {flag.name}.{nearest(flag.name, _OPTIONS)}"
                yield launch.hit((flag.name,), message, "Correct it, or put it after the script.")
        yield from _values(launch)
        backend, tuning = launch.value(("--launcher",)), launch.value(("--autotuning",))
        if backend and backend.lower() not in _BACKENDS:
            active = left(launch)
            alone = launch.has("--no_ssh") or (
                active is not None and len(active) < 2 and not launch.has("--force_multi")
            )
            message = f"no launcher is called {backend!r}{', and one host needs none' if alone else ''}."
            yield launch.hit(("--launcher",), message, f"Use {listed(_BACKENDS)}.", "info" if alone else None)
        if tuning and tuning not in ("tune", "run"):
            yield launch.hit(("--autotuning",), f"--autotuning is {tuning!r}.", "Use tune or run.")
        if launch.has("--module") and launch.has("--no_python"):
            yield launch.hit(("--no_python",), "--module together with --no_python: ValueError.", "Keep one.")


_WHOLE = (NODES, GPUS, ("--master_port",), ("--node_rank",), ("--ssh_port",))
_LEVELS = ("debug", "info", "warning", "error", "critical")


def _values(launch: Launch) -> Iterator[Hit]:
    """Values that argparse refuses."""
    for names in _WHOLE:
        text = launch.value(names)
        if text and not _OPEN.search(text) and not _is_whole(text):
            message = f"{names[0]} is {text[:40]!r}, no whole number: argparse refuses the line."
            yield launch.hit(names, message, "Write a whole number.")
    level = launch.value(("--log_level",))
    if level and level not in _LEVELS and not _OPEN.search(level):
        message = f"--log_level is {level[:40]!r}: argparse refuses the line."
        yield launch.hit(("--log_level",), message, f"Use {listed(_LEVELS)}.")


_OPEN = re.compile(r"[$`<>{}]")
"""What a shell, a template or a reader fills in."""


def _is_whole(text: str) -> bool:
    try:
        int(text)
    except ValueError:
        return False
    return True


@rule("launcher.place", severity="wrong", raised_by="nobody", evidence=f"{_RUNNER}; DeepSpeed#1656, #191")
def place(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """An option of the launcher after the script, which goes to the script."""
    for launch in launches(files):
        for flag in launch.command.arguments.flags:
            if flag.name in _OWN_ONLY:
                script = launch.command.script.text if launch.command.script else "the script"
                message = f"{flag.name} after the script goes to {script}; the launcher keeps its default."
                yield launch.at_argument(flag.at, message, f"Put it before {script}.")


@rule("launcher.address", severity="wrong", raised_by="nobody", evidence=f"{_MULTI}; DeepSpeed#1656, #6895")
def address(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A master address or port that isn't used, or can't be."""
    for launch in launches(files):
        port, backend = launch.count(("--master_port",)), launch.value(("--launcher",)).lower()
        if port is not None and not 0 < port < 65536:
            message = f"--master_port {port}: ranks can't agree on it."
            yield launch.hit(("--master_port",), message, "Write a free port from 1024 to 65535.", "error")
        if launch.has("--master_addr") and not launch.has(*HOSTFILE):
            message = "--master_addr without a hostfile is replaced by 127.0.0.1."
            fix = "Give --hostfile, or start each node with torchrun; on one node it isn't needed."
            here = launch.count(NODES) == 1 or set(slots_of(launch.value(INCLUDE)) or ()) == {"localhost"}
            yield launch.hit(("--master_addr",), message, fix, "info" if here else None)
        for name in ("--master_addr", "--master_port"):
            if backend in ("openmpi", "mvapich", "slurm") and launch.has(name):
                message = f"{name} isn't handed on by --launcher {backend}: ranks take rank 0's, through mpi4py."
                fix = "Take it out, or set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each task."
                yield launch.hit((name,), message, fix, "info")


@rule("launcher.no-ssh", severity="error", raised_by="deepspeed launcher", evidence=_RUNNER)
def no_ssh(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """--no_ssh without what each node then needs."""
    for launch in launches(files):
        if not launch.has("--no_ssh"):
            continue
        if not launch.has(*HOSTFILE):
            yield launch.hit(
                ("--no_ssh",), "--no_ssh without --hostfile: one node only.", "Give --hostfile.", "wrong"
            )
        elif launch.hosts and (number := launch.count(("--node_rank",))) not in (None, *range(len(launch.hosts))):
            message = f"--node_rank {number} of {len(launch.hosts)} hosts: AssertionError, they count from 0."
            yield launch.hit(("--node_rank",), message, f"Use 0 to {len(launch.hosts) - 1}.")
        elif not launch.has("--master_addr"):
            message = (
                "--no_ssh without --master_addr: the launcher asks the first host over ssh for its address."
            )
            yield launch.hit(("--no_ssh",), message, "Give --master_addr.")
        if not launch.has("--node_rank"):
            message = "--no_ssh without --node_rank: DeepSpeed asserts that it is set."
            yield launch.hit(("--no_ssh",), message, "Give each node its --node_rank.")


@rule(
    "launcher.ssh",
    severity="info",
    raised_by="nobody",
    evidence=f"{_RUNNER}; DeepSpeed#4907; volcano-sh/volcano#2952",
)
def ssh(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A launch over ssh, of which the launcher tests the first host alone."""
    for launch in launches(files):
        several = launch.hosts is not None and len(launch.hosts) > 1
        if several and not launch.has("--no_ssh", "--no_ssh_check") and _backend(launch) == "pdsh":
            assert launch.hosts is not None
            message = (
                f"RuntimeError where {next(iter(launch.hosts))} isn't reached by ssh without a password;"
            )
            message += " the other hosts aren't tested, and hang."
            yield launch.hit(
                HOSTFILE, message, "Test every host first, or start each with --no_ssh --node_rank."
            )


@rule("launcher.single", severity="wrong", raised_by="nobody", evidence=_RUNNER)
def single(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """One host that is left, on which nothing is started: the job runs where the command is typed."""
    for launch in launches(files):
        hosts = launch.hosts or {}
        one = len(hosts) == 1 or (len(hosts) > 1 and launch.count(NODES) == 1)
        if (
            one
            and next(iter(hosts)) not in ("localhost", "127.0.0.1")
            and not launch.has("--force_multi", "--no_ssh")
        ):
            message = f"one host, {next(iter(hosts))}: the job runs on this machine, whatever its name."
            yield launch.hit(
                HOSTFILE, message, "Add --force_multi, or drop the hostfile where this is that host."
            )
        if launch.has("--launcher") and not launch.has(*HOSTFILE) and not launch.has("--force_multi"):
            message = (
                "--launcher without --hostfile isn't used (unless /job/hostfile is there): one "
                "node needs none."
            )
            yield launch.hit(("--launcher",), message, "Delete it, or give --hostfile.", "info")


@rule("launcher.backend", severity="error", raised_by="deepspeed launcher", evidence=_MULTI)
def backend_limits(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """What the chosen backend can't do, or drops."""
    for launch in launches(files):
        backend, active = _backend(launch), left(launch)
        several = active is None or len(active) > 1 or launch.has("--force_multi")
        if backend in ("openmpi", "mpich", "impi", "mvapich") and several and not launch.has("--no_ssh"):
            for names in (INCLUDE, EXCLUDE, NODES, GPUS):
                if launch.has(*names) and launch.has(*HOSTFILE) and launch.count(names) != -1:
                    message = f"--launcher {backend} takes no {names[0]}: ValueError."
                    yield launch.hit(names, message, "Write the hosts into the hostfile.")
            if backend != "openmpi" and len(set((launch.hosts or {}).values())) > 1:
                message = f"--launcher {backend} needs the same slots on each host: ValueError."
                yield launch.hit(HOSTFILE, message, "Write the same number for each, or use pdsh.")
        if backend == "slurm":
            yield from _for_srun(launch, active)
        for name in ("--module", "--no_python", "--no_local_rank"):
            if backend == "slurm" and launch.has(name):
                message = f"--launcher slurm drops {name}: it runs `python -u SCRIPT`."
                yield launch.hit((name,), message, "Wrap the call in a script.", "wrong")
        for name in ("--ssh_port", "--venv_script"):
            if backend != "pdsh" and launch.has(name):
                yield launch.hit((name,), f"--launcher {backend} drops {name}.", "Use pdsh.", "wrong")
        if backend == "pdsh" and len(launch.hosts or {}) > 1:
            yield from _lost_by_pdsh(launch)


def left(launch: Launch) -> dict[str, list[int]] | None:
    """The slots by host that filters and counts leave of the hostfile; None where it isn't known."""
    if launch.hosts is None:
        return None
    found = {host: list(range(count)) for host, count in launch.hosts.items()}
    wanted, unwanted = slots_of(launch.value(INCLUDE)), slots_of(launch.value(EXCLUDE))
    if launch.value(INCLUDE):
        chosen = wanted or {}
        found = {host: sorted(set(chosen[host])) or slots for host, slots in found.items() if host in chosen}
    for host, slots in (unwanted or {}).items() if launch.value(EXCLUDE) else ():
        found[host] = [slot for slot in found.get(host, []) if slots and slot not in slots]
    found = {host: slots for host, slots in found.items() if slots}
    nodes, gpus = launch.count(NODES) or 0, launch.count(GPUS) or 0
    kept = list(found)[:nodes] if nodes > 0 else list(found)
    return {host: list(range(gpus)) if gpus > 0 else found[host] for host in kept}


def _for_srun(launch: Launch, active: dict[str, list[int]] | None) -> Iterator[Hit]:
    """What srun can't be told: single devices, or another number of them on each host."""
    chosen = slots_of(launch.value(INCLUDE)) or {} if active is None else active
    filtered = next((names for names in (INCLUDE, EXCLUDE) if launch.has(*names)), HOSTFILE)
    if any(sorted(slots) != list(range(len(slots))) for slots in chosen.values()):
        message = "--launcher slurm takes slots from 0 on alone: ValueError."
        yield launch.hit(filtered, message, "Name hosts without slots, or use pdsh.")
    elif active is not None and len({len(slots) for slots in active.values()}) > 1:
        message = "--launcher slurm needs the same slots on each host: ValueError."
        yield launch.hit(filtered, message, "Take the same number of each, or use pdsh.")


def _lost_by_pdsh(launch: Launch) -> Iterator[Hit]:
    for name in ("--bind_cores_to_rank", "--bind_core_list", "--log_level", "--quiet"):
        if launch.has(name):
            yield launch.hit((name,), f"pdsh doesn't hand {name} to the nodes.", "Wrap the script.", "wrong")
    for flag in launch.command.arguments.flags:
        for text in flag.values:
            if any(mark in text for mark in ";*?'\"|&<>") and " " not in text:
                message = f"{text[:40]!r} reaches the other nodes' shell without quotes."
                yield Hit(
                    launch.file.name,
                    flag.at,
                    message,
                    "Quote it twice, or put it in a file.",
                    "wrong",
                    "nobody",
                )


def _backend(launch: Launch) -> str:
    return launch.value(("--launcher",)).lower() or "pdsh"


@rule(
    "launcher.environment", severity="error", raised_by="nobody",
    evidence="deepspeedai/DeepSpeed:deepspeed/comm/comm.py init_distributed 0.19.8; DeepSpeed#8444; "
    "axolotl-ai-cloud/axolotl#1211",
)  # fmt: skip
def environment(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A script with DeepSpeed that no launcher gives its ranks."""
    configured = any(
        str(file.get("distributed_type")).upper() == "DEEPSPEED" for file in files.of("accelerate")
    )
    for file, command in files.launches():
        programs = [launcher.program for launcher in command.launchers]
        if not command.arguments.has("--deepspeed", "--deepspeed_config"):
            continue
        outer = command.launchers[0]
        if command.script is not None and WITHOUT_TRAINING.search(command.script.text.rpartition("/")[2]):
            continue
        own = any(found.name in ("RANK", "LAUNCHER") for found in command.environment)
        own = own or command.arguments.value("--launcher") in ("slurm", "mpi")  # the program's own start
        if programs == ["python"] and not own:
            message = "no launcher sets RANK and the like: DeepSpeed looks for mpi4py (ModuleNotFoundError)."
            severity: Severity = "error" if _starts_deepspeed(files, command) else "info"
            reads = "" if severity == "error" else " A script that only reads the file needs none."
            yield Hit(file.name, outer.at, message, f"Start it with deepspeed or torchrun.{reads}", severity)
        elif programs[-1] == "accelerate" and not configured:
            given = command.launchers[-1].options
            if not given.has(
                "--use_deepspeed", "--use-deepspeed", "--config_file", "--multi_gpu", "--multi-gpu"
            ):
                message = (
                    "accelerate launch without --use_deepspeed (unless its default configuration "
                    "says DEEPSPEED)"
                )
                fix = "Add --use_deepspeed, or --config_file with distributed_type DEEPSPEED."
                effect = "one process, no RANK, and DeepSpeed looks for mpi4py (ModuleNotFoundError)"
                yield Hit(file.name, outer.at, f"{message}: {effect}.", fix)


def _starts_deepspeed(files: FileSet, command: CommandLine) -> bool:
    """Whether a script with DeepSpeed's options, or the Trainer's, is started, or one that is seen to use them."""
    given = command.arguments
    script = started(files, command)
    if script is not None and (script.deepspeed or script.by_framework):
        return True
    trainers = given.has("--output_dir", "--output-dir") and any(given.has(f"--{name}") for name in _TRAINERS)
    return given.has("--deepspeed_config") or given.value("--deepspeed") is None or trainers


_TRAINERS = ("per_device_train_batch_size", "learning_rate", "num_train_epochs", "max_steps", "do_train")


@rule(
    "launcher.mpi4py", severity="info", raised_by="deepspeed.initialize",
    evidence="deepspeedai/DeepSpeed:deepspeed/comm/comm.py mpi_discovery, launcher/multinode_runner.py 0.19.8; "
    "DeepSpeed#2025; hiyouga/LlamaFactory#2574",
)  # fmt: skip
def mpi4py(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """Ranks that SLURM or MPI gives out, of which DeepSpeed learns through mpi4py alone."""
    if any(_MAPPED.search(file.text) for file in files.of("shell", "env", "python")):
        return
    for file, command in files.launches():
        inner, outer = command.launchers[-1], command.launchers[0]
        by_backend = inner.program == "deepspeed" and (inner.options.value("--launcher") or "").lower() in _MPI
        by_hand = inner.program == "python" and outer.program in ("srun", "mpirun")
        if command.arguments.has("--deepspeed", "--deepspeed_config") and (by_backend or by_hand):
            message = "nothing here sets RANK and LOCAL_RANK for each task: DeepSpeed asks mpi4py, and needs it."
            fix = "Install mpi4py for this MPI, or set RANK, LOCAL_RANK, WORLD_SIZE and MASTER_ADDR in each task."
            yield Hit(file.name, outer.at, message, fix)


_MPI = ("openmpi", "mpich", "mvapich", "slurm")
"""Backends of DeepSpeed's launcher that leave the ranks to MPI; impi sets them."""
_MAPPED = re.compile(
    r"\b(?:LOCAL_)?RANK=|SLURM_PROCID|SLURM_LOCALID|OMPI_COMM_WORLD|PMI_RANK|mpi4py|MPI_LOCALRANKID"
)
"""A script that hands the ranks on, or asks MPI by itself."""
