"""Training scripts whose engine, Accelerator or optimizer is stepped or saved so that something is lost."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.deepspeed.config import ZERO, one_config
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.defaults import value_of
from dslaunch.rules.scripts.guards import guards
from dslaunch.rules.scripts.tree import ACCELERATOR, Call, Script, scripts
from dslaunch.rules.settings import Settings

_ENGINE = "deepspeedai/DeepSpeed:deepspeed/runtime/engine.py 0.19.8"
_RETURNED = 4
"""What deepspeed.initialize returns: engine, optimizer, loader, scheduler."""
_OF_ENGINES = frozenset({"backward", "step", "train_batch", "eval_batch", "train", "save_checkpoint"})
_ACCUMULATES = ("accumulate", "no_sync", "sync_gradients", "GradientState")
"""What a script names that counts passes by accelerate, or by itself."""


@rule("script.engine-step", severity="wrong", raised_by="nobody", evidence=f"{_ENGINE} step, run")
def engine_step(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """engine.step() in each N-th pass only: the engine counts its passes in step, and so never sees the others."""
    for script in scripts(files):
        if script.by_framework or script.methods("set_gradient_accumulation_boundary"):
            continue
        for call in script.methods("step"):
            told = _counted(script, call) if call.owner in script.engines and not call.node.args else None
            if told is not None and not _beside(told, script.engines):
                message = (
                    f"{call.owner}.step() is called in some passes only, and counts the others as none: ZeRO 1 "
                    "and 2 step with the last pass's gradients alone, accumulation takes as many times longer."
                )
                fix = f"Call {call.owner}.step() behind each backward; gradient_accumulation_steps does the rest."
                yield script.hit(call, message, fix)


def _counted(script: Script, call: Call) -> ast.If | None:
    """The condition around a call that is a remainder of the passes: `if (i + 1) % 8 == 0`."""
    for node, first_branch in guards(call):
        test = script.bound(node.test) or node.test
        divided = (
            each for each in ast.walk(test)
            if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Mod)
            and not isinstance(each.left, ast.Constant)
        )  # fmt: skip
        if first_branch and isinstance(node, ast.If) and next(divided, None) is not None:
            return node
    return None


def _beside(condition: ast.If, engines: set[str]) -> bool:
    """Whether backward stands under the condition too, or a step in its other branch."""
    under, other = (
        {ast.unparse(each.func) for part in parts for each in ast.walk(part) if isinstance(each, ast.Call)}
        for parts in (condition.body, condition.orelse)
    )
    steps, backwards = ({f"{name}.{method}" for name in engines} for method in ("step", "backward"))
    return bool(other & steps or under & backwards)


@rule("script.engine-tuple", severity="error", raised_by="python", evidence="deepspeed.initialize 0.19.8, run")
def engine_tuple(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """All four that deepspeed.initialize returns, in one name that is used as the engine."""
    for script in scripts(files):
        for node in script.nodes if script.deepspeed else ():
            if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
                continue
            target, call = node.targets[0], node.value
            if script.name(call.func) != "deepspeed.initialize":
                continue
            name = ast.unparse(target)
            if isinstance(target, ast.Tuple | ast.List):
                count = len(target.elts)
                if count != _RETURNED and not any(isinstance(each, ast.Starred) for each in target.elts):
                    message = f"{count} names for the {_RETURNED} things that initialize returns: ValueError."
                    fix = "Write engine, optimizer, loader, scheduler = ..., or engine, *_ = ..."
                    yield Hit(script.path, script.python.at(node), message, fix)
                continue
            uses = [each for each in script.calls if each.owner == name and each.method in _OF_ENGINES]
            if any(each.node.lineno > node.lineno and not _rebound(script, name, node, each) for each in uses):
                message = (
                    f"{name} holds four things, of which the engine is the first: TypeError or AttributeError, "
                    "a tuple has no such method."
                )
                fix = f"Write {name}, *_ = deepspeed.initialize(...)."
                yield Hit(script.path, script.python.at(node), message, fix)


def _rebound(script: Script, name: str, made: ast.Assign, use: Call) -> bool:
    """Whether the name is bound again before its use; an attribute anywhere else in the file."""
    if "." in name:
        assigned = (node for node in script.nodes if isinstance(node, ast.Assign))
        parts = (part for node in assigned for each in node.targets for part in ast.walk(each))
        return sum(isinstance(part, ast.Attribute) and ast.unparse(part) == name for part in parts) > 1
    return any(made.lineno < line <= use.node.lineno for line in script.bound_at.get(name, ()))


@rule("script.zero3-state", severity="wrong", raised_by="nobody", evidence=f"{_ENGINE}, run at stage 3")
def zero3_state(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """A model saved under ZeRO-3 without its shards put together: empty tensors, or no file at all."""
    config = one_config(plan, files, settings)
    if config is None or config.stage != 3:
        return
    for script in scripts(files):
        if script.by_framework or not script.engines:
            continue
        gathers = config.get(f"{ZERO}.stage3_gather_16bit_weights_on_model_save")
        for call in script.methods("save_16bit_model", "save_fp16_model") if not gathers else ():
            if call.owner in script.engines:
                message = (
                    f"{call.method} writes nothing without stage3_gather_16bit_weights_on_model_save, and only "
                    "logs that."
                )
                yield script.hit(call, message, 'Set "stage3_gather_16bit_weights_on_model_save": true.')
        handed = {ast.unparse(model) for each in script.deepspeed if (model := each.argument("model", 1))}
        models = {f"{name}.module" for name in script.engines} | handed
        models |= {name for name in script.bound_at if _source(script, name) in models}
        for call in script.methods("state_dict", "save_pretrained"):
            if call.owner not in models or _gathered(script, call) or not _is_saved(script, call):
                continue
            message = "under ZeRO-3 each parameter is empty between passes: the file holds tensors of size 0."
            fix = "Call engine.save_16bit_model on all ranks, or zero_to_fp32.py on a checkpoint."
            yield script.hit(call, message, fix)


def _gathered(script: Script, call: Call) -> bool:
    """Whether the parameters are put together around the call, or anywhere in its file by name."""
    text = script.python.text
    if "GatheredParameters" in text or "_zero3_consolidated_16bit_state_dict" in text:
        return True
    return call.method == "save_pretrained" and (call.keyword("state_dict") is not None or call.unpacks)


def _is_saved(script: Script, call: Call) -> bool:
    """Whether it is written at once: save_pretrained, or state_dict() within torch.save, below initialize."""
    if call.node.lineno < min(each.node.lineno for each in script.deepspeed):
        return False
    inside = (each for each in call.around if isinstance(each, ast.Call))
    if call.method == "save_pretrained" or any(script.name(each.func) == "torch.save" for each in inside):
        return True
    given = (each.argument("obj", 0) for each in script.called("torch.save"))
    return any(isinstance(each, ast.Name) and script.bound(each) is call.node for each in given)


def _source(script: Script, name: str) -> str:
    """What a name that is bound once is bound to, as text."""
    bound = script.bound(ast.Name(name, ast.Load()))
    return ast.unparse(bound) if isinstance(bound, ast.Attribute | ast.Name) else ""


@rule(
    "script.accelerate-accumulate", severity="wrong", raised_by="nobody",
    evidence="huggingface/accelerate:src/accelerate/accelerator.py backward, accumulate 1.15.0, run",
)  # fmt: skip
def accumulate(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """An Accelerator with gradient_accumulation_steps, and a loop that never enters accumulate."""
    for script in scripts(files):
        text = script.python.text
        backwards = [call for call in script.methods("backward") if call.owner in script.accelerators]
        if not backwards or any(name in text.replace("gradient_accumulation_steps", "") for name in _ACCUMULATES):
            continue
        counted = any(_counted(script, call) for call in script.methods("step"))
        for call in script.called(*ACCELERATOR) if not counted else ():
            steps = _accumulated(script, call)
            if steps > 1:
                name = backwards[0].owner
                message = (
                    f"nothing enters {name}.accumulate(model): the optimizer steps in each pass, with gradients "
                    f"divided by {steps}."
                )
                fix = f"Put the pass under `with {name}.accumulate(model):`."
                yield script.hit(call, message, fix)


def _accumulated(script: Script, call: Call) -> int:
    """The passes that an Accelerator is to accumulate, where a number tells; 0 for anything else."""
    plugin = script.bound(call.keyword("gradient_accumulation_plugin"))
    steps = script.constant(call.keyword("gradient_accumulation_steps"))
    if isinstance(plugin, ast.Call):
        steps = script.constant(Call(plugin, "", ()).argument("num_steps", 0))
    return steps if type(steps) is int else 0


@rule("script.zero-grad-first", severity="wrong", raised_by="nobody", evidence="torch 2.13, run")
def zero_grad_first(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """zero_grad between backward and step: the gradients are gone before they are used."""
    for script in scripts(files):
        for call in script.methods("zero_grad"):
            loop = next((each for each in call.around if isinstance(each, ast.For | ast.While)), None)
            block = _block(call)
            if loop is None or block is None or not _steps_next(script, block, call):
                continue
            before = (each for each in script.passes if loop in each.around)
            if any(each.node.lineno < call.node.lineno for each in before):
                message = (
                    f"{call.owner}.zero_grad() stands between backward and step: the gradients are None when "
                    "the optimizer steps, no weight changes."
                )
                yield script.hit(call, message, "Move it behind the step.")


def _block(call: Call) -> list[ast.stmt] | None:
    """The statements behind that which a call is, in the same list."""
    statement = call.around[0] if call.around else None
    for node in call.around[1:2]:
        for body in (getattr(node, "body", []), getattr(node, "orelse", [])):
            if isinstance(body, list) and statement in body:
                return body[body.index(statement) + 1 :]
    return None


def _steps_next(script: Script, block: list[ast.stmt], call: Call) -> bool:
    """Whether the next thing that is done with the same optimizer is a step, and no pass comes between."""
    for statement in block:
        made = statement.value if isinstance(statement, ast.Expr) else None
        if not isinstance(made, ast.Call):
            return False
        name = script.name(made.func)
        given = ast.unparse(made.args[0]) if made.args else ""
        if name == f"{call.owner}.step":
            return not made.args and not made.keywords
        if name.rpartition(".")[2] == "step" and given == call.owner:
            return True
        if name.rpartition(".")[2] not in _HARMLESS:
            return False
    return False


_HARMLESS = ("clip_grad_norm_", "clip_grad_value_", "unscale_", "print", "info", "update")


@rule("script.schedule-steps", severity="error", raised_by="torch", evidence="torch 2.13, run")
def schedule_steps(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A schedule as long as there are epochs, that is stepped after each batch."""
    for script in scripts(files):
        for call in script.calls if not script.accelerators else ():
            length = call.argument(*_LENGTHS[call.name]) if call.name in _LENGTHS else None
            if length is None:
                if call.name in _LENGTHS:
                    yield from _divided(files, script, call)
                continue
            text, names = ast.unparse(length), script.assigned(call.name)
            for step in script.methods("step"):
                loops = [each for each in step.around if isinstance(each, ast.For | ast.While)]
                trains = any(loops and loops[0] in each.around for each in script.passes)
                each_batch = len(loops) > 1 and trains and not list(guards(step))
                if step.owner not in names or not each_batch or not _counts(script, loops[-1], text):
                    continue
                kind = call.name.rpartition(".")[2]
                effect = "ValueError as soon as it has taken that many steps"
                if kind != "OneCycleLR":
                    effect = "the rate falls within that many batches, and rises again"
                message = f"{kind} of {text} steps, the epochs, is stepped after each batch: {effect}."
                found = script.hit(call, message, f"Write {text} * len(loader), or step it once an epoch.")
                yield found if kind == "OneCycleLR" else replace(found, severity="wrong")
                break


def _divided(files: FileSet, script: Script, call: Call) -> Iterator[Hit]:
    """steps_per_epoch of fewer steps than there are batches, and a step behind each batch."""
    given = call.argument("steps_per_epoch", 4)
    divides = isinstance(given, ast.BinOp) and isinstance(given.op, ast.FloorDiv | ast.Div)
    if not isinstance(given, ast.BinOp) or not divides or not re.fullmatch(r"len\(\w+\)", ast.unparse(given.left)):
        return
    loader, parts = ast.unparse(given.left)[4:-1], value_of(files, script, given.right, call.around)
    for step in script.methods("step"):
        loop = next((each for each in step.around if isinstance(each, ast.For | ast.While)), None)
        if not isinstance(loop, ast.For) or list(guards(step)) or step.owner not in script.assigned(call.name):
            continue
        over = {each.id for each in ast.walk(loop.iter) if isinstance(each, ast.Name)}
        leaves = any(isinstance(each, ast.Continue) for each in ast.walk(loop))
        trains = any(loop in each.around for each in script.passes)
        if loader in over and trains and not leaves and type(parts) is int and parts > 1:
            message = (
                f"steps_per_epoch is {ast.unparse(given)}, and the schedule is stepped after each batch: "
                f"ValueError when 1/{parts} of the run is done."
            )
            fix = f"Write steps_per_epoch={ast.unparse(given.left)}, or step it with the optimizer alone."
            yield script.hit(call, message, fix)
            return


_LENGTHS = {
    "torch.optim.lr_scheduler.OneCycleLR": ("total_steps", 2),
    "torch.optim.lr_scheduler.CosineAnnealingLR": ("T_max", 1),
}
"""The argument that is a schedule's length, and its place."""


def _counts(script: Script, loop: ast.For | ast.While, text: str) -> bool:
    """Whether a loop runs over that many numbers: `for epoch in range(args.epochs)`."""
    over = loop.iter if isinstance(loop, ast.For) else None
    if isinstance(over, ast.Call) and script.name(over.func).rpartition(".")[2] == "tqdm" and over.args:
        over = over.args[0]
    by_range = isinstance(over, ast.Call) and script.name(over.func) == "range"
    return isinstance(over, ast.Call) and by_range and bool(over.args) and ast.unparse(over.args[-1]) == text
