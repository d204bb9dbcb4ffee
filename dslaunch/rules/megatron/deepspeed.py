"""Megatron-DeepSpeed's flags against the DeepSpeed JSON that they name: which of the two decides what."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from dslaunch.engines.deepspeed_keys import release
from dslaunch.engines.versions import NO_MEM_STATUS
from dslaunch.files.fileset import File, FileSet
from dslaunch.files.flags import is_told
from dslaunch.planfile import Plan
from dslaunch.rules.deepspeed.config import Config
from dslaunch.rules.megatron.run import Run, deepspeed_runs, where_told
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.settings import Settings

_TRAINING = "deepspeedai/Megatron-DeepSpeed:megatron/training.py at 4efb479 (2025-07); deepspeedai/DeepSpeed:"
_CONFIG = "--deepspeed_config"
_ZBH1, _ZBH1_EXACT = "--enable-zbh1-pipeline", "--enable-zbh1-exact-semantics"
_MICRO, _GLOBAL, _CLIP, _ZERO = "--micro-batch-size", "--global-batch-size", "--clip-grad", "--zero-stage"


@rule(
    "megatron-deepspeed.switch", severity="wrong", raised_by="nobody",
    evidence=f"{_TRAINING}deepspeed/__init__.py add_config_arguments 0.19.8",
)  # fmt: skip
def switch(_plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """--deepspeed_config without --deepspeed: Megatron trains by itself, and reads no JSON."""
    for run in deepspeed_runs(files, settings):
        yield from where_told(_switched(run))


def _switched(run: Run) -> Iterator[Hit]:
    if run.arguments.has(_CONFIG) and not run.on("--deepspeed"):
        message = f"{_CONFIG} without --deepspeed: the file isn't read, and no ZeRO runs."
        yield run.hit(_CONFIG, message, "Add --deepspeed.")


@rule(
    "megatron-deepspeed.json", severity="error", raised_by="megatron",
    evidence=f"{_TRAINING}deepspeed/runtime/config.py (hjson) 0.19.8",
)  # fmt: skip
def strict_json(_plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """A JSON with comments or trailing commas, which Megatron-DeepSpeed reads before DeepSpeed does."""
    for run, file in _pairs(files, settings):
        try:
            if not file.inside:
                json.loads(file.text)
        except ValueError as error:
            message = f"Megatron-DeepSpeed reads {file.name} as strict JSON, and it is none: {error}."
            yield run.hit(_CONFIG, message, "Take comments, trailing commas and bare words out of the file.")


@rule(
    "megatron-deepspeed.mismatch", severity="wrong", raised_by="nobody",
    evidence=f"{_TRAINING}deepspeed/runtime/engine.py set_train_batch_size 0.19.8",
)  # fmt: skip
def mismatch(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """A micro-batch, type, ZeRO stage or clipping that flags and JSON say differently."""
    for run, file in _pairs(files, settings):
        config = Config(file, plan, settings)
        for check in (_micro_batch, _global_batch, _precision, _stage, _clipping):
            yield from where_told(check(run, config))


@rule(
    "megatron-deepspeed.zero-bubble", severity="error", raised_by="megatron",
    evidence=(
        "deepspeedai/Megatron-DeepSpeed:megatron/arguments.py parse_args, 4efb479 (2025-07); "
        "DeepSpeed 0.17.4 and 0.19.8, run"
    ),
)  # fmt: skip
def zero_bubble(_plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """ZB-H1 without DeepSpeed, with a newer one or sequence parallelism; its exact semantics without it."""
    for run in deepspeed_runs(files, settings):
        yield from where_told(_split_backward(run, settings))


def _split_backward(run: Run, settings: Settings) -> Iterator[Hit]:
    if not run.on(_ZBH1):
        if run.on(_ZBH1_EXACT):
            yield run.hit(_ZBH1_EXACT, f"{_ZBH1_EXACT} without {_ZBH1}: AssertionError.", f"Add {_ZBH1}.")
        return
    if run.arguments.has("--sequence-parallel"):
        message = f"--sequence-parallel beside {_ZBH1}: AssertionError, for nobody has tested the two together."
        yield run.hit("--sequence-parallel", message, f"Leave out --sequence-parallel, or {_ZBH1}.")
    if not run.on("--deepspeed"):
        yield run.hit(_ZBH1, f"{_ZBH1} without --deepspeed: AssertionError.", "Add --deepspeed.")
    elif release(settings.deepspeed_version) >= release(NO_MEM_STATUS) and run.pp > 1:
        message = (
            f"Its schedule calls PipelineEngine.mem_status, which DeepSpeed has no more from {NO_MEM_STATUS} on: "
            "AttributeError in the first step."
        )
        yield run.hit(_ZBH1, message, f"Leave out {_ZBH1}, or install deepspeed 0.17.4.")


@rule(
    "megatron-deepspeed.offload", severity="error", raised_by="deepspeed.initialize",
    evidence="deepspeedai/Megatron-DeepSpeed:megatron/optimizer/__init__.py get_megatron_optimizer at 4efb479; "
    "deepspeedai/DeepSpeed:deepspeed/runtime/engine.py _configure_optimizer 0.19.8, run",
)  # fmt: skip
def offload(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """Optimizer states on the CPU by the JSON, and an optimizer of Megatron's that isn't made for it."""
    for run, file in _pairs(files, settings):
        yield from where_told(_offloaded(run, Config(file, plan, settings)))


def _offloaded(run: Run, config: Config) -> Iterator[Hit]:
    offloads = config.stage in (1, 2, 3) and config.offload("optimizer") != "none"
    if not offloads or config.off("zero_force_ds_cpu_optimizer") or not run.trains:
        return
    if run.on("--cpu-optimizer") and not run.on("--cpu_torch_adam"):
        return
    made = "torch's AdamW (--cpu_torch_adam)" if run.on("--cpu-optimizer") else "FusedAdam"
    message = f"{config.file.name} offloads the optimizer, and Megatron makes {made}: ZeRORuntimeException."
    fix = 'Add --cpu-optimizer, without --cpu_torch_adam; or write "zero_force_ds_cpu_optimizer": false.'
    yield run.hit(_CONFIG, message, fix)


_UNTOLD = re.compile(r"\$\{[^}]*\}|\$\w+|\$\(.*\)")


def _pairs(files: FileSet, settings: Settings) -> Iterator[tuple[Run, File]]:
    """Each run under DeepSpeed with the JSON that it names, or the only one there is where the name isn't told."""
    for run in deepspeed_runs(files, settings):
        name = (run.arguments.value(_CONFIG) or "").rpartition("/")[2]
        found = [file for file in files.of("deepspeed_json") if isinstance(file.value, dict)]
        if not is_told(name):
            typed = re.compile(".*".join(re.escape(part) for part in _UNTOLD.split(name)))
            named = ((file, file.name.rpartition("/")[2]) for file in found)
            found = [
                file for file, base in named
                if file.inside or (typed.fullmatch(base) and "template" not in base.lower())
            ]  # fmt: skip
        else:
            found = [file for file in found if file.name.rpartition("/")[2] == name or _written_as(file, name)]
        own = _holds_one(run.file)
        found = [file for file in found if not (own and file.inside and file.name != run.file.name)]
        if name and len(found) == 1 and run.arguments.has("--deepspeed"):
            yield run, found[0]


