"""The plan and the prediction: plain dataclasses, and their JSON.

`Plan` holds decisions (what a review is about), `Prediction` what the ledgers say of them. Both are frozen,
free of clocks and paths of this machine, and serialise to the same bytes everywhere. The runtime reads
plan.json through this module, so it imports nothing of dslaunch but the errors.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from dataclasses import dataclass
from typing import Any

from dslaunch.errors import ConfigError

PLAN_SCHEMA = "dslaunch.plan/1"
PREDICTION_SCHEMA = "dslaunch.prediction/1"
_READABLE = {PLAN_SCHEMA, PREDICTION_SCHEMA}


@dataclass(frozen=True)
class StagePlan:
    """One pipeline stage of one component."""

    stage: int
    ranks: tuple[int, ...]
    """Global ranks that hold this stage."""
    layers: int
    params_on_rank: int
    """Parameters that one rank of the stage computes with: after TP and PP, before ZeRO."""
    trainable_on_rank: int
    """Of those, the ones that get a gradient."""


@dataclass(frozen=True)
class ComponentPlan:
    """The layout of one component. micro_batch * num_microbatches * dp = global_batch."""

    tp: int
    pp: int
    vpp: int
    cp: int
    ep: int
    dp: int
    zero: int
    """ZeRO stage 0-3; FSDP2 counts as 3, DDP as 0."""
    offload: str
    """none | cpu (optimizer states) | cpu_params (ZeRO-3: parameters as well)"""
    recompute: str
    """none | selective | full"""
    micro_batch: int
    num_microbatches: int
    rank_offset: int
    params: int
    """Parameters of the whole component."""
    trainable: int
    lr: float
    weight_decay: float
    layers_per_stage: tuple[int, ...]
    stages: tuple[StagePlan, ...]

    @property
    def ranks(self) -> int:
        """Ranks that the component's grid spans."""
        return self.tp * self.pp * self.cp * self.dp


@dataclass(frozen=True)
class ClusterPlan:
    """The hardware as planned for."""

    gpu: str
    """The GPU's full name, such as A100-SXM4-80GB, or CPU."""
    accelerator: str
    """cuda | cpu"""
    nodes: int
    gpus_per_node: int
    local: bool
    """This machine: launched without hostfile or scheduler."""
    hosts: tuple[str, ...] = ()
    """Host names, in rank order, where the configuration names them."""


@dataclass(frozen=True)
class TrainingPlan:
    """What decides convergence, and the schedule."""

    global_batch: int
    """Samples per optimizer step."""
    seq_len: int
    """Tokens per sample as the trunk (the LLM) sees them."""
    precision: str
    """bf16 | fp16 | fp32"""
    grad_accum_dtype: str
    """bf16 | fp16 | fp32"""
    steps: int
    """Optimizer steps."""
    seed: int
    clip: float
    """Global gradient norm above which gradients are scaled down; 0 is off."""
    schedule: str
    """1f1b | gpipe | interleaved"""
    overlap_comm: bool
    sequence_parallel: bool
    optimizer: str
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    warmup_steps: int
    lr_schedule: str
    """constant | linear | cosine"""
    min_lr: float


@dataclass(frozen=True)
class EnginePlan:
    """Who executes the plan."""

    name: str
    version: str
    """The framework version that the files are rendered for."""
    sharding: str
    """zero | ddp | fsdp2"""
    path: str = ""
    """A checkout of Megatron, for the engines that run its script."""


@dataclass(frozen=True)
class ProgramPlan:
    """What runs on every rank."""

    script: str = ""
    """A Python file, as the user gave it; empty where a module runs."""
    module: str = ""
    """A Python module, run as `python -m`."""
    args: tuple[str, ...] = ()


