"""What an engine of dslaunch.runtime holds beside the states, moment by moment: DeepSpeed's buffers by ZeRO stage.

Gradients are reduced when the last micro-batch has run backward, and the optimizer steps behind that, without what
was there for reducing. Elements are those of one stage of one component on a rank. Sources: runtime/engine.py,
bf16_optimizer.py, zero/stage_1_and_2.py and zero/stage3.py of DeepSpeed 0.19.8; `python -m benchmarks.tracked`
holds their sum against what CPU ranks allocate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dslaunch.engines.base import WIDTH
from dslaunch.engines.deepspeed_buckets import PREFETCH, ZERO3_SUB_GROUP, bucket_elements, gathered_elements
from dslaunch.model.params import Counts
from dslaunch.plan.case import Case
from dslaunch.plan.host_memory import one_gradient
from dslaunch.plan.nvme import largest_parameter

_FP32 = 4
_REDUCED_AT_ONCE = 500_000_000
"""Elements that an engine without ZeRO joins for one reduction (runtime/engine.py, MEMORY_OPT_ALLREDUCE_SIZE)."""


@dataclass(frozen=True)
class Buffers:
    """Bytes of one engine beside weights and optimizer states."""

    first: float = 0.0
    """Gradients that are there before the first backward pass of a step."""
    forward: float = 0.0
    """Buffers while the loss is made."""
    standing: float = 0.0
    """Buffers while a backward pass runs."""
    reducing: float = 0.0
    """Buffers while the last gradients are reduced."""
    stepping: float = 0.0
    """Buffers while the optimizer steps."""
    replaced: bool = False
    """Whether `stepping` has the gradients too, and those of the backward passes are gone."""


def buffers(case: Case, held: Counts) -> Buffers:
    """Of the engine of one stage; none where nothing of it trains."""
    if not held.trained:
        return Buffers()
    width, trained = case.width, held.trained
    shard = trained / case.layout.shard
    match case.layout.zero:
        case 0:
            # All gradients are joined, reduced, and copied back.
            joined = float(width * min(trained, _REDUCED_AT_ONCE))
            step = _temporaries(case, largest_parameter(case.component))
            return Buffers(reducing=joined, stepping=step)
        case 1 if _accumulated(case) > width:
            # BF16_Optimizer has no buckets: its flat fp32 gradients are reduced as a copy in bf16.
            first, copied = float(_accumulated(case) * trained), float(width * trained)
            return Buffers(first=first, reducing=copied, stepping=_temporaries(case, shard))
        case 3:
            return _stage3(case, held, shard)
        case _:
            return _with(_away(case), _stages_1_and_2(case, trained, shard))


def judged_share(case: Case) -> float:
    """Share of the decoder's tokens that have logits: no label stands on tokens of other components, and where a
    head reads the decoder its own vocabulary is never asked."""
    edges = [edge for edge in case.config.model.edges if edge.join != "shared_attention"]
    if any(edge.source == case.name for edge in edges):
        return 0.0
    return max(0.0, 1 - sum(edge.tokens for edge in edges if edge.to == case.name) / case.tokens)


def _stages_1_and_2(case: Case, trained: int, shard: float) -> Buffers:
    """Buckets are made by the first gradient; stage 2 gives them back behind each micro-batch, stage 1 behind the
    last. What one holds is joined once more to be reduced; the gradients of stage 1 are in it by then."""
    layout, width = case.layout, case.width
    bucket = float(width * bucket_elements(trained))
    standing = bucket * (2 if _overlaps(case) else 1)
    forward = standing if layout.zero == 1 and layout.num_microbatches > 1 else 0.0
    temporaries = _temporaries(case, shard)
    if _accumulated(case) > width:
        return Buffers(forward=forward, standing=standing, reducing=standing + bucket, stepping=temporaries)
    # The shard's gradients are put beside those of the backward passes, and joined into one tensor for the step.
    apart = shard * width
    stepping = max(apart + shard * _joined_width(case), shard * _FP32 + temporaries)
    reducing = standing + (bucket if layout.zero == 2 else 0.0)
    return Buffers(0.0, forward, standing, reducing, stepping, replaced=True)


def _away(case: Case) -> float:
    """Bytes that offload takes on the GPU."""
    return one_gradient(case) if case.layout.offload != "none" and not _on_cpu(case) else 0.0


def _with(more: float, found: Buffers) -> Buffers:
    """The buffers with bytes that stand all the time."""
    return replace(
        found,
        forward=found.forward + more,
        standing=found.standing + more,
        reducing=found.reducing + more,
        stepping=found.stepping + more,
    )


def _stage3(case: Case, held: Counts, shard: float) -> Buffers:
    """One bucket that stays, the gathered weights until their backward pass, and in the forward pass the tensor in
    which those of one fetch arrive together."""
    bucket = float(case.width * bucket_elements(held.trained))
    gathered, arriving = case.width * gathered_elements(held.total), case.width * min(held.total, PREFETCH)
    at_once = min(shard, ZERO3_SUB_GROUP)
    return Buffers(
        first=shard * _accumulated(case),
        forward=bucket + gathered + arriving,
        standing=bucket + gathered,
        reducing=2 * bucket,
        stepping=bucket + max(at_once * _joined_width(case), at_once * _FP32 + _temporaries(case, at_once)),
    )


def _accumulated(case: Case) -> int:
    """Bytes of an element that gradients are added up in."""
    return WIDTH[case.grad_accum_dtype]


def _joined_width(case: Case) -> int:
    """Of a gradient joined for the step, and copied to fp32 where it is not."""
    accumulated = _accumulated(case)
    return accumulated + (_FP32 if accumulated < _FP32 else 0)


def _overlaps(case: Case) -> bool:
    """Whether there are two buckets, of which one fills while the other is reduced."""
    return case.config.training.overlap_comm and case.layout.pp == 1 and not _on_cpu(case)


def _temporaries(case: Case, elements: float) -> float:
    """Of the optimizer: torch's on CPUs takes the root of the second moment and a quotient, both in fp32, of one
    tensor at a time (torch/optim/adam.py, _single_tensor_adam, 2.13). GPUs have one kernel for it, and offloaded
    states are not on the device."""
    return 2 * _FP32 * elements if _on_cpu(case) and case.layout.offload == "none" else 0.0


def _on_cpu(case: Case) -> bool:
    return case.config.cluster.gpu.accelerator == "cpu"
