"""Training scripts that load a model for the Trainer or accelerate, and what that then can't do."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.deepspeed.config import one_config
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.guards import function_of, guards
from dslaunch.rules.scripts.tree import Call, Script, scripts
from dslaunch.rules.settings import Settings

_ARGUMENTS = ("TrainingArguments", "Seq2SeqTrainingArguments")


@rule(
    "script.model-first", severity="memory", raised_by="nobody",
    evidence="huggingface/transformers:src/transformers/integrations/deepspeed.py 5.24.0",
)  # fmt: skip
def model_first(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """A model that is loaded before TrainingArguments under ZeRO-3: every rank holds all of it."""
    config = one_config(plan, files, settings)
    for script in scripts(files) if config is not None and config.stage == 3 else ():
        if "DeepSpeedConfig" in script.python.text or "zero.Init" in script.python.text:
            continue
        made = [call for call in script.methods(*_ARGUMENTS) if call.keyword("deepspeed") is not None]
        for call in script.methods("from_pretrained") if len(made) == 1 else ():
            if _is_model(call) and call.node.lineno < made[0].node.lineno and _same_way(call, made[0]):
                message = (
                    f"loaded before {made[0].method} in line {made[0].node.lineno} tells of ZeRO-3: each rank "
                    "holds the whole model first."
                )
                yield script.hit(call, message, f"Make {made[0].method} first, and keep it.")


def _is_model(call: Call) -> bool:
    owner = call.owner.rpartition(".")[2]
    return owner.startswith("AutoModel") or owner.endswith(("ForCausalLM", "ForConditionalGeneration"))


def _same_way(early: Call, late: Call) -> bool:
    """Whether the calls stand in the same function, with no condition around either."""
    return function_of(early) is function_of(late) and not [*_conditions(early), *_conditions(late)]


def _conditions(call: Call) -> Iterator[ast.expr]:
    return (node.test for node, _ in guards(call) if "__name__" not in ast.unparse(node.test))


@rule(
    "script.device-map", severity="error", raised_by="transformers",
    evidence="huggingface/accelerate:src/accelerate/accelerator.py prepare, prepare_model 1.15.0",
)  # fmt: skip
def device_map(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """A model spread over the GPUs by device_map, and trained by several processes or by ZeRO-3."""
    refused = list(_under_zero3(plan, files, settings))
    yield from refused
    places = {(each.name, each.at) for each in refused}
    for script in scripts(files) if (settings.world_size or 1) > 1 else ():
        for call in script.methods("from_pretrained"):
            if (script.path, script.python.at(call.node)) in places:
                continue
            spread = script.constant(call.keyword("device_map"))
            if _is_model(call) and spread in _SPREAD and _is_trained(script, call):
                count = settings.world_size
                message = f'device_map="{spread}" in a run of {count} processes: accelerate raises ValueError.'
                yield script.hit(call, message, "Leave device_map out: each process takes its own GPU.")
            elif _is_model(call) and _is_trained(script, call) and _on_first(script, call):
                quantized = any(call.keyword(name) is not None for name in _QUANTIZES)
                message = (
                    f"{settings.world_size} processes load the model, each on the first GPU of its node: "
                    + ("accelerate raises ValueError on all but one." if quantized else "it holds all of theirs.")
                )
                found = script.hit(call, message, 'Write device_map={"": int(os.environ["LOCAL_RANK"])}.')
                yield found if quantized else replace(found, severity="memory")


def _under_zero3(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """Any device_map at all, once transformers knows of ZeRO-3."""
    config = one_config(plan, files, settings)
    for script in scripts(files) if config is not None and config.stage == 3 else ():
        told = [call for call in script.methods(*_ARGUMENTS) if call.keyword("deepspeed") is not None]
        for call in script.methods("from_pretrained") if len(told) == 1 else ():
            given = call.keyword("device_map")
            value = script.bound(given)
            is_map = isinstance(value, ast.Dict) or (isinstance(value, ast.Constant) and value.value is not None)
            late = told[0].node.lineno < call.node.lineno and _same_way(told[0], call)
            if late and is_map and _is_model(call) and _is_trained(script, call):
                message = (
                    f"device_map beside ZeRO-3, of which {told[0].method} in line {told[0].node.lineno} tells: "
                    "transformers raises ValueError."
                )
                yield script.hit(call, message, "Leave device_map out: ZeRO-3 places each part.")


_QUANTIZES = ("quantization_config", "load_in_4bit", "load_in_8bit")


def _on_first(script: Script, call: Call) -> bool:
    """Whether device_map is the first GPU and nothing else: `{"": 0}`, `0` or `"cuda:0"`."""
    node = script.bound(call.keyword("device_map"))
    if isinstance(node, ast.Dict) and len(node.keys) == 1 and script.constant(node.keys[0]) == "":
        node = node.values[0]
    value = node.value if isinstance(node, ast.Constant) else None
    return value == "cuda:0" or (type(value) is int and value == 0)


_SPREAD = ("auto", "balanced", "balanced_low_0", "sequential")


def _is_trained(script: Script, call: Call) -> bool:
    """Whether a Trainer or prepare gets what the call returns, by the one name it is bound to."""
    names = {name for name in script.bound_at if script.bound(ast.Name(name, ast.Load())) is call.node}
    names_of = script.accelerators
    takers = (each for each in script.calls if each.method.endswith("Trainer") or each.owner in names_of)
    return any(
        isinstance(given, ast.Name) and given.id in names
        for each in takers for given in (each.keyword("model"), *each.node.args)
    )  # fmt: skip


@rule(
    "script.resume-always", severity="error", raised_by="transformers",
    evidence="huggingface/transformers:src/transformers/trainer.py train 5.24.0, run",
)  # fmt: skip
def resume_always(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A Trainer that is told to resume in each run, the first one too."""
    for script in scripts(files):
        makes = [name for name in script.calls if name.method.endswith("Trainer")]
        if not makes or _ASKS.search(script.python.text):
            continue
        for call in script.methods("train"):
            given = call.argument("resume_from_checkpoint", 0)
            always = isinstance(given, ast.Constant) and given.value is True
            chosen = any(isinstance(each, ast.If | ast.Try | ast.IfExp) for each in call.around)
            if always and not chosen:
                message = "the first run has no checkpoint: ValueError, No valid checkpoint found."
                fix = "Give resume_from_checkpoint=get_last_checkpoint(output_dir), which is None without one."
                yield script.hit(call, message, fix)


_ASKS = re.compile(r"get_last_checkpoint|exists\(|isdir\(|is_dir\(|listdir\(|glob\(")


@rule(
    "script.quantized", severity="error", raised_by="transformers",
    evidence="huggingface/transformers:src/transformers/trainer_utils.py validate_quantization_for_training 5.24",
)  # fmt: skip
def quantized(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A model of 4 or 8 bits that a Trainer is to train without adapters."""
    for script in scripts(files):
        words = {*script.imports.values(), *(str(getattr(node, "arg", "")) for node in script.nodes)}
        if any(re.search("peft|lora|adapter", word, re.IGNORECASE) for word in (*words, *script.bound_at)):
            continue
        for call in script.called("transformers.Trainer", "transformers.Seq2SeqTrainer"):
            given = call.argument("model", 0)
            made = script.bound(given) if isinstance(given, ast.Name) else None
            trains = any(each.method == "train" for each in script.every)
            adapts = any("adapter" in each.method.lower() for each in script.calls)
            if isinstance(made, ast.Call) and _has_few_bits(script, made) and trains and not adapts:
                message = "a model of 4 or 8 bits without adapters: the Trainer raises ValueError when it is made."
                fix = "Train adapters: get_peft_model(prepare_model_for_kbit_training(model), LoraConfig(...))."
                yield script.hit(call, message, fix)


def _has_few_bits(script: Script, made: ast.Call) -> bool:
    """Whether a model is loaded by bitsandbytes."""
    given = {each.arg: script.bound(each.value) for each in made.keywords}
    asked = given.get("quantization_config")
    by_config = isinstance(asked, ast.Call) and script.name(asked.func) == "transformers.BitsAndBytesConfig"
    if isinstance(asked, ast.Call) and by_config:
        given = {each.arg: each.value for each in asked.keywords}
    return any(script.constant(given.get(name)) is True for name in ("load_in_4bit", "load_in_8bit"))
