"""What the Trainer's arguments need beyond themselves: packages, and a hub that answers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from dslaunch.files.fileset import File, FileSet
from dslaunch.files.shell import Assignment
from dslaunch.planfile import Plan
from dslaunch.rules.huggingface.trainer import arguments
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.guards import guards
from dslaunch.rules.scripts.launched import launched
from dslaunch.rules.scripts.tree import scripts
from dslaunch.rules.settings import Settings

_CODE = "huggingface/transformers:src/transformers"
_PACKAGES: Mapping[str, re.Pattern[str]] = {
    "bitsandbytes": re.compile(r"adamw_bnb_8bit|adamw_8bit|(?:paged_)?(?:ademamix|lion|adamw)_(?:8|32)bit|ademamix"
                               r"|rmsprop_bnb\w*|galore_adamw_8bit\w*"),
    "galore-torch": re.compile(r"galore_\w+"),
    "apollo-torch": re.compile(r"apollo_\w+"),
    "lomo-optim": re.compile(r"(?:ada)?lomo"),
    "grokadamw": re.compile(r"grokadamw"),
    "schedulefree": re.compile(r"schedule_free_\w+"),
    "torch-optimi": re.compile(r"stable_adamw"),
    "torchao": re.compile(r"adamw_torch_[48]bit"),
    "torchdistx": re.compile(r"adamw_anyprecision"),
    "apex": re.compile(r"adamw_apex_fused"),
    "torch-xla": re.compile(r"adamw_torch_xla"),
    "torch-npu": re.compile(r"adamw_torch_npu_fused"),
}  # fmt: skip
"""The packages that `optim` needs beside torch: trainer_optimizer.py 5.24.0."""
_ON = ("1", "on", "yes", "true")
"""What huggingface_hub takes for true, in any case."""
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


@rule(
    "huggingface.package", severity="info", raised_by="transformers",
    evidence=f"{_CODE}/trainer_optimizer.py 5.24.0, run",
)  # fmt: skip
def package(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """An optimizer of the Trainer that another package holds."""
    given = arguments(files).get("optim")
    needed = [
        name for name, pattern in _PACKAGES.items()
        if given is not None and isinstance(given.value, str) and pattern.fullmatch(given.value)
    ]  # fmt: skip
    if given is not None and needed:
        names = " and ".join(needed)
        message = f"optim {given.value} is of {names}: without it the Trainer raises as training begins."
        fix = f"Install {names} in the training environment, on every node."
        yield Hit(given.name, given.at, message, fix)


@rule(
    "huggingface.offline", severity="error", raised_by="transformers",
    evidence=f"{_CODE}/trainer.py init_hf_repo 5.24.0, huggingface_hub 1.x, run",
)  # fmt: skip
def offline(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """What asks the Hugging Face hub, beside a variable that forbids it."""
    where = _forbidden(files)
    if not where:
        return
    given = arguments(files).get("push_to_hub")
    told = {(given.name, given.at)} if given is not None and given.value is True else set()
    started = [script for _, _, script in launched(files)] or list(scripts(files))
    for script in started:
        for call in script.every:
            pushes = script.constant(call.keyword("push_to_hub")) is True and call.method.endswith(
                "Arguments"
            )
            by_itself = call.method == "push_to_hub" and "." in call.name and not list(guards(call))
            if pushes or by_itself:
                told.add((script.path, script.python.at(call.keyword("push_to_hub") or call.node)))
    for name, at in sorted(told):
        message = f"the hub is asked here, and {where}: OfflineModeIsEnabled."
        yield Hit(
            name, at, message, "Push after the job, where there is a network; or leave the variable out."
        )
    for script in started:
        for call in script.methods("from_pretrained", "snapshot_download", "hf_hub_download"):
            named = script.constant(call.argument("pretrained_model_name_or_path", 0))
            if isinstance(named, str) and _REPOSITORY.fullmatch(named) and not list(guards(call)):
                message = (
                    f"{named}, if no folder, is read from the node's cache alone: {where}. Else OSError."
                )
                fix = "Download it once for each node, or name the folder that it is in."
                yield replace(script.hit(call, message, fix), severity="info")


def _forbidden(files: FileSet) -> str:
    """Where the hub is switched off for programs, in words; empty where it isn't."""
    for file in files.files:
        for each in file.assignments:
            if each.name in _OFFLINE and each.value.lower() in _ON and _is_handed_on(file, each):
                return f"{each.name} is {each.value} in {file.name.rpartition('/')[2]}:{each.at.line}"
    return ""


def _is_handed_on(file: File, given: Assignment) -> bool:
    """Whether programs get a variable: it is exported, or stands before a command."""
    if file.kind != "shell":
        return True
    line = file.lines[given.at.line - 1]
    exported = rf"^\s*(?:export|declare\s+-x)\s[^#]*\b{given.name}\b|^\s*set\s+-\w*a|--export="
    before = re.search(rf"{given.name}=\S+[ \t]+[^\s#&|;]", line)
    return before is not None or re.search(exported, file.text, re.MULTILINE) is not None
