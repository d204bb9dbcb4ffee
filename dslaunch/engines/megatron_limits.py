"""What Megatron's own validation stops at: model, layout and precision together, by version.

Source: megatron/training/arguments.py (validate_args) and megatron/core/transformer/transformer_config.py of
NVIDIA/Megatron-LM, core_v0.12.0 to core_v0.19.0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dslaunch.engines.layout import Layout
from dslaunch.engines.megatron_catalogue import megatron_versions
from dslaunch.engines.versions import named
from dslaunch.schema.config import RunConfig
from dslaunch.schema.model import Decoder

DEFAULT = "0.16.0"
"""The newest version whose core is checked by running it, not by its catalogue of arguments alone."""
KV_REPLICAS_SINCE = "0.16.0"
"""Key/value heads may be fewer than tp from here on."""
WHOLE_BIASED_SINCE = "0.15.0"
"""From here on experts that are cut have no biases."""
MTP_WITH_CP_SINCE = "0.14.0"
"""Layers that predict further tokens go with context parallelism from here on."""


_STATE_TYPES = ("main-grads-dtype", "main-params-dtype", "exp-avg-dtype", "exp-avg-sq-dtype")
"""Flags that give parts of the optimizer's states a type (megatron/core/optimizer/optimizer_config.py)."""


def combinations(config: RunConfig, layouts: Mapping[str, Layout]) -> list[str]:
    """A sentence for each combination that the version does not take."""
    version = named(config.engine.version, megatron_versions()) or DEFAULT
    return [
        fault
        for name, layout in layouts.items()
        if isinstance(decoder := config.model.components[name], Decoder)
        for fault in (
            *unflagged(name, decoder),
            *_biases(name, decoder),
            *_by_version(name, decoder, layout, version),
            *_experts(config, name, decoder, layout),
            *_expert_biases(name, decoder, layout, version),
            *_dispatched(config, name, decoder, layout),
            *_optimizer_flags(config, name, layout),
        )
    ]


def unflagged(name: str, decoder: Decoder) -> Iterator[str]:
    """What neither Megatron-LM nor Megatron-DeepSpeed has a flag for."""
    key = f"model.components.{name}"
    if decoder.pattern:
        yield (
            f"{key}.pattern is given: hybrids of Mamba are trained by a script of their own (Megatron-LM "
            "pretrain_mamba.py), which dslaunch does not render. Take engine=deepspeed or engine=torch with your "
            "own script"
        )
    if decoder.post_norms:
        yield f"{key}.post_norms is true: Megatron's layers have no norm on a branch's output, and no flag for it"
    if decoder.sinks or (decoder.experts and decoder.experts.biased_router):
        yield (
            f"{key}.sinks is {str(decoder.sinks).lower()}: Megatron's flags for attention sinks and a router's "
            "bias belong to gpt-oss, whose activation is none that dslaunch describes"
        )


def _biases(name: str, decoder: Decoder) -> Iterator[str]:
    if (decoder.out_bias, decoder.mlp_bias) not in ((False, False), (decoder.qkv_bias, decoder.qkv_bias)):
        yield (
            f"model.components.{name}: qkv_bias {decoder.qkv_bias}, out_bias {decoder.out_bias}, mlp_bias "
            f"{decoder.mlp_bias}: Megatron has a bias on all linear layers, on none, or on qkv alone"
        )


def _by_version(name: str, decoder: Decoder, layout: Layout, version: str) -> Iterator[str]:
    if decoder.mla is None and decoder.kv_heads % layout.tp and _before(version, KV_REPLICAS_SINCE):
        yield (
            f"strategy.{name}.tp is {layout.tp}, model.components.{name}.kv_heads {decoder.kv_heads}: Megatron-LM "
            f"core {version} cannot keep key/value heads twice; core {KV_REPLICAS_SINCE} and newer can. Set "
            f"engine.version={KV_REPLICAS_SINCE}, or a tp that divides {decoder.kv_heads}"
        )
    if decoder.mtp_layers and layout.cp > 1 and _before(version, MTP_WITH_CP_SINCE):
        yield (
            f"model.components.{name}.mtp_layers is {decoder.mtp_layers}, cp {layout.cp}: Megatron-LM core "
            f"{version} does not take both; core {MTP_WITH_CP_SINCE} and newer do. Set "
            f"engine.version={MTP_WITH_CP_SINCE}, or strategy.{name}.cp=1"
        )


