"""Megatron-LM's own report of its first stage's memory (megatron/training/theoretical_memory_usage.py)."""

from __future__ import annotations

import sys
import types
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

from benchmarks.peers.base import Estimate, checkout, no_checkout
from benchmarks.settings import Setting
from dslaunch.schema.model import Decoder

NAME = "Megatron-LM's theoretical memory"
_FILE = "megatron/training/theoretical_memory_usage.py"


def missing() -> str:
    """How to get it."""
    return no_checkout("Megatron-LM", "https://github.com/NVIDIA/Megatron-LM")


def estimate(run: Setting) -> Estimate | None:
    """Weights, optimizer and activations of a Megatron run with sequence parallelism and selective recompute.

    For other runs the script counts weights and optimizer alone, and says so: they are left out here.
    """
    case = next(iter(run.cases.values()))
    layout, component = case.layout, case.component
    if case.engine.name != "megatron" or not isinstance(component, Decoder) or layout.cp > 1:
        return None
    if (
        not (case.sequence_parallel or layout.tp == 1)
        or layout.recompute == "full"
        or component.train != "all"
    ):
        return None
    script, args = _script(), _arguments(run)
    states = script.compute_weight_and_optimizer_memory(args)
    kept = script.compute_activation_memory(args, num_microbatches=layout.num_microbatches)
    return Estimate(memory_gib=(states + kept) / 2**30)


def _script() -> Any:
    """The one file, without the package around it, which imports Transformer Engine."""
    package = types.ModuleType("megatron_report")
    package.__path__ = []
    utils = types.ModuleType("megatron_report.utils")
    utils.print_rank_0 = lambda text: None  # type: ignore[attr-defined]
    utils.is_hybrid_model = lambda args: False  # type: ignore[attr-defined]
    sys.modules |= {"megatron_report": package, "megatron_report.utils": utils}
    spec = spec_from_file_location("megatron_report.memory", checkout("Megatron-LM") / _FILE)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _arguments(run: Setting) -> types.SimpleNamespace:
    """Megatron's arguments of that run, as far as the script reads them."""
    case = next(iter(run.cases.values()))
    layout, decoder, training = case.layout, case.component, run.config.training
    assert isinstance(decoder, Decoder)
    experts, mla = decoder.experts, decoder.mla
    rows = 128 * layout.tp
    return types.SimpleNamespace(
        hidden_size=decoder.hidden, num_layers=decoder.layers, num_attention_heads=decoder.heads,
        kv_channels=decoder.head_dim or decoder.hidden // decoder.heads, ffn_hidden_size=decoder.ffn,
        group_query_attention=decoder.kv_heads != decoder.heads and mla is None, num_query_groups=decoder.kv_heads,
        padded_vocab_size=-(-decoder.vocab // rows) * rows, swiglu=decoder.gated_mlp,
        normalization="RMSNorm" if decoder.norm == "rmsnorm" else "LayerNorm", add_bias_linear=decoder.mlp_bias,
        untie_embeddings_and_output_weights=not decoder.tied_embeddings, seq_length=training.seq_len,
        num_experts=experts.count if experts else None, moe_router_topk=experts.top_k if experts else 1,
        moe_ffn_hidden_size=experts.ffn if experts else None,
        moe_shared_expert_intermediate_size=experts.shared_ffn or None if experts else None,
        moe_layer_freq=[int(layer >= experts.dense_layers) for layer in range(decoder.layers)] if experts else 1,
        moe_latent_size=None, mtp_num_layers=decoder.mtp_layers or None, multi_latent_attention=mla is not None,
        q_lora_rank=(mla.q_lora_rank or None) if mla else None, kv_lora_rank=mla.kv_lora_rank if mla else None,
        qk_head_dim=mla.qk_nope_head_dim if mla else None, v_head_dim=mla.v_head_dim if mla else None,
        qk_pos_emb_head_dim=mla.qk_rope_head_dim if mla else None,
        tensor_model_parallel_size=layout.tp, pipeline_model_parallel_size=layout.pp, context_parallel_size=1,
        expert_model_parallel_size=layout.ep, expert_tensor_parallel_size=layout.tp if layout.ep == 1 else 1,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        data_parallel_size=max(1, layout.dp), world_size=run.config.cluster.world_size,
        micro_batch_size=layout.micro_batch,
        use_distributed_optimizer=layout.zero == 1, recompute_granularity="selective", sequence_parallel=True,
    )  # fmt: skip
