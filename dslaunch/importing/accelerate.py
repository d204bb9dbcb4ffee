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
from dslaunch.importing.deepspeed import flattened, read_config, take_deepspeed
from dslaunch.importing.imported import Imported, Note, checked_name
from dslaunch.importing.recipe import Recipe, begun, require

_WITHOUT_BEARING = frozenset({
    "compute_environment", "machine_rank", "main_training_function", "same_network", "gpu_ids", "debug",
    "main_process_ip", "rdzv_backend", "enable_cpu_affinity", "use_cpu", "tpu_use_cluster", "tpu_use_sudo",
    "tpu_env", "tpu_name", "tpu_zone", "tpu_vm", "commands", "command_file", "downcast_bf16",
})  # fmt: skip
"""What the launcher finds out at launch, or what belongs to machines that dslaunch does not start."""
_LAUNCH_KEYS = ("num_processes", "num_machines", "mixed_precision", "distributed_type")
_DEEPSPEED_ENV = (
    "the script has to be handed the rendered file: with ACCELERATE_USE_DEEPSPEED=true and "
    "ACCELERATE_DEEPSPEED_CONFIG_FILE, or DeepSpeedPlugin(hf_ds_config=os.environ['DSLAUNCH_DS_CONFIG'])"
)


class Source:
    """The file's keys, dotted; what nobody takes is told."""

    def __init__(self, config: Mapping[str, Any], path: str) -> None:
        self.path = path
        self.left = dict(flattened(config))
        self.notes: list[Note] = []
        mixed = str(self.left.pop("mixed_precision", None) or "no").lower()
        self.precision = {"no": "fp32", "fp8": "bf16"}.get(mixed, mixed)
        if mixed == "fp8":
            self.note("mixed_precision", "fp8: planned as bf16")

    def take(self, key: str) -> Any:
        """The value; None where it is absent."""
        return self.left.pop(key, None)

    def note(self, key: str, reason: str) -> None:
        """Something that is not carried over as it stands."""
        self.notes.append(Note(key, reason))

    def finish(self) -> tuple[Note, ...]:
        """The notes, with one for each key that says something and that nobody took."""
        for key, value in self.left.items():
            off = value in (None, False, "", "no", "NO", "none", {}, [])
            if not off and key not in _WITHOUT_BEARING:
                self.note(key, f"{value}: no key of dslaunch stands for it")
        return tuple(self.notes)


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
    _cluster(recipe, source)
    require(recipe, "model", "training.seq_len", source=path)
    if (port := source.take("main_process_port")) and port >= 1024:
        recipe.put("launcher.master_port", port)
    kind = str(source.take("distributed_type") or "NO").upper()
    if kind not in _KINDS:
        raise ConfigError(
            f"{path}: distributed_type is {kind}. Known are {listed(_KINDS)}.{nearest(kind, _KINDS)}"
        )
    stated = {key: config[key] for key in _LAUNCH_KEYS if key in config}
    original = {**stated, **_KINDS[kind](recipe, source)}
    require(recipe, "training.global_batch", source=path)
    notes = source.finish()
    text = recipe.text(notes, [f"Imported from the accelerate configuration {Path(path).name}."])
    return Imported(name, {f"recipes/{name}.yaml": text}, notes, recipe.choices, original)


