"""The DeepSpeed configuration of one component, or of the whole model, as DeepSpeed 0.16.9 to 0.19.8 read it.

Left out on purpose: `overlap_comm` where nothing reads it (stage 0, and pipelines); `activation_checkpointing`,
which only a script that calls deepspeed.checkpointing.configure reads, not the engine; `scheduler` for
dslaunch.runtime, which hands its own to deepspeed.initialize, and that wins over the block anyway.
Source: deepspeed/runtime/{config,engine}.py and runtime/zero/config.py, 0.19.8.
"""

from __future__ import annotations

from typing import Any

from dslaunch.engines.deepspeed_buckets import LIVE, PERSISTENT, PREFETCH, bucket_elements
from dslaunch.errors import ConfigError
from dslaunch.planfile import ComponentPlan, Plan
from dslaunch.render.deepspeed_schedule import scheduler

RUNTIME_MODULE = "dslaunch.runtime"
PRINT_EVERY = 10
"""Steps between two lines of DeepSpeed's own, for scripts; dslaunch.runtime prints its own."""


def trained(component: ComponentPlan) -> int:
    """Parameters with a gradient on the rank that has most of them."""
    return max(stage.trainable_on_rank for stage in component.stages)


def deepspeed_config(
    plan: Plan, component: ComponentPlan, gradients: int, shared: bool, scheduled: bool = True
) -> dict[str, Any]:
    """What deepspeed.initialize gets for `component`.

    Args:
        gradients: parameters with a gradient on a rank: a bucket is never larger.
        shared: the component stands for the whole model (engine deepspeed), not for itself (engine native).
        scheduled: a script gets its learning rates from here.

    Raises:
        ConfigError: a combination that DeepSpeed 0.19.8 refuses.
    """
    runtime = plan.program.module == RUNTIME_MODULE
    config: dict[str, Any] = {
        "train_batch_size": plan.global_batch,
        "train_micro_batch_size_per_gpu": component.micro_batch,
        "gradient_accumulation_steps": component.num_microbatches,
        "gradient_clipping": plan.training.clip,
        "optimizer": _optimizer(plan, component, shared),
        "zero_optimization": _zero(plan, component, gradients),
        "data_types": _data_types(plan, component),
        "wall_clock_breakdown": False,
    }
    if plan.training.precision == "fp16":
        config["fp16"] = {"enabled": True}
    if plan.training.precision == "bf16":
        # Written out, since its default went from false to true with 0.19.3.
        config["bf16"] = {"enabled": True, "check_grad_overflow": True}
    if not runtime:
        config |= {"steps_per_print": PRINT_EVERY}
        if scheduled:
            config |= scheduler(plan, component, shared)
    if not shared:
        # Tags are this component's own; the check of them is a collective over the world.
        config["checkpoint"] = {"tag_validation": "Ignore"}
    return config


def _optimizer(plan: Plan, component: ComponentPlan, shared: bool) -> dict[str, Any]:
    """AdamW; torch's on CPU ranks, where DeepSpeed's own would have to be compiled first."""
    training = plan.training
    params: dict[str, Any] = {
        "lr": training.lr if shared else component.lr,
        "betas": list(training.betas),
        "eps": training.eps,
        "weight_decay": training.weight_decay if shared else component.weight_decay,
    }
    if plan.cluster.accelerator == "cpu":
        params["torch_adam"] = True
    return {"type": "AdamW", "params": params}


def _zero(plan: Plan, component: ComponentPlan, gradients: int) -> dict[str, Any]:
    if component.zero == 0:
        return {"stage": 0}
    bucket = bucket_elements(gradients)
    zero: dict[str, Any] = {"stage": component.zero, "contiguous_gradients": True, "reduce_bucket_size": bucket}
    if component.pp == 1:
        zero["overlap_comm"] = plan.training.overlap_comm and plan.cluster.accelerator != "cpu"
    if component.zero == 3:
        zero |= {
            "stage3_prefetch_bucket_size": PREFETCH,
            "stage3_param_persistence_threshold": PERSISTENT,
            "stage3_max_live_parameters": LIVE,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    else:
        zero["allgather_bucket_size"] = bucket
    return zero | _offload(plan, component)


def _offload(plan: Plan, component: ComponentPlan) -> dict[str, Any]:
    target = {"device": "cpu", "pin_memory": plan.cluster.accelerator != "cpu"}
    if component.offload == "cpu":
        return {"offload_optimizer": target}
    if component.offload == "cpu_params":
        return {"offload_optimizer": target, "offload_param": dict(target)}
    return {}


def _data_types(plan: Plan, component: ComponentPlan) -> dict[str, str]:
    precision, accum = plan.training.precision, plan.training.grad_accum_dtype
    if component.zero == 0 and accum != precision:
        raise ConfigError(
            f"training.grad_accum_dtype is {accum}, but without ZeRO DeepSpeed 0.19.8 accumulates in the "
            f"model's own type and stops at any other. Set training.grad_accum_dtype={precision}, or a ZeRO "
            "stage of 1 or more"
        )
    return {"grad_accum_dtype": accum}
