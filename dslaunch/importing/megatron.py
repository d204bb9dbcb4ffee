"""`dslaunch import megatron`: a model file and a recipe from a script or argument line of Megatron."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from dslaunch.errors import ConfigError
from dslaunch.files.fileset import read_paths
from dslaunch.importing.imported import Imported, checked_name
from dslaunch.importing.megatron_flags import KEYS, Flags, as_values
from dslaunch.importing.megatron_model import take_decoder
from dslaunch.importing.megatron_training import take_data, take_layout, take_training
from dslaunch.importing.megatron_words import CommandLine, command_line
from dslaunch.importing.recipe import Recipe, begun
from dslaunch.importing.taken import default_megatron, megatron_arguments, megatron_value
from dslaunch.importing.writing import yaml_text
from dslaunch.render.megatron_flags import DECIDED

_COMPONENT = "llm"
_MODEL_KEYS = f"model.components.{_COMPONENT}."
_NEEDLESS = {
    "--use-mcore-models": "on in every Megatron that dslaunch renders for",
    "--use-flash-attn": "the default implementation chooses it",
    "--local-rank": "torchrun sets it",
}
_MEGATRON_DEEPSPEED = {
    "--deepspeed": "written for the engine megatron_deepspeed",
    "--deepspeed_config": "the rendered file takes its place; `dslaunch import deepspeed` reads the old one",
    "--deepspeed-activation-checkpointing": "written where recompute is full",
}
"""Flags of Megatron-DeepSpeed alone, and what becomes of them under its engine."""
_OTHER_MODELS = ("bert", "t5", "ict", "retro", "mamba", "hybrid", "vision", "vlm", "mimo", "multimodal")
_OTHER_FLAGS = (
    "--encoder-num-layers", "--decoder-seq-length", "--bert-no-binary-head", "--language-model-type",
    "--vision-model-type", "--hybrid-override-pattern", "--hybrid-layer-pattern", "--is-hybrid-model",
    "--retro-project-dir", "--vocab-extra-ids",
)  # fmt: skip
"""What tells an encoder, an encoder and decoder, a state-space model or one of several modalities."""
_UNPLANNED = {
    "--use-megatron-fsdp": "kept; the plan counts parameters and gradients as not sharded",
    "--use-custom-fsdp": "kept; the plan counts parameters and gradients as not sharded",
    "--use-torch-fsdp2": "kept; the plan counts parameters and gradients as not sharded",
}
"""Flags that are rendered as they stand, and that memory and time of the plan do not follow."""
_DEFAULTS_KEPT = {"--attention-dropout": 0.1, "--hidden-dropout": 0.1}
"""Megatron's own where the flag is absent; dslaunch would write 0."""


def import_megatron(path: str, words: Sequence[str] = (), name: str = "") -> Imported:
    """A model file and a recipe.

    Args:
        path: a shell script that starts Megatron-LM or Megatron-DeepSpeed, or a file of its arguments.
        words: what the script cannot say, as KEY=VALUE: cluster, data.path, ...; model.components.llm.KEY
            goes into the model file.
        name: of model and recipe; made from the file's where it is empty.

    Raises:
        ConfigError: no such command in the file, or a size that its flags do not say.
    """
    (file,) = read_paths([Path(path)]).files
    line = command_line(file.text, path)
    flags = Flags(line.arguments, path)
    _refuse_others(line, flags, path)
    for condition in line.doubts:
        flags.note("if", f"{condition}: the script does not tell; its branch was read")
    name = checked_name(name, Path(path).stem)
    own = {w.partition("=")[0].removeprefix(_MODEL_KEYS): w for w in words if w.startswith(_MODEL_KEYS)}
    recipe = begun(name, f"imported from {Path(path).name}", [w for w in words if w not in own.values()])
    original = as_values(flags.given)
    files = {} if "model" in recipe.groups else {f"conf/model/{name}.yaml": _model(flags, own, name, path)}
    recipe.groups.setdefault("model", name)
    _cluster(recipe, line, path)
    _engine(recipe, flags)
    replica = take_layout(recipe, flags, _COMPONENT)
    take_training(recipe, flags, replica)
    take_data(recipe, flags)
    _extra(recipe, flags, () if files else _sizes(flags, recipe.groups["model"]))
    notes = tuple(flags.notes)
    text = recipe.text(notes, [f"Imported from {Path(path).name}, which starts {line.script or 'Megatron'}."])
    return Imported(name, {**files, f"recipes/{name}.yaml": text}, notes, recipe.choices, original)


def _refuse_others(line: CommandLine, flags: Flags, path: str) -> None:
    """Raises ConfigError for a script of a model that is no decoder: its flags mean another shape."""
    name = Path(line.script).name
    told = next((word for word in _OTHER_MODELS if word in name.removesuffix(".py").split("_")), "")
    told = told or next((flag for flag in _OTHER_FLAGS if flag in flags.given), "")
    if told:
        raise ConfigError(
            f"{path}: {told} in {name or 'its arguments'}: that is no language model of one decoder, and others "
            "are not imported. Describe the model in conf/model/NAME.yaml; `dslaunch schema model.components` "
            "lists the keys."
        )


