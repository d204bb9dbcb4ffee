"""preflight.json: what the hosts must be, of what plan.json does not say."""

from __future__ import annotations

from dslaunch.planfile import Plan, PreflightPlan
from dslaunch.render.environment import variables
from dslaunch.schema.config import RunConfig

_MOMENTS_BYTES = 8
"""Two fp32 moments of a parameter; optimizers with fewer take less."""
_MASTER_BYTES = 4
"""The fp32 copy of a parameter that is trained in half precision."""


def preflight_plan(plan: Plan, config: RunConfig) -> PreflightPlan:
    cluster, settings = config.cluster, config.preflight
    network = cluster.network if plan.cluster.nodes > 1 else None
    every, environment = plan.files.checkpoint_every, variables(plan, config)
    return PreflightPlan(
        enabled=settings.enabled,
        max_seconds=settings.max_seconds,
        host_seconds=settings.host_seconds,
        collective=settings.collective,
        bandwidth_fraction=settings.bandwidth_fraction,
        clock_seconds=settings.clock_seconds,
        cache_minutes=settings.cache_minutes,
        dcgm=settings.dcgm,
        ignore=settings.ignore,
        gpu_memory_gib=cluster.gpu.memory_gib,
        intra_gb_per_s=cluster.intra.gb_per_s,
        nvlink=cluster.intra.kind == "nvlink" and plan.cluster.gpus_per_node > 1,
        network_gb_per_s=network.gb_per_s if network else 0.0,
        infiniband=network is not None and network.kind == "infiniband",
        cpu_cores=cluster.node.cpu_cores,
        checkpoint_bytes=checkpoint_bytes(plan),
        checkpoints=max(1, plan.training.steps // every) if every else 1,
        container=config.launcher.container.kind != "none",
        env={each.name: each.value for each in environment if not each.keeps},
        env_defaults={each.name: each.value for each in environment if each.keeps},
    )


def checkpoint_bytes(plan: Plan) -> int:
    """Weights as they are computed with; for what trains two moments, and an fp32 copy in half precision."""
    whole = plan.training.precision == "fp32"
    weight, trained = (4, _MOMENTS_BYTES) if whole else (2, _MOMENTS_BYTES + _MASTER_BYTES)
    return sum(each.params * weight + each.trainable * trained for each in plan.components.values())
