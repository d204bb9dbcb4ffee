"""accelerate's configuration: keys and values that stop `accelerate launch`, or the processes that it starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from dslaunch.engines.trainer_catalogue import accelerate_options, accelerate_versions, accelerate_words
from dslaunch.errors import listed, nearest
from dslaunch.files.fileset import File, FileSet
from dslaunch.files.flags import is_told
from dslaunch.files.position import Position
from dslaunch.planfile import Plan
from dslaunch.rules.accelerate.launch import FALSE, TRUE, started
from dslaunch.rules.accelerate.starts import starter
from dslaunch.rules.deepspeed.values import shown
from dslaunch.rules.launchers.torchrun import BACKENDS as RENDEZVOUS
from dslaunch.rules.registry import Hit, hit, rule
from dslaunch.rules.settings import Settings

_CONFIG = "huggingface/accelerate:src/accelerate/commands/config/config_args.py 0.30.1 to 1.15.0, run"
_PLUGIN = (
    "huggingface/accelerate:src/accelerate/utils/dataclasses.py FullyShardedDataParallelPlugin, utils/launch.py "
    "prepare_multi_gpu_env 1.15.0, run"
)
_MESH = "huggingface/accelerate:src/accelerate/parallelism_config.py 1.15.0, run"
_LOOKED_AT = 50
"""Keys and options that nothing knows, of which each is compared with those that there are."""
_OLD_FORM = frozenset({"fp16", "dynamo_backend"})
"""Keys of older configurations that accelerate converts."""
_ENVIRONMENTS = ("LOCAL_MACHINE", "AMAZON_SAGEMAKER")
_COUNTS = ("num_machines", "num_processes", "machine_rank", "main_process_port")


@rule("accelerate.key", severity="error", raised_by="accelerate", evidence=_CONFIG)
def key(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A key that accelerate's configuration doesn't have, one that is missing, or a value of the wrong kind."""
    for file in files.of("accelerate"):
        if not isinstance(file.value, dict):
            continue
        environment = file.value.get("compute_environment", "LOCAL_MACHINE")
        if environment not in _ENVIRONMENTS:
            message = f"compute_environment is {shown(environment)}: accelerate raises."
            yield hit(file, ("compute_environment",), message, f"Use {' or '.join(_ENVIRONMENTS)}.")
            continue
        yield from _unknown_keys(file)
        if environment != "AMAZON_SAGEMAKER":
            yield from _wrong_values(file)


def _unknown_keys(file: File) -> Iterator[Hit]:
    known = accelerate_words("sagemaker" if file.get("compute_environment") == "AMAZON_SAGEMAKER" else "keys")
    odd = (name for name in file.value if name not in known or known[name].until)
    for name in islice(odd, _LOOKED_AT):
        word = known.get(name)
        if word is None and name not in _OLD_FORM:
            near = nearest(str(name), known)
            message = f"accelerate's configuration has no key '{name}': accelerate launch raises ValueError.{near}"
            yield hit(file, (name,), message, "Correct it, or take it out.")
        elif word is not None and word.until:
            message = f"accelerate {word.next} and newer have no key '{name}', and raise ValueError."
            yield hit(file, (name,), message, "Take it out, or keep the older version.", severity="info")


def _wrong_values(file: File) -> Iterator[Hit]:
    kinds, chosen = accelerate_words("distributed_type"), file.get("distributed_type")
    if "distributed_type" not in file.value:
        message = "no distributed_type: accelerate launch raises ValueError."
        yield hit(file, (), message, "Write one, such as distributed_type: MULTI_GPU.")
    elif isinstance(chosen, str) and chosen not in kinds:
        near = nearest(chosen, kinds)
        message = f"accelerate has no distributed_type {chosen}: ValueError.{near}"
        yield hit(file, ("distributed_type",), message, f"Use one of {listed(kinds)}.")
    for name in _COUNTS:
        given = file.get(name)
        if isinstance(given, str) and not _is_filled_in(given) and _is_computed(file, name, given):
            message = f"{name} is {shown(given)}, a text: accelerate computes with it, and raises TypeError."
            yield hit(file, (name,), message, "Write a number, without quotes.")
    yield from _wrong_words(file)
    ids = file.get("gpu_ids")
    if ids is not None and not isinstance(ids, str):
        message = f"gpu_ids is {shown(ids)} to YAML, and no text: accelerate raises AttributeError."
        yield hit(file, ("gpu_ids",), message, "Write it in quotes, such as '0,1'.")
    elif ids is not None and ids != "all" and "," not in ids and _alone(file) and _is_several(file):
        message = f"gpu_ids {ids!r} is one GPU, and distributed_type {chosen} wants two: ValueError."
        yield hit(file, ("gpu_ids",), message, "Name two or more, or write all.")
    for name in (name for name in file.value if str(name).endswith("_config")):
        if file.get(name) is not None and not isinstance(file.get(name), dict):
            message = f"{name} is {shown(file.get(name))}, and no section: accelerate raises."
            yield hit(file, (name,), message, f"Write its keys, indented, below {name}.")


