"""The memory ledger: bytes on one GPU, by component, stage and term. Sources stand at each term."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dslaunch.engines.deepspeed_buckets import bucket_elements, gathered_elements
from dslaunch.engines.deepspeed_modes import hpz
from dslaunch.hardware.workspaces import library_bytes, weight_bytes
from dslaunch.model import params as counts
from dslaunch.model.activations import gradient_bytes, logits_bytes, stage_bytes, stage_working_bytes
from dslaunch.model.params import Counts
from dslaunch.model.shapes import width_out
from dslaunch.plan import host_memory, memory_torch, nvme
from dslaunch.plan.case import Case
from dslaunch.plan.schedules import put_off
from dslaunch.plan.wide import in_own_type, spans
from dslaunch.planfile import MemoryGib
from dslaunch.schema.components import Decoder

GIB = 2**30
COMMUNICATOR_GIB = 0.5
"""NCCL buffers of the groups that a rank belongs to, together: 16-channel defaults on 8-GPU nodes take
300-600 MiB as reported in NVIDIA/nccl#1112 and Megatron-LM logs; the benchmark is to replace it."""
_SAVED_BYTES = 12
"""Of a trained parameter in a checkpoint of dslaunch.runtime."""
MEGATRON_ALLOCATED = 0.96
"""Share of reserved memory that is allocated, under Megatron's layers."""


def stage_memory(case: Case, stage: int, factor: float = 1.0) -> MemoryGib:
    """Bytes of one stage of one component on one of its ranks, in GiB, at the fullest moment of a step.

    Args:
        factor: by which the site's own runs correct the ledger.
    """
    held = case.counts(stage)
    terms = _states(case, stage, held)
    if case.software.family == "megatron":
        terms |= _fullest(case, stage, held)
    else:
        made = {"gradients": terms["gradients"], "buffers": _made(case, held)}
        terms |= memory_torch.fullest(case, stage, held, _activations(case, stage)[0], made)
    gib = {name: value * factor / GIB for name, value in terms.items()}
    return MemoryGib(**gib, total=sum(gib.values()))


def reserved_gib(case: Case, stage: int) -> float:
    """What PyTorch's caching allocator holds of a stage's memory and beyond it, in GiB."""
    held = case.counts(stage)
    if case.software.family == "megatron":
        return (stage_memory(case, stage).total + _unjoined(case, stage, held) / GIB) / MEGATRON_ALLOCATED
    terms = _states(case, stage, held) | {"buffers": _made(case, held)}
    return memory_torch.reserved(case, stage, held, _activations(case, stage)[0], terms) / GIB


def _states(case: Case, stage: int, held: Counts) -> dict[str, float]:
    """Bytes of what stays all the time."""
    states, expert_states = case.states, case.expert_states
    dense, experts = held.trained - held.trained_experts, held.trained_experts
    return {
        "weights": dense * states.weights
        + experts * expert_states.weights
        + (0.0 if case.layout.offload.endswith("_params") else _frozen_bytes(case, held))
        + (0.0 if case.layout.offload == "cpu_params" else _second_partition(case, held))
        + _in_products_type(case, stage, held),
        "gradients": dense * states.gradients + experts * expert_states.gradients,
        "optimizer": dense * states.optimizer + experts * expert_states.optimizer + _zenflow(case, held),
        "boundary": _boundary(case, stage),
    }


def _in_products_type(case: Case, stage: int, held: Counts) -> float:
    """Bytes of matrices in the type of their products, less those that do not stand in the run's own type beside.

    Where weights are sharded (Megatron's FSDP) they are made in that type when they are gathered, and go again.
    """
    software, layout = case.software, case.layout
    if software.family != "megatron" or software.fp8 == "none":
        return 0.0
    narrow = held.products - _wide_products(case, stage)
    if layout.zero == 3:
        return -narrow * (case.width - 1) / layout.shard if software.narrow_weights else 0.0
    instead = case.width if software.narrow_weights else 0
    return narrow * (weight_bytes(case.config.cluster.gpu, software.fp8) - instead)


def _wide_products(case: Case, stage: int) -> int:
    """Parameters of the stage's matrices whose products are in the run's own type all the same."""
    layout, number = case.layout, case.layout.layers_per_stage[stage]
    return sum(
        counts.counts(case.component, layout.tp, first, size, layout.ep, layout.etp, tail=False).products
        for wide, first, size in spans(case, case.first_layer(stage), number)
        if wide
    )


def _made(case: Case, held: Counts) -> float:
    """DeepSpeed's buckets (native's come and go: memory_native), and the workspaces of libraries."""
    has_buckets = case.engine.deepspeed and case.engine.name != "native"
    buckets = _buffers(case, held.total, held.trained) if has_buckets else 0.0
    return buckets + _workspaces(case)


