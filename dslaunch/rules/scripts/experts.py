"""DeepSpeed's own mixture of experts in a training script, against the ranks and the DeepSpeed JSON."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.deepspeed.config import ZERO, one_config
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.bindings import possible
from dslaunch.rules.scripts.defaults import value_of
from dslaunch.rules.scripts.tree import Call, Script, scripts
from dslaunch.rules.settings import Settings

_ENGINE = "deepspeedai/DeepSpeed:deepspeed/runtime/engine.py _validate_zero3_moe_compatibility 0.19.8, run"
_ZERO = "deepspeedai/DeepSpeed:deepspeed/runtime/zero/stage_1_and_2.py _configure_moe_settings 0.19.8, run"
_SPLIT = "split_params_into_different_moe_groups_for_optimizer"


def _layers(files: FileSet) -> Iterator[tuple[Script, Call]]:
    """Each place where a script builds a layer of experts."""
    for script in scripts(files):
        for call in script.called("deepspeed.moe.layer.MoE"):
            yield script, call


@rule(
    "moe.experts", severity="error", raised_by="deepspeed.initialize",
    evidence="deepspeedai/DeepSpeed:deepspeed/moe/layer.py MoE, utils/groups.py 0.19.8, run",
)  # fmt: skip
def experts(_plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """Experts, or ranks, that an expert-parallel size doesn't divide."""
    for script, call in _layers(files):
        count = value_of(files, script, call.argument("num_experts", 2), call.around)
        size = value_of(files, script, call.argument("ep_size", 3), call.around)
        if type(size) is not int or size < 1:
            continue
        if type(count) is int and count % size:
            message = f"ep_size {size} doesn't divide {count} experts: AssertionError."
            yield script.hit(call, message, f"Use an ep_size that divides {count}.")
        elif settings.data_parallel is not None and settings.data_parallel % size:
            ranks = settings.data_parallel
            message = f"ep_size {size} doesn't divide the {ranks} replicas: AssertionError."
            yield script.hit(call, message, f"Use an ep_size that divides {ranks}.")


@rule("moe.zero3", severity="error", raised_by="deepspeed.initialize", evidence=_ENGINE)
def zero3(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """deepspeed.moe's layers at ZeRO stage 3."""
    config = one_config(plan, files, settings)
    for script, call in _layers(files):
        if config is not None and config.stage == 3:
            message = f"{script.path}:{call.node.lineno} builds deepspeed.moe's MoE: at stage 3 AssertionError."
            yield config.hit(f"{ZERO}.stage", message, "Use stage 1 or 2, or AutoEP (expert_parallel).")
            return


@rule("moe.options", severity="error", raised_by="deepspeed.initialize", evidence=_ZERO)
def options(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """Options of ZeRO stage 1 and 2 that deepspeed.moe's layers need, switched off."""
    config = one_config(plan, files, settings)
    if config is None or config.stage not in (1, 2) or next(_layers(files), None) is None:
        return
    offloaded = config.offload("optimizer") != "none"
    if config.stage == 2 and config.off(f"{ZERO}.contiguous_gradients") and not offloaded:
        message = "the script builds deepspeed.moe's MoE: without contiguous_gradients AssertionError at stage 2."
        yield config.hit(f"{ZERO}.contiguous_gradients", message, "Leave it out.")
    if config.off(f"{ZERO}.reduce_scatter"):
        message = "the script builds deepspeed.moe's MoE: without reduce_scatter AssertionError."
        yield config.hit(f"{ZERO}.reduce_scatter", message, "Leave it out.")


@rule("moe.groups", severity="error", raised_by="deepspeed.initialize", evidence=_ZERO)
def groups(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """An optimizer of the script's own whose groups don't keep the experts apart."""
    config = one_config(plan, files, settings)
    if config is None or config.stage not in (1, 2) or next(_layers(files), None) is None:
        return
    marked = any(script.methods(_SPLIT) or "'moe'" in ast.unparse(script.python.tree) for script in scripts(files))
    for script in scripts(files) if not marked else ():
        for call in script.deepspeed:
            given = call.argument("optimizer", 2)
            made = possible(script, given, call.around) if given is not None else []
            calls = [each for each in made if isinstance(each, ast.Call)]
            if calls == made and calls and all(_is_plain(script, each) for each in calls):
                message = "no parameter group is marked as of experts: AssertionError at ZeRO stage 1 and 2."
                fix = f"Split them: deepspeed.moe.utils.{_SPLIT}."
                yield script.hit(call, message, fix)


def _is_plain(script: Script, made: ast.Call) -> bool:
    """Whether it makes an optimizer that knows nothing of experts."""
    return script.name(made.func).startswith(_PLAIN)


_PLAIN = ("torch.optim.", "deepspeed.ops.adam.", "deepspeed.ops.lamb.", "deepspeed.ops.lion.")
