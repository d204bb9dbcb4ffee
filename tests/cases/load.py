"""The rules' cases: tests/cases/RULE.yaml, a list of cases of that rule.

A case holds `files` ({name: text}), a `checkpoint` (tag, ranks, universal), what is known beside them
(`version`, `megatron_version`, `world_size`, `nodes`, `ranks_per_node`, `tp`, `pp`, `huggingface`, or a `plan`
of a few words), and `expect`: every finding, as rule and place. `real` says what DeepSpeed does with it where
that doesn't follow from the findings: `unjudged` is for what it can't see, `config` for what its parser can see
and an engine on one CPU can't.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from dslaunch.files.checkpoint import Checkpoint
from dslaunch.files.fileset import File, FileSet, read_fileset
from dslaunch.planfile import (
    ClusterPlan,
    ComponentPlan,
    EnginePlan,
    FilesPlan,
    LauncherPlan,
    Plan,
    ProgramPlan,
    TrainingPlan,
)
from dslaunch.rules.settings import NEWEST_DEEPSPEED, Settings

FOLDER = Path(__file__).parent
_LOADER: type = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Case:
    rule: str
    name: str
    files: dict[str, str]
    settings: Settings
    plan: Plan | None
    expect: tuple[tuple[str, str], ...]
    """(rule, where) of each finding."""
    real: str
    checkpoint: Checkpoint | None = None
    folders: frozenset[str] = frozenset()
    """Those that were read as a whole, and the ones in them."""

    def fileset(self) -> FileSet:
        """The files, and the checkpoint as a folder of that name tells it."""
        files = read_fileset(self.files).files
        if self.checkpoint is not None:
            files += (File("checkpoint/latest", "checkpoint", self.checkpoint.tag, self.checkpoint),)
        return FileSet(files, self.folders)


@cache
def all_cases() -> Sequence[Case]:
    return [case for path in sorted(FOLDER.glob("*.yaml")) for case in read_cases(path)]


def read_cases(path: Path) -> list[Case]:
    """The cases of one file, of the rule that the file is called after."""
    return [read_case(path.stem, raw) for raw in yaml.load(path.read_bytes(), _LOADER)]


def read_case(rule: str, raw: dict[str, Any]) -> Case:
    """One case as it stands in YAML."""
    settings = Settings(
        raw.get("version", NEWEST_DEEPSPEED),
        megatron_version=raw.get("megatron_version", ""),
        world_size=raw.get("world_size", 8),
        nodes=raw.get("nodes"),
        ranks_per_node=raw.get("ranks_per_node"),
        tp=raw.get("tp"),
        pp=raw.get("pp"),
        huggingface=raw.get("huggingface", False),
    )
    plan = small_plan(**raw["plan"]) if "plan" in raw else None
    expect = tuple((finding["rule"], finding["where"]) for finding in raw["expect"])
    saved = _checkpoint(**raw["checkpoint"]) if "checkpoint" in raw else None
    folders = frozenset(raw.get("folders", ()))
    return Case(rule, raw["name"], raw["files"], settings, plan, expect, raw.get("real", ""), saved, folders)


def _checkpoint(tag: str, ranks: Sequence[Sequence[int]], universal: bool) -> Checkpoint:
    return Checkpoint(tag, frozenset((data, model) for data, model in ranks), universal)


def small_plan(
    engine: str,
    world_size: int,
    components: Mapping[str, Mapping[str, Any]],
    nodes: int = 0,
    model: dict[str, Any] | None = None,
) -> Plan:
    """A plan of 8-GPU nodes; a component is its degrees, 1 (ZeRO: 0) where they aren't given."""
    cluster = ClusterPlan("A100-SXM4-80GB", "cuda", nodes or -(-world_size // 8), 8, local=False)
    training = TrainingPlan(
        global_batch=world_size, seq_len=2048, precision="bf16", grad_accum_dtype="fp32", steps=100, seed=1,
        clip=1.0, schedule="1f1b", overlap_comm=True, sequence_parallel=False, optimizer="adamw", lr=1e-4,
        betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, warmup_steps=10, lr_schedule="cosine", min_lr=0.0,
    )  # fmt: skip
    return Plan(
        name="case", recipe="case", strategy="custom", world_size=world_size, global_batch=world_size,
        cluster=cluster, training=training, engine=EnginePlan(engine, NEWEST_DEEPSPEED, "zero"), engines=(engine,),
        program=ProgramPlan("train.py"), launcher=LauncherPlan(
            name="auto", python="python", hostfile="", master_port=0, confirm_above=64, timeout_minutes=10.0,
            pass_env=(),
        ),
        files=FilesPlan(), components={name: _component(**degrees) for name, degrees in components.items()},
        env_names=(), model=model or {},
    )  # fmt: skip


def _component(
    tp: int = 1,
    pp: int = 1,
    vpp: int = 1,
    dp: int = 1,
    zero: int = 0,
    recompute: str = "none",
    layers_per_stage: Sequence[int] = (),
) -> ComponentPlan:
    return ComponentPlan(
        tp=tp, pp=pp, vpp=vpp, cp=1, ep=1, dp=dp, zero=zero, offload="none", recompute=recompute, micro_batch=1,
        num_microbatches=1, rank_offset=0, params=0, trainable=0, lr=1e-4, weight_decay=0.1,
        layers_per_stage=tuple(layers_per_stage), stages=(),
    )  # fmt: skip