def _workspaces(case: Case) -> int:
    """Of the libraries of matrix products, counted with the trunk."""
    if not case.is_trunk:
        return 0
    routed = isinstance(case.component, Decoder) and case.component.experts is not None
    return library_bytes(case.config.cluster.gpu, case.software, routed)


def overhead_gib(case: Case, world_size: int) -> float:
    """What a GPU holds beside the components: the device context and the communicators."""
    gpu = case.config.cluster.gpu
    return gpu.context_gib + (COMMUNICATOR_GIB if world_size > 1 and gpu.accelerator != "cpu" else 0.0)


def host_gib_per_rank(case: Case, stage: int) -> float:
    """Host memory of a rank: offloaded states, DeepSpeed's buffers for them and on the way to NVMe, and its share
    of a checkpoint that is written in the background."""
    held = case.counts(stage)
    dense = held.trained - held.trained_experts
    states = dense * case.states.host + held.trained_experts * case.expert_states.host
    if case.layout.offload == "cpu_params":
        states += _frozen_bytes(case, held)
    second = _second_partition(case, held) if case.layout.offload == "cpu_params" else 0.0
    buffers = host_memory.beside_states(case, stage) + nvme.host_bytes(case, stage)
    return (states + second + buffers + _saved_copy(case, held)) / GIB


def loading_gib_per_node(cases: Mapping[str, Case], slots: int) -> float:
    """Host memory of a node whose processes have the whole model each, in the run's type, before they cut it."""
    whole = sum(counts.params(case.component) * case.width for case in cases.values())
    return slots * (whole / GIB + 2.0)


def uses_host(case: Case) -> bool:
    """Whether something of the component is in host memory, beside what each process takes."""
    away = case.layout.offload != "none" or case.software.offloaded_states > 0
    return away or case.config.checkpoint.in_background


def _saved_copy(case: Case, held: Counts) -> float:
    """Replicas share the copy of what trains: its weights and two moments, in fp32 (dslaunch.runtime.saving)."""
    return _SAVED_BYTES * held.trained / case.layout.dp if case.config.checkpoint.in_background else 0.0


