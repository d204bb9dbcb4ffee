"""Plans and small rendered files for tests of launching."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from dslaunch.planfile import (
    ClusterPlan,
    ComponentPlan,
    EnginePlan,
    FilesPlan,
    LauncherPlan,
    Plan,
    ProgramPlan,
    StagePlan,
    TrainingPlan,
    to_json,
)

HOSTILE = "it's a $HOME; `echo` \"run\" 100% é"
"""A folder's name with what breaks careless quoting."""


def make_plan(
    nodes: int = 1,
    gpus_per_node: int = 2,
    *,
    local: bool = True,
    hosts: tuple[str, ...] = (),
    script: str = "train.py",
    engine: str = "deepspeed",
    engine_path: str = "",
    files: FilesPlan | None = None,
    **launcher: Any,
) -> Plan:
    """A plan of one component without any sharding; `launcher` are fields of LauncherPlan."""
    world = nodes * gpus_per_node
    stage = StagePlan(0, tuple(range(world)), layers=1, params_on_rank=10, trainable_on_rank=10)
    component = ComponentPlan(
        tp=1, pp=1, vpp=1, cp=1, ep=1, dp=world, zero=0, offload="none", recompute="none", micro_batch=1,
        num_microbatches=1, rank_offset=0, params=10, trainable=10, lr=1e-3, weight_decay=0.0,
        layers_per_stage=(1,), stages=(stage,),
    )  # fmt: skip
    training = TrainingPlan(
        global_batch=world, seq_len=8, precision="bf16", grad_accum_dtype="bf16", steps=1, seed=1, clip=1.0,
        schedule="1f1b", optimizer="adamw", lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0,
        warmup_steps=0, lr_schedule="constant", min_lr=0.0, overlap_comm=False,
        sequence_parallel=False,
    )  # fmt: skip
    default = LauncherPlan(
        name="auto", python="python3", hostfile="", master_port=0, confirm_above=64, timeout_minutes=30.0,
        pass_env=(),
    )  # fmt: skip
    return Plan(
        name="tiny",
        recipe="tiny",
        strategy="ddp",
        world_size=world,
        global_batch=world,
        cluster=ClusterPlan("CPU" if local else "A100-SXM4-80GB", "cpu", nodes, gpus_per_node, local, hosts),
        training=training,
        engine=EnginePlan(engine, "0.19.8", "zero", engine_path),
        engines=(engine,),
        program=ProgramPlan(script=script),
        launcher=dataclasses.replace(default, **launcher),
        files=files or FilesPlan(),
        components={"llm": component},
        env_names=(),
        model={"components": {}},
    )


def make_files(plan: Plan, **texts: str) -> dict[str, str]:
    """What every rendering holds, empty but for plan.json and the given texts (`launch_sh` is launch.sh)."""
    files = {"plan.json": to_json(plan), "launch.sh": "", "rank.sh": "", "job.sbatch": "", "env.sh": ""}
    for name, text in texts.items():
        files[name.replace("_", ".")] = text
    hashes = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in files.items()}
    manifest = {"schema": "dslaunch.manifest/1", "dslaunch": "0", "files": hashes}
    return {**files, "manifest.json": json.dumps(manifest)}


def put(folder: Path, files: dict[str, str]) -> Path:
    """Write the files as `dslaunch render -o` would."""
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder
