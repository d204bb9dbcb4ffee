"""Seconds of communication of a stage, by kind of parallelism: what is moved, before anything hides it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dslaunch.engines.base import WIDTH
from dslaunch.engines.deepspeed_modes import hpz
from dslaunch.hardware.collectives import exchange, ring, scatter, send
from dslaunch.hardware.efficiency import GpuRates
from dslaunch.hardware.topology import Group, group_link, inside
from dslaunch.model.blocks import Block, blocks, further_blocks
from dslaunch.plan.case import Case
from dslaunch.plan.compute import kinds
from dslaunch.schema.model import Decoder, Mlp, Other

_BUCKET = 160e6
"""Bytes of a bucket of gradients: 40e6 elements and up (megatron/core/distributed/ddp_config, 0.16)."""

_RING_KERNELS = 8
"""Of one attention and step."""
_ZERO3_NETWORK = 0.1
"""Speed of DeepSpeed's ZeRO-3 between nodes by that of a ring over all ports: 2,240 GPUs took 184 s for 530B
parameters and 640 took 256 s (arXiv:2104.04473, table 2), 1,024 took 402 s for 1T (deepspeedai/DeepSpeed:
docs/_posts/2022-07-26-deepspeed-azure.md), all of which leave some 20 to 30 of 200 GB/s."""


def layer_range(case: Case, stage: int) -> range:
    """Layers of a stage."""
    first = case.first_layer(stage)
    return range(first, first + case.layout.layers_per_stage[stage])


def hidden_bytes(case: Case) -> float:
    """Bytes of a micro-batch's activations of hidden width, before tp cuts them; 0 where nothing is cut."""
    component = case.component
    if isinstance(component, Mlp | Other):
        return 0.0
    return float(case.samples * case.tokens * component.hidden * case.width)


def _layered(case: Case) -> bool:
    return not isinstance(case.component, Mlp | Other)


def _kinds(case: Case, stage: int) -> list[tuple[Block, int]]:
    """(a layer, how many of the stage are like it), of a component that has layers."""
    assert not isinstance(case.component, Mlp | Other)
    every = blocks(case.component)
    number = case.layout.layers_per_stage[stage]
    return [(every[at], count) for at, count in kinds(case.component, case.first_layer(stage), number)]


def tensor(case: Case, stage: int, rates: GpuRates) -> tuple[float, float]:
    """(forward, backward) of one micro-batch, tensor parallelism.

    A branch takes an all-reduce of s*b*h each way, or an all-gather and a reduce-scatter of the same volume
    under sequence parallelism: 2 (t-1)/t of the bytes. Vocabulary: one more of them at each end. Experts
    exchange tokens instead (`experts`).
    """
    layout = case.layout
    if layout.tp == 1 or not _layered(case):
        return 0.0, 0.0
    once = 2 * scatter(case.config.cluster, Group(layout.tp), hidden_bytes(case), rates)
    branches = sum(_branches(block) * number for block, number in _kinds(case, stage))
    ends = (stage == 0) + (stage == case.tail_stage) if isinstance(case.component, Decoder) else 0
    return (branches + ends / 2) * once, (branches + ends / 2) * once


def _branches(block: Block) -> int:
    return len(block.attentions) + (block.mamba is not None) + (block.ffn > 0)