def _is_computed(file: File, name: str, given: str) -> bool:
    """Whether a text in place of this number is more than handed on."""
    kind = starter(file)
    if kind == "tpu":
        return False
    if name == "machine_rank":
        return kind != "alone" and not _alone(file) and not given.strip().isdecimal()
    if name == "num_processes":
        return kind == "alone" or not _alone(file) or not given.isdecimal()
    return name != "main_process_port" or kind != "alone"


def _is_several(file: File) -> bool:
    kind = str(file.get("distributed_type"))
    return kind.startswith("MULTI_") and kind != "MULTI_CPU"


def _wrong_words(file: File) -> Iterator[Hit]:
    """Names that torch or accelerate look up, and a rank that there isn't."""
    backend, engine = file.get("rdzv_backend"), file.get("dynamo_backend")
    path: tuple[str, ...] = ("dynamo_backend",)
    if isinstance(backend, str) and backend not in RENDEZVOUS and starter(file) in ("torchrun", "deepspeed"):
        message = f"torch has no rdzv_backend {backend!r}: ValueError."
        yield hit(file, ("rdzv_backend",), message, f"Use {listed(RENDEZVOUS)}.")
    for name in ("dynamo_backend", "backend"):
        if file.get("dynamo_config", name) is not None:
            engine, path = file.get("dynamo_config", name), ("dynamo_config", name)
    engines = accelerate_words("dynamo_backend")
    if starter(file) in ("deepspeed", "tpu"):
        engine = None  # its processes are not told
    if engine is not None and not isinstance(engine, str):
        message = f"{path[-1]} is {shown(engine)} to YAML, and no text: accelerate raises AttributeError."
        yield hit(file, path, message, "Write 'no' in quotes, or a compiler's name.")
    if isinstance(engine, str) and engine.upper() not in engines:
        message = f"accelerate has no dynamo backend {engine!r}: ValueError.{nearest(engine.upper(), engines)}"
        yield hit(file, path, message, f"Use one of {listed(engines)}.")
    rank, machines = file.get("machine_rank"), file.get("num_machines")
    if isinstance(rank, int) and isinstance(machines, int) and machines > 1 and not 0 <= rank < machines:
        message = f"machine_rank {rank} of {machines} machines, which count from 0: torch refuses it, or waits."
        yield hit(file, ("machine_rank",), message, f"Use 0 to {machines - 1}.")


def _alone(file: File) -> bool:
    machines = file.get("num_machines")
    return machines is None or (isinstance(machines, int) and machines <= 1)


def _is_filled_in(text: str) -> bool:
    """A gap in a template: `{{ nodes }}`, `$NODES`, `<nodes>`."""
    return any(mark in text for mark in "${<")


_PREFIXES: Mapping[str, str] = {
    "fsdp_config": "fsdp_", "fp8_config": "fp8_", "dynamo_config": "dynamo_", "megatron_lm_config": "",
    "parallelism_config": "", "mpirun_config": "",
}  # fmt: skip
"""Sections whose keys are options of accelerate launch: accelerate puts this in front where it is missing."""
_BESIDE = frozenset({"fsdp_ignored_modules"})
"""Keys that are read and are no options."""


def unread(file: File) -> Iterator[tuple[str, str, str, str]]:
    """The keys of sections that accelerate doesn't read: section, key, the last version that did, the nearest."""
    known, newest = accelerate_options().elsewhere, accelerate_versions()[-1]
    for section, prefix in _PREFIXES.items():
        values = file.get(section)
        for name in islice(values, _LOOKED_AT) if isinstance(values, dict) else ():
            full = str(name) if str(name).startswith(prefix) else f"{prefix}{name}"
            spans = known.get(f"--{full}", ())
            if not spans and full not in _BESIDE:
                names = [each[2:] for each in known if each.startswith(f"--{section.removesuffix('config')}")]
                yield section, str(name), "", nearest(full, names)
            elif spans and not any(each.until == newest for each in spans):
                yield section, str(name), spans[-1].until, ""


