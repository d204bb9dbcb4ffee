"""What the files themselves say of ranks and nodes, where no option does. What they leave open stays unknown."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import PurePath

from dslaunch.files import slurm
from dslaunch.files.commands import CommandLine, Launcher
from dslaunch.files.fileset import File, FileSet
from dslaunch.files.flags import Arguments
from dslaunch.files.script import ShellScript
from dslaunch.rules.scripts.launched import reads_json_itself
from dslaunch.rules.scripts.pipeline import stages_of
from dslaunch.rules.scripts.tree import Call, scripts
from dslaunch.rules.settings import Settings

_TRAINER_FLAG = "--per_device_train_batch_size"
_MAX_RANKS = 1_000_000


@dataclass(frozen=True)
class Size:
    """How many ranks a job has; None: not told."""

    world: int | None = None
    nodes: int | None = None
    per_node: int | None = None


def told(files: FileSet, settings: Settings) -> Settings:
    """The settings, with the sizes that options leave open and the files agree on.

    A launch line counts first, then accelerate's configuration, then a hostfile that a launcher would read whole.
    """
    size, source = _size(files, settings)
    size = _completed(size)
    return replace(
        settings,
        world_size=size.world,
        nodes=size.nodes,
        ranks_per_node=size.per_node,
        size_from=source,
        tp=settings.tp or _degree(files, "--tensor-model-parallel-size"),
        pp=settings.pp or _degree(files, "--pipeline-model-parallel-size") or _pipeline(files),
        huggingface=settings.huggingface or _reads_as_huggingface(files),
    )


def _size(files: FileSet, settings: Settings) -> tuple[Size, str]:
    """The size, and who says it."""
    given = Size(settings.world_size, settings.nodes, settings.ranks_per_node)
    if given != Size():
        return given, "as given"
    launches = list(files.launches())
    parallel = [(file, launch) for file, launch in launches if launch.launchers[0].program != "python"]
    if launches:
        started = parallel or launches
        file, launch = started[0]
        size = _agreed(_of_launch(file, launch, files) for file, launch in started)
        return size, f"from {file.name}:{launch.at.line}"
    for kind, reader in (("accelerate", _of_accelerate), ("hostfile", of_hosts)):
        if found := [file for file in files.files if file.kind == kind]:
            return _agreed(reader(file) for file in found), f"from {found[0].name}"
    return given, ""


def described(settings: Settings) -> str:
    """`ranks: 16 = 2 nodes x 8, from job.sbatch:12`; says so where they aren't known."""
    if settings.world_size is None:
        said = f", {settings.size_from.removeprefix('from ')} leaves them open" if settings.size_from else ""
        return f"ranks: not known{said}; --world-size N or cluster=NAME tells"
    nodes, per_node = settings.nodes, settings.ranks_per_node
    grid = f" = {nodes} node{'s' if nodes != 1 else ''} x {per_node}" if nodes and per_node else ""
    degrees = [f"{name} {size}" for name, size in (("tp", settings.tp), ("pp", settings.pp)) if size]
    cut = f"; {', '.join(degrees)}" if degrees else ""
    return f"ranks: {settings.world_size}{grid}, {settings.size_from}{cut}"


def of_hosts(file: File) -> Size:
    """A hostfile's size; not told where a line can't be read."""
    slots = [line.slots for line in file.value if line.host]
    if not slots or len(slots) != len(file.value):
        return Size()
    even = slots[0] if len(set(slots)) == 1 else None
    return Size(sum(slots), len(slots), even)


def _agreed(sizes: Iterable[Size]) -> Size:
    """What all say alike; one that says nothing leaves all open."""
    found = list(sizes)
    return Size(*(_same([getattr(size, name) for size in found]) for name in ("world", "nodes", "per_node")))


def _same(values: list[int | None]) -> int | None:
    return values[0] if values and len(set(values)) == 1 else None


def _completed(size: Size) -> Size:
    """The third of world = nodes * per_node."""
    world, nodes, per_node = size.world, size.nodes, size.per_node
    if world is None and nodes and per_node:
        world = nodes * per_node
    if per_node is None and world and nodes and world % nodes == 0:
        per_node = world // nodes
    if nodes is None and world and per_node and world % per_node == 0:
        nodes = world // per_node
    return Size(world, nodes, per_node)


def _of_launch(file: File, launch: CommandLine, files: FileSet) -> Size:
    """The ranks that one command starts."""
    script: ShellScript = file.value
    if launch.components:
        return Size()
    innermost = launch.launchers[-1]
    if innermost.program == "python":
        outer = next((each for each in reversed(launch.launchers) if each.program != "python"), None)
        if outer is None:
            return Size() if launch.conditional or script.directives else Size(1, 1, 1)
        innermost = outer
    reader = _READERS[innermost.program]
    return _completed(reader(innermost, script, files))


def _torchrun(launcher: Launcher, _script: ShellScript, _files: FileSet) -> Size:
    options = launcher.options
    nodes = _number(options, "--nnodes") if options.has("--nnodes") else 1
    names = ("--nproc-per-node", "--nproc_per_node", "--nproc-per_node")
    ranks = _number(options, *names) if options.has(*names) else 1
    return _whole(Size(None, nodes, ranks), options)


