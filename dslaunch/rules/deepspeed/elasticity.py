"""Elastic training, which DeepSpeed had up to 0.19.7."""

from __future__ import annotations

from collections.abc import Iterator

from dslaunch.rules.deepspeed.config import Config, config_rule
from dslaunch.rules.registry import Hit

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@config_rule(
    "elasticity.batch", severity="error", raised_by="DeepSpeedConfig", since="0.16.9", until="0.19.7",
    evidence="deepspeed/runtime/config.py DeepSpeedConfig.__init__ 0.16.9 to 0.19.6, run",
)  # fmt: skip
def batch(config: Config) -> Iterator[Hit]:
    """Batch keys beside elasticity, which chooses them itself."""
    told = config.get("elasticity.ignore_non_elastic_batch_info")
    given = [key for key in _BATCH if config.has(key)]
    if config.get("elasticity.enabled") is True and given and not told:
        message = f"{given[0]} beside elasticity, which chooses the batch: ElasticityConfigError."
        fix = 'Delete the batch keys, or write "ignore_non_elastic_batch_info": true in elasticity.'
        yield config.hit(given[0], message, fix)
