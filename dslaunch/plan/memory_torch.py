"""What PyTorch's and Hugging Face's training steps hold beside the states, moment by moment.

A step is fullest where the loss is made, where a layer's backward pass runs, or where the optimizer steps;
a term that is gone by then does not count. Gradients exist from the backward pass on, unless micro-batches
are accumulated.

FSDP2 (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, 2.13): a unit's 16-bit weights are
gathered into a buffer of the gathering stream and copied out; its 16-bit gradients are copied into an fp32
buffer and reduced into the shard, which is allocated on the reducing stream. The caching allocator never
gives a block to another stream, so that gradients and gathering buffers are reserved on top of what the
computing stream reserves at its own fullest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dslaunch.engines.deepspeed_buckets import ZERO3_SUB_GROUP
from dslaunch.hardware.reserved import left_by_lengths, reserved_ratio
from dslaunch.model.activations import logits_bytes
from dslaunch.model.blocks import blocks
from dslaunch.model.eager import backward_bytes, kept_loss_bytes
from dslaunch.model.params import Counts, padded_vocab
from dslaunch.plan import memory_native
from dslaunch.plan.case import Case
from dslaunch.plan.nvme import largest_parameter
from dslaunch.schema.model import Decoder

NF4_BYTES = (4 + 8 / 64 + 32 / (64 * 256)) / 8
"""Of a value in NF4 with double quantisation: 4 bits, 8 for each 64 of them, 32 for each 256 of those."""
_GIB = 2**30
_FP32 = 4
_QUANTISED_STEP = 12
"""Bytes an element that an 8-bit optimizer's step takes, one parameter at a time: moments and update in fp32."""


@dataclass(frozen=True)
class Moment:
    """Bytes at one moment of a step."""

    gradients: float
    activations: float
    logits: float
    buffers: float

    @property
    def total(self) -> float:
        return self.gradients + self.activations + self.logits + self.buffers


def fullest(case: Case, stage: int, held: Counts, kept: float, made: Mapping[str, float]) -> dict[str, float]:
    """Terms of the ledger at the fullest moment of a step.

    Args:
        kept: activations of all micro-batches in flight.
        made: bytes of gradients and of buffers that the engine has (DeepSpeed's buckets).
    """
    return vars(max(moments(case, stage, held, kept, made), key=lambda moment: moment.total)).copy()


def moments(
    case: Case, stage: int, held: Counts, kept: float, made: Mapping[str, float]
) -> tuple[Moment, ...]:
    """The loss, the first layer to run backward, the last one, and the optimizer's step; see `fullest`."""
    if case.engine.name == "native":
        return _of_native(case, stage, held, kept, made)
    gradients, buffers = made["gradients"], made["buffers"]
    if case.software.step_in_backward:
        gradients = float(case.width * _largest(case))
    before = gradients if _keeps_gradients(case) else 0.0
    ends, layer = _gathered(case, stage, held)
    working = case.samples * working_bytes(case, stage)
    kept = 0.0 if case.software.offloaded_activations else kept
    last = kept / max(1, case.layout.layers_per_stage[stage])
    loss = case.samples * loss_bytes(case, stage)
    backward = buffers + ends + layer + _dequantised(case)
    return (
        Moment(before, kept, loss, buffers + ends + _head_gradient(case, stage)),
        Moment(before, kept + working, 0.0, backward),
        Moment(gradients, last + working, 0.0, backward),
        Moment(gradients, 0.0, 0.0, buffers + _step_bytes(case, held)),
    )


def _of_native(
    case: Case, stage: int, held: Counts, kept: float, made: Mapping[str, float]
) -> tuple[Moment, ...]:
    """The same of dslaunch.runtime, and the reduction behind the last backward pass."""
    gradients, libraries = made["gradients"], made["buffers"]
    engine = memory_native.buffers(case, held)
    before = gradients if case.layout.num_microbatches > 1 else engine.first
    standing = libraries + engine.standing
    working = case.samples * working_bytes(case, stage)
    last = kept / max(1, case.layout.layers_per_stage[stage])
    judged = memory_native.judged_share(case)
    loss, others = judged * case.samples * loss_bytes(case, stage), judged * _other_losses(case, stage)
    return (
        Moment(before, kept, loss + others, libraries + engine.forward),
        Moment(before, kept + working, others, standing),
        Moment(gradients, last + working, 0.0, standing),
        Moment(gradients, 0.0, 0.0, libraries + engine.reducing),
        Moment(0.0 if engine.replaced else gradients, 0.0, 0.0, libraries + engine.stepping),
    )