def _deepspeed(launcher: Launcher, _script: ShellScript, files: FileSet) -> Size:
    """deepspeed/launcher/runner.py main, 0.19.8: a hostfile's first num_nodes hosts, num_gpus slots of each."""
    options = launcher.options
    if options.has("--include", "-i", "--exclude", "-e"):
        return Size()
    nodes = _number(options, "--num_nodes")
    ranks = _number(options, "--num_gpus", "--num_accelerators")
    if options.has("--hostfile", "-H"):
        hosts = files.of("hostfile")
        size = of_hosts(hosts[0]) if len(hosts) == 1 else Size()
        nodes, ranks = nodes or size.nodes, ranks or size.per_node
        whole = size.world if not options.has("--num_nodes", "--num_gpus") else None
        return _whole(Size(whole, nodes, ranks), options)
    return _whole(Size(None, nodes if options.has("--num_nodes") else 1, ranks), options)


def _accelerate(launcher: Launcher, _script: ShellScript, files: FileSet) -> Size:
    """accelerate/commands/launch.py 1.14: options go before the file's keys."""
    options = launcher.options
    configs = files.of("accelerate")
    size = _of_accelerate(configs[0]) if len(configs) == 1 and options.has("--config_file") else Size()
    world = _number(options, "--num_processes") if options.has("--num_processes") else size.world
    nodes = _number(options, "--num_machines") if options.has("--num_machines") else size.nodes
    return _whole(Size(world, nodes or 1), options)


def _srun(launcher: Launcher, script: ShellScript, _files: FileSet) -> Size:
    """srun takes what its options leave open from the job's directives."""

    def number(*names: str) -> int | None:
        if launcher.options.has(*names):
            return _number(launcher.options, *names)
        directive = script.directive(*names)
        return _whole_number(directive.value) if directive else None

    nodes, tasks = number("--nodes", "-N"), number("--ntasks", "-n")
    per_node = number("--ntasks-per-node")
    return _whole(Size(tasks, nodes, per_node), launcher.options)


def _mpirun(launcher: Launcher, _script: ShellScript, _files: FileSet) -> Size:
    options = launcher.options
    return _whole(Size(_number(options, "-np", "-n", "--np", "-c")), options)


_READERS: dict[str, Callable[[Launcher, ShellScript, FileSet], Size]] = {
    "accelerate": _accelerate,
    "deepspeed": _deepspeed,
    "mpirun": _mpirun,
    "srun": _srun,
    "torchrun": _torchrun,
}


def _of_accelerate(file: File) -> Size:
    world, nodes = file.get("num_processes"), file.get("num_machines")
    return Size(_positive(world), _positive(nodes))


def _whole(size: Size, options: Arguments) -> Size:
    """Nothing is told where the options may not be all."""
    return size if options.complete else Size()


def _number(options: Arguments, *names: str) -> int | None:
    """The option's whole number."""
    return _whole_number(options.value(*names) or "")


def gpus_per_node(script: ShellScript) -> int | None:
    """GPUs that the directives ask for on each node; None where several kinds of node are asked for."""
    if any(each.component for each in script.directives):
        return None
    directive = script.directive("--gpus-per-node", "--gres")
    return slurm.gpus(directive.value) if directive else None


def _whole_number(text: str) -> int | None:
    return _positive(int(text)) if text.isascii() and text.isdigit() and len(text) < 8 else None


def _positive(value: object) -> int | None:
    return value if type(value) is int and 0 < value <= _MAX_RANKS else None


def _degree(files: FileSet, flag: str) -> int | None:
    """A degree of Megatron's arguments, where all agree; 1 where it isn't given, and no flag may be hidden."""
    told = (each for _, each in files.megatron() if each.complete or each.has(flag))
    return _same([_whole_number(arguments.value(flag) or "1") for arguments in told])


def _pipeline(files: FileSet) -> int | None:
    """The stages of the PipelineModule that the only call of deepspeed.initialize gets."""
    engines = [(script, call) for script in scripts(files) for call in script.deepspeed]
    if len(engines) != 1:
        return None
    script, engine = engines[0]
    made = script.bound(engine.argument("model", 1))
    if isinstance(made, ast.Call) and script.name(made.func).rpartition(".")[2] == "PipelineModule":
        return stages_of(script, Call(made, "PipelineModule", ()))
    return None


def _reads_as_huggingface(files: FileSet) -> bool | None:
    """Whether Trainer or accelerate reads the DeepSpeed JSON, or the script itself; None where nothing tells."""
    if files.of("hf_arguments", "accelerate"):
        return True
    launches = [launch for _, launch in files.launches()]
    if any(launch.launcher("accelerate") for launch in launches):
        return True
    if any(launch.arguments.has(_TRAINER_FLAG) and not reads_json_itself(files, launch) for launch in launches):
        return True
    if _handed_to_trainer(files):
        return True
    return False if _reads_by_itself(files) else None


def _handed_to_trainer(files: FileSet) -> bool:
    """Whether a script hands DeepSpeed's configuration to the Trainer, and none calls DeepSpeed itself."""
    found = list(scripts(files))
    handed = (
        script.bound(call.keyword("deepspeed"))
        for script in found for call in script.calls if call.method in _TRAINER_CLASSES
    )  # fmt: skip
    given = any(node is not None and not (isinstance(node, ast.Constant) and not node.value) for node in handed)
    return given and not any(script.deepspeed for script in found)


_TRAINER_CLASSES = ("TrainingArguments", "Seq2SeqTrainingArguments", "SFTConfig")


def _reads_by_itself(files: FileSet) -> bool:
    """Whether a script hands one of these JSON files to DeepSpeed, and nothing of Hugging Face's is in it."""
    names = {PurePath(file.name).name for file in files.of("deepspeed_json")}
    own = [script for script in scripts(files) if not script.by_framework]
    handed = [script.constant(call.argument("config", 10)) for script in own for call in script.deepspeed]
    return any(isinstance(path, str) and PurePath(path).name in names for path in handed)