def _before(version: str, since: str) -> bool:
    """Whether `version` is one of the known that are older than `since`."""
    order = megatron_versions()
    return version in order and order.index(version) < order.index(since)


def _experts(config: RunConfig, name: str, decoder: Decoder, layout: Layout) -> Iterator[str]:
    if decoder.experts is None:
        return
    if layout.ep > 1 and config.training.precision == "fp16":
        yield (
            f"strategy.{name}.ep is {layout.ep}, training.precision fp16: Megatron shares experts out in bf16 and "
            "fp32 only. Set training.precision=bf16, or ep 1"
        )
    if layout.tp > 1 and not config.training.sequence_parallel:
        yield (
            f"training.sequence_parallel is false, and strategy.{name}.tp {layout.tp}: with experts Megatron "
            "takes tensor parallelism only beside sequence parallelism. Set training.sequence_parallel=true, or "
            "tp 1"
        )


def _expert_biases(name: str, decoder: Decoder, layout: Layout, version: str) -> Iterator[str]:
    if decoder.experts and decoder.mlp_bias and layout.etp > 1 and not _before(version, WHOLE_BIASED_SINCE):
        yield (
            f"model.components.{name}.mlp_bias is true, and {layout.etp} ranks share an expert: Megatron-LM core "
            f"{version} takes biases of whole experts only. Set strategy.{name}.etp=1"
        )


def _optimizer_flags(config: RunConfig, name: str, layout: Layout) -> Iterator[str]:
    """Flags of engine.extra that Megatron takes in company only, or whose value is none of its own."""
    extra, key = config.engine.extra, "engine.extra"
    sharded = f"strategy.{name}.zero=1"
    beside = f"Megatron takes it beside {key}.use-precision-aware-optimizer=true only"
    if extra.get("optimizer-cpu-offload"):
        if not extra.get("use-precision-aware-optimizer"):
            yield f"{key}.optimizer-cpu-offload: {beside}"
        if extra.get("fp8-param-gather") and extra.get("fp8-recipe", "delayed") != "delayed":
            yield (
                f"{key}.optimizer-cpu-offload and fp8-param-gather: Megatron takes both with fp8-recipe=delayed "
                f"only, found {extra['fp8-recipe']}"
            )
    for flag in _STATE_TYPES:
        if extra.get(flag, "fp32") != "fp32" and not extra.get("use-precision-aware-optimizer"):
            yield f"{key}.{flag} is {extra[flag]}: {beside}"
    share = extra.get("optimizer-offload-fraction", 1.0)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        yield f"{key}.optimizer-offload-fraction is {share!r}: a share of the optimizer's states, from 0 to 1"
    for flag in ("use-precision-aware-optimizer", "fp8-param-gather"):
        if extra.get(flag) and layout.zero == 0:
            yield f"{key}.{flag}: Megatron takes it with the distributed optimizer only. Set {sharded}"
    if extra.get("fp8-param-gather") and not extra.get("fp8-format"):
        fix = f"Set {key}.fp8-format, such as hybrid"
        yield f"{key}.fp8-param-gather: weights can be in fp8 where products are. {fix}"


def _dispatched(config: RunConfig, name: str, decoder: Decoder, layout: Layout) -> Iterator[str]:
    """Source: megatron/core/transformer/moe/token_dispatcher.py and transformer_config.py, core 0.16."""
    if config.strategy.dispatcher == "alltoall":
        return
    key, gpu = f"strategy.dispatcher is {config.strategy.dispatcher}", config.cluster.gpu
    if decoder.experts is None or layout.ep * layout.etp == 1:
        yield f"{key}, but every rank has all experts of {name} whole: nothing travels. Leave it out, or raise ep"
    if gpu.accelerator != "cuda" or gpu.name.startswith("V100"):
        yield f"{key}: DeepEP runs on GPUs of NVIDIA from Ampere on, and the cluster has {gpu.name}. Leave it out"