def context(case: Case, stage: int, rates: GpuRates) -> tuple[float, float]:
    """(forward, backward) of one micro-batch, context parallelism.

    A ring sends keys and values c-1 times forward, and with their gradients backward; Ulysses exchanges
    queries, keys, values and the output, both ways (arXiv:2309.14509); so does a state space with what goes into
    its scan and comes out (megatron/core/ssm/mamba_context_parallel.py, 0.16).
    """
    layout = case.layout
    if layout.cp == 1 or not case.is_trunk or not _layered(case):
        return 0.0, 0.0
    forward = backward = 0.0
    group, cluster = Group(layout.cp, layout.tp), case.config.cluster
    tokens = case.samples * case.tokens * case.width
    for block, number in _kinds(case, stage):
        if block.mamba:
            wide = tokens * (block.mamba.projected + block.mamba.inner) / layout.tp
            once = number * exchange(cluster, group, wide, rates)
            forward, backward = forward + once, backward + once
        for attention in block.attentions:
            kv, q = attention.kv_width(layout.tp), attention.query_width(layout.tp)
            if case.engine.deepspeed:
                width = q + attention.value_width(layout.tp) + kv
                once = number * exchange(cluster, group, tokens * width, rates)
                forward, backward = forward + once, backward + once
            else:
                once = number * ring(cluster, group, tokens * kv * (layout.cp - 1), rates)
                forward, backward = forward + once, backward + 2 * once
    return forward, backward


def ring_kernels(case: Case, stage: int) -> int:
    """Kernels that context parallelism adds to a stage's forward.

    In each step of a ring keys and values are sent and received, attention starts, and its output and statistics
    join those so far
    (transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py, 2.11).
    """
    layout = case.layout
    if layout.cp == 1 or case.engine.deepspeed or not case.is_trunk or not _layered(case):
        return 0
    rings = sum(len(block.attentions) * number for block, number in _kinds(case, stage))
    return _RING_KERNELS * layout.cp * rings


