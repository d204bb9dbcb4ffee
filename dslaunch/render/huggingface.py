"""A DeepSpeed configuration that Hugging Face's Trainer fills in, and the arguments that it must be given.

Source: transformers/integrations/deepspeed.py (trainer_config_process, trainer_config_finalize),
training_args.py, optimization.py, 5.24.0.
"""

from __future__ import annotations

from typing import Any

from dslaunch.errors import ConfigError
from dslaunch.planfile import ComponentPlan, Plan, TrainingPlan
from dslaunch.render.decimals import quotient

ARGUMENTS = "hf_args.json"
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
_OPTIMIZER = ("lr", "betas", "eps", "weight_decay")


def with_auto(made: dict[str, Any]) -> dict[str, Any]:
    """`made`, which has no schedule, with `auto` where the Trainer knows the value.

    Bucket sizes stay numbers: the Trainer would derive others from the hidden size.
    """
    found = {**made, **dict.fromkeys(_BATCH, "auto")}
    params = {**made["optimizer"]["params"], **dict.fromkeys(_OPTIMIZER, "auto")}
    found["optimizer"] = {**made["optimizer"], "params": params}
    for precision in ("bf16", "fp16"):
        if precision in made:
            found[precision] = {**made[precision], "enabled": "auto"}
    return found


def arguments(plan: Plan, component: ComponentPlan) -> dict[str, Any]:
    """TrainingArguments by name, as HfArgumentParser reads them from a JSON file.

    Raises:
        ConfigError: a schedule that the Trainer cannot follow.
    """
    training = plan.training
    found = {
        "per_device_train_batch_size": component.micro_batch,
        "gradient_accumulation_steps": component.num_microbatches,
        "max_steps": training.steps,
        "max_grad_norm": training.clip,
        "learning_rate": training.lr,
        "adam_beta1": training.betas[0],
        "adam_beta2": training.betas[1],
        "adam_epsilon": training.eps,
        "weight_decay": training.weight_decay,
        "warmup_steps": training.warmup_steps,
        "bf16": training.precision == "bf16",
        "fp16": training.precision == "fp16",
        "seed": training.seed,
        "save_strategy": "steps",
        "save_steps": plan.files.checkpoint_every or training.steps,
        "ddp_timeout": round(60 * plan.launcher.timeout_minutes),
        **_schedule(plan),
    }
    if component.recompute == "full":
        found["gradient_checkpointing"] = True
    if plan.files.checkpoint_dir:
        found["output_dir"] = plan.files.checkpoint_dir
    if plan.files.checkpoint_load:
        found["resume_from_checkpoint"] = plan.files.checkpoint_load
    return found


def _schedule(plan: Plan) -> dict[str, Any]:
    training = plan.training
    if training.lr_schedule == "wsd":
        return _stable(training)
    if training.lr_schedule == "constant":
        return {"lr_scheduler_type": "constant_with_warmup" if training.warmup_steps else "constant"}
    if training.lr_schedule == "linear" and training.min_lr:
        raise ConfigError(
            f"training.optimizer.min_lr is {training.min_lr}: the Trainer's linear schedule ends at 0. Set it to "
            "0, or training.optimizer.schedule=cosine"
        )
    if training.min_lr:
        return {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": training.min_lr}}
    return {"lr_scheduler_type": training.lr_schedule}


def _stable(training: TrainingPlan) -> dict[str, Any]:
    """Peak until the last steps; the Trainer's warm-up would rise from where the decay ends."""
    if training.min_lr and training.warmup_steps:
        raise ConfigError(
            f"training.optimizer.min_lr is {training.min_lr}: with schedule wsd the Trainer's warm-up starts "
            "there, not at 0. Set min_lr or warmup_steps to 0"
        )
    return {
        "lr_scheduler_type": "warmup_stable_decay",
        "lr_scheduler_kwargs": {
            "num_decay_steps": training.lr_decay_steps,
            "decay_type": {"sqrt": "1-sqrt"}.get(training.lr_decay_shape, training.lr_decay_shape),
            "min_lr_ratio": quotient(training.min_lr, training.lr),
        },
    }
