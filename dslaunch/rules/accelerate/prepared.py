"""What a script hands to accelerate's prepare together, against DeepSpeed's or FSDP's configuration beside it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.accelerate.models import model_named
from dslaunch.rules.deepspeed.config import one_config
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.launched import launched
from dslaunch.rules.scripts.tree import ACCELERATOR, LOADER, Call, Script, scripts
from dslaunch.rules.settings import Settings

_DEEPSPEED = "huggingface/accelerate:src/accelerate/accelerator.py _prepare_deepspeed 1.15.0, run"
_MICRO = "train_micro_batch_size_per_gpu"
_NAMED = "deepspeed_config_file"
_DUMMIES = {"optimizer": "DummyOptim", "scheduler": "DummyScheduler"}
_SCHEDULES = re.compile(
    r"torch\.optim\.lr_scheduler\.\w+|(?:transformers|diffusers)\.(?:optimization\.)?get_(?:\w+_)?schedule\w*"
)
_OPTIMIZERS = re.compile(
    r"torch\.optim\.(?:\w+\.)?[A-Z]\w+|transformers\.(?:optimization\.)?(?:AdamW|Adafactor)|bitsandbytes\.optim\.\w+"
)


def _prepares(script: Script) -> list[Call]:
    """Calls of prepare whose arguments are told one by one."""
    calls = [call for call in script.methods("prepare") if call.owner in script.accelerators]
    return [call for call in calls if not any(isinstance(each, ast.Starred) for each in call.node.args)]


def _kind(script: Script, node: ast.expr) -> str:
    """`model`, `optimizer`, `scheduler`, `loader` or the name of a stand-in; empty where it isn't told."""
    made = script.bound(node)
    name = script.name(made.func) if isinstance(made, ast.Call) else ""
    if name.startswith("accelerate.") and (dummy := name.rpartition(".")[2]) in _DUMMIES.values():
        return dummy
    if _SCHEDULES.fullmatch(name):
        return "scheduler"
    if _OPTIMIZERS.fullmatch(name):
        return "optimizer"
    return "loader" if name == LOADER else "model" if model_named(script, node) else ""


@rule("accelerate.optimizer", severity="error", raised_by="accelerate", evidence=_DEEPSPEED)
def optimizer(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """An optimizer or scheduler that the script hands to accelerate, and the DeepSpeed JSON holds as well."""
    config = one_config(plan, files, settings)
    for script in scripts(files) if config is not None else ():
        assert config is not None
        told = _is_told(files, script) and not _is_anothers(files, script, config.file.name)
        for call in _prepares(script) if told else ():
            kinds = {_kind(script, each): each for each in call.node.args}
            for section, dummy in _DUMMIES.items():
                assert config is not None
                held = config.has(section)
                if held and section in kinds:
                    message = f"{section} is made here, and stands in the DeepSpeed JSON: ValueError."
                    yield script.hit(call, message, f"Make accelerate.utils.{dummy}, or drop the section.")
                stand_in = script.bound(kinds[dummy]) if dummy in kinds and not held else None
                if isinstance(stand_in, ast.Call) and not _makes_its_own(stand_in):
                    message = f"{dummy} stands for a section of the DeepSpeed JSON that isn't there: ValueError."
                    yield script.hit(call, message, f'Add "{section}" to the JSON, or make a real one.')


def _is_told(files: FileSet, script: Script) -> bool:
    """Whether accelerate may know of the DeepSpeed JSON: not where all commands of the script leave it out."""
    started = [command.launcher("accelerate") for _, command, each in launched(files) if each is script]
    apart = [each for each in started if each is not None and not each.options.has(*_TELLS)]
    beside = "DeepSpeedPlugin" in script.python.text or any(True for _ in files.of("accelerate"))
    return beside or not started or len(apart) < len(started)


def _is_anothers(files: FileSet, script: Script, path: str) -> bool:
    """Whether nothing leads from a script to a JSON: another one names it, or accelerate's own section is read."""
    name = PurePosixPath(path).name
    own = list(files.of("accelerate"))
    named = {str(file.get("deepspeed_config", _NAMED)) for file in own}
    for _, command in files.launches():
        launcher = command.launcher("accelerate")
        given = launcher.options.value("--deepspeed_config_file", "--deepspeed-config-file") if launcher else None
        named.add(str(given))
    if name in script.python.text or any(PurePosixPath(each).name == name for each in named):
        return False
    inline = bool(own) and all(isinstance(file.get("deepspeed_config"), dict) for file in own)
    return inline or any(name in other.python.text for other in scripts(files) if other is not script)


_TELLS = ("--use_deepspeed", "--use-deepspeed", "--deepspeed_config_file", "--deepspeed-config-file",
          "--config_file", "--config-file")  # fmt: skip


def _makes_its_own(stand_in: ast.Call) -> bool:
    """Whether a DummyScheduler brings along a function that makes a real one."""
    return any(each.arg in ("lr_scheduler_callable", None) for each in stand_in.keywords)


@rule("accelerate.dataloader", severity="error", raised_by="accelerate", evidence=_DEEPSPEED)
def dataloader(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """A micro-batch that accelerate is to take from a data loader, and none is handed to it."""
    config = one_config(plan, files, settings)
    alone = [
        file for file in files.of("accelerate")
        if isinstance(file.get("deepspeed_config"), dict) and file.get("deepspeed_config", _NAMED) is None
    ]  # fmt: skip
    by_fields = len(alone) == len(files.of("accelerate")) == 1 and not files.of("deepspeed_json")
    if (config is None or config.get(_MICRO) != "auto") and not by_fields:
        return
    for script in scripts(files):
        calls = _prepares(script)
        told = [[_kind(script, each) for each in call.node.args] for call in calls]
        if _MICRO in script.python.text or len(calls) < len(script.methods("prepare", "prepare_data_loader")):
            continue
        unnamed = not re.search(r"loader|_dl\b", script.python.text, re.IGNORECASE)
        none = not any(each in ("", "loader") for kinds in told for each in kinds)
        for call, kinds in zip(calls, told, strict=True):
            if unnamed or (none and "model" in kinds):
                message = f"{_MICRO} is auto, and no data loader is prepared that tells it: ValueError."
                yield script.hit(call, message, f"Write {_MICRO} in the JSON, or prepare the data loader too.")
                break


@rule(
    "accelerate.apart", severity="error", raised_by="accelerate",
    evidence="huggingface/accelerate:src/accelerate/accelerator.py prepare 1.15.0, run on two ranks",
)  # fmt: skip
def apart(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """Under FSDP 2, a model prepared without its optimizer, or an optimizer without its model."""
    told = [file for file in files.of("accelerate") if str(file.get("distributed_type")).upper() == "FSDP"]
    versions = {str(file.get("fsdp_config", "fsdp_version")) for file in told}
    for script in scripts(files) if versions == {"2"} else ():
        if len(script.called(*ACCELERATOR)) != 1 or len(told) < len(files.of("accelerate")):
            continue
        for call in _prepares(script):
            kinds = [_kind(script, each) for each in call.node.args]
            given = {"model", "optimizer"} & set(kinds)
            if len(given) == 1 and "" not in kinds:
                (name,) = given
                other = "model" if name == "optimizer" else "optimizer"
                message = f"the {name} without the {other}: FSDP 2 puts new parameters in both, ValueError."
                yield script.hit(call, message, f"Hand the {other} to the same call of prepare.")
