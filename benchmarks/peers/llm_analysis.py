"""llm-analysis (cli99/llm-analysis): memory and latency formulas with one assumed efficiency."""

from __future__ import annotations

from benchmarks.peers.base import Estimate, checkout, importable, no_checkout
from benchmarks.settings import Setting
from dslaunch.schema.model import Decoder

NAME = "llm-analysis"


def missing() -> str:
    """How to get it."""
    return no_checkout("llm-analysis", "https://github.com/cli99/llm-analysis", "llm_analysis.analysis")


def estimate(run: Setting) -> Estimate | None:
    """A decoder whose parameters all train, without context parallelism, on the GPU's own figures."""
    with importable(checkout("llm-analysis")):
        from llm_analysis.analysis import ActivationRecomputation, DSZeRO, LLMAnalysis
        from llm_analysis.config import DtypeConfig, GPUConfig, ModelConfig, ParallelismConfig

    case = next(iter(run.cases.values()))
    layout, decoder, training, cluster = case.layout, case.component, run.config.training, run.config.cluster
    if not isinstance(decoder, Decoder) or decoder.train != "all" or layout.cp > 1 or decoder.mla:
        return None
    gpu, away = cluster.gpu, cluster.network or cluster.intra
    experts = decoder.experts
    analysis = LLMAnalysis(
        ModelConfig(
            name="model", num_layers=decoder.layers, n_head=decoder.heads, hidden_dim=decoder.hidden,
            vocab_size=decoder.vocab, max_seq_len=training.seq_len, num_key_value_heads=decoder.kv_heads,
            ffn_embed_dim=experts.ffn if experts else decoder.ffn, mlp_gated_linear_units=decoder.gated_mlp,
            moe_num_experts=experts.count if experts else 1, moe_top_k=experts.top_k if experts else 1,
        ),
        GPUConfig(
            name="gpu", mem_per_GPU_in_GB=gpu.memory_gib, hbm_bandwidth_in_GB_per_sec=gpu.hbm_gb_per_s,
            intra_node_bandwidth_in_GB_per_sec=cluster.intra.gb_per_s,
            intra_node_min_message_latency=cluster.intra.latency_us * 1e-6,
            peak_fp16_TFLOPS=gpu.peak_tflops["bf16"],
            inter_node_bandwidth_in_GB_per_sec=away.gb_per_s,
        ),
        DtypeConfig(),
        ParallelismConfig(
            tp_size=layout.tp, pp_size=layout.pp, dp_size=layout.dp, ep_size=layout.ep,
            sp_size=layout.tp if case.sequence_parallel else 1,
        ),
    )  # fmt: skip
    recompute = {"none": ActivationRecomputation.NONE, "full": ActivationRecomputation.FULL}
    found = analysis.training(
        batch_size_per_gpu=layout.micro_batch, gradient_accumulation_steps=layout.num_microbatches,
        global_batch_size=training.global_batch, seq_len=training.seq_len,
        activation_recomputation=recompute.get(layout.recompute, ActivationRecomputation.ATTN_COMPUTE),
        ds_zero=DSZeRO(layout.zero), flash_attn=case.software.flash_attention,
    )  # fmt: skip
    return Estimate(found["estimated_peak_memory_per_gpu"] / 2**30, found["latency_per_iter"])