def _other_losses(case: Case, stage: int) -> float:
    """Under GPipe the last stage has the losses of all its micro-batches before the first runs backward."""
    if stage != case.tail_stage or case.layout.pp == 1 or case.config.training.schedule != "gpipe":
        return 0.0
    return (case.in_flight(stage) - 1) * case.samples * kept_loss_bytes(case.component, case.run)


def reserved(case: Case, stage: int, held: Counts, kept: float, terms: Mapping[str, float]) -> float:
    """Bytes that the caching allocator holds, from the ledger's terms."""
    states = terms["weights"] + terms["optimizer"] + terms["boundary"]
    made = {"gradients": terms["gradients"], "buffers": terms["buffers"]}
    hole = _loss_hole(case, stage)
    if not _is_fsdp(case):
        at = moments(case, stage, held, kept, made)
        allocated = states + max(each.total for each in at)
        if case.software.varying_lengths:
            longest = at[0].logits + hole
            others = left_by_lengths(longest, case.tokens, case.software.usual_tokens)
            return max(allocated, min(allocated + hole + others, _capacity(case)))
        return reserved_ratio(case.software, case.layout.shard > 1) * allocated + hole
    at = moments(case, stage, held, kept, {**made, "gradients": 0.0})
    own = states + max(each.total for each in at) + hole
    return reserved_ratio(case.software, True) * own + made["gradients"] + _largest_unit(case, stage, held)


def _capacity(case: Case) -> float:
    """Bytes at which the allocator gives freed blocks back, to try again."""
    gpu = case.config.cluster.gpu
    return (gpu.memory_gib - gpu.context_gib) * _GIB


def working_bytes(case: Case, stage: int) -> float:
    """What one layer's backward pass adds to what is kept, for one sample: what is made again, and gradients."""
    if case.frozen and not case.passes_gradient:
        return 0.0
    layers = case.layout.layers_per_stage[stage]
    mlp, attention = backward_bytes(case.component, case.run, case.first_layer(stage), layers)
    return max(mlp, attention + _exchanged(case))


