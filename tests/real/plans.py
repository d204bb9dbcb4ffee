"""Plans for the runtime's tests: a small vision-language-action model, and the DeepSpeed JSON beside it.

They are written out here, so that the runtime is held to the plan file alone and not to the planner.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from dslaunch import planfile
from dslaunch.schema.model import Model

HIDDEN = 64
VISION = {
    "arch": "vit", "layers": 2, "hidden": 48, "heads": 4, "ffn": 96, "patch": 2, "image": 8, "channels": 1,
}  # fmt: skip
LLM = {
    "arch": "decoder", "layers": 2, "hidden": HIDDEN, "heads": 4, "kv_heads": 2, "ffn": 160, "vocab": 64,
}  # fmt: skip
MODEL = {
    "name": "vla_test",
    "components": {
        "vision_encoder": VISION,
        "projector": {"arch": "mlp", "dims": [48, HIDDEN, HIDDEN]},
        "llm": LLM,
    },
    "edges": [
        {"from": "vision_encoder", "to": "projector", "tokens": 16, "join": "channel"},
        {"from": "projector", "to": "llm", "tokens": 16, "join": "sequence"},
    ],
}
SHARDINGS = {
    "ddp": ("ddp", 0, "none"),
    "fsdp2": ("fsdp2", 3, "none"),
    "zero0": ("zero", 0, "none"),
    "zero1": ("zero", 1, "none"),
    "zero2": ("zero", 2, "none"),
    "zero3": ("zero", 3, "none"),
    "zero3_cpu_offload": ("zero", 3, "cpu_params"),
}


def model_of(configuration: dict[str, Any]) -> dict[str, Any]:
    """A model's configuration as it stands in plan.json."""
    return Model.model_validate(configuration).model_dump(mode="json", by_alias=True)


def training_plan(steps: int = 6, precision: str = "fp32", global_batch: int = 16) -> planfile.TrainingPlan:
    return planfile.TrainingPlan(
        global_batch=global_batch, seq_len=28, precision=precision, grad_accum_dtype=precision, steps=steps,
        seed=7, clip=1.0, schedule="1f1b", optimizer="adamw", lr=3e-3, betas=(0.9, 0.95), eps=1e-8,
        weight_decay=0.1, warmup_steps=2, lr_schedule="cosine", min_lr=1e-4,
        overlap_comm=False, sequence_parallel=False,
    )  # fmt: skip


def component_plan(
    training: planfile.TrainingPlan, world_size: int, zero: int, offload: str
) -> planfile.ComponentPlan:
    """One replica per rank, two micro-batches per step."""
    return planfile.ComponentPlan(
        tp=1, pp=1, vpp=1, cp=1, ep=1, dp=world_size, zero=zero, offload=offload, recompute="none",
        micro_batch=training.global_batch // world_size // 2, num_microbatches=2, rank_offset=0, params=0,
        trainable=0, lr=training.lr, weight_decay=training.weight_decay, layers_per_stage=(), stages=(),
    )  # fmt: skip


def plan_for(
    strategy: str,
    world_size: int = 2,
    training: planfile.TrainingPlan | None = None,
    model: dict[str, Any] = MODEL,
    files: planfile.FilesPlan | None = None,
) -> planfile.Plan:
    """`model` on `world_size` CPU ranks under one strategy for all components."""
    sharding, zero, offload = SHARDINGS[strategy]
    training = training or training_plan()
    layout = component_plan(training, world_size, zero, offload)
    return planfile.Plan(
        name="test", recipe="test", strategy=strategy, world_size=world_size,
        global_batch=training.global_batch,
        cluster=planfile.ClusterPlan("CPU", "cpu", 1, world_size, local=True),
        training=training,
        engine=planfile.EnginePlan("deepspeed" if sharding == "zero" else "torch", "", sharding),
        engines=("deepspeed",),
        program=planfile.ProgramPlan(module="dslaunch.runtime"),
        launcher=planfile.LauncherPlan("local", "python3", "", 0, 64, 2.0, ()),
        files=files or planfile.FilesPlan(data_path="digits"),
        components=dict.fromkeys(model["components"], layout),
        env_names=(),
        model=model_of(model),
    )  # fmt: skip


def with_component(plan: planfile.Plan, name: str, **changes: Any) -> planfile.Plan:
    """`plan` with other settings of one component."""
    return replace(plan, components={**plan.components, name: replace(plan.components[name], **changes)})


def deepspeed_config(plan: planfile.Plan) -> dict[str, Any]:
    """The DeepSpeed JSON of `plan`. No parameter is too small to be cut at stage 3."""
    layout, training = next(iter(plan.components.values())), plan.training
    zero: dict[str, Any] = {"stage": layout.zero, "stage3_param_persistence_threshold": 0}
    if layout.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    if layout.offload == "cpu_params":
        zero["offload_param"] = {"device": "cpu", "pin_memory": False}
    return {
        "train_batch_size": plan.global_batch,
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.num_microbatches,
        "gradient_clipping": training.clip,
        "bf16": {"enabled": training.precision == "bf16"},
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": training.lr, "betas": list(training.betas), "eps": training.eps,
                "weight_decay": training.weight_decay, "torch_adam": True,
            },
        },
        "zero_optimization": zero,
    }  # fmt: skip


def write(plan: planfile.Plan, folder: Path) -> Path:
    """plan.json and ds_config.json in `folder`; the path of the former."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ds_config.json").write_text(json.dumps(deepspeed_config(plan)), encoding="utf-8")
    path = folder / "plan.json"
    path.write_text(planfile.to_json(plan), encoding="utf-8")
    return path