@dataclass(frozen=True)
class Given:
    """One value of FSDP's, from a configuration or a command line."""

    raw: Any
    """As YAML reads it; a text on a command line."""
    file: str
    at: Position

    @property
    def text(self) -> str:
        """As accelerate hands it on in the environment."""
        return str(self.raw)

    def hit(self, message: str, fix: str) -> Hit:
        """A finding at the value."""
        return Hit(self.file, self.at, message, fix)

    @property
    def on(self) -> bool:
        """Whether it says true."""
        return self.text.lower() in TRUE


_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_PREFETCH = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
_STATES = ("FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT")
_WRAPS = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
_NUMBERED = {"sharding_strategy": "12345", "backward_prefetch": "12", "state_dict_type": "123"}
"""Numbers that stand for torch's own order of the choices."""
_OPTIONAL = frozenset({"auto_wrap_policy", "backward_prefetch", "state_dict_type"})
"""Left to accelerate where they are null."""
_BOTH: Mapping[str, tuple[str, ...]] = {
    "auto_wrap_policy": _WRAPS, "backward_prefetch": _PREFETCH,
    **dict.fromkeys(("offload_params", "activation_checkpointing", "activation_checkpointing_offload",
                     "cpu_ram_efficient_loading"), TRUE + FALSE),
}  # fmt: skip
_CHOICES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "1": {
        **_BOTH, "sharding_strategy": (*_STRATEGIES, "_HYBRID_SHARD_ZERO2"), "state_dict_type": _STATES,
        **dict.fromkeys(("use_orig_params", "sync_module_states", "forward_prefetch"), TRUE + FALSE),
    },
    "2": {**_BOTH, "reshard_after_forward": TRUE + FALSE, "state_dict_type": _STATES[:2]},
}  # fmt: skip
"""What each version of FSDP reads, and the values that it takes, in any case of letters."""


