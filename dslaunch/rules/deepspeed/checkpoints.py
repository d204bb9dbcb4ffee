"""A saved checkpoint against the job that is to resume from it."""

from __future__ import annotations

from collections.abc import Iterator

from dslaunch.files.checkpoint import Checkpoint
from dslaunch.files.fileset import FileSet
from dslaunch.files.position import START
from dslaunch.planfile import Plan
from dslaunch.rules.deepspeed.config import ZERO, Config, config_rule, configs
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.settings import Settings

_ENGINE = "deepspeed/runtime/engine.py _load_zero_checkpoint 0.19.8, run"


@rule(
    "checkpoint.ranks", severity="error", raised_by="deepspeed.initialize",
    evidence=f"deepspeedai/DeepSpeed:{_ENGINE}",
)  # fmt: skip
def ranks(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """A checkpoint of ZeRO's states that another number of replicas wrote."""
    for file in files.of("checkpoint"):
        saved: Checkpoint = file.value
        now = _replicas(plan, settings, saved)
        if now is None or saved.universal or not saved.ranks or _universal(plan, files, settings):
            continue
        if now != saved.data_parallel:
            message = (
                f"{saved.tag} was written by {saved.data_parallel} replicas, and this job has {now}: "
                "load_checkpoint raises ZeRORuntimeException, ZeRO's states aren't cut anew."
            )
            fix = (
                "Convert it with ds_to_universal.py and set checkpoint.load_universal, or load with "
                "load_optimizer_states=False, or keep the number of replicas."
            )
            yield Hit(file.name, START, message, fix)


def _replicas(plan: Plan | None, settings: Settings, saved: Checkpoint) -> int | None:
    """Replicas of this job; by the checkpoint's own tensor and pipeline parallelism where nobody tells them."""
    if plan is not None:
        sizes = {part.dp * part.cp for part in plan.components.values()}
        return sizes.pop() if len(sizes) == 1 else None
    if settings.world_size is None:
        return None
    cut = (settings.tp or 1) * (settings.pp or 1) if settings.tp or settings.pp else saved.model_parallel
    return settings.world_size // cut if cut and settings.world_size % cut == 0 else None


def _universal(plan: Plan | None, files: FileSet, settings: Settings) -> bool:
    return any(config.on("checkpoint.load_universal") for config in configs(plan, files, settings))


@rule(
    "checkpoint.files", severity="error", raised_by="deepspeed.initialize",
    evidence="deepspeedai/DeepSpeed:deepspeed/runtime/engine.py _get_all_zero_checkpoint_state_dicts 0.19.8, run",
)  # fmt: skip
def complete(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A checkpoint without some ranks' optimizer states: one didn't write, or a copy was cut short."""
    for file in files.of("checkpoint"):
        saved: Checkpoint = file.value
        data, model = saved.data_parallel, saved.model_parallel
        grid = ((rank, cut) for cut in range(model) for rank in range(data))
        first = next((rank for rank in grid if rank not in saved.ranks), None)
        if first is not None and not saved.universal:
            count = data * model - len(saved.ranks)
            message = (
                f"{saved.tag}: {count} of {data} x {model} files of optimizer states missing, the first of rank "
                f"{first[0]} (mp_rank {first[1]}): that rank raises FileNotFoundError in load_checkpoint, and the "
                "others wait for it."
            )
            yield Hit(file.name, START, message, "Copy the rest, or resume from an earlier step.")


@config_rule("checkpoint.serial", severity="error", raised_by="nobody", evidence=_ENGINE)
def serial(config: Config) -> Iterator[Hit]:
    """Loading a checkpoint one rank after the other, below ZeRO stage 3."""
    key = f"{ZERO}.pipeline_loading_checkpoint"
    if config.stage in (1, 2) and config.on(key):
        message = f"pipeline_loading_checkpoint at ZeRO stage {config.stage}: load_checkpoint asserts stage 3."
        yield config.hit(key, message, "Leave it out.")
