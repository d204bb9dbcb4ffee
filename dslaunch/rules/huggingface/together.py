"""Arguments of the Trainer that exclude each other, or that need another one."""

from __future__ import annotations

from collections.abc import Iterator

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.deepspeed.config import configs
from dslaunch.rules.huggingface.arguments import read_as_they_are
from dslaunch.rules.huggingface.kinds import handed
from dslaunch.rules.huggingface.trainer import Argument, runs, runs_reading
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.settings import Settings


@rule(
    "huggingface.together", severity="error", raised_by="transformers",
    evidence="huggingface/transformers:src/transformers/training_args.py __post_init__, trainer.py 5.24.0, run",
)  # fmt: skip
def together(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """Arguments of the Trainer that exclude each other, or that need another one."""
    as_they_are = read_as_they_are(files)
    for given in runs(files):
        yield from _together(given)
        if as_they_are.issuperset(each.name for each in given.values()):
            yield from _never_judged(given)
    for given in handed(files):
        yield from _never_judged(given)
    for given, read in runs_reading(files, configs(plan, files, settings)):
        found = "deepspeed" in given and _true(given, "auto_find_batch_size")
        if found and len(read) == 1 and read[0].stage == 3:
            message = "auto_find_batch_size at ZeRO stage 3: the Trainer raises ValueError."
            yield _at(given, "auto_find_batch_size", message, "Leave it out, or use stage 2.")


def _never_judged(given: dict[str, Argument]) -> Iterator[Hit]:
    """The best model at the end, where nothing else is said: it is saved by steps, and never evaluated."""
    if _true(given, "load_best_model_at_end") and not any(name in given for name in _STRATEGIES):
        message = "load_best_model_at_end without an eval_strategy, which is no by default: ValueError."
        yield _at(given, "load_best_model_at_end", message, "Add eval_strategy and save_strategy, both epoch.")


_STRATEGIES = ("save_strategy", "eval_strategy", "evaluation_strategy")


def _together(given: dict[str, Argument]) -> Iterator[Hit]:
    if _true(given, "fp16") and _true(given, "bf16"):
        message = "fp16 and bf16 are both true: TrainingArguments raises ValueError."
        yield Hit(given["fp16"].name, given["fp16"].at, message, "Keep one; bf16 needs no loss scale.")
    save, judge = _said(given, "save_strategy"), _said(given, "eval_strategy", "evaluation_strategy")
    if _true(given, "load_best_model_at_end") and (save or judge) and save != "best":
        save, judge = save or "steps", judge or "no"
        if save != judge:
            best = given["load_best_model_at_end"]
            message = f"load_best_model_at_end with save_strategy {save} and eval_strategy {judge}: ValueError."
            yield Hit(best.name, best.at, message, "Save and evaluate by the same strategy, or save the best.")
        elif judge == "steps":
            yield from _saved_between(given)
    yield from _needed(given)
    yield from _of_trainer(given)


def _saved_between(given: dict[str, Argument]) -> Iterator[Hit]:
    """The best model can be loaded where each save falls on an evaluation."""
    logs = _number(given, "logging_steps", 500)
    evals = _number(given, "eval_steps", None) or logs
    saves = _number(given, "save_steps", 500)
    if not evals or saves is None or "save_steps" not in given or saves % evals == 0:
        return
    counted = evals >= 1 and saves >= 1
    if (counted and saves % evals) or (not counted and (evals >= 1 or saves >= 1 or not _divides(evals, saves))):
        message = f"save_steps {saves:g} is no multiple of eval_steps {evals:g}, with load_best_model_at_end:"
        yield _at(given, "save_steps", f"{message} ValueError.", "Save after every evaluation, or every few.")


def _divides(evals: float, saves: float) -> bool:
    """As transformers compares shares of the run."""
    return (saves * 1_000_000) % (evals * 1_000_000) == 0


def _number(given: dict[str, Argument], name: str, default: float | None) -> float | None:
    """A number that is told; the default where it isn't given, None where it is something else."""
    if name not in given:
        return default
    value = given[name].value
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _needed(given: dict[str, Argument]) -> Iterator[Hit]:
    """Arguments that can't do without another one."""
    judge = _said(given, "eval_strategy", "evaluation_strategy") or "no"
    if _said(given, "lr_scheduler_type") in _JUDGING and judge in ("no", "False"):
        message = f"lr_scheduler_type {given['lr_scheduler_type'].value} without an eval_strategy: ValueError."
        yield _at(given, "lr_scheduler_type", message, "Add eval_strategy: epoch, or steps.")
    if _true(given, "fp16_full_eval") and _true(given, "bf16_full_eval"):
        message = "fp16_full_eval and bf16_full_eval are both true: TrainingArguments raises ValueError."
        yield _at(given, "fp16_full_eval", message, "Keep one.")
    ahead = given.get("dataloader_prefetch_factor")
    if ahead is not None and ahead.value is not None and _number(given, _WORKERS, 0) == 0:
        message = f"dataloader_prefetch_factor without {_WORKERS}: TrainingArguments raises ValueError."
        yield _at(given, "dataloader_prefetch_factor", message, f"Add {_WORKERS} above 0.")
    for name in ("dataloader_persistent_workers", "dataloader_multiprocessing_context"):
        asked = given[name].value if name in given else None
        if (asked is True or (asked and isinstance(asked, str))) and _number(given, _WORKERS, 0) == 0:
            message = f"{name} without {_WORKERS}: DataLoader raises ValueError as training begins."
            yield _at(given, name, message, f"Add {_WORKERS} above 0, or leave it out.")
    if _number(given, "logging_steps", 500) == 0:
        by_steps = _said(given, "logging_strategy") in ("", "steps")
        if by_steps or (judge == "steps" and not _number(given, "eval_steps", None)):
            message = "logging_steps 0, by which the Trainer logs or evaluates: ValueError."
            yield _at(given, "logging_steps", message, "Write logging_strategy: no, or steps above 0.")


def _of_trainer(given: dict[str, Argument]) -> Iterator[Hit]:
    """What the Trainer itself refuses, when it is made."""
    best, sharded = _true(given, "load_best_model_at_end"), "deepspeed" in given or "fsdp" in given
    judged = best or "metric_for_best_model" in given or _said(given, "lr_scheduler_type") in _JUDGING
    if _said(given, "save_strategy") == "best" and not judged:
        message = "save_strategy best without metric_for_best_model: the Trainer raises ValueError."
        yield _at(given, "save_strategy", message, "Add metric_for_best_model, such as loss.")
    if best and sharded and _true(given, "save_only_model"):
        message = "save_only_model and load_best_model_at_end, under DeepSpeed or FSDP: ValueError."
        yield _at(given, "save_only_model", message, "Drop one of the two.")
    section = given["fsdp_config"].value if "fsdp_config" in given else None
    twice = isinstance(section, dict) and section.get("activation_checkpointing") is True
    if twice and _true(given, "gradient_checkpointing"):
        message = "activation_checkpointing in fsdp_config, and gradient_checkpointing: ValueError."
        yield _at(given, "gradient_checkpointing", message, "Keep the one in fsdp_config.")
    optimizer = _said(given, "optim")
    if optimizer.startswith(_OF_MODULES) and "optim_target_modules" not in given:
        message = f"optim {optimizer} without optim_target_modules: ValueError as training begins."
        yield _at(given, "optim", message, 'Name the modules, such as optim_target_modules="all-linear".')


_OF_MODULES = ("apollo_", "galore_")
"""Optimizers that cut the gradients of chosen modules down."""


_WORKERS = "dataloader_num_workers"
_JUDGING = ("reduce_lr_on_plateau", "greedy")
"""Schedules that look at evaluations."""


def _at(given: dict[str, Argument], name: str, message: str, fix: str) -> Hit:
    return Hit(given[name].name, given[name].at, message, fix)


def _true(given: dict[str, Argument], name: str) -> bool:
    return name in given and given[name].value is True


def _said(given: dict[str, Argument], *names: str) -> str:
    return next((str(given[name].value) for name in names if name in given), "")