def _holds_one(file: File) -> bool:
    """Whether a script holds a JSON of its own, so that one in another script isn't its."""
    return "<<" in file.text and '"train_micro_batch_size_per_gpu"' in file.text


def _written_as(file: File, name: str) -> bool:
    """Whether a script writes the JSON under this name, by the line above it, or under one that it fills in."""
    above = file.lines[max(0, file.at().line - 2)] if file.inside else ""
    return "<<" in above and (name in above or "$" in above)


def _micro_batch(run: Run, config: Config) -> Iterator[Hit]:
    flag, held = run.size(_MICRO), config.number("train_micro_batch_size_per_gpu")
    if held is not None and held != flag:
        message = (
            f"{_MICRO} is {flag}, and train_micro_batch_size_per_gpu {held:g} in {config.file.name}: Megatron "
            "makes batches of the first, DeepSpeed counts a step's micro-batches by the second."
        )
        yield run.hit(_MICRO, message, "Write the same number in both places.")


def _global_batch(run: Run, config: Config) -> Iterator[Hit]:
    flag, held = run.size(_GLOBAL), config.number("train_batch_size")
    if held is not None and held != flag:
        message = (
            f"{_GLOBAL} is {flag}, and train_batch_size {held:g} in {config.file.name}: Megatron sets its own "
            "before each step, so the JSON's is never trained with."
        )
        yield run.hit(_GLOBAL, message, "Write the same number in both places.")


def _precision(run: Run, config: Config) -> Iterator[Hit]:
    flag = "bf16" if run.on("--bf16") else "fp16" if run.on("--fp16") else "fp32"
    if flag != config.precision:
        message = (
            f"Megatron's model is {flag}, and {config.file.name} says {config.precision}: activations have one "
            "type, weights and loss scaling follow the other."
        )
        enabled = f'Write {{"{flag}": {{"enabled": true}}}} in the JSON.'
        fix = f"Add --{config.precision}." if flag == "fp32" else enabled
        yield run.hit(("--bf16", "--fp16") if flag != "fp32" else _CONFIG, message, fix)


def _stage(run: Run, config: Config) -> Iterator[Hit]:
    if run.arguments.has(_ZERO) and config.stage is not None and config.stage != run.size(_ZERO):
        message = (
            f"{_ZERO} is {run.size(_ZERO)}, and {config.file.name} says stage {config.stage}, which runs; the "
            "flag alone decides whether the model is built in parts (stage 3)."
        )
        yield run.hit(_ZERO, message, "Write the same stage in both places.")


def _clipping(run: Run, config: Config) -> Iterator[Hit]:
    held = config.number("gradient_clipping")
    if run.arguments.has(_CLIP) and held is not None and held != run.number(_CLIP):
        message = f"{_CLIP} {run.number(_CLIP):g} isn't read under DeepSpeed: gradient_clipping {held:g} counts."
        yield run.hit(_CLIP, message, "Write the same number in both places.")
