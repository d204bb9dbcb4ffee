"""`dslaunch import accelerate`: a recipe from a configuration of Hugging Face's accelerate.

Keys as accelerate 1.14 reads them (commands/config/config_args.py, utils/launch.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from dslaunch.errors import ConfigError, listed, nearest
from dslaunch.files.fileset import read_paths
from dslaunch.importing.accelerate_source import DEGREES, Source
from dslaunch.importing.accelerate_torch import take_ddp, take_fsdp
from dslaunch.importing.deepspeed import take_deepspeed
from dslaunch.importing.deepspeed_file import flattened, read_config
from dslaunch.importing.imported import Imported, checked_name
from dslaunch.importing.recipe import Recipe, begun, require

_LAUNCH_KEYS = ("num_processes", "num_machines", "mixed_precision", "distributed_type")
_DEEPSPEED_ENV = (
    "the script has to be handed the rendered file: with ACCELERATE_USE_DEEPSPEED=true and "
    "ACCELERATE_DEEPSPEED_CONFIG_FILE, or DeepSpeedPlugin(hf_ds_config=os.environ['DSLAUNCH_DS_CONFIG'])"
)


def import_accelerate(
    path: str, words: Sequence[str] = (), script_arguments: Sequence[str] = (), name: str = ""
) -> Imported:
    """The recipe of an accelerate configuration.

    Args:
        path: the YAML file.
        words: what it cannot say, as KEY=VALUE: model, cluster (its type, the file tells how many),
            training.seq_len, training.global_batch, script, ...

    Raises:
        ConfigError: no such configuration, a kind that is not known, or something missing.
    """
    config = _parsed(path)
    name = checked_name(name, Path(path).stem)
    recipe = begun(name, f"imported from {Path(path).name}", words, script_arguments)
    source = Source(config, path)
    kind = _kind(source)
    require(
        recipe,
        "model",
        "cluster",
        "training.seq_len",
        *_batch_keys(recipe, config, kind),
        source=path,
        cluster="H100",
    )
    _cluster(recipe, source, kind)
    if (port := source.whole("main_process_port", least=0)) and port >= 1024:
        recipe.put("launcher.master_port", port)
    stated = {key: config[key] for key in _LAUNCH_KEYS if key in config}
    if "mixed_precision" in stated:
        stated["mixed_precision"] = stated["mixed_precision"] or "no"
    if "distributed_type" in stated:
        stated["distributed_type"] = kind
    original = {**stated, **_KINDS[kind](recipe, source)}
    notes = source.finish()
    text = recipe.text(notes, [f"Imported from the accelerate configuration {Path(path).name}."])
    return Imported(name, {f"recipes/{name}.yaml": text}, notes, recipe.choices, original)


def _kind(source: Source) -> str:
    """The distributed_type; NO without quotes is false to YAML."""
    kind = str(source.take("distributed_type") or "NO").upper()
    if kind not in _KINDS:
        raise ConfigError(
            f"{source.path}: distributed_type is {kind}. Known are {listed(_KINDS)}.{nearest(kind, _KINDS)}"
        )
    return kind


def _batch_keys(recipe: Recipe, config: Mapping[str, Any], kind: str) -> tuple[str, ...]:
    """The batch is the script's, except where a DeepSpeed file may tell it; ZeRO's follows from a micro-batch."""
    plugin = config.get("deepspeed_config") or {}
    told = kind == "DEEPSPEED" and (recipe.get("training.micro_batch") or "deepspeed_config_file" in plugin)
    return () if told else ("training.global_batch",)


def _parsed(path: str) -> Mapping[str, Any]:
    (file,) = read_paths([Path(path)]).files
    try:
        config = yaml.safe_load(file.text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise ConfigError(
            f"{path}{line}: not YAML: {error.problem}. Give accelerate's configuration."
        ) from error
    if (
        not isinstance(config, dict)
        or not all(isinstance(key, str) for key in config)
        or not {"distributed_type", "num_processes"} & set(config)
    ):
        raise ConfigError(
            f"{path}: has neither distributed_type nor num_processes, so it is none of accelerate's."
        )
    return config


def _cluster(recipe: Recipe, source: Source, kind: str) -> None:
    """`cluster=A100` takes its size from num_processes and num_machines; a sized one stays."""
    processes, machines = source.whole("num_processes"), source.whole("num_machines") or 1
    processes = processes or (1 if kind == "NO" else None)
    if recipe.gpus is not None or recipe.groups["cluster"] == "local":
        return
    if processes is None:
        raise ConfigError(
            f"{source.path}: num_processes is missing. Say how many GPUs: cluster=8x{recipe.groups['cluster']}"
        )
    if processes % machines:
        raise ConfigError(f"{source.path}: {processes} processes do not share {machines} machines equally.")
    recipe.groups["cluster"] = f"{machines}x{processes // machines}x{recipe.groups['cluster']}"


def _deepspeed(recipe: Recipe, source: Source) -> dict[str, Any]:
    """The plugin's keys as the DeepSpeed configuration that accelerate makes of them, or its file."""
    section = "deepspeed_config."
    source.note("distributed_type", f"DEEPSPEED: {_DEEPSPEED_ENV}")
    if source.take(f"{section}zero3_init_flag"):
        source.note(f"{section}zero3_init_flag", "deepspeed.zero.Init is the script's to call")
    if hostfile := source.text(f"{section}deepspeed_hostfile"):
        recipe.put("launcher.hostfile", hostfile)
    source.refuse_cut("tp_size", "cp_size")
    if (shared := source.whole(f"{DEGREES}sp_size") or 1) > 1:
        recipe.put("strategy.every.cp", shared)
    for unit in ("dp_replicate_size", "dp_shard_size"):
        source.take(f"{DEGREES}{unit}")
    if file := source.text(f"{section}deepspeed_config_file"):
        config = _beside(source, file)
        source.notes += take_deepspeed(recipe, config, file)
    else:
        config = _plugin(source, section)
        source.notes += take_deepspeed(recipe, {**config, **_script_batch(recipe)}, source.path)
    return dict(flattened(config))


