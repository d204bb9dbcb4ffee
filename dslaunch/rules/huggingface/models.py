"""The Hugging Face Trainer and a model under DeepSpeed: sizes that it fills in, weights, runs without training."""

from __future__ import annotations

from collections.abc import Iterator

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.deepspeed.config import ZERO, configs
from dslaunch.rules.deepspeed.model import model_of
from dslaunch.rules.huggingface.trainer import arguments
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.tree import scripts
from dslaunch.rules.settings import Settings

_CODE = "huggingface/transformers:src/transformers/integrations/deepspeed.py"
_FILLED = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
_WITHOUT_WIDTH = frozenset({"blt", "encoder-decoder", "pi0", "t5gemma", "t5gemma2", "vision-encoder-decoder"})
"""Model types whose configuration has neither hidden_size nor hidden_sizes, its text_config neither (5.24.0)."""


@rule(
    "huggingface.hidden-size", severity="error", raised_by="transformers",
    evidence=f"{_CODE} trainer_config_finalize 5.24.0, run",
)  # fmt: skip
def hidden_size(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """`auto` for sizes that the Trainer takes from the model's width, which the model doesn't tell."""
    for config in configs(plan, files, settings) if settings.huggingface else ():
        model = model_of(config, files)
        if model is None or not model.types or model.types[0] not in _WITHOUT_WIDTH:
            continue
        if any(name in shape for shape in model.shapes[:1] for name in ("hidden_size", "hidden_sizes")):
            continue
        for name in _FILLED:
            if config.get(f"{ZERO}.{name}") == "auto":
                message = (
                    f"{model.said()}, whose configuration has no hidden_size: the Trainer can't fill in `auto`, "
                    "and raises ValueError."
                )
                yield config.hit(f"{ZERO}.{name}", message, "Write a number, or leave the key out.")


@rule(
    "huggingface.tensor-parallel", severity="error", raised_by="transformers",
    evidence=f"{_CODE} _apply_weight_conversions_to_state_dict 5.24.0, run",
)  # fmt: skip
def tensor_parallel(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """AutoTP with ZeRO-3 under Hugging Face: from_pretrained can't load the weights."""
    key = "tensor_parallel.autotp_size"
    for config in configs(plan, files, settings) if settings.huggingface else ():
        if config.stage == 3 and (config.number(key) or 1) > 1:
            message = "AutoTP with ZeRO-3: from_pretrained of transformers raises NotImplementedError."
            yield config.hit(key, message, "Use AutoTP with ZeRO stage 1 or 2, or ZeRO-3 alone.")


@rule(
    "huggingface.inference", severity="error", raised_by="transformers",
    evidence=f"{_CODE} deepspeed_init 5.24.0, run",
)  # fmt: skip
def inference(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """A Trainer that only evaluates or predicts, below ZeRO stage 3."""
    sharded = [config for config in configs(plan, files, settings) if config.stage in (0, 1, 2)]
    if len(sharded) != 1 or not settings.huggingface:
        return
    effect = f"without training, and ZeRO stage {sharded[0].stage}: the Trainer raises ValueError."
    fix = "Use ZeRO stage 3, or leave DeepSpeed out where nothing is trained."
    given = arguments(files)
    for name in ("do_eval", "do_predict"):
        asked, trains = given.get(name), given.get("do_train")
        if asked and asked.value is True and "deepspeed" in given and (not trains or trains.value is False):
            yield Hit(asked.name, asked.at, f"{name} {effect}", fix)
            return
    for script in scripts(files):
        configured = any(call.keyword("deepspeed") is not None for call in script.calls)
        for call in script.methods("evaluate", "predict") if configured and not script.methods("train") else ():
            if "trainer" in call.owner.lower():
                yield script.hit(call, f"{call.method} {effect}", fix)
                return
