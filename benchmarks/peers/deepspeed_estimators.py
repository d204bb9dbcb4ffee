"""DeepSpeed's estimators of model states (deepspeed/runtime/zero/stage_1_and_2.py and stage3.py, 0.19.8)."""

from __future__ import annotations

from benchmarks.peers.base import Estimate, not_installed
from benchmarks.settings import Setting
from dslaunch.model.params import params, params_on_rank

NAME = "DeepSpeed's estimators (model states only)"


def missing() -> str:
    """How to get it."""
    return not_installed("deepspeed", "deepspeed")


def estimate(run: Setting) -> Estimate | None:
    """Memory of a run of ZeRO-2 or -3 under DeepSpeed, all parameters trained."""
    case = next(iter(run.cases.values()))
    layout = case.layout
    if (
        not case.engine.deepspeed
        or layout.zero < 2
        or layout.pp > 1
        or layout.tp > 1
        or case.component.train != "all"
    ):
        return None
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    total, cluster = params(case.component), run.config.cluster
    shape = {"num_gpus_per_node": cluster.slots, "num_nodes": cluster.node_count}
    if layout.zero == 2:
        _, gpu, *_ = estimate_zero2_model_states_mem_needs(
            total, cpu_offload=layout.offload != "none", **shape
        )
    else:
        widest = params_on_rank(case.component, 1, 0, 1)
        _, gpu, *_ = estimate_zero3_model_states_mem_needs(
            total,
            widest,
            cpu_offload=layout.offload != "none",
            cpu_offload_params="params" in layout.offload,
            **shape,
        )
    return Estimate(memory_gib=gpu / 2**30)
