"""What a training script hands to DeepSpeed, against the DeepSpeed JSON beside it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace

from dslaunch.errors import listed
from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.deepspeed.config import one_config
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.bindings import possible
from dslaunch.rules.scripts.defaults import value_of
from dslaunch.rules.scripts.launched import launched
from dslaunch.rules.scripts.objects import assigned
from dslaunch.rules.scripts.tree import Call, Script, is_none, scripts
from dslaunch.rules.settings import Settings

_TP = "tensor_parallel"
_FLOATS = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
_FP32 = ("fp32", "float32", "float", "torch.float32")


@rule(
    "autotp.model-init", severity="error", raised_by="deepspeed.initialize", since="0.19.2",
    evidence="deepspeedai/DeepSpeed:deepspeed/runtime/tensor_parallel/init_utils.py 0.19.8, run",
)  # fmt: skip
def model_init(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """tp_model_init with another size or type than the DeepSpeed JSON."""
    config = one_config(plan, files, settings)
    for script in scripts(files) if config is not None else ():
        for call in script.called("deepspeed.tp_model_init"):
            assert config is not None
            size, kind = script.constant(call.argument("tp_size", 1)), _float(script, call.argument("dtype", 2))
            for key in (f"{_TP}.autotp_size", f"{_TP}.tp.tp_size") if type(size) is int else ():
                held = config.number(key)
                if held is not None and held != size:
                    message = f"tp_size {size} here, and {key} {held:g} in the DeepSpeed JSON: ValueError."
                    yield script.hit(call, message, "Give the same size in both, or leave it out of the JSON.")
            if kind and config.precision not in ("fp32", kind):
                message = f"dtype {kind} here, and {config.precision} in the DeepSpeed JSON: ValueError."
                yield script.hit(call, message, "Give the same type in both.")


def _float(script: Script, node: ast.expr | None) -> str:
    """bf16 | fp16 | fp32 for torch's types; empty for what isn't told."""
    name = script.name(node) if node is not None else ""
    return _FLOATS.get(name.removeprefix("torch."), "") if name.startswith("torch.") else ""


@rule(
    "script.no-optimizer", severity="error", raised_by="deepspeed.initialize",
    evidence="deepspeedai/DeepSpeed:deepspeed/runtime/engine.py _configure_zero_optimizer 0.19.8, run",
)  # fmt: skip
def no_optimizer(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """A script that trains with an engine for which neither it nor the JSON names an optimizer."""
    config = one_config(plan, files, settings)
    for script in scripts(files) if config is not None and not config.has("optimizer") else ():
        assert config is not None
        if len(script.deepspeed) != 1 or script.by_framework or not script.methods("backward", "train_batch"):
            continue
        call = script.deepspeed[0]
        given = call.argument("optimizer", 2)
        if call.unpacks or not (given is None or is_none(given)):
            continue
        fix = 'Give the JSON an "optimizer" section and the call model_parameters=, or the call optimizer=.'
        if config.stage in (1, 2, 3):
            message = f"no optimizer here or in the DeepSpeed JSON: ZeRO stage {config.stage} raises."
            yield script.hit(call, message, fix)
        else:
            message = "no optimizer here or in the DeepSpeed JSON: the engine runs, and no weight ever changes."
            yield replace(script.hit(call, message, fix), severity="wrong")


@rule(
    "optimizer.muon-dense", severity="error", raised_by="deepspeed.initialize", since="0.19.8",
    evidence="deepspeedai/DeepSpeed:deepspeed/runtime/bf16_optimizer.py BF16_Optimizer.__init__ 0.19.8, run",
)  # fmt: skip
def muon_dense(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """Muon by BF16_Optimizer with experts or an mpu, which it takes for dense models alone."""
    config = one_config(plan, files, settings)
    if config is None or config.optimizer != "muon" or config.stage != 1 or not config.bf16:
        return
    summed = config.get("data_types.grad_accum_dtype") in _FP32
    if not summed or config.offload("optimizer") != "none":
        return
    why = "bf16, stage 1 and fp32 accumulation make BF16_Optimizer step Muon"
    for script in scripts(files):
        for call in script.deepspeed:
            mpu = call.argument("mpu", 7)
            if mpu is not None and not is_none(mpu):
                message = f"{why}, which refuses an mpu: ValueError."
                yield script.hit(call, message, "Use ZeRO stage 2, or leave mpu out.")
        if layers := script.called("deepspeed.moe.layer.MoE"):
            message = f"{why}, which refuses layers of experts: ValueError."
            yield script.hit(layers[0], message, "Use ZeRO stage 2.")


@rule(
    "optimizer.muon-parameters", severity="error", raised_by="deepspeed.initialize", since="0.19.8",
    evidence="deepspeedai/DeepSpeed:deepspeed/runtime/engine.py _muon_param_groups 0.19.8, run",
)  # fmt: skip
def muon_parameters(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """Parameters for Muon that aren't the model's."""
    config = one_config(plan, files, settings)
    for script in scripts(files) if config is not None and config.optimizer == "muon" else ():
        for call in script.deepspeed:
            model, given = call.argument("model", 1), script.bound(call.argument("model_parameters", 3))
            if not isinstance(model, ast.Name) or given is None:
                continue
            others = _owners(given) - _related(script, model.id, call.node)
            if others:
                message = (
                    f"model_parameters holds those of {listed(sorted(others))}, which isn't seen to be part of "
                    f"{model.id}: Muon tags what is the model's, and raises ValueError at the rest."
                )
                yield script.hit(call, message, f"Pass {model.id}.parameters(), with the rest as parts of it.")


def _owners(given: ast.expr) -> set[str]:
    """Names whose `.parameters()` are called in an expression."""
    calls = (node.func for node in ast.walk(given) if isinstance(node, ast.Call))
    return {
        func.value.id for func in calls
        if isinstance(func, ast.Attribute) and func.attr == "parameters" and isinstance(func.value, ast.Name)
    }  # fmt: skip


def _related(script: Script, name: str, but: ast.Call) -> set[str]:
    """The name, and every other that an assignment, but for that of a call, binds together with it."""
    found = {name}
    for node in script.nodes:
        if isinstance(node, ast.Assign) and node.value is not but:
            names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
            found |= names if name in names else set()
    return found


@rule(
    "script.no-sync", severity="error", raised_by="deepspeed",
    evidence="deepspeedai/DeepSpeed:deepspeed/runtime/engine.py no_sync 0.19.8, run",
)  # fmt: skip
def no_sync(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """engine.no_sync() at ZeRO stage 2 or 3, which cuts the gradients in every pass."""
    config = one_config(plan, files, settings)
    for script in scripts(files) if config is not None and config.stage in (2, 3) else ():
        for call in script.methods("no_sync"):
            if call.owner in script.engines:
                assert config is not None
                message = f"no_sync() at ZeRO stage {config.stage}: AssertionError, each pass cuts gradients."
                fix = f"Drop it: {call.owner} accumulates by gradient_accumulation_steps; or use stage 1."
                yield script.hit(call, message, fix)


@rule(
    "script.client-scheduler", severity="wrong", raised_by="nobody",
    evidence="deepspeedai/DeepSpeed:deepspeed/runtime/engine.py _do_sanity_check, _take_model_step 0.19.8, run",
)  # fmt: skip
def client_scheduler(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """A scheduler that was made with another optimizer than that of the DeepSpeed JSON, which it is to drive."""
    config = one_config(plan, files, settings)
    for script in scripts(files) if config is not None and config.optimizer else ():
        for call in script.deepspeed:
            optimizer = call.argument("optimizer", 2)
            scheduler = _made_by(script, script.bound(call.argument("lr_scheduler", 5)))
            if (optimizer is None or is_none(optimizer)) and _SCHEDULES.fullmatch(scheduler):
                message = (
                    "the optimizer comes from the DeepSpeed JSON, and lr_scheduler drives another: the learning "
                    "rate that trains never moves."
                )
                fix = "Pass a function that takes the optimizer, or write a scheduler section."
                yield script.hit(call, message, fix)
            elif (optimizer is None or is_none(optimizer)) and not scheduler:
                yield from _stepped_by_hand(script)


def _stepped_by_hand(script: Script) -> Iterator[Hit]:
    """A schedule that the script steps, over an optimizer that it makes and hands to nobody."""
    for call in script.methods("step"):
        made = script.bound(call.node.func.value) if isinstance(call.node.func, ast.Attribute) else None
        if not isinstance(made, ast.Call) or not _SCHEDULES.fullmatch(_made_by(script, made)):
            continue
        given = next((each for each in made.args if isinstance(each, ast.Name)), None)
        held = assigned(script, given.id) if given is not None else []
        own = [isinstance(each, ast.Call) and script.name(each.func).startswith("torch.optim.") for each in held]
        if given is not None and own and all(own):
            message = (
                f"{call.owner} drives {given.id} of line {held[0].lineno}, and the optimizer that trains comes "
                "from the DeepSpeed JSON: its learning rate never moves."
            )
            fix = "Make it over the optimizer that deepspeed.initialize returns, or write a scheduler section."
            yield script.hit(call, message, fix)


_SCHEDULES = re.compile(r"torch\.optim\.lr_scheduler\.\w+|transformers\.(?:\w+\.)*get_\w*sched\w*")


def _made_by(script: Script, made: ast.expr | None) -> str:
    """The function or class that made an object, also where a function of the file returns it."""
    if not isinstance(made, ast.Call):
        return ""
    name = script.name(made.func)
    function = script.functions.get(name)
    ends = [each for each in function.body if isinstance(each, ast.Return)] if function is not None else []
    inner = script.bound(ends[0].value) if ends else None
    return script.name(inner.func) if isinstance(inner, ast.Call) else name


@rule(
    "offload.client-optimizer", severity="error", raised_by="deepspeed.initialize",
    evidence="deepspeedai/DeepSpeed:deepspeed/runtime/engine.py _configure_optimizer 0.19.8, run",
)  # fmt: skip
def client_optimizer(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """An optimizer of torch's own with states on the CPU, which DeepSpeed takes only where it is told to."""
    config = one_config(plan, files, settings)
    if config is None or config.offload("optimizer") == "none" or config.off("zero_force_ds_cpu_optimizer"):
        return
    for script in scripts(files):
        for call in script.deepspeed:
            names = _optimizers(script, call)
            name = next(iter(names), "")
            if names and all(each.startswith(_NOT_OF_CPU) and "lr_scheduler" not in each for each in names):
                message = f"{name} with offload_optimizer: ZeRORuntimeException, it would step slowly on the CPU."
                fix = (
                    "Make deepspeed.ops.adam.DeepSpeedCPUAdam, or name the optimizer in the JSON; "
                    '"zero_force_ds_cpu_optimizer": false takes it as it is.'
                )
                yield script.hit(call, message, fix)