@dataclass(frozen=True)
class LauncherPlan:
    """Who starts the ranks."""

    name: str
    """auto | local | torchrun | ssh | slurm; auto is resolved at launch."""
    python: str
    """Interpreter of the training environment, as the user gave it; empty where it was left open."""
    hostfile: str
    """The user's hostfile; empty where one is rendered."""
    master_port: int
    """0: chosen at launch."""
    confirm_above: int
    """On a terminal, launches on more GPUs than this ask first."""
    timeout_minutes: float
    """Limit of a collective."""
    pass_env: tuple[str, ...]
    """Environment variables handed over by name; their values are in no file."""


@dataclass(frozen=True)
class FilesPlan:
    """What the program reads and writes; each as the user gave it."""

    data_path: str = ""
    tokenizer: str = ""
    weights: str = ""
    checkpoint_dir: str = ""
    """Empty: the folder `checkpoints` in the run folder."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0 saves one at the end only."""
    checkpoint_load: str = ""


@dataclass(frozen=True)
class Finding:
    """One judgement of a plan or file."""

    rule: str
    severity: str
    """error | hang | memory | wrong | slow | deprecated | info"""
    message: str
    where: str = ""
    """file:line:column, or a key."""
    fix: str = ""


@dataclass(frozen=True)
class Candidate:
    """One layout that the search considered."""

    layout: str
    """In words, such as `llm TP8 PP4 DP2 ZeRO-1`."""
    peak_memory_gib: float
    step_time_s: float
    verdict: str
    """chosen | slower | refused: why, with its figure"""


@dataclass(frozen=True)
class Plan:
    """Decisions. Written as plan.json."""

    name: str
    recipe: str
    strategy: str
    world_size: int
    global_batch: int
    cluster: ClusterPlan
    training: TrainingPlan
    engine: EnginePlan
    engines: tuple[str, ...]
    """Every engine that can execute this plan, the chosen one first."""
    program: ProgramPlan
    launcher: LauncherPlan
    files: FilesPlan
    components: dict[str, ComponentPlan]
    env_names: tuple[str, ...]
    """Environment variables that the rendered files set."""
    model: dict[str, Any]
    """The model's configuration as validated: what the program builds from."""
    accepted: tuple[str, ...] = ()
    """Rules that the user waived."""
    schema: str = PLAN_SCHEMA


@dataclass(frozen=True)
class MemoryGib:
    """Bytes on one GPU of one stage, in GiB (2**30), by term. `total` is the sum of the other terms."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    boundary: float
    """Inputs and outputs kept for other stages or components."""
    logits: float
    buffers: float
    """Communication buckets and gathered parameters."""
    total: float


@dataclass(frozen=True)
class StagePrediction:
    """The ledgers of one stage."""

    stage: int
    memory_gib: MemoryGib
    host_gib_per_rank: float
    time_s: dict[str, float]
    """Seconds in one optimizer step, by term: compute, recompute, tp, dp, pp, optimizer, offload."""


@dataclass(frozen=True)
class WorstRank:
    """The rank that decides whether the plan fits."""

    rank: int
    memory_gib: dict[str, float]
    """By `component/term` with the stage the rank holds, and `overhead`."""


@dataclass(frozen=True)
class Prediction:
    """What the ledgers say of a plan. Written as prediction.json."""

    components: dict[str, tuple[StagePrediction, ...]]
    overhead_gib: float
    """CUDA context, communicators and allocator, per GPU."""
    worst: WorstRank
    peak_memory_gib: float
    gpu_memory_gib: float
    memory_limit_gib: float
    """gpu_memory_gib * goal.memory_fraction."""
    host_memory_gib: float
    """Host memory needed on one node."""
    host_limit_gib: float
    step_time_s: float
    tokens_per_s: float
    samples_per_s: float
    mfu: float
    """Model FLOPs (no recompute) over what the GPUs' dense peak allows."""
    hfu: float
    """The same with recomputed FLOPs counted."""
    bubble: float
    """Share of the step in which the trunk's pipeline idles."""
    band: str
    """The error band of these figures."""
    findings: tuple[Finding, ...]
    candidates: tuple[Candidate, ...]
    tables_sha256: str
    """Hash of the efficiency tables used."""
    plan_sha256: str
    """Hash of the plan.json that these figures belong to."""
    schema: str = PREDICTION_SCHEMA


