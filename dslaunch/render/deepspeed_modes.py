"""DeepSpeed's modes beside the ZeRO stages, as keys of its configuration; the plan refused what it can't take."""

from __future__ import annotations

from typing import Any

from dslaunch.engines.deepspeed_buckets import (
    NVME_IN_HOST,
    NVME_OPTIMIZER_BUFFERS,
    NVME_PARAM_BUFFERS,
    NVME_SUB_GROUP,
)
from dslaunch.engines.deepspeed_modes import hpz
from dslaunch.plan.nvme import param_buffer
from dslaunch.planfile import ComponentPlan, Plan
from dslaunch.schema.config import RunConfig


def with_modes(
    made: dict[str, Any], plan: Plan, config: RunConfig, component: ComponentPlan
) -> dict[str, Any]:
    """`made` (the configuration of the ZeRO stage alone) with what else is asked for."""
    zero = {
        **made["zero_optimization"],
        **_zero_plus_plus(config),
        **_nvme_states(plan, config, component),
        **_zenflow(config),
    }
    if config.strategy.super_offload.enabled:
        cores = config.strategy.super_offload.cpu_cores
        own = {"super_offload": True, "cpuadam_cores_perc": cores}
        zero["offload_optimizer"] = {**zero["offload_optimizer"], **own}
    found = {**made, "zero_optimization": zero, **_aio(config, component), **_ranks(component)}
    found |= {**_activation_checkpointing(config), **_checkpoint(config), **_monitors(plan, config)}
    if component.tp > 1:
        # DeepSpeedConfig would hold it against all ranks, not against the replicas.
        del found["train_batch_size"]
    return found


def _zero_plus_plus(config: RunConfig) -> dict[str, Any]:
    plus, size = config.strategy.zero_plus_plus, hpz(config)
    found: dict[str, Any] = {"zero_hpz_partition_size": size} if size > 1 else {}
    if plus.quantized_weights:
        found["zero_quantized_weights"] = True
    if plus.quantized_gradients:
        found["zero_quantized_gradients"] = True
    return found


def _nvme_states(plan: Plan, config: RunConfig, component: ComponentPlan) -> dict[str, Any]:
    if not component.offload.startswith("nvme"):
        return {}
    target = {
        "device": "nvme",
        "nvme_path": config.strategy.nvme.path,
        "pin_memory": plan.cluster.accelerator != "cpu",
    }
    found: dict[str, Any] = {
        "sub_group_size": NVME_SUB_GROUP,
        "offload_optimizer": {**target, "buffer_count": NVME_OPTIMIZER_BUFFERS},
    }
    if component.offload == "nvme_params":
        found["offload_param"] = {
            **target,
            "buffer_count": NVME_PARAM_BUFFERS,
            "buffer_size": param_buffer(config, component.dp * component.cp),
            "max_in_cpu": NVME_IN_HOST,
        }
    return found


def _aio(config: RunConfig, component: ComponentPlan) -> dict[str, Any]:
    if not component.offload.startswith("nvme"):
        return {}
    nvme = config.strategy.nvme
    return {
        "aio": {
            "block_size": nvme.block_size,
            "queue_depth": nvme.queue_depth,
            "intra_op_parallelism": nvme.threads,
            "single_submit": nvme.single_submit,
            "overlap_events": nvme.overlap_events,
        }
    }


def _zenflow(config: RunConfig) -> dict[str, Any]:
    """The columns are chosen every so many steps: `epoch`, DeepSpeed's own choice, needs its data loader."""
    zenflow = config.strategy.zenflow
    if not zenflow.enabled:
        return {}
    return {
        "zenflow": {
            "topk_ratio": zenflow.topk_ratio,
            "select_strategy": "step",
            "select_interval": zenflow.select_interval,
            "update_interval": zenflow.update_interval,
            "full_warm_up_rounds": zenflow.warmup_steps,
            "overlap_step": zenflow.overlap_step,
        }
    }


def _ranks(component: ComponentPlan) -> dict[str, Any]:
    """AutoTP, or Ulysses' mesh."""
    if component.tp > 1:
        return {"tensor_parallel": {"autotp_size": component.tp}}
    if component.cp > 1:
        return {"sequence_parallel_size": component.cp, "data_parallel_size": component.dp}
    return {}


def _activation_checkpointing(config: RunConfig) -> dict[str, Any]:
    wanted = config.engine.activation_checkpointing
    if not wanted.enabled:
        return {}
    section: dict[str, Any] = {
        "partition_activations": wanted.partition_activations,
        "cpu_checkpointing": wanted.cpu,
        "contiguous_memory_optimization": wanted.contiguous,
        "synchronize_checkpoint_boundary": wanted.synchronize,
        "profile": wanted.profile,
    }
    if wanted.number is not None:
        section["number_checkpoints"] = wanted.number
    return {"activation_checkpointing": section}


def _checkpoint(config: RunConfig) -> dict[str, Any]:
    return {"checkpoint": {"load_universal": True}} if config.checkpoint.universal else {}


def _monitors(plan: Plan, config: RunConfig) -> dict[str, Any]:
    """What is empty is left to the monitor, but for names, which are the run's."""
    monitor, found = config.engine.monitor, {}
    for section, files in (("tensorboard", monitor.tensorboard), ("csv_monitor", monitor.csv)):
        if files.enabled:
            found[section] = {"enabled": True, "output_path": files.path, "job_name": files.job or plan.name}
    if monitor.wandb.enabled:
        given = {"team": monitor.wandb.team, "group": monitor.wandb.group}
        project = monitor.wandb.project or plan.name
        found["wandb"] = {"enabled": True, "project": project, **_not_empty(given)}
    if monitor.comet.enabled:
        given = {"workspace": monitor.comet.workspace, "experiment_name": monitor.comet.experiment}
        project, every = monitor.comet.project or plan.name, monitor.comet.every
        found["comet"] = {"enabled": True, "project": project, "samples_log_interval": every, **_not_empty(given)}
    return found


def _not_empty(texts: dict[str, str]) -> dict[str, str]:
    return {name: text for name, text in texts.items() if text}
