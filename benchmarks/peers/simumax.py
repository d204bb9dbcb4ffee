"""SimuMax (MooreThreads/SimuMax, 1.2): memory and time under Megatron, on machines that it ships tables for."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.base import Estimate, checkout, importable, no_checkout
from benchmarks.settings import Setting
from dslaunch.schema.model import Decoder

NAME = "SimuMax"
_SYSTEMS = {"B200": "b200_bf16_ceperm", "A100": "a100_pcie", "A100-80GB": "a100_pcie"}
_TIMED = ("B200",)
"""GPUs whose table holds for the published runs; the A100 table is of a PCIe machine."""


def missing() -> str:
    """How to get it."""
    return no_checkout("SimuMax", "https://github.com/MooreThreads/SimuMax", "simumax.core.perf_llm")


def estimate(run: Setting) -> Estimate | None:
    """A decoder that trains whole under Megatron in bf16."""
    case = next(iter(run.cases.values()))
    gpu, decoder = run.record.gpu.type or "", case.component
    if case.engine.name != "megatron" or gpu not in _SYSTEMS or not isinstance(decoder, Decoder):
        return None
    if decoder.train != "all" or case.software.fp8 != "none":
        return None
    folder = checkout("SimuMax")
    with importable(folder):
        from simumax.core.config import ModelConfig, StrategyConfig, SystemConfig
        from simumax.core.perf_llm import PerfLLM

        model = PerfLLM()
        model.configure(
            strategy_config=StrategyConfig(**_strategy(run)),
            model_config=ModelConfig(**_model(decoder)),
            system_config=SystemConfig.init_from_config_file(
                str(folder / "configs" / "system" / f"{_SYSTEMS[gpu]}.json")
            ),
        )
        model.model_config.padded_vocab_size = True
        model.model_config.make_vocab_size_divisible_by = 128
        model.run_estimate()
        memory = model.get_pp_stage_peak_mem(model.analysis_mem(), "peak_mem")
        seconds = model.analysis_cost().data["duration_time_per_iter"] if gpu in _TIMED else None
    return Estimate(max(_gib(value) for value in memory.values()), seconds and _seconds(seconds))


def _gib(value: Any) -> float:
    return float(str(value).split()[0]) if isinstance(value, str) else float(value) / 2**30


def _seconds(value: Any) -> float:
    words = str(value).split()
    return float(words[0]) * {"ms": 1e-3, "s": 1.0}.get(words[-1], 1e-3)


def _model(decoder: Decoder) -> dict[str, Any]:
    experts, mla = decoder.experts, decoder.mla
    result: dict[str, Any] = {
        "model_type": "moe" if experts else "dense", "model_name": "model", "hidden_size": decoder.hidden,
        "head_num": decoder.heads, "kv_head_num": decoder.kv_heads,
        "head_size": decoder.head_dim or decoder.hidden // decoder.heads, "intermediate_size": decoder.ffn,
        "layer_num": decoder.layers, "vocab_size": decoder.vocab, "use_swiglu": decoder.gated_mlp,
    }  # fmt: skip
    if experts:
        result |= {
            "expert_num": experts.count, "topk": experts.top_k, "moe_ffn_hidden_size": experts.ffn,
            "moe_shared_expert_intermediate_size": experts.shared_ffn or None,
            "dense_layers": experts.dense_layers,
        }  # fmt: skip
    if mla:
        result |= {
            "attention_type": "mla", "q_lora_rank": mla.q_lora_rank, "kv_lora_rank": mla.kv_lora_rank,
            "qk_head_dim": mla.qk_nope_head_dim, "qk_pos_emb_head_dim": mla.qk_rope_head_dim,
            "v_head_dim": mla.v_head_dim,
        }  # fmt: skip
    return result


def _strategy(run: Setting) -> dict[str, Any]:
    case = next(iter(run.cases.values()))
    layout = case.layout
    return {
        "seq_len": run.config.training.seq_len, "micro_batch_size": layout.micro_batch,
        "micro_batch_num": layout.num_microbatches, "dtype": "bf16", "world_size": run.config.cluster.world_size,
        "tp_size": layout.tp, "pp_size": layout.pp, "cp_size": layout.cp, "ep_size": layout.ep, "etp_size": 1,
        "moe_dispatcher_policy": "all2all", "enable_sequence_parallel": case.sequence_parallel,
        "interleaving_size": layout.vpp, "zero_state": layout.zero, "enable_dropout": False,
        "use_fused_norm": True,
        "use_math_sdp": not case.software.flash_attention, "use_flash_sdp": case.software.flash_attention,
        "use_fp32_accum_grad": True, "enable_recompute": layout.recompute == "full",
        "recompute_granularity": "full_block" if layout.recompute == "full" else None,
        "recompute_layer_num": max(layout.layers_per_stage) if layout.recompute == "full" else 0,
    }  # fmt: skip