def _parsed(path: str) -> Mapping[str, Any]:
    (file,) = read_paths([Path(path)]).files
    try:
        config = yaml.safe_load(file.text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {error}. Give accelerate's configuration.") from error
    if not isinstance(config, dict) or not {"distributed_type", "num_processes"} & set(config):
        raise ConfigError(
            f"{path}: has neither distributed_type nor num_processes, so it is none of accelerate's."
        )
    return config


def _cluster(recipe: Recipe, source: Source) -> None:
    """`cluster=A100` takes its size from num_processes and num_machines; a sized one stays."""
    processes, machines = source.take("num_processes"), source.take("num_machines") or 1
    choice = recipe.groups.get("cluster", "")
    if not choice:
        raise ConfigError(f"{source.path}: does not say which GPU. Add cluster=TYPE, such as cluster=A100.")
    if recipe.gpus is not None or not processes or processes < 1:
        return
    if processes % machines:
        raise ConfigError(f"{source.path}: {processes} processes do not share {machines} machines equally.")
    recipe.groups["cluster"] = f"{machines}x{processes // machines}x{choice}"


def _deepspeed(recipe: Recipe, source: Source) -> dict[str, Any]:
    """The plugin's keys as the DeepSpeed configuration that accelerate makes of them, or its file."""
    section = "deepspeed_config."
    source.note("distributed_type", f"DEEPSPEED: {_DEEPSPEED_ENV}")
    if source.take(f"{section}zero3_init_flag"):
        source.note(f"{section}zero3_init_flag", "deepspeed.zero.Init is the script's to call")
    if hostfile := source.take(f"{section}deepspeed_hostfile"):
        recipe.put("launcher.hostfile", hostfile)
    if file := source.take(f"{section}deepspeed_config_file"):
        config = read_config(str(Path(source.path).parent / file))
        source.notes += take_deepspeed(recipe, config, file)
        return dict(flattened(config))
    config = _plugin(source, section)
    source.notes += take_deepspeed(recipe, {**config, **_script_batch(recipe, source)}, source.path)
    return dict(flattened(config))


def _plugin(source: Source, section: str) -> dict[str, Any]:
    stage = source.take(f"{section}zero_stage")
    zero: dict[str, Any] = {"stage": 2 if stage is None else stage}
    for key, device in (
        ("offload_optimizer", "offload_optimizer_device"),
        ("offload_param", "offload_param_device"),
    ):
        value = source.take(f"{section}{device}")
        if value not in (None, "none"):
            zero[key] = {"device": value}
    if source.take(f"{section}zero3_save_16bit_model"):
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    config: dict[str, Any] = {"zero_optimization": zero}
    steps, clip = (
        source.take(f"{section}gradient_accumulation_steps"),
        source.take(f"{section}gradient_clipping"),
    )
    if isinstance(steps, int):
        config["gradient_accumulation_steps"] = steps
    if isinstance(clip, int | float):
        config["gradient_clipping"] = clip
    if source.precision != "fp32":
        config[source.precision] = {"enabled": True}
    return config


def _script_batch(recipe: Recipe, source: Source) -> dict[str, Any]:
    """Samples per pass are the script's; without training.micro_batch or global_batch nothing can be planned."""
    if recipe.get("training.micro_batch") is None and recipe.get("training.global_batch") is None:
        raise ConfigError(
            f"{source.path}: the batch is the script's. Add training.micro_batch=4 (per GPU) or "
            "training.global_batch=128."
        )
    micro = recipe.get("training.micro_batch")
    return {"train_micro_batch_size_per_gpu": micro} if micro else {}


def _fsdp(recipe: Recipe, source: Source) -> dict[str, Any]:
    section = "fsdp_config."
    version, strategy = source.take(f"{section}fsdp_version"), source.take(f"{section}fsdp_sharding_strategy")
    reshard = source.take(f"{section}fsdp_reshard_after_forward")
    if version in (None, 1):
        source.note(f"{section}fsdp_version", "1: planned as FSDP2")
    if strategy in ("NO_SHARD", 3):
        return _ddp(recipe, source)
    if strategy in ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2", 4, 5):
        source.note(f"{section}fsdp_sharding_strategy", f"{strategy}: planned as one shard over all GPUs")
    if strategy in ("SHARD_GRAD_OP", 2) or reshard is False:
        source.note(
            f"{section}fsdp_reshard_after_forward",
            "parameters stay whole between forward and backward: planned as resharded, which takes less memory",
        )
    if source.take(f"{section}fsdp_activation_checkpointing"):
        recipe.put("strategy.every.recompute", "full")
    _torch(recipe, source, "fsdp2")
    env = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"}
    for key, name in _FSDP_ENV.items():
        value = source.take(f"{section}{key}")
        if value not in (None, "", "none"):
            env[name] = str(value).lower() if isinstance(value, bool) else str(value)
    for name, value in env.items():
        recipe.put(f"env.{name}", value)
    return {}


_FSDP_ENV = {
    "fsdp_auto_wrap_policy": "FSDP_AUTO_WRAP_POLICY",
    "fsdp_transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP",
    "fsdp_min_num_params": "FSDP_MIN_NUM_PARAMS",
    "fsdp_state_dict_type": "FSDP_STATE_DICT_TYPE",
    "fsdp_cpu_ram_efficient_loading": "FSDP_CPU_RAM_EFFICIENT_LOADING",
}


def _ddp(recipe: Recipe, source: Source) -> dict[str, Any]:
    _torch(recipe, source, "ddp")
    return {}


def _torch(recipe: Recipe, source: Source, strategy: str) -> None:
    """accelerate under torchrun takes its settings from the environment."""
    recipe.groups.setdefault("strategy", strategy)
    recipe.groups.setdefault("engine", "torch")
    recipe.put("training.precision", source.precision)
    recipe.put("env.ACCELERATE_MIXED_PRECISION", "no" if source.precision == "fp32" else source.precision)


def _megatron(recipe: Recipe, source: Source) -> dict[str, Any]:
    raise ConfigError(
        f"{source.path}: distributed_type is MEGATRON_LM: dslaunch starts Megatron's script. Write its arguments "
        "into a file and use `dslaunch import megatron FILE`, or write a recipe with engine=megatron."
    )


_KINDS: dict[str, Callable[[Recipe, Source], dict[str, Any]]] = {
    "DEEPSPEED": _deepspeed,
    "FSDP": _fsdp,
    "MEGATRON_LM": _megatron,
    "MULTI_CPU": _ddp,
    "MULTI_GPU": _ddp,
    "NO": _ddp,
}