def experts(case: Case, stage: int, rates: GpuRates) -> tuple[float, float]:
    """(forward, backward) of one micro-batch: tokens to their experts and back, both ways.

    Ranks that share an expert gather the tokens that reached each of them, and add up what comes out
    (megatron/core/transformer/moe/token_dispatcher.py, core 0.16); where all have the same tokens, they only add.
    """
    layout, component = case.layout, case.component
    if layout.ep * layout.etp == 1 or not isinstance(component, Decoder) or component.experts is None:
        return 0.0, 0.0
    cluster, chosen = case.config.cluster, component.experts.top_k
    mixed = sum(number for block, number in _kinds(case, stage) if block.experts is not None)
    if stage == case.tail_stage:
        mixed += component.mtp_layers * sum(block.experts is not None for block in further_blocks(component))
    group = Group(layout.ep, layout.etp)
    rows = case.samples * case.tokens / (layout.tp if case.sequence_parallel else 1)
    nodes = -(-layout.ep // inside(cluster, group))
    sent = 1.0
    if case.software.dispatcher == "deepep":
        others = nodes - 1
        sent = others * (1 - (1 - 1 / nodes) ** chosen) / (chosen * others / nodes) if others else 1.0
    size = rows * chosen * (component.experts.latent or component.hidden) * case.width
    once = 2 * exchange(cluster, group, size, rates, sent)
    shared = layout.etp * size if case.sequence_parallel else hidden_bytes(case)
    once += 2 * scatter(cluster, Group(layout.etp), shared, rates)
    return mixed * once, mixed * once


def pipeline(case: Case, rates: GpuRates) -> float:
    """A micro-batch's activations to the next stage and gradients back, each virtual stage once.

    A stage of DeepSpeed's PipelineModule sends, then receives: four transfers a micro-batch that nothing runs
    beside, where others send one way while they receive the other. It gathers over tp what came in parts
    (deepspeed/runtime/pipe/schedule.py, TrainSchedule, and engine.py, pipe_partitioned; 0.19.8).
    """
    layout = case.layout
    if layout.pp == 1 or not _layered(case):
        return 0.0
    cut = layout.tp if case.sequence_parallel or case.software.family == "megatron" else 1
    stride = layout.tp * layout.cp * layout.dp
    once = send(case.config.cluster, stride, hidden_bytes(case) / cut, rates)
    if case.engine.deepspeed and not case.engine.per_component:
        gathered = scatter(case.config.cluster, Group(layout.tp), hidden_bytes(case), rates)
        return 4 * once + 2 * gathered
    return 2 * layout.vpp * once


@dataclass(frozen=True)
class Replicas:
    """Seconds that replicas of a stage take to agree."""

    reduce: float = 0.0
    """One reduction of all gradients."""
    gather: float = 0.0
    """One gathering of all weights."""


def replicas(case: Case, stage: int, rates: GpuRates) -> Replicas:
    """Of one stage: dense parameters over all replicas, routed experts over those that hold the same ones."""
    layout, held = case.layout, case.counts(stage)
    if case.frozen and layout.zero != 3:
        return Replicas()
    every = layout.num_microbatches == 1 or layout.zero not in case.engine.reduces_every_microbatch
    width = WIDTH[case.grad_accum_dtype] if every else case.width
    width = 2 if case.software.half_gradients else width
    everyone, own = Group(layout.shard, layout.tp), Group(layout.expert_shard, layout.ep * layout.etp)
    narrow = (held.products - held.experts, held.experts) if _gathers_narrow(case) else (0, 0)
    dense = _agree(
        case, held.trained - held.trained_experts, held.total - held.experts, width, everyone, rates, narrow[0]
    )
    routed = _agree(case, held.trained_experts, held.experts, width, own, rates, narrow[1])
    found = Replicas(dense.reduce + routed.reduce, dense.gather + routed.gather)
    return _zero_plus_plus(case, found) if layout.zero == 3 else found


def _gathers_narrow(case: Case) -> bool:
    """Whether weights are gathered in 8 bits: in 16 where each 32 have a scale, and are quantised afterwards
    (megatron/core/distributed/param_and_grad_buffer.py, shared_buffer, 0.16)."""
    software = case.software
    return software.narrow_weights and software.fp8 in ("tensorwise", "blockwise")


def _agree(
    case: Case, trained: int, total: int, width: int, group: Group, rates: GpuRates, narrow: int
) -> Replicas:
    """Seconds for the ranks of `group`, which shard these parameters among them.

    Args:
        narrow: parameters that are gathered in 8 bits.
    """
    layout, cluster = case.layout, case.config.cluster
    if layout.zero == 3 and case.engine.deepspeed:
        rates = replace(rates, network=rates.network * _ZERO3_NETWORK)
    gathered = total if layout.zero == 3 else trained
    gathered_bytes = gathered * case.width - narrow * (case.width - 1)
    number = _messages(case, gathered * case.width)
    reduce = scatter(cluster, group, trained * width / number, rates) * (1 if layout.zero else 2) * number
    gather = scatter(cluster, group, gathered_bytes / number, rates) * number if layout.zero else 0.0
    copies = layout.dp * layout.cp // layout.shard
    if copies > 1:
        far = Group(copies, layout.tp * layout.shard)
        reduce += 2 * scatter(cluster, far, trained * width / group.size, rates)
    return Replicas(reduce, gather)


def _messages(case: Case, size: float) -> float:
    """Collectives that all weights of a stage take: one a layer at ZeRO-3, buckets otherwise."""
    if case.layout.zero == 3:
        return float(max(case.layout.layers_per_stage))
    return max(1.0, size / _BUCKET)


def _zero_plus_plus(case: Case, found: Replicas) -> Replicas:
    """int8 weights, int4 gradients, the backward's gather within a node.

    qwZ moves half of bf16's bytes, qgZ a quarter, with scales of 1/64 of them (arXiv:2306.10209 section 3).
    """
    plus, size = case.config.strategy.zero_plus_plus, hpz(case.config)
    scales, reduce, gather = 1 + 1 / 64, found.reduce, found.gather
    if plus.quantized_gradients:
        reduce *= scales / (2 * case.width)
    if size > 1:
        near = group_link(case.config.cluster, size)
        far = group_link(case.config.cluster, case.layout.tp * case.layout.shard)
        gather = gather / 2 * (1 + far.gb_per_s / near.gb_per_s)
    if plus.quantized_weights:
        gather *= scales / case.width
    return Replicas(reduce, gather)
