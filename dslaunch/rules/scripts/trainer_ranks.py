"""Methods of a Hugging Face Trainer that all ranks have to call."""

from __future__ import annotations

from collections.abc import Iterator

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.deepspeed.config import one_config
from dslaunch.rules.huggingface.trainer import arguments
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.guards import one_rank_guard
from dslaunch.rules.scripts.tree import Call, Script, scripts
from dslaunch.rules.settings import Settings

_ALWAYS = ("evaluate", "predict", "train")
"""What gathers over the ranks, whatever holds the model."""


@rule(
    "script.trainer-on-one-rank", severity="hang", raised_by="nobody",
    evidence="huggingface/transformers:src/transformers/trainer.py evaluation_loop, save_model 5.24.0, run on two "
    "gloo ranks; huggingface/accelerate:src/accelerate/accelerator.py get_state_dict 1.15.0",
)  # fmt: skip
def on_one_rank(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """A Trainer's train, evaluate, predict, or under ZeRO-3 and FSDP save_model, that one rank alone calls."""
    cut = _cut(plan, files, settings)
    for script in scripts(files):
        for call in script.methods(*_ALWAYS, *(["save_model"] if cut else [])):
            if not _is_trainers(script, call) or one_rank_guard(call) is None:
                continue
            why = f"gathers the model of {cut}" if call.method == "save_model" else "gathers from all ranks"
            message = f"{call.method} {why}, and only some get here: they wait for the others."
            yield script.hit(call, message, "Call it on all ranks; the Trainer writes on the first alone.")


def _is_trainers(script: Script, call: Call) -> bool:
    """Whether a method is called on what a class of transformers or TRL, called ...Trainer, makes in this file."""
    makers = {each.name for each in script.calls if each.method.endswith("Trainer")}
    names = {name for maker in makers if "lightning" not in maker for name in script.assigned(maker)}
    return call.owner in names


def _cut(plan: Plan | None, files: FileSet, settings: Settings) -> str:
    """What cuts the parameters over the ranks; empty where that isn't told, or nothing does."""
    config = one_config(plan, files, settings)
    given = arguments(files)
    if config is not None and config.stage == 3 and ("deepspeed" in given or settings.huggingface):
        return "ZeRO-3"
    fsdp = given["fsdp"].value if "fsdp" in given else ""
    by_accelerate = [each for each in files.of("accelerate") if each.get("distributed_type") == "FSDP"]
    return "FSDP" if (isinstance(fsdp, str) and "shard" in fsdp) or by_accelerate else ""
