"""What all ranks have to do alike: making groups, loading a model that is cut over them, stepping the engine."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.deepspeed.batch import STEPS
from dslaunch.rules.deepspeed.config import one_config
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.guards import guards, on_one_rank
from dslaunch.rules.scripts.tree import Script, scripts
from dslaunch.rules.settings import Settings

_RANKS = frozenset({"GLOBAL_RANK", "RANK", "get_rank", "global_rank", "rank", "world_rank"})
_FIRST = ("local_main_process_first", "main_process_first")


@rule(
    "script.new-group", severity="hang", raised_by="nobody",
    evidence="PyTorch 2.13 documentation: torch.distributed.new_group; run on four gloo ranks",
)  # fmt: skip
def new_group(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A process group that only its members make: every rank of the run has to call new_group for each group."""
    for script in scripts(files):
        for call in script.called("torch.distributed.new_group"):
            alone = call.keyword("use_local_synchronization")
            if alone is None and any(_asks_for_a_rank(node.test) for node, _ in guards(call)):
                message = "new_group needs every rank, members or not, and not all get here: they wait for ever."
                fix = "Make all groups on all ranks, in the same order, and choose afterwards."
                yield script.hit(call, message, fix)


def _asks_for_a_rank(test: ast.expr) -> bool:
    """Whether a condition holds on some ranks: no comparison with -1, and no question whether there are ranks."""
    for node in (each for each in ast.walk(test) if isinstance(each, ast.Compare)):
        sides = [node.left, *node.comparators]
        if any(ast.unparse(each) == "-1" or "environ" in ast.unparse(each) for each in sides[1:]):
            continue
        words = (each for side in sides for each in ast.walk(side) if isinstance(each, ast.Name | ast.Attribute))
        if any((each.id if isinstance(each, ast.Name) else each.attr) in _RANKS for each in words):
            return True
    return on_one_rank(test) is not None


@rule(
    "script.main-process-first", severity="hang", raised_by="nobody",
    evidence="huggingface/accelerate#3709; deepspeedai/DeepSpeed:deepspeed/runtime/zero/partition_parameters.py "
    "0.19.8",
)  # fmt: skip
def main_process_first(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """A model that is loaded within main_process_first under ZeRO-3: cutting it up takes all ranks at once."""
    config = one_config(plan, files, settings)
    stages = [each.get("deepspeed_config", "zero_stage") for each in files.of("accelerate")]
    at_once = [each.get("deepspeed_config", "zero3_init_flag") is not False for each in files.of("accelerate")]
    cut = (config is not None and config.stage == 3 and all(at_once)) or (stages == [3] and all(at_once))
    for script in scripts(files) if cut else ():
        for call in script.methods("from_pretrained", "from_config"):
            if "Model" in call.owner and any(_takes_turns(script, node) for node in call.around):
                message = (
                    "the first rank loads alone, and ZeRO-3 cuts the model up with all ranks: it waits for them, "
                    "and they for it."
                )
                yield script.hit(call, message, "Load the model outside; only download or tokenise in turns.")


def _takes_turns(script: Script, node: ast.AST) -> bool:
    items = node.items if isinstance(node, ast.With) else []
    made = (each.context_expr for each in items if isinstance(each.context_expr, ast.Call))
    return any(script.name(each.func).rpartition(".")[2] in _FIRST for each in made)


@rule(
    "script.engine-optimizer", severity="error", raised_by="deepspeed",
    evidence="deepspeedai/DeepSpeed:deepspeed/runtime/zero/stage_1_and_2.py 0.19.8, run on two gloo ranks",
)  # fmt: skip
def engine_optimizer(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """The optimizer that deepspeed.initialize returns, stepped in place of the engine between accumulations."""
    config = one_config(plan, files, settings)
    steps = config.number(STEPS) if config else None
    if config is None or not config.sharded or steps is None or steps <= 1:
        return
    for script in scripts(files):
        if any(f"{engine}.step" == call.name for engine in script.engines for call in script.methods("step")):
            continue
        for name in _optimizers(script):
            for call in script.methods("step"):
                if call.name == f"{name}.step":
                    message = (
                        f"{name}.step() in each pass, and {STEPS} is {steps:g}: KeyError, gradients are there "
                        "at the last pass alone."
                    )
                    yield script.hit(call, message, f"Call {min(script.engines)}.step(), which steps it in time.")


def _optimizers(script: Script) -> set[str]:
    """Names that hold what deepspeed.initialize returns second."""
    found: set[str] = set()
    for node in script.nodes:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        if script.name(node.value.func) == "deepspeed.initialize" and isinstance(node.targets[0], ast.Tuple):
            found |= {ast.unparse(each) for each in node.targets[0].elts[1:2]}
    return found - {"_"} if script.engines else set()


@rule(
    "script.visible-devices", severity="error", raised_by="torch",
    evidence="the programming guide of CUDA 13, CUDA_VISIBLE_DEVICES; PyTorch 2.13 documentation: set_device",
)  # fmt: skip
def visible_devices(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A process that shows itself one GPU, its own, and then asks for it by the number it had on the node."""
    for script in scripts(files):
        shown = list(_shown(script))
        for call in script.called("torch.cuda.set_device"):
            asked = call.argument("device", 0)
            above = [node for name, node in shown if isinstance(asked, ast.Name) and asked.id == name]
            if above and above[0].lineno < call.node.lineno and not list(guards(call)):
                message = (
                    f"CUDA_VISIBLE_DEVICES in line {above[0].lineno} leaves one GPU, and its number is 0: invalid "
                    "device ordinal on all ranks but the first."
                )
                yield script.hit(call, message, "Leave CUDA_VISIBLE_DEVICES alone, or take device 0.")


def _shown(script: Script) -> Iterator[tuple[str, ast.Assign]]:
    """`os.environ["CUDA_VISIBLE_DEVICES"] = str(NAME)`, with the name."""
    for each in script.nodes:
        if isinstance(each, ast.Assign) and "CUDA_VISIBLE_DEVICES" in ast.unparse(each.targets[0]):
            value = each.value
            if isinstance(value, ast.Call) and script.name(value.func) == "str" and len(value.args) == 1:
                value = value.args[0]
            if isinstance(value, ast.Name):
                yield value.id, each