@rule("accelerate.fsdp", severity="error", raised_by="accelerate", evidence=_PLUGIN)
def fsdp(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A value of FSDP's that accelerate refuses, or two that exclude each other."""
    for values in _fsdp(files):
        version = values["version"].text if "version" in values else "1"
        if version not in _CHOICES:
            again = values.get("reshard_after_forward")
            if not (version.isdecimal() and again and again.text.upper() in _STRATEGIES):
                yield values["version"].hit(f"fsdp_version is {version!r}: accelerate raises.", "Write 1 or 2.")
            continue
        for name, choices in _CHOICES[version].items():
            given = values.get(name)
            if given is not None and not _is_choice(name, given, choices, version):
                message = f"fsdp_{name} is {shown(given.raw)} with FSDP {version}: accelerate raises."
                words = ("true", "false") if "true" in choices else choices
                yield given.hit(message, f"Use {listed(words)}.")
        yield from _fsdp_together(values, version)


def _is_choice(name: str, given: Given, choices: tuple[str, ...], version: str) -> bool:
    if given.raw is None:
        return name in _OPTIONAL
    numbers = _NUMBERED.get(name, "") if version == "1" or name != "state_dict_type" else "13"
    folded = given.text.lower() if "true" in choices else given.text.upper()
    return folded in choices or (len(given.text) == 1 and given.text in numbers)


def _fsdp_together(values: Mapping[str, Given], version: str) -> Iterator[Hit]:
    sync, loading = values.get("sync_module_states"), values.get("cpu_ram_efficient_loading")
    if sync is not None and not sync.raw and (loading is None or loading.raw):
        says = "is true where nothing is said" if loading is None else "is true"
        message = f"fsdp_sync_module_states is false, and fsdp_cpu_ram_efficient_loading {says}: ValueError."
        yield sync.hit(message, "Set fsdp_sync_module_states: true, or fsdp_cpu_ram_efficient_loading: false.")
    offload, kept = values.get("activation_checkpointing_offload"), values.get("activation_checkpointing")
    if offload and offload.on and not (kept and kept.on):
        message = "fsdp_activation_checkpointing_offload without fsdp_activation_checkpointing: ValueError."
        yield offload.hit(message, "Add fsdp_activation_checkpointing: true.")
    elif offload and offload.on and version == "1":
        message = "fsdp_activation_checkpointing_offload with FSDP 1: ValueError."
        yield offload.hit(message, "Write fsdp_version: 2.")
    wrap, least = values.get("auto_wrap_policy"), values.get("min_num_params")
    if wrap and least and wrap.text.upper() == "SIZE_BASED_WRAP" and not least.text.isdecimal():
        message = f"fsdp_min_num_params is {shown(least.raw)}, and no whole number: accelerate raises ValueError."
        yield least.hit(message, "Write all digits, such as 100000000.")


def _fsdp(files: FileSet) -> Iterator[dict[str, Given]]:
    """What reaches FSDP: of each configuration that is for it, and of each command with what it overrides."""
    used: set[str] = set()
    for start in started(files):
        config = start.config if start.config and start.config.get("distributed_type") == "FSDP" else None
        if not start.flag("use_fsdp") and config is None:
            continue
        used |= {config.name} if config else set()
        values = _of_config(config) if config else {}
        for flag in start.launcher.options.flags:
            name = flag.name.removeprefix("--").replace("-", "_")
            if name.startswith("fsdp_") and flag.values:
                values[name.removeprefix("fsdp_")] = Given(flag.values[-1], start.file.name, flag.at)
        yield {name: given for name, given in values.items() if is_told(given.text)}
    for file in files.of("accelerate"):
        if file.get("distributed_type") == "FSDP" and file.name not in used:
            yield {name: given for name, given in _of_config(file).items() if not _is_filled_in(given.text)}


def _of_config(file: File) -> dict[str, Given]:
    section = file.get("fsdp_config")
    given = section if isinstance(section, dict) else {}
    return {
        str(name).removeprefix("fsdp_"): Given(value, file.name, file.at("fsdp_config", name))
        for name, value in given.items()
    }


_SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")


@rule("accelerate.parallelism", severity="error", raised_by="accelerate", evidence=_MESH)
def parallelism(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """Sizes of accelerate's parallelism_config that exclude each other, or don't make up the processes."""
    for file in files.of("accelerate"):
        section = file.get("parallelism_config")
        if isinstance(section, dict) and section:
            yield from _mesh(file, section)


def _mesh(file: File, section: Mapping[str, Any]) -> Iterator[Hit]:
    sizes: dict[str, int] = {}
    for name in _SIZES:
        given = section.get(f"parallelism_config_{name}", 1)
        if isinstance(given, bool) or not isinstance(given, int) or given < 1:
            message = f"parallelism_config_{name} is {shown(given)}: accelerate raises."
            yield _at_mesh(file, name, message, "Write a whole number from 1 on.")
            return
        sizes[name] = given
    replicas, shards, tp, cp, sp = sizes.values()
    if cp > 1 and sp > 1:
        yield _at_mesh(file, "sp_size", "cp_size and sp_size above 1 exclude each other: ValueError.", "Keep one.")
    if (tp > 1 or cp > 1) and replicas > 1 and shards == 1:
        message = f"tp_size {tp} and cp_size {cp} with dp_replicate_size {replicas} and no shards: ValueError."
        yield _at_mesh(file, "dp_replicate_size", message, "Shard the replicas: dp_shard_size above 1.")
    yield from _mesh_words(file, section, cp, sp)
    total, processes = replicas * shards * tp * cp, file.get("num_processes")
    if sp == 1 and total > 1 and isinstance(processes, int) and processes > 0 and total != processes:
        message = f"parallelism_config makes {total} processes, and num_processes is {processes}: ValueError."
        yield hit(file, ("parallelism_config",), message, "Make their product num_processes.")


def _mesh_words(file: File, section: Mapping[str, Any], cp: int, sp: int) -> Iterator[Hit]:
    """Names of ways to cut a sequence."""
    words: dict[str, tuple[str, ...]] = {"cp_backend": ("torch",), "sp_backend": ("deepspeed",)}
    if cp > 1:
        words["cp_comm_strategy"] = ("allgather", "alltoall")
    for name, allowed in words.items():
        given = section.get(f"parallelism_config_{name}", allowed[0])
        if given not in allowed and not _is_filled_in(str(given)):
            message = f"parallelism_config_{name} is {shown(given)}: accelerate raises ValueError."
            yield _at_mesh(file, name, message, f"Use {listed(allowed)}.")
    attention = section.get("parallelism_config_sp_attn_implementation", "sdpa")
    if sp > 1 and attention not in _ATTENTION and "flash-attn" not in str(attention).partition("/")[2]:
        name, fix = "sp_attn_implementation", f"Use {listed(_ATTENTION)}, or a kernel of the hub."
        message = f"parallelism_config_{name} is {shown(attention)}: accelerate raises ValueError."
        yield _at_mesh(file, name, message, fix)


_ATTENTION = ("flash_attention_2", "flash_attention_3", "sdpa")


def _at_mesh(file: File, name: str, message: str, fix: str) -> Hit:
    return hit(file, ("parallelism_config", f"parallelism_config_{name}"), message, fix)
