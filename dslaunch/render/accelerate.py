"""What a script under PyTorch alone is given: accelerate.yaml, and torch.json with all that the plan decides.

Source: accelerate/commands/config/config_args.py (ClusterConfig), commands/launch.py, utils/dataclasses.py
(FullyShardedDataParallelPlugin, DistributedDataParallelKwargs) and parallelism_config.py, 1.15.
"""

from __future__ import annotations

from typing import Any

from dslaunch.planfile import ComponentPlan, Plan
from dslaunch.schema.config import RunConfig

TORCH_SCHEMA = "dslaunch.torch/1"


def accelerate_follows(plan: Plan) -> bool:
    """On CPU ranks accelerate leaves FSDP out without a word (accelerate/state.py, AcceleratorState, 1.15)."""
    return plan.cluster.accelerator != "cpu" or plan.engine.sharding == "ddp"


def accelerate_config(plan: Plan) -> dict[str, Any]:
    """The keys of accelerate.yaml, in the order of a reader; mappings are sections."""
    sharded = plan.engine.sharding != "ddp"
    several = "MULTI_CPU" if plan.cluster.accelerator == "cpu" else "MULTI_GPU"
    found: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if sharded else several if plan.world_size > 1 else "NO",
        "mixed_precision": "bf16" if plan.training.precision == "bf16" else "no",
        "num_machines": plan.cluster.nodes,
        "num_processes": plan.world_size,
        "main_training_function": "main",
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": plan.cluster.accelerator == "cpu",
    }
    if plan.launcher.master_port:
        found["main_process_port"] = plan.launcher.master_port
    if sharded:
        found["fsdp_config"] = _fsdp(plan)
    if plan.engine.sharding == "hsdp":
        found["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": plan.world_size // plan.engine.shard_size,
            "parallelism_config_dp_shard_size": plan.engine.shard_size,
        }
    return found


def _fsdp(plan: Plan) -> dict[str, Any]:
    """Layers are found by the model's own list (Transformers' _no_split_modules)."""
    full = any(component.recompute == "full" for component in plan.components.values())
    return {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": True,
        "fsdp_offload_params": False,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_activation_checkpointing": full,
    }


def accelerate_environment(plan: Plan, config: RunConfig) -> dict[str, str]:
    """What `accelerate launch` would set from accelerate.yaml, and the accumulation that it takes from code only.

    The names are those of accelerate/utils/launch.py (prepare_multi_gpu_env, prepare_simple_launcher_cmd_env) and
    accelerator.py, 1.15; what has accelerate's own default there is left out.
    """
    made, micro_batches = accelerate_config(plan), _trunk(plan, config).num_microbatches
    found = {
        "ACCELERATE_MIXED_PRECISION": made["mixed_precision"],
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": str(micro_batches),
    }
    if made["use_cpu"]:
        found["ACCELERATE_USE_CPU"] = "true"
    for section, switch in (("fsdp_config", "FSDP"), ("parallelism_config", "PARALLELISM_CONFIG")):
        if section in made:
            found[f"ACCELERATE_USE_{switch}"] = "true"
            found |= {key.upper(): _text(value) for key, value in made[section].items()}
    return found


def _text(value: bool | int | str) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def torch_settings(plan: Plan, config: RunConfig) -> dict[str, Any]:
    """torch.json: what a script of one's own hands to PyTorch."""
    component = _trunk(plan, config)
    found: dict[str, Any] = {
        "schema": TORCH_SCHEMA,
        "sharding": plan.engine.sharding,
        "precision": plan.training.precision,
        "batch": {
            "global_batch": plan.global_batch,
            "micro_batch": component.micro_batch,
            "num_microbatches": component.num_microbatches,
        },
        "timeout_minutes": plan.launcher.timeout_minutes,
        "clip": plan.training.clip,
        "adamw": {
            "lr": plan.training.lr,
            "betas": list(plan.training.betas),
            "eps": plan.training.eps,
            "weight_decay": plan.training.weight_decay,
        },
    }
    if plan.engine.sharding == "ddp":
        found["ddp"] = config.strategy.ddp.model_dump()
    else:
        shard = plan.engine.shard_size or plan.world_size
        found["mesh"] = {"dp_replicate": plan.world_size // shard, "dp_shard": shard}
    return found


def _trunk(plan: Plan, config: RunConfig) -> ComponentPlan:
    """The component whose micro-batches are the script's."""
    return plan.components[config.model.trunk]