def _model(flags: Flags, words: dict[str, str], name: str, path: str) -> str:
    given = {key: yaml.safe_load(word.partition("=")[2]) for key, word in words.items()}
    component = take_decoder(flags, flags.peek("--tensor-model-parallel-size") or 1, given)
    model: dict[str, Any] = {"name": name, "source": Path(path).name, "components": {_COMPONENT: component}}
    return yaml_text(model, [f"Imported from the arguments in {Path(path).name}."])


def _cluster(recipe: Recipe, line: CommandLine, path: str) -> None:
    """`cluster=A100` takes its size from torchrun's, deepspeed's or sbatch's options; a sized one stays."""
    nodes = _option(line, "--nnodes", "--num_nodes") or _sbatch(line, "--nodes", "-N")
    per_node = _option(line, "--nproc_per_node", "--num_gpus")
    per_node = per_node or _sbatch(line, "--gpus-per-node", "--gres", "--ntasks-per-node")
    size = f"{nodes}x{per_node}x" if nodes and per_node else ""
    choice = recipe.groups.get("cluster", "")
    if not choice and size:
        raise ConfigError(
            f"{path}: does not say which GPU. Add cluster=TYPE: cluster=A100 is read as {size}A100."
        )
    if not choice:
        raise ConfigError(f"{path}: does not say which GPUs, and how many. Add them, such as cluster=8xA100.")
    if recipe.gpus is None:
        recipe.groups["cluster"] = f"{size}{choice}"


def _option(line: CommandLine, *names: str) -> int | None:
    """A whole number among the launcher's options, written with = or a blank, - or _."""
    words = [word.replace("-", "_").lstrip("_") for word in line.launcher]
    wanted = {name.replace("-", "_").lstrip("_") for name in names}
    for at, word in enumerate(words):
        key, equals, value = word.partition("=")
        if key in wanted:
            value = value if equals else (words[at + 1] if at + 1 < len(words) else "")
            return int(value) if value.isdigit() else None
    return None


def _sbatch(line: CommandLine, *names: str) -> int | None:
    """The number of the first of `names` that sbatch is told; --gres=gpu:8 ends with it."""
    given = {name: value.rpartition(":")[2] for name, value in line.sbatch}
    return next((int(given[name]) for name in names if given.get(name, "").isdigit()), None)


def _engine(recipe: Recipe, flags: Flags) -> None:
    theirs = "--deepspeed" in flags.left
    recipe.groups.setdefault("engine", "megatron_deepspeed" if theirs else "megatron")
    recipe.groups.setdefault("strategy", "layouts")
    own = recipe.groups["engine"] == "megatron_deepspeed"
    for flag, fate in _MEGATRON_DEEPSPEED.items():
        if flags.left.pop(flag, None) is not None:
            flags.note(flag, fate if own else "Megatron-DeepSpeed's; the recipe is for Megatron-LM")
    for flag, reason in _NEEDLESS.items():
        if flags.left.pop(flag, None) is not None:
            flags.note(flag, reason)


def _sizes(flags: Flags, model: str) -> tuple[str, ...]:
    """Flags that the chosen model answers, each with a note; the comparison of keys shows where it differs."""
    sizes = tuple(flag for flag in flags.left if DECIDED.get(flag, "").startswith("model."))
    for flag in sizes:
        flags.note(flag, f"model={model} decides")
    return sizes


def _extra(recipe: Recipe, flags: Flags, told: Sequence[str]) -> None:
    """What is left and not `told` goes to engine.extra where the renderer takes it, else into a note."""
    version = str(recipe.get("engine.version") or default_megatron())
    catalogue = megatron_arguments(recipe.groups["engine"], version)
    kept: dict[str, Any] = {f.removeprefix("--"): v for f, v in _DEFAULTS_KEPT.items() if f not in flags.left}
    for flag, values in flags.left.items():
        if flag in told:
            continue
        key = flag.removeprefix("--")
        if any("$" in value for value in values):
            own = KEYS.get(flag, f"engine.extra.{key}")
            flags.note(flag, f"{' '.join(values)}: nothing in the script sets it; give {own}")
            continue
        try:
            value = megatron_value(flag, values, catalogue)
        except ConfigError as error:
            flags.note(flag, str(error))
            continue
        kept[key] = value
        if flag in _UNPLANNED:
            flags.note(flag, _UNPLANNED[flag])
    recipe.tree.setdefault("engine", {}).setdefault("extra", {}).update(
        {key: value for key, value in kept.items() if key not in recipe.get("engine.extra")}
    )
