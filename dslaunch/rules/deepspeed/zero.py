"""ZeRO stages against pipelines, offload and gradient reduction."""

from __future__ import annotations

from collections.abc import Iterator

from dslaunch.files.fileset import File, FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.deepspeed.coercion import number
from dslaunch.rules.megatron.run import runs
from dslaunch.rules.registry import Hit, hit, rule
from dslaunch.rules.settings import Settings
from dslaunch.rules.topology import component

_ZERO = "zero_optimization"
_PIPELINE_ENGINES = ("deepspeed", "megatron_deepspeed", "native")


def stage(file: File) -> int | None:
    """The ZeRO stage that a DeepSpeed JSON asks for; None where it is no stage."""
    section = file.get(_ZERO)
    if isinstance(section, bool):
        return int(section)
    value = section.get("stage", 0) if isinstance(section, dict) else 0
    size = number(0 if value == "auto" else value)
    return int(size) if size in (0, 1, 2, 3) else None


@rule(
    "zero.pp-stage",
    severity="error",
    raised_by="deepspeed.initialize",
    evidence="deepspeedai/DeepSpeed:deepspeed/runtime/pipe/engine.py PipelineEngine.__init__ 0.19.8; "
    "DeepSpeed#823; deepspeedai/Megatron-DeepSpeed#474",
)
def pipeline_stage(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """ZeRO-2 or ZeRO-3 under a pipeline: DeepSpeed asserts after the model is built."""
    fix = "Use ZeRO-1 with the pipeline, or ZeRO-2/3 with pp 1."
    for file in files.of("deepspeed_json"):
        stages = _stages(plan, file, settings)
        if stages > 1 and (stage(file) or 0) >= 2:
            message = f"ZeRO stage {stage(file)} with {stages} pipeline stages: {_ASSERTS}."
            yield hit(file, (_ZERO, "stage"), message, fix)
    for run in runs(files, settings):
        names, zero = run.arguments.names, run.arguments.value("--zero-stage") or ""
        led = "--deepspeed" in names and "--no-pipeline-parallel" not in names
        if led and zero in ("2", "3") and run.trains:
            message = (
                f"--zero-stage {zero} with Megatron-DeepSpeed's pipeline module (for pp 1 too): {_ASSERTS}."
            )
            more = f"{fix} pp 1 needs --no-pipeline-parallel."
            told = run.whole  # a variable may hold --no-pipeline-parallel
            at = run.arguments.position("--zero-stage")
            yield Hit(run.file.name, at, message, more, None if told else "info")
    yield from _planned(plan, fix)


_ASSERTS = "DeepSpeed's pipeline engine asserts a stage below 2"


def _stages(plan: Plan | None, file: File, settings: Settings) -> int:
    if plan is None:
        return settings.pp or 1
    found = component(plan, file)
    return found[1].pp if found and plan.engine.name in _PIPELINE_ENGINES else 1


def _planned(plan: Plan | None, fix: str) -> Iterator[Hit]:
    if plan is None or plan.engine.name not in _PIPELINE_ENGINES:
        return
    for name, part in plan.components.items():
        if part.pp > 1 and part.zero >= 2:
            message = f"{name}: ZeRO stage {part.zero} with pp {part.pp}: {_ASSERTS}."
            yield Hit(f"strategy.{name}.zero", None, message, fix)


@rule(
    "zero.offload-stage",
    severity="error",
    raised_by="deepspeed.initialize",
    evidence="deepspeedai/DeepSpeed:deepspeed/runtime/engine.py zero_use_cpu_optimizer, runtime/zero/config.py "
    "offload_ratio_check 0.19.8; offload_param below stage 3 run",
)
def offload_stage(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """Offload at a ZeRO stage that can't do it."""
    for file in files.of("deepspeed_json"):
        level = stage(file)
        if level is None:
            continue
        if level == 0 and _offloads(file, "offload_optimizer"):
            yield _offloaded_whole(file)
        if level < 3 and _offloads(file, "offload_param"):
            message = f"offload_param at ZeRO stage {level}: DeepSpeed ignores it without a word."
            yield hit(
                file, (_ZERO, "offload_param"), message, "Use stage 3, or delete offload_param.",
                severity="wrong", raised_by="nobody",
            )  # fmt: skip
        ratio = number(file.get(_ZERO, "offload_optimizer", "ratio"))
        if level < 3 and ratio is not None and 0 <= ratio < 1:
            message = (
                f"offload_optimizer.ratio {ratio:g} at ZeRO stage {level}: partial offload needs stage 3."
            )
            path = (_ZERO, "offload_optimizer", "ratio")
            yield hit(file, path, message, "Use stage 3, or delete the ratio.", raised_by="DeepSpeedConfig")


def _offloaded_whole(file: File) -> Hit:
    """offload_optimizer without ZeRO: a CPU optimizer of DeepSpeed's fails on a GPU, any other one stays there."""
    name = str(file.get("optimizer", "type") or "adam").lower()
    path, fix = (_ZERO, "offload_optimizer"), "Use stage 1, 2 or 3, or no offload."
    if name in _ON_CPU and not file.get("optimizer", "params", "torch_adam"):
        message = "offload_optimizer at stage 0: the CPU optimizer gets parameters on the GPU and fails."
        return hit(file, path, message, fix, raised_by="nobody")  # on the GPU alone: a CPU's engine steps
    message = "offload_optimizer at stage 0: nothing is offloaded, and DeepSpeed says nothing of it."
    return hit(file, path, message, fix, severity="wrong", raised_by="nobody")


_ON_CPU = frozenset({"adam", "adamw", "adagrad", "lion"})
"""Optimizers that DeepSpeed has a CPU version of."""


def _offloads(file: File, name: str) -> bool:
    return file.get(_ZERO, name, "device") in ("cpu", "nvme")


@rule(
    "zero.grad-norm",
    severity="error",
    raised_by="DeepSpeedConfig",
    since="0.19.7",
    evidence="deepspeedai/DeepSpeed:deepspeed/runtime/zero/config.py compute_grad_norm_valid 0.19.8, run",
)
def grad_norm(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """compute_grad_norm false outside ZeRO stage 1 and 2."""
    for file in files.of("deepspeed_json"):
        level, value = stage(file), file.get(_ZERO, "compute_grad_norm")
        if level in (0, 3) and _off(value):
            message = (
                f"compute_grad_norm false at ZeRO stage {level}: DeepSpeed takes it at stage 1 and 2 only."
            )
            yield hit(file, (_ZERO, "compute_grad_norm"), message, "Delete it, or use stage 1 or 2.")


@rule(
    "zero.sum-op",
    severity="error",
    raised_by="DeepSpeedConfig",
    since="0.19.6",
    evidence="deepspeedai/DeepSpeed:deepspeed/runtime/config.py _do_error_check 0.19.8, run",
)
def sum_op(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """gradient_allreduce_op sum with a mode that can't sum."""
    for file in files.of("deepspeed_json"):
        if str(file.get("gradient_allreduce_op")).lower() != "sum":
            continue
        blockers = {
            "ZeRO stage 3": stage(file) == 3,
            "zenflow": isinstance(file.get(_ZERO, "zenflow"), dict),
            "compile.deepcompile": on(file.get("compile", "deepcompile")),
        }
        for blocker in (name for name, present in blockers.items() if present):
            message = f"gradient_allreduce_op sum with {blocker}: DeepSpeed raises ValueError at start-up."
            yield hit(file, ("gradient_allreduce_op",), message, f"Use mean, or go without {blocker}.")


def on(value: object) -> bool:
    """Whether pydantic reads `value` as true."""
    return value in (True, 1) or (
        isinstance(value, str) and value.lower() in ("1", "on", "t", "true", "y", "yes")
    )


def _off(value: object) -> bool:
    text = isinstance(value, str) and value.lower() in ("0", "off", "f", "false", "n", "no")
    return text or (value is not None and value in (False, 0))