def _exchanged(case: Case) -> float:
    """Ulysses' all-to-alls for one sample: q, k, v, the output and their gradients on both sides at once.

    Key and value heads fewer than the ranks are copied for each
    (deepspeed/runtime/sequence_parallel/ulysses_sp.py, 0.19.8). The ring of PyTorch's context parallelism
    has one more pair of keys and values in flight: left out.
    """
    layout, component = case.layout, case.component
    if layout.cp == 1 or not case.engine.deepspeed or not isinstance(component, Decoder):
        return 0.0
    each = next(attention for block in blocks(component) for attention in block.attentions)
    query, kv = each.query_width(layout.tp), each.kv_width(layout.tp)
    copied = kv * max(1, layout.cp * layout.tp // each.kv_heads)
    return case.tokens * case.width * (2 * (2 * query + copied) + copied - kv + 2 * query)


def loss_bytes(case: Case, stage: int) -> float:
    """Head and loss of one sample on the last stage.

    A pipeline's last stage keeps the outputs of all micro-batches, and joins them
    (torch/distributed/pipelining/stage.py, output_chunks, 2.13); DualPipeV keeps the losses alone
    (deepseek-ai/DualPipe: dualpipe/dualpipev.py, return_outputs).
    """
    component = case.component
    if stage != case.tail_stage or not isinstance(component, Decoder):
        return 0.0
    pipelined = case.layout.pp > 1 and case.engine.name == "torch" and not case.software.naive_split
    pipelined = pipelined and case.config.training.schedule != "dualpipe-v"
    outputs = 2 * case.layout.num_microbatches if pipelined else 0
    return logits_bytes(component, case.run) + outputs * _logits(component, case) * case.width


def _logits(component: Decoder, case: Case) -> int:
    """Logits of one sample on a rank."""
    cut = 1 if case.software.gathered_logits else case.layout.tp
    return case.tokens * padded_vocab(component, cut) * (1 + component.mtp_layers)


def _loss_hole(case: Case, stage: int) -> float:
    """Reserved by the plain loss beyond what it allocates.

    The 16-bit logits are freed before their space is large enough for an fp32 tensor of theirs, so that the third
    of those is put behind the others. Where lengths vary, blocks for all tokens but the last, which the loss has,
    fit none for all of them: fp32 logits and their gradient (transformers' modeling_llama.py before 4.45).
    """
    component, software = case.component, case.software
    if stage != case.tail_stage or not isinstance(component, Decoder):
        return 0.0
    if software.loss != "plain" or software.logits_held:
        return 0.0
    if not (software.expandable_segments or software.varying_lengths or software.half_loss or _is_fsdp(case)):
        return 0.0
    apart = 2 * _FP32 if software.logits_upcast and software.varying_lengths else 0
    return float(case.samples * _logits(component, case) * (case.width * (case.width < _FP32) + apart))


def _head_gradient(case: Case, stage: int) -> float:
    """A chunked loss adds each chunk's gradient of the head to the sum so far: two of them, in 16 bits."""
    component = case.component
    if stage != case.tail_stage or case.software.loss != "chunked" or not isinstance(component, Decoder):
        return 0.0
    return float(2 * case.width * _head(component, case) * (component.train == "all"))


def _head(component: Decoder, case: Case) -> int:
    return padded_vocab(component, case.layout.tp) * component.hidden


def _is_fsdp(case: Case) -> bool:
    return case.engine.name == "torch" and case.layout.zero == 3


def _keeps_gradients(case: Case) -> bool:
    """Whether gradients are there before the backward pass: of earlier micro-batches, or an engine's own."""
    return case.layout.num_microbatches > 1 or case.layout.pp > 1 or case.engine.name != "torch"


def _gathered(case: Case, stage: int, held: Counts) -> tuple[float, float]:
    """Bytes that FSDP has gathered of the model's ends, and what a layer's backward pass adds.

    The head's weights stay gathered from the loss on, and those of embedding and last layer with them where
    embedding and head are one unit. A layer adds its own weights and the next one's, its 16-bit gradients
    and their fp32 copy. In a pipeline nothing is given back between micro-batches, and gradients are added
    up whole (torch/distributed/pipelining/stage.py). So they are where a program has them reduced behind the
    last micro-batch alone, in the type that they are reduced in
    (torch/distributed/fsdp/_fully_shard/_fsdp_param.py, to_accumulated_grad_if_needed, 2.13).
    """
    if not _is_fsdp(case):
        return 0.0, 0.0
    w = _gathered_width(case, held)
    if case.layout.pp > 1:
        return w * held.total + _FP32 * held.trained, 0.0
    layer = _layer_params(case, stage, held)
    ends = case.width * _end_unit(case) + (w * layer if case.software.joined_ends else 0.0)
    ends += _whole_gradients(case, held)
    return ends, 2 * w * layer + (case.width + _FP32) * layer * held.trained / held.total


def _whole_gradients(case: Case, held: Counts) -> float:
    """Bytes of the gradients that wait for a step's last micro-batch, of all parameters of the rank."""
    if not case.software.whole_gradients or case.layout.num_microbatches == 1:
        return 0.0
    return float((case.width if case.software.half_gradients else _FP32) * held.trained)


def _largest_unit(case: Case, stage: int, held: Counts) -> float:
    """Bytes of FSDP's largest gathering buffer."""
    return max(case.width * _end_unit(case), _gathered_width(case, held) * _layer_params(case, stage, held))


def _end_unit(case: Case) -> int:
    """Parameters of the unit with the head."""
    component = case.component
    if not isinstance(component, Decoder):
        return 0
    return _head(component, case) * (2 if case.software.joined_ends and not component.tied_embeddings else 1)


def _layer_params(case: Case, stage: int, held: Counts) -> float:
    """Parameters of one layer on a rank, on average."""
    component, layout = case.component, case.layout
    tables = 0
    if isinstance(component, Decoder):
        apart = not component.tied_embeddings or case.tail_stage > 0
        tables = _head(component, case) * ((stage == 0) + (stage == case.tail_stage and apart))
    return (held.total - tables) / layout.layers_per_stage[stage]


def _gathered_width(case: Case, held: Counts) -> float:
    """Bytes of a gathered parameter on average: 4-bit matrices travel as they are."""
    packed = held.packed / held.total
    return case.width * (1 - packed) + packed * NF4_BYTES


def _dequantised(case: Case) -> float:
    """QLoRA makes one matrix at a time whole, in 16 bits."""
    return float(case.width * _largest(case)) if case.component.train == "qlora" else 0.0


def _step_bytes(case: Case, held: Counts) -> float:
    if case.software.optimizer == "adamw8bit":
        return float(_QUANTISED_STEP * _largest(case))
    return copied_bytes(case, held)


def copied_bytes(case: Case, held: Counts) -> float:
    """Copies that an engine's step makes; ZeRO-3's of one sub-group at a time."""
    at_once = held.trained
    if case.engine.deepspeed and case.layout.zero == 3:
        at_once = min(held.trained, ZERO3_SUB_GROUP * case.layout.shard)
    return at_once * case.states.step


def _largest(case: Case) -> int:
    return largest_parameter(case.component)
