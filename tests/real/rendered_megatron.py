"""Builds megatron-core's own configuration and ranks from rendered flags, with the core that is on the path.

python -m tests.real.rendered_megatron < JOBS: a JSON list of jobs, each {"flags", "dp"}: flag -> value as the
script's parser gives it. Prints a JSON list: what megatron-core made of each, or its error.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import sys
from typing import Any

# megatron-core's name of a field, where the flag's is another (megatron/training/arguments.py,
# core_transformer_config_from_args).
RENAMED = {
    "--norm-epsilon": "layernorm_epsilon",
    "--swiglu": "gated_linear_unit",
    "--num-experts": "num_moe_experts",
    "--decoder-first-pipeline-num-layers": "num_layers_in_first_pipeline_stage",
    "--decoder-last-pipeline-num-layers": "num_layers_in_last_pipeline_stage",
    "--num-virtual-stages-per-pipeline-rank": "virtual_pipeline_model_parallel_size",
}


def core_config(flags: dict[str, Any]) -> Any:
    """TransformerConfig, or its relative for latent attention."""
    import torch
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    kind = MLATransformerConfig if "--multi-latent-attention" in flags else TransformerConfig
    names = {field.name for field in dataclasses.fields(kind)}
    fields = {RENAMED.get(flag, flag.removeprefix("--").replace("-", "_")): v for flag, v in flags.items()}
    known = {name: _converted(name, value) for name, value in fields.items() if name in names}
    del known["attention_backend"]  # an enum, which the script's parser converts
    missing = set(RENAMED.values()) & fields.keys() - known.keys()
    assert not missing, missing
    # The script's default, which plain attention has a kernel for in Transformer Engine only, and so on no CPU.
    fused = kind is MLATransformerConfig and "--no-rope-fusion" not in flags
    return kind(
        **known,
        add_bias_linear="--disable-bias-linear" not in flags,
        apply_rope_fusion=fused,
        pipeline_dtype=torch.bfloat16,
    )


def _converted(name: str, value: Any) -> Any:
    """As the script's own types and validation turn a value into the field's."""
    if name == "moe_layer_freq":
        return eval(value, {"__builtins__": {}}) if isinstance(value, str) else value
    if name == "window_size":
        return tuple(int(part) for part in value.split(","))
    if name in ("moe_router_load_balancing_type", "moe_aux_loss_coeff") and isinstance(value, list):
        return value[0]
    return value


def layers_built(config: Any, vpp: int) -> list[int]:
    """Layers that megatron-core would build on each pipeline stage, its virtual stages added up."""
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    pp = config.pipeline_model_parallel_size
    parallel_state.set_pipeline_model_parallel_world_size(pp)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(vpp if vpp > 1 else None)
    takes = inspect.signature(get_num_layers_to_build).parameters
    built = []
    for stage in range(pp):
        parallel_state.set_pipeline_model_parallel_rank(stage)
        given = {"pp_rank": stage} if "pp_rank" in takes else {}
        layers = 0
        for virtual in range(vpp) if vpp > 1 else (None,):
            parallel_state.set_virtual_pipeline_model_parallel_rank(virtual)  # core 0.12 reads it
            chunk = {**given, **({"vp_stage": virtual} if "vp_stage" in takes else {})}
            layers += get_num_layers_to_build(config, **chunk)
        built.append(layers)
    return built


def judge(job: dict[str, Any]) -> dict[str, Any]:
    """What megatron-core makes of one job."""
    from megatron.core.parallel_state import RankGenerator

    flags = job["flags"]
    config = core_config(flags)
    size = {n: flags[f"--{n}-model-parallel-size"] for n in ("tensor", "pipeline")}
    cp, ep = flags["--context-parallel-size"], flags.get("--expert-model-parallel-size", 1)
    etp = flags.get("--expert-tensor-parallel-size", size["tensor"])
    dense = RankGenerator(
        tp=size["tensor"], ep=1, dp=job["dp"], pp=size["pipeline"], cp=cp, order="tp-cp-ep-dp-pp"
    )
    experts = RankGenerator(
        tp=etp, ep=ep, dp=job["dp"] * cp * size["tensor"] // (ep * etp), pp=size["pipeline"], cp=1,
        order="tp-cp-ep-dp-pp",
    )  # fmt: skip
    return {
        "layers": layers_built(config, job["vpp"]),
        "stages": [sorted(stage) for stage in zip(*dense.get_ranks("pp"), strict=True)],
        "tp": dense.get_ranks("tp")[0],
        "expert_groups": len(experts.get_ranks("ep")),
        "experts": experts.get_ranks("ep")[0],
        "config": {name: getattr(config, name, None) for name in job["fields"]},
    }


def main() -> None:
    jobs = json.load(sys.stdin)
    output = os.dup(1)
    os.dup2(2, 1)
    results = []
    for job in jobs:
        try:
            results.append(judge(job))
        except Exception as error:
            results.append({"error": f"{type(error).__name__}: {error}"})
    os.write(output, json.dumps(results).encode())


if __name__ == "__main__":
    main()