def host_gib_per_node(rank_host_gib: Mapping[int, float], slots: int) -> float:
    """The fullest node, with 2 GiB for each process's interpreter, libraries and pinned staging buffers."""
    nodes: dict[int, float] = {}
    for rank, gib in rank_host_gib.items():
        nodes[rank // slots] = nodes.get(rank // slots, 0.0) + gib + 2.0
    return max(nodes.values())


def _second_partition(case: Case, held: Counts) -> float:
    """hpZ keeps the weights a second time, cut over a node: 2/hpz bytes a parameter (arXiv:2306.10209 section
    3.3; deepspeed/runtime/zero/partition_parameters.py _partition_param_sec, 0.19.8)."""
    size = hpz(case.config)
    return held.total * case.width / size if size > 1 and case.layout.zero == 3 else 0.0


def _zenflow(case: Case, held: Counts) -> float:
    """ZenFlow's chosen columns have a gradient and two moments on the GPU, in the weights' own type
    (deepspeed/ops/adam/zenflow_torch_adam.py, 0.19.8)."""
    zenflow = case.config.strategy.zenflow
    if not zenflow.enabled:
        return 0.0
    cut = case.layout.shard if case.layout.zero == 3 else 1
    return 3 * case.width * zenflow.topk_ratio * held.trained / cut


def _frozen_bytes(case: Case, held: Counts) -> float:
    """What is frozen has weights only; ZeRO-1 and -2 keep them whole on each rank, ZeRO-3 shards them.

    NF4 with double quantisation takes 4 bits, 8 for each 64 values and 32 for each 256 of those: 4.127 bits a
    value (arXiv:2305.14314 section 3).
    """
    plain = held.total - held.trained - held.packed
    sharded = case.layout.shard if case.layout.zero == 3 else 1
    return (plain * case.width + held.packed * memory_torch.NF4_BYTES) / sharded


def _fullest(case: Case, stage: int, held: Counts) -> dict[str, float]:
    """Activations, logits and buffers at the fullest moment of a step.

    With all micro-batches in flight either the loss is computed or a layer runs backward; with one less the
    embedding's gradient is made; with none the optimizer steps.
    """
    fullest = max(_moments(case, stage, held), key=sum)
    return dict(zip(("activations", "logits", "buffers"), fullest, strict=True))


def _moments(case: Case, stage: int, held: Counts) -> tuple[tuple[float, float, float], ...]:
    kept, working = _activations(case, stage)
    earlier = kept * (1 - 1 / case.in_flight(stage))
    layers = case.layout.layers_per_stage[stage]
    standing, table = 0.0, 0.0
    if not case.frozen:
        standing, table = gradient_bytes(case.component, case.run, case.first_layer(stage), layers)
    buffers = _buffers(case, held.total, held.trained) + standing + _workspaces(case)
    return (
        (kept, _logits(case, stage), buffers),
        (kept + working, 0.0, buffers),
        (earlier, 0.0, buffers + table),
        (0.0, 0.0, buffers + memory_torch.copied_bytes(case, held)),
    )


def _unjoined(case: Case, stage: int, held: Counts) -> float:
    """Reserved for DeepSpeed's copies of gradients beyond the fullest moment.

    They are single tensors of gigabytes, and blocks that activations left are not joined to hold them.
    """
    if not case.engine.deepspeed:
        return 0.0
    *before, stepping = map(sum, _moments(case, stage, held))
    return max(before) + memory_torch.copied_bytes(case, held) - max(*before, stepping)


def _activations(case: Case, stage: int) -> tuple[float, float]:
    """Bytes (kept for the backward passes of all micro-batches in flight, taken by one layer's backward
    pass)."""
    layout, component = case.layout, case.component
    first, end = case.first_layer(stage), case.first_layer(stage) + layout.layers_per_stage[stage]
    first = max(first, case.lowest_layer)
    if first >= end or (case.frozen and not case.passes_gradient):
        return 0.0, 0.0
    kept = case.in_flight(stage) * case.samples * _kept_bytes(case, first, end - first)
    late = put_off(case.config.training.order(layout.vpp), stage, layout.num_microbatches)
    if late and layout.recompute == "full":
        whole = stage_bytes(component, replace(case.run, recompute="none"), first, end - first)
        kept += late * case.samples * (whole - stage_bytes(component, case.run, first, end - first))
    kept *= max(0.0, 1 - case.software.offloaded_layers / sum(layout.layers_per_stage))
    working = stage_working_bytes(component, case.run, first, end - first)
    return kept, case.samples * working


def _kept_bytes(case: Case, first: int, number: int) -> float:
    """What layers keep for one sample's backward pass, those in the run's own type among them."""
    if not any(case.software.wide_layers):
        return stage_bytes(case.component, case.run, first, number)
    return sum(
        stage_bytes(case.component, in_own_type(case.run) if wide else case.run, start, size)
        for wide, start, size in spans(case, first, number)
    )


def _boundary(case: Case, stage: int) -> float:
    """Tensors kept for other stages or components.

    In a pipeline: the output of the micro-batch under way and the gradient that comes back for it; DeepSpeed's
    keeps the outputs of all in flight until their backward (deepspeed/runtime/pipe/engine.py, pipe_buffers,
    0.19.8). With encode-all, a component's outputs and their gradients wait as long as its
    micro-batches, and the trunk's first stage holds the joined tokens of all a macro-batch's samples, and their
    gradients.
    """
    layout, config = case.layout, case.config
    hidden = width_out(case.component)
    total = 0.0
    if layout.pp > 1:
        cut = layout.tp if case.sequence_parallel else 1
        kept = case.in_flight(stage) if case.engine.deepspeed and stage < layout.pp - 1 else 1
        total += (kept + 1) * case.samples * case.tokens * hidden * case.width / cut
    if case.encode_all:
        tokens = sum(edge.tokens for edge in config.model.edges if edge.source == case.name)
        total += 2 * case.in_flight(stage) * layout.micro_batch * tokens * hidden * case.width
    if case.is_trunk and case.engine.per_component and stage == 0:
        tokens = sum(edge.tokens for edge in config.model.edges if edge.to == case.name)
        held = layout.num_microbatches // config.training.macro_batches
        total += 2 * held * layout.micro_batch * tokens * hidden * case.width
    return total


def _logits(case: Case, stage: int) -> float:
    if stage != case.tail_stage:
        return 0.0
    return case.samples * logits_bytes(case.component, case.run)


def _buffers(case: Case, params: int, trained: int) -> float:
    """Communication buckets and gathered parameters."""
    layout = case.layout
    if case.engine.deepspeed and layout.zero:
        return _deepspeed_buffers(case, params, trained)
    if layout.zero == 3:
        layers = sum(layout.layers_per_stage)
        return 2 * params / layers * (case.width + 4)
    return 0.0


def _deepspeed_buffers(case: Case, params: int, trained: int) -> float:
    """One engine has one set of buckets: where it holds the whole model, they are counted with the trunk."""
    if not case.engine.per_component:
        if not case.is_trunk:
            return 0.0
        every = case.config.model.components.values()
        params, trained = sum(map(counts.params, every)), sum(map(counts.trainable, every))
    overlapped = 2 if case.config.training.overlap_comm and case.layout.pp == 1 else 1
    bucket = overlapped * bucket_elements(trained) if trained else 0
    gathered = gathered_elements(params) if case.layout.zero == 3 else 0
    away = case.layout.offload != "none" and case.layout.zero < 3 and trained
    return float((bucket + gathered) * case.width) + (host_memory.one_gradient(case) if away else 0.0)