def _beside(source: Source, file: str) -> Mapping[str, Any]:
    """The DeepSpeed file that the configuration names, relative to its own folder."""
    try:
        return read_config(str(Path(source.path).parent / file))
    except ConfigError as error:
        raise ConfigError(f"{source.path}: deepspeed_config.deepspeed_config_file: {error}") from error


def _plugin(source: Source, section: str) -> dict[str, Any]:
    """What accelerate makes of its own keys (utils/dataclasses.py, DeepSpeedPlugin)."""
    stage = source.whole(f"{section}zero_stage", least=0)
    if stage is not None and stage > 3:
        raise source.wrong(f"{section}zero_stage", stage, "0, 1, 2 or 3")
    zero: dict[str, Any] = {"stage": 2 if stage is None else stage}
    for part in ("optimizer", "param"):
        device = source.text(f"{section}offload_{part}_device") or "none"
        if device not in ("none", "cpu", "nvme"):
            raise source.wrong(f"{section}offload_{part}_device", device, "none, cpu or nvme")
        if device != "none":
            place = source.text(f"{section}offload_{part}_nvme_path")
            zero[f"offload_{part}"] = {"device": device} | ({"nvme_path": place} if place else {})
    if source.take(f"{section}zero3_save_16bit_model"):
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    config: dict[str, Any] = {"zero_optimization": zero}
    steps, clip = (
        source.take(f"{section}gradient_accumulation_steps"),
        source.take(f"{section}gradient_clipping"),
    )
    if type(steps) is int:
        config["gradient_accumulation_steps"] = steps
    if isinstance(clip, int | float):
        config["gradient_clipping"] = clip
    if kind := source.text(f"{section}seq_parallel_communication_data_type"):
        config["seq_parallel_communication_data_type"] = kind
    if source.precision != "fp32":
        config[source.precision] = {"enabled": True}
    return config


def _script_batch(recipe: Recipe) -> dict[str, Any]:
    """Samples per pass are the script's."""
    micro = recipe.get("training.micro_batch")
    return {"train_micro_batch_size_per_gpu": micro} if micro else {}


def _megatron(recipe: Recipe, source: Source) -> dict[str, Any]:
    raise ConfigError(
        f"{source.path}: distributed_type is MEGATRON_LM: dslaunch starts Megatron's script. Write its arguments "
        "into a file and use `dslaunch import megatron FILE`, or write a recipe with engine=megatron."
    )


_KINDS: dict[str, Callable[[Recipe, Source], dict[str, Any]]] = {
    "DEEPSPEED": _deepspeed,
    "FSDP": take_fsdp,
    "MEGATRON_LM": _megatron,
    "MULTI_CPU": take_ddp,
    "MULTI_GPU": take_ddp,
    "NO": take_ddp,
}
