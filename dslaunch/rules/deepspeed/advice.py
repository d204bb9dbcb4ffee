"""Learning rate and warm-up against the batch: advice, from published runs."""

from __future__ import annotations

from collections.abc import Iterator

from dslaunch.rules.deepspeed.config import Config, config_rule
from dslaunch.rules.registry import Hit

_RATES = "deepspeed/runtime/lr_schedules.py 0.19.8; arXiv:2005.14165 table 2.1; arXiv:1706.02677 section 2"
_HIGH = 1e-3
"""Above the peak of every model of GPT-3's table (6e-4 for 125M parameters, at 0.5M tokens a step)."""
_LARGE = 1024
"""Samples a step from which a run without warm-up is worth a remark; arXiv:1706.02677 warms up from 256 on."""


@config_rule("advice.learning-rate", severity="info", evidence=_RATES)
def learning_rate(config: Config) -> Iterator[Hit]:
    """An Adam learning rate above what is published for Transformers."""
    rate = config.number("optimizer.params.lr")
    if config.plan is None and config.optimizer in ("adam", "adamw") and rate is not None and rate > _HIGH:
        message = (
            f"lr {rate:g} with {config.get('optimizer.type')}: published Transformers peak at 6e-5 to 6e-4."
        )
        fix = "Try a tenth, or raise it with the batch: by its square root for Adam."
        yield config.hit("optimizer.params.lr", message, fix)


@config_rule(
    "advice.gradient-sum", severity="info", since="0.19.6",
    evidence="deepspeed/runtime/constants.py GRADIENT_ALLREDUCE_OP 0.19.8, run",
)  # fmt: skip
def gradient_sum(config: Config) -> Iterator[Hit]:
    """Gradients that are added up over the replicas: the step grows with their number."""
    if str(config.get("gradient_allreduce_op")).lower() == "sum" and max(config.replicas, default=2) > 1:
        known = config.replicas
        times = f"{known[0]} times as large" if len(known) == 1 else "as many times as large as there are replicas"
        message = f"gradient_allreduce_op sum: gradients are {times} as those that mean gives."
        fix = "Divide the loss by the number of replicas, or write mean; with Adam only clipping notices."
        yield config.hit("gradient_allreduce_op", message, fix)


@config_rule("advice.warmup", severity="info", evidence=_RATES)
def warmup(config: Config) -> Iterator[Hit]:
    """A large batch without warm-up, or a warm-up that is most of the run."""
    train = config.number("train_batch_size")
    steps = config.number("scheduler.params.warmup_num_steps")
    total = config.number("scheduler.params.total_num_steps")
    if (
        train is not None
        and train >= _LARGE
        and config.optimizer
        and not config.has("scheduler")
        and not config.plan
    ):
        message = f"{train:g} samples a step and no scheduler here: a large batch wants a warm-up."
        yield config.hit(
            "train_batch_size", message, "Warm up over 1 to 3 % of the steps, here or in the script."
        )
    if steps is not None and total is not None and 0 < total / 2 < steps <= total:
        message = f"warm-up takes {steps:g} of {total:g} steps: the rate is at its peak for the rest alone."
        yield config.hit("scheduler.params.warmup_num_steps", message, "1 to 10 % of the steps are common.")