def to_json(value: Any) -> str:
    """Sorted keys, two spaces, lists of scalars on one line, a newline at the end."""
    return _write(_plain(value), "") + "\n"


def plan_from_json(text: str, where: str = "plan.json") -> Plan:
    """The Plan in `text`.

    Raises:
        ConfigError: not JSON, another schema, or a missing or unknown key.
    """
    plan = _read(Plan, text, where)
    assert isinstance(plan, Plan)
    return plan


def prediction_from_json(text: str, where: str = "prediction.json") -> Prediction:
    """The Prediction in `text`; raises ConfigError like plan_from_json."""
    prediction = _read(Prediction, text, where)
    assert isinstance(prediction, Prediction)
    return prediction


def joined(plan: Plan, prediction: Prediction) -> dict[str, Any]:
    """The one object of `dslaunch plan --json`: the prediction laid over the plan, stage by stage."""
    result: dict[str, Any] = {**_plain(prediction), **_plain(plan)}
    for name, stages in prediction.components.items():
        for decided, predicted in zip(result["components"][name]["stages"], stages, strict=True):
            decided.update(_plain(predicted))
    return result


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _write(value: Any, indent: str) -> str:
    inner = indent + "  "
    if isinstance(value, dict) and value:
        rows = [f"{inner}{json.dumps(key)}: {_write(value[key], inner)}" for key in sorted(value)]
        return "{\n" + ",\n".join(rows) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        return "[\n" + ",\n".join(inner + _write(item, inner) for item in value) + f"\n{indent}]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _read(kind: Any, text: str, where: str) -> Any:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}. Render it again with `dslaunch render`.") from error
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema not in _READABLE:
        raise ConfigError(
            f"{where}: schema is {schema!r}; this dslaunch reads {', '.join(sorted(_READABLE))}. "
            "Render it again with `dslaunch render`."
        )
    return _build(kind, data, where)


def _build(kind: Any, data: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _build_dataclass(kind, data, where)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is dict:
        return {key: _build(args[1], item, f"{where}.{key}") for key, item in data.items()}
    if origin is tuple:
        kinds = args[:1] * len(data) if args[-1] is Ellipsis else args
        return tuple(
            _build(k, item, f"{where}[{i}]") for i, (k, item) in enumerate(zip(kinds, data, strict=True))
        )
    if kind is Any or origin is types.UnionType:
        return data
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if not isinstance(data, kind) or (kind is int and isinstance(data, bool)):
        raise ConfigError(
            f"{where}: {data!r} is not {kind.__name__}. Render it again with `dslaunch render`."
        )
    return data


def _build_dataclass(kind: Any, data: Any, where: str) -> Any:
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: expected an object, found {type(data).__name__}.")
    required = {n for n, f in fields.items() if f.default is dataclasses.MISSING}
    wrong = sorted(set(data) - set(fields)) + sorted(required - set(data))
    if wrong:
        raise ConfigError(
            f"{where}: unknown or missing key {wrong[0]!r}. Render it again with `dslaunch render`."
        )
    return kind(**{name: _build(hints[name], item, f"{where}.{name}") for name, item in data.items()})


__all__ = [
    "PLAN_SCHEMA",
    "PREDICTION_SCHEMA",
    "Candidate",
    "ClusterPlan",
    "ComponentPlan",
    "EnginePlan",
    "FilesPlan",
    "Finding",
    "LauncherPlan",
    "MemoryGib",
    "Plan",
    "Prediction",
    "ProgramPlan",
    "StagePlan",
    "StagePrediction",
    "TrainingPlan",
    "WorstRank",
    "joined",
    "plan_from_json",
    "prediction_from_json",
    "to_json",
]
