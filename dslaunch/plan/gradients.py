"""What adding gradients up costs where no product does it: HBM traffic a trained parameter and micro-batch.

    Megatron, unfused          gradient read, main gradient read and written   w + 2 a
                               (megatron/core/distributed/distributed_data_parallel.py, 0.16; Megatron-LM 2)
    autograd into .grad        the same in one type, from the second micro-batch of a step on   3 a
                               (torch/csrc/autograd/functions/accumulate_grad.h, 2.13)
    DeepSpeed's BF16_Optimizer 16-bit gradients set to zero, added to, copied to fp32 and added there
                               w + 3 w + (w + a) + 3 a = 26 bytes
                               (deepspeed/runtime/bf16_optimizer.py, 0.19.8: clear_lp_grads, _update_hp_grad)

w: bytes of a gradient as it is computed, a: as it is accumulated. Megatron's fused products add their output
to the main gradients themselves. ZeRO-3 and FSDP reduce what a micro-batch leaves, and add shards only: not
counted.
"""

from __future__ import annotations

from dslaunch.engines.base import WIDTH
from dslaunch.plan.case import Case


def bytes_per_param(case: Case) -> float:
    """On average over the micro-batches of a step."""
    layout, software = case.layout, case.software
    own, held = case.width, WIDTH[case.grad_accum_dtype]
    if layout.zero == 3:
        return 0.0
    if case.engine.deepspeed and held > own:
        return 4.0 * own + (own + held) + 3.0 * held
    if software.family == "megatron" and not case.engine.deepspeed:
        return 0.0 if software.fused_wgrad else own + 2.0 * (own if software.half_gradients else held)
    width = own if case.engine.deepspeed or software.half_states else WIDTH["fp32"]
    return 3.0 * width * (1 - 1 / layout.num_microbatches)


def seconds(case: Case, stage: int, memory: float) -> float:
    """Of one micro-batch on a rank of the stage.

    Args:
        memory: bytes a second that such kernels reach.
    """
    return case.counts(stage).trained * bytes_per_param(case) / memory