_NOT_OF_CPU = (
    "torch.optim.", "bitsandbytes.optim.", "apex.optimizers.", "transformers.", "deepspeed.ops.adam.Fused",
)  # fmt: skip


def _optimizers(script: Script, call: Call) -> list[str]:
    """What the optimizer that deepspeed.initialize gets is made by; empty where that isn't told."""
    given = call.argument("optimizer", 2)
    made = possible(script, given, call.around) if given is not None else []
    names = [script.name(each.func) if isinstance(each, ast.Call) else "" for each in made]
    return names if all("." in each for each in names) else []


@rule(
    "script.untested-optimizer", severity="error", raised_by="deepspeed.initialize",
    evidence="deepspeedai/DeepSpeed:deepspeed/runtime/engine.py _do_optimizer_sanity_check, runtime/zero/utils.py "
    "ZERO_SUPPORTED_OPTIMIZERS 0.19.8, run",
)  # fmt: skip
def untested_optimizer(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """An optimizer of the script's that ZeRO takes only with zero_allow_untested_optimizer."""
    config = one_config(plan, files, settings)
    if config is None or not config.sharded or config.get("zero_allow_untested_optimizer"):
        return
    if config.offload("optimizer") != "none" and not config.off("zero_force_ds_cpu_optimizer"):
        return  # which offload.client-optimizer is about
    for script in scripts(files):
        for call in script.deepspeed:
            names = _optimizers(script, call)
            if names and all(_is_untested(each) for each in names):
                message = (
                    f"{names[0]} at ZeRO stage {config.stage}: DeepSpeed asserts zero_allow_untested_optimizer, "
                    "as it isn't one of those that ZeRO was tested with."
                )
                fix = 'Write "zero_allow_untested_optimizer": true in the DeepSpeed JSON, or use AdamW.'
                yield script.hit(call, message, fix)


def _is_untested(name: str) -> bool:
    module, _, kind = name.rpartition(".")
    of_torch = module.startswith("torch.optim") and "lr_scheduler" not in module
    other = module.startswith("bitsandbytes.optim") or name in _UNTESTED
    return other or (of_torch and kind[:1].isupper() and kind not in ("Adam", "AdamW", "Adagrad"))


_UNTESTED = frozenset({
    "transformers.Adafactor", "transformers.optimization.Adafactor", "deepspeed.ops.lamb.FusedLamb",
})  # fmt: skip


@rule(
    "script.optimizer-twice", severity="wrong", raised_by="nobody",
    evidence="deepspeedai/DeepSpeed:deepspeed/runtime/engine.py _configure_optimizer 0.19.8, run",
)  # fmt: skip
def optimizer_twice(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """An optimizer or scheduler that the script passes, beside a section that DeepSpeed then doesn't read."""
    config = one_config(plan, files, settings)
    for script in scripts(files) if config is not None and config.optimizer else ():
        for call in script.deepspeed if len(script.deepspeed) == 1 else ():
            names = _optimizers(script, call)
            if names and config is not None:
                message = (
                    f"{names[0]} is passed here, and the optimizer section of the DeepSpeed JSON, "
                    f"{config.get('optimizer.type')}, isn't read: its rate and decay are those of the script."
                )
                yield script.hit(call, message, "Take out the section, or don't pass optimizer=.")
    for script in scripts(files) if config is not None and config.get("scheduler.type") else ():
        for call in script.deepspeed if len(script.deepspeed) == 1 else ():
            given = call.argument("lr_scheduler", 5)
            made = possible(script, given, call.around) if given is not None else []
            if config is not None and made and all(isinstance(each, ast.Call | ast.Lambda) for each in made):
                message = (
                    f"lr_scheduler is passed here, and the scheduler section of the DeepSpeed JSON, "
                    f"{config.get('scheduler.type')}, isn't read: its warm-up and rates have no effect."
                )
                yield script.hit(call, message, "Take out the section, or don't pass lr_scheduler=.")


@rule(
    "autotp.data", severity="error", raised_by="deepspeed.initialize",
    evidence="deepspeedai/DeepSpeed:deepspeed/runtime/engine.py _configure_tensor_parallel 0.19.8",
)  # fmt: skip
def autotp_data(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """Samples shared out over all ranks under AutoTP, whose ranks of one group need the same."""
    config = one_config(plan, files, settings)
    size = config.number(f"{_TP}.autotp_size") if config is not None else None
    for script in scripts(files) if size is not None and size > 1 else ():
        for call in script.called("torch.utils.data.DistributedSampler") if script.deepspeed else ():
            if call.argument("num_replicas", 1) is None and call.argument("rank", 2) is None:
                message = (
                    f"DistributedSampler gives each rank samples of its own, and {size:g} ranks are one replica: "
                    "AssertionError in the first pass."
                )
                fix = "Give num_replicas and rank of the data-parallel group."
                yield script.hit(call, message, fix)


@rule(
    "script.local-rank-default", severity="error", raised_by="deepspeed.initialize",
    evidence="deepspeedai/DeepSpeed:deepspeed/runtime/engine.py _do_args_sanity_check 0.19.8, run",
)  # fmt: skip
def local_rank_default(_plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """args with a local_rank of 0 on every rank, because the launcher passes none: DeepSpeed compares them."""
    for _, command, script in launched(files):
        by_deepspeed = command.launcher("deepspeed") is not None or settings.ranks_per_node == 1
        for call in script.deepspeed if not by_deepspeed else ():
            args = call.argument("args", 0)
            if not isinstance(args, ast.Name) or f"{args.id}.local_rank =" in script.python.text:
                continue
            value = value_of(files, script, ast.Attribute(args, "local_rank", ast.Load()))
            if type(value) is int and value >= 0:
                message = (
                    f"{args.id}.local_rank is {value} on every rank, as nothing passes --local_rank: "
                    "AssertionError, Mismatch in local rank setting, on all but one of a node."
                )
                yield script.hit(call, message, "Let --local_rank default to -1: LOCAL_RANK is read then.")
