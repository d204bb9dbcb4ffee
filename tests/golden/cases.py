"""Plans and their rendered files, made from command-line words as a user types them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dslaunch.compose import compose
from dslaunch.paths import data_dirs
from dslaunch.plan.planner import plan
from dslaunch.planfile import Plan, Prediction
from dslaunch.render import render
from dslaunch.schema.config import RunConfig
from dslaunch.schema.validate import validate

CASES = {
    "vla70b_64xA100": ["recipe=vla70b", "cluster=64xA100"],
    "vla_tiny_local": ["recipe=vla_tiny", "cluster=local"],
    "vla_tiny_ddp": ["recipe=vla_tiny", "cluster=local", "strategy=ddp"],
    "llama3_8b_zero3": [
        "recipe=llama3_8b", "cluster=2x8xA100", "engine=deepspeed", "strategy=zero3_cpu_offload",
        "script=train.py", "cluster.hosts=[node-a,node-b]", "env.NCCL_IB_HCA=mlx5_0,mlx5_1",
        "env.NOTE=it's $5; a \"quote\"", "launcher.pass_env=[WANDB_API_KEY]",
    ],
    "llama3_70b_megatron": [
        "recipe=llama3_70b", "cluster=64xA100", "engine=megatron", "engine.path=/opt/Megatron-LM",
        "data.path=0.3 /data/web_text 0.7 '/data/our books_text'", "data.tokenizer=/models/llama3",
        "checkpoint.every=500", "launcher.slurm.partition=gpu", "launcher.slurm.account=vla",
        "launcher.slurm.time=2-00:00:00", "launcher.slurm.exclude=n[1-2]",
        "launcher.slurm.modules=[cuda/12.4,nccl]",
        "launcher.container.kind=pyxis", "launcher.container.image=nvcr.io#nvidia/pytorch:25.03-py3",
        "launcher.container.mounts=[/data:/data]",
    ],
    "llama3_70b_megatron_deepspeed": [
        "recipe=llama3_70b", "cluster=64xA100", "engine=megatron_deepspeed",
        "engine.path=/opt/Megatron-DeepSpeed",
        "data.path=/data/web_text", "data.tokenizer=/models/llama3", "cluster.hosts=[a,b,c,d,e,f,g,h]",
        "strategy.llm.recompute=full",
    ],
    "vla70b_megatron_mimo": [
        "recipe=vla70b", "cluster=72xA100", "strategy=zero1", "engine=megatron_mimo",
        "engine.path=/opt/Megatron-LM", "data.path=/data/web_text", "data.tokenizer=/models/llama3",
        "script=train_vlm.py",
        "strategy.vision_encoder.tp=4", "strategy.vision_encoder.dp=2", "strategy.vision_encoder.rank_offset=0",
        "strategy.projector.tp=4", "strategy.projector.dp=2", "strategy.projector.rank_offset=0",
        "strategy.llm.tp=8", "strategy.llm.pp=4", "strategy.llm.rank_offset=8",
    ],
    "mixtral_megatron_0_19": [
        "recipe=llama3_8b", "model=mixtral_8x7b", "cluster=64xH100", "strategy=auto", "engine=megatron",
        "engine.version=0.19.0", "engine.path=/opt/Megatron-LM", "data.path=/data/web_text",
        "data.tokenizer=/models/mixtral", "training.global_batch=512", "training.micro_batch=1",
        "strategy.llm.tp=4", "strategy.llm.pp=4", "strategy.llm.ep=8", "strategy.llm.etp=1", "strategy.llm.zero=1",
        "strategy.llm.recompute=none", "strategy.llm.offload=none", "strategy.llm.vpp=1", "strategy.llm.cp=1",
        "strategy.llm.micro_batch=1",
    ],
    "llama3_8b_hsdp": [
        "recipe=llama3_8b", "cluster=64xH100", "strategy=hsdp", "script=train.py", "profile=nsys",
        "profile.ranks=[0,8]",
    ],
    "vla_tiny_two_kinds": [
        "recipe=vla_tiny", "cluster=A100", "launcher=slurm", "script=train.py", "module=",
        "training.micro_batch=2",
        "cluster.mixed=[{nodes: 2, gpus: 8, partition: big}, {nodes: 1, gpus: 4, constraint: small}]",
        "training.global_batch=120", "launcher.slurm.partition=gpu", "launcher.slurm.time=12:00:00",
        "launcher.slurm.signal_before_s=300", "launcher.slurm.requeue=2", "launcher.stage.from=.",
        "launcher.stage.to=/local/scratch", "launcher.bind_cpus=true",
    ],
}  # fmt: skip
"""Folder of golden files -> words of the command line."""

NOT_GOLDEN = {"prediction.json", "manifest.json"}
"""They follow from the ledgers, and from the other files."""


def planned(*words: str, **changes: Any) -> tuple[Plan, Prediction, RunConfig]:
    """A plan, its prediction and its configuration; `changes` are keys of the configuration's top level."""
    recipe = next(word.removeprefix("recipe=") for word in words if word.startswith("recipe="))
    composed = compose(recipe, [word for word in words if not word.startswith("recipe=")])
    config = validate({**composed.tree, **changes}, composed.locate)
    return (*plan(config), config)


def rendered(*words: str, site_templates: Path | None = None, **changes: Any) -> dict[str, str]:
    """The files of a command line."""
    folders = [*([site_templates] if site_templates else []), *data_dirs("templates")]
    return render(*planned(*words, **changes), folders)


def written(folder: Path, files: dict[str, str]) -> Path:
    """Put `files` into a new `folder`."""
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder
