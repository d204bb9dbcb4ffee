"""calculon (calculon-ai/calculon): memory and time of GPT in Megatron's layout, on its own A100 and H100 files."""

from __future__ import annotations

import json
import logging
from typing import Any

from benchmarks.peers.base import Estimate, checkout, importable, no_checkout
from benchmarks.settings import Setting
from dslaunch.schema.model import Decoder

NAME = "calculon"
_SYSTEMS = {"A100-80GB": "a100_80e", "A100": "a100_80e", "H100-80GB": "h100_80g_nvl8"}
"""a100_80e is the file of its own validation (calculon/llm/validation.py)."""


def missing() -> str:
    """How to get it."""
    return no_checkout("calculon", "https://github.com/calculon-ai/calculon", "calculon.llm")


def estimate(run: Setting) -> Estimate | None:
    """A GPT without GQA or SwiGLU, bf16 or fp16, under Megatron."""
    case = next(iter(run.cases.values()))
    decoder, system = case.component, _SYSTEMS.get(run.record.gpu.type or "")
    if (
        not isinstance(decoder, Decoder)
        or system is None
        or case.engine.name not in ("megatron", "megatron_deepspeed")
    ):
        return None
    if decoder.gated_mlp or decoder.kv_heads != decoder.heads or decoder.experts or case.layout.cp > 1:
        return None
    folder = checkout("calculon")
    with importable(folder):
        from calculon.llm import Llm
        from calculon.system import System

        machine = System(json.loads((folder / "systems" / f"{system}.json").read_text()))
        model = Llm(Llm.Application(_application(decoder, run)), logging.getLogger("calculon"))
        model.compile(machine, Llm.Execution.from_json(_execution(run)))
        model.run(machine)
    return Estimate(memory_gib=model.get_mem_tier1_cap_req() / 2**30, step_s=model.get_total_time())


def _application(decoder: Decoder, run: Setting) -> dict[str, Any]:
    return {
        "hidden": decoder.hidden, "feedforward": decoder.ffn, "seq_size": run.config.training.seq_len,
        "attn_heads": decoder.heads, "attn_size": decoder.head_dim or decoder.hidden // decoder.heads,
        "num_blocks": decoder.layers,
    }  # fmt: skip


def _execution(run: Setting) -> dict[str, Any]:
    case = next(iter(run.cases.values()))
    layout = case.layout
    recompute = {"selective": "attn_only"}.get(layout.recompute, layout.recompute)
    slots = run.config.cluster.slots
    return {
        "num_procs": run.config.cluster.world_size, "tensor_par": layout.tp, "pipeline_par": layout.pp,
        "data_par": layout.dp, "tensor_par_net": 0,
        "pipeline_par_net": int(layout.ranks > slots), "data_par_net": int(layout.tp * layout.dp > slots),
        "batch_size": run.config.training.global_batch, "microbatch_size": layout.micro_batch,
        "datatype": "float16",
        "fused_activation": True, "attention_type": "multihead", "activation_recompute": recompute,
        "pipeline_interleaving": layout.vpp, "optimizer_sharding": layout.zero == 1 and layout.dp > 1,
        "tensor_par_comm_type": "rs_ag" if case.sequence_parallel else "ar", "tensor_par_overlap": "none",
        "seq_par_ag_redo": case.sequence_parallel and layout.recompute != "full", "data_par_overlap": False,
        "weight_offload": False, "activations_offload": False, "optimizer_offload": False, "training": True,
    }  # fmt: skip
