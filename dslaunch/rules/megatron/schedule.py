"""What stops Megatron behind its arguments and before the first step: schedule, data, seed."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dslaunch.rules.megatron.demands import Demand, demands
from dslaunch.rules.megatron.run import NotToldError, Run

_VERSIONS = "core_v0.12.3 to core_v0.19.0"
_SCHEDULER = (
    "NVIDIA/Megatron-LM:megatron/core/optimizer_param_scheduler.py OptimizerParamScheduler, "
    f"megatron/training/training.py get_optimizer_param_scheduler at {_VERSIONS}; megatron-core 0.16.1, run"
)
_DATASET = (
    "NVIDIA/Megatron-LM:megatron/core/datasets/blended_megatron_dataset_config.py, utils.py get_blend_from_list, "
    f"megatron/training/initialize.py at {_VERSIONS}; megatron-core 0.16.1, run"
)


def _unit(run: Run) -> str:
    """What training is counted by; NotToldError where it isn't counted at all, another row's matter."""
    if run.size("--train-iters", 0) > 0:
        return "iters"
    if run.size("--train-samples", 0) > 0:
        return "samples"
    raise NotToldError("--train-iters")


def _decay(run: Run) -> int:
    unit = _unit(run)
    return run.size(f"--lr-decay-{unit}", run.size(f"--train-{unit}", 0))


def _warms_up_too_long(run: Run) -> bool:
    if run.on("--lr-warmup-fraction"):
        return _decay(run) > 0 and run.number("--lr-warmup-fraction") >= 1
    return _decay(run) > 0 and run.size(f"--lr-warmup-{_unit(run)}", 0) >= _decay(run)


_WHOLE = (
    "--eval-iters", "--eval-interval", "--log-interval", "--lr-decay-style", "--lr-warmup-fraction",
    "--lr-warmup-iters", "--lr-warmup-samples",
)  # fmt: skip
"""Flags of a course of training: where none stands, the command may be an excerpt."""


def _trains(run: Run) -> bool:
    """Whether a whole command starts a program of Megatron's own to train, which then makes an optimizer."""
    whole = run.program.startswith("pretrain_") and run.on(*_WHOLE)
    return whole and not run.on("--skip-train", "--perform-rl-step", "--retro-project-dir")


_SCHEDULE = (
    Demand(
        "--lr-warmup-iters",
        lambda r: _warms_up_too_long(r) and not r.on("--lr-warmup-fraction") and _unit(r) == "iters",
        "--lr-warmup-iters is not below --lr-decay-iters, or --train-iters where that isn't given",
        "Warm up for less than the decay.",
    ),
    Demand(
        "--lr-warmup-samples",
        lambda r: _warms_up_too_long(r) and not r.on("--lr-warmup-fraction") and _unit(r) == "samples",
        "--lr-warmup-samples is not below --lr-decay-samples, or --train-samples where that isn't given",
        "Warm up for less than the decay.",
    ),
    Demand(
        "--lr-warmup-fraction", lambda r: r.on("--lr-warmup-fraction") and _warms_up_too_long(r),
        "--lr-warmup-fraction of 1 or more: the warm-up has to be shorter than the decay",
        "Write a share such as 0.01.",
    ),
    Demand(
        "--lr-decay-iters", lambda r: _unit(r) == "iters" and _decay(r) <= 0, "--lr-decay-iters below 1",
        "Leave it out, or write the iterations of the decay.",
    ),
    Demand(
        "--lr-decay-samples", lambda r: _unit(r) == "samples" and _decay(r) <= 0, "--lr-decay-samples below 1",
        "Leave it out, or write the samples of the decay.",
    ),
    Demand(
        "--lr-decay-style",
        lambda r: r.text("--lr-decay-style", "linear") == "WSD" and not r.on(f"--lr-wsd-decay-{_unit(r)}"),
        "--lr-decay-style WSD without the length of its decay, --lr-wsd-decay-iters or --lr-wsd-decay-samples",
        "Add --lr-wsd-decay-iters, or --lr-wsd-decay-samples where training is counted by samples.",
    ),
    Demand(
        "--lr-warmup-init",
        lambda r: r.on("--lr") and r.number("--lr-warmup-init", 0.0) > r.number("--lr"),
        "--lr-warmup-init above --lr", "Start the warm-up below --lr.",
    ),
    Demand("--min-lr", lambda r: r.number("--min-lr", 0.0) < 0, "--min-lr below 0", "Write 0 or more."),
    Demand(
        "--override-opt_param-scheduler",
        lambda r: r.on("--override-opt_param-scheduler", "--override-opt-param-scheduler")
        and r.on("--use-checkpoint-opt_param-scheduler", "--use-checkpoint-opt-param-scheduler"),
        "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler exclude each other", "Keep one.",
    ),
    Demand(
        "--start-weight-decay",
        lambda r: r.text("--weight-decay-incr-style", "constant") != "constant"
        and not 0 <= r.number("--start-weight-decay") <= r.number("--end-weight-decay"),
        "--start-weight-decay below 0, or above --end-weight-decay", "Begin with the smaller one.",
    ),
    Demand(
        "--lr", lambda r: _trains(r) and not r.on("--lr"), "no --lr, and float(None) raises TypeError",
        "Add --lr.",
    ),
    Demand(
        "--train-iters",
        lambda r: _trains(r) and not r.on("--phase-transition-iterations")
        and r.size("--train-iters", 0) == 0 and r.size("--train-samples", 0) == 0,
        "neither --train-iters nor --train-samples says how long to train", "Add --train-iters.",
    ),
)  # fmt: skip
demands(
    "megatron.schedule", "A schedule that Megatron refuses when it is made, or none.", _SCHEDULE,
    evidence=_SCHEDULER,
)  # fmt: skip

