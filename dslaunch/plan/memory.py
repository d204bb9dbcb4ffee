"""The memory ledger: bytes on one GPU, by component, stage and term. Sources stand at each term."""

from __future__ import annotations

from collections.abc import Mapping

from dslaunch.engines.deepspeed_buckets import gathered_elements, reduce_bucket_elements
from dslaunch.model.activations import layer_bytes, logits_bytes, working_set_bytes
from dslaunch.plan.case import Case
from dslaunch.planfile import MemoryGib

GIB = 2**30
COMMUNICATOR_GIB = 0.5
"""NCCL buffers of the groups that a rank belongs to, together: 16-channel defaults on 8-GPU nodes take
300-600 MiB as reported in NVIDIA/nccl#1112 and Megatron-LM logs; the benchmark is to replace it."""


def stage_memory(case: Case, stage: int) -> MemoryGib:
    """Bytes of one stage of one component on one of its ranks, in GiB."""
    params = case.params_on_rank(stage)
    states = case.states
    trained = 0 if case.frozen else params
    weights = params * (_frozen_weight_bytes(case) if case.frozen else states.weights)
    terms = {
        "weights": weights,
        "gradients": trained * states.gradients,
        "optimizer": trained * states.optimizer,
        "activations": 0.0 if case.frozen and not case.passes_gradient else _activations(case, stage),
        "boundary": _boundary(case, stage),
        "logits": _logits(case, stage),
        "buffers": _buffers(case, params, trained),
    }
    gib = {name: value / GIB for name, value in terms.items()}
    return MemoryGib(**gib, total=sum(gib.values()))


def overhead_gib(case: Case, world_size: int) -> float:
    """What a GPU holds beside the components: the device context and the communicators."""
    gpu = case.config.cluster.gpu
    return gpu.context_gib + (COMMUNICATOR_GIB if world_size > 1 and gpu.accelerator == "cuda" else 0.0)


def host_gib_per_rank(case: Case, stage: int) -> float:
    """Host memory of a rank: offloaded states."""
    return 0.0 if case.frozen else case.params_on_rank(stage) * case.states.host / GIB


def host_gib_per_node(rank_host_gib: Mapping[int, float], slots: int) -> float:
    """The fullest node, with 2 GiB for each process's interpreter, libraries and pinned staging buffers."""
    nodes: dict[int, float] = {}
    for rank, gib in rank_host_gib.items():
        nodes[rank // slots] = nodes.get(rank // slots, 0.0) + gib + 2.0
    return max(nodes.values())


def _frozen_weight_bytes(case: Case) -> float:
    """A frozen component has weights only; ZeRO-1 and -2 keep them whole on each rank."""
    return case.width / case.layout.shard if case.layout.zero == 3 else float(case.width)


def _activations(case: Case, stage: int) -> float:
    layout, component = case.layout, case.component
    per_sample = layer_bytes(
        component, case.tokens, layout.tp, case.sequence_parallel, layout.recompute, case.width
    )
    kept = case.in_flight(stage) * case.samples * layout.layers_per_stage[stage] * per_sample
    if layout.recompute != "full":
        return kept
    working = working_set_bytes(component, case.tokens, layout.tp, case.sequence_parallel, case.width)
    return kept + case.samples * working


def _boundary(case: Case, stage: int) -> float:
    """Tensors kept for other stages or components.

    In a pipeline: the output of the micro-batch under way and the gradient that comes back for it. With
    encode-all, a component's outputs and their gradients wait for all micro-batches, and the trunk's first
    stage holds the joined tokens of all its samples, and their gradients.
    """
    layout, config = case.layout, case.config
    hidden = case.component.dims[-1] if case.component.arch == "mlp" else case.component.hidden
    total = 0.0
    if layout.pp > 1:
        cut = layout.tp if case.sequence_parallel else 1
        total += 2 * case.samples * case.tokens * hidden * case.width / cut
    if case.encode_all:
        tokens = sum(edge.tokens for edge in config.model.edges if edge.source == case.name)
        total += 2 * layout.num_microbatches * layout.micro_batch * tokens * hidden * case.width
    if case.is_trunk and case.engine.per_component and stage == 0:
        tokens = sum(edge.tokens for edge in config.model.edges if edge.to == case.name)
        total += 2 * layout.num_microbatches * layout.micro_batch * tokens * hidden * case.width
    return total


def _logits(case: Case, stage: int) -> float:
    if stage != case.layout.pp - 1:
        return 0.0
    return case.samples * logits_bytes(
        case.component, case.tokens, case.layout.tp, case.sequence_parallel, case.width
    )


def _buffers(case: Case, params: int, trained: int) -> float:
    """Communication buckets, gathered parameters, and what the optimizer's step allocates."""
    layout = case.layout
    step = trained * case.states.step
    if case.engine.name in ("deepspeed", "megatron_deepspeed", "native") and layout.zero:
        overlapped = 2 if case.config.training.overlap_comm and layout.pp == 1 else 1
        bucket = overlapped * reduce_bucket_elements(trained) * case.width
        return bucket + step + (gathered_elements(params) * case.width if layout.zero == 3 else 0.0)
    if layout.zero == 3:
        layers = max(1, sum(layout.layers_per_stage))
        return step + 2 * params / layers * (case.width + 4)
    return step