_PER_SPLIT = ("--train-data-path", "--valid-data-path", "--test-data-path")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _mixes(paths: Sequence[str]) -> bool:
    """Weights for some of the data only, or in an odd list, where each number would be a path."""
    if any("<" in each or ">" in each for each in paths):
        return False  # gaps that the reader is to fill in
    weights = [_is_number(each) for each in paths]
    pairs = weights[::2] if len(paths) % 2 == 0 else weights
    return any(pairs) and not all(pairs)


def _mixed(flag: str) -> Demand:
    return Demand(
        flag, lambda r: _mixes(r.texts(flag)),
        f"{flag} gives weights to some of its data: it takes paths alone, or a weight before each",
        "Write WEIGHT PATH for each, or paths alone.",
    )  # fmt: skip


def _shares(run: Run) -> list[float]:
    """The numbers in --split, as Megatron finds them."""
    try:
        return [float(each) for each in re.findall(r"[.0-9]+", run.text("--split", "1"))]
    except ValueError:
        raise NotToldError("--split") from None


_SOURCES = (
    *(_mixed(flag) for flag in ("--data-path", *_PER_SPLIT)),
    Demand("--split", lambda r: len(_shares(r)) > 3, "--split has more than three parts", "Write three shares."),
    Demand(
        "--split", lambda r: r.on("--split") and r.on("--data-path") and sum(_shares(r)[:1]) == 0,
        "--split leaves nothing to train on", "Give the first part, which is for training, a share.",
    ),
    Demand(
        "--split", lambda r: r.on("--split") and r.on(*_PER_SPLIT, "--per-split-data-args-path"),
        "--split beside paths for each split", "Drop --split.",
    ),
    Demand(
        "--dataloader-fast-cache-load",
        lambda r: r.on("--dataloader-fast-cache-load") and (not r.on("--data-cache-path") or r.on("--data-path")),
        "--dataloader-fast-cache-load without --data-cache-path, or with --data-path",
        "Give --data-cache-path, and paths for each split.",
    ),
    Demand(
        "--multiple-validation-sets",
        lambda r: r.on("--multiple-validation-sets") and not r.on("--full-validation"),
        "--multiple-validation-sets without --full-validation", "Add --full-validation.",
    ),
    Demand(
        "--wandb-project", lambda r: r.text("--wandb-project") != "" and not r.text("--wandb-exp-name"),
        "--wandb-project without --wandb-exp-name; the last rank raises", "Give the run a name.",
        since="0.16.0", before="0.17.0",
    ),
    Demand("--seed", lambda r: r.size("--seed", 1234) < 1, "--seed below 1", "Write a whole number from 1 on."),
    Demand(
        "--use-checkpoint-args",
        lambda r: r.on("--use-checkpoint-args") and not r.arguments.has("--load", "--pretrained-checkpoint")
        and r.arguments.complete,
        "--use-checkpoint-args without --load or --pretrained-checkpoint", "Add --load.",
    ),
    Demand(
        "--ckpt-convert-format",
        lambda r: r.on("--ckpt-convert-format") and not (r.on("--ckpt-convert-save") and r.on("--load")),
        "--ckpt-convert-format without --ckpt-convert-save and --load",
        "Name the folder to read and the one to write.",
    ),
    Demand(
        "--use-checkpoint-args",
        lambda r: r.arguments.has("--use-checkpoint-args")
        and r.arguments.value("--non-persistent-ckpt-type") == "local",
        "--use-checkpoint-args with --non-persistent-ckpt-type local",
        "Write the arguments out, or save globally.",
    ),
)  # fmt: skip
demands(
    "megatron.sources", "Data, a seed or a checkpoint that Megatron refuses before the first step.", _SOURCES,
    evidence=_DATASET,
)  # fmt: skip
