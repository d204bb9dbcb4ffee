"""DeepSpeed with a script of the user's: ZeRO 0-3, AutoTP or Ulysses; one strategy for the whole model."""

from __future__ import annotations

from dslaunch.engines.base import WIDTH, Engine, StateBytes, StateCase
from dslaunch.engines.deepspeed_keys import table
from dslaunch.engines.deepspeed_modes import limits


def grad_accum(precision: str, accumulates: bool) -> str:
    """fp32 where half-precision gradients of several micro-batches are added up."""
    return "fp32" if accumulates and precision == "bf16" else precision


def grad_accum_choices(precision: str, zero: int) -> frozenset[str]:
    """At ZeRO-0 only the model's own type (deepspeed/runtime/engine.py:_do_optimizer_sanity_check, 0.19.8)."""
    return frozenset({precision}) if zero == 0 else frozenset({precision, "fp32"})


def states(case: StateCase) -> StateBytes:
    """Weights, gradients, master weights and Adam's two moments, as DeepSpeed 0.19.8 lays them out.

    Half precision: 2 + 2 + 12; stage 1 shards the 12, stage 2 the gradients too, stage 3 all. Where bf16
    gradients are accumulated in fp32, stage 1 takes BF16_Optimizer, which keeps a whole fp32 buffer beside
    the bf16 gradients (8 + 12/N); stages 2 and 3 keep the reduced shard in fp32. In fp32 there is no other
    master than the weights, but ZeRO still keeps its own flat copy. With offload, master weights, moments
    and the fp32 gradients of the shard (16/N) are in host memory, or in files on NVMe. Beside them, in host
    memory either way, are at stages 1 and 2 the shard's new weights on their way to the GPU
    (param_buffer_of_bit16_for_cpu_offload_groups), and at stage 3 its gradients in the type that they are added
    up in (grad_partitions_flat_buffer). Sources: arXiv:1910.02054 section 3; arXiv:2104.07857 section 3;
    deepspeed/runtime/{engine,bf16_optimizer}.py and runtime/zero/{stage_1_and_2,stage3}.py, 0.19.8.
    """
    n, width = case.shard, WIDTH[case.precision]
    accum = WIDTH[case.grad_accum_dtype]
    master = 12.0 if width == 2 or case.zero > 0 else 8.0
    weights = width / n if case.zero == 3 else float(width)
    if case.zero >= 2:
        gradients = accum / n
    elif accum > width:
        gradients = float(width + accum)
    else:
        gradients = float(width)
    if case.offload == "none":
        optimizer = master / n if case.zero else master
        return StateBytes(weights, gradients, optimizer, step=_step(case.zero, n, width, accum))
    gpu_gradients = 0.0 if case.zero >= 2 else gradients
    away = 16.0 / n + (weights if case.offload.endswith("_params") else 0.0)
    on_gpu = 0.0 if case.offload.endswith("_params") else weights
    beside = (accum if case.zero == 3 else width) / n
    if case.offload.startswith("nvme"):
        return StateBytes(on_gpu, gpu_gradients, 0.0, host=beside, nvme=away)
    return StateBytes(on_gpu, gpu_gradients, 0.0, host=away + beside)


def _step(zero: int, shards: int, width: int, accum: int) -> float:
    """Copies of gradients while they are reduced and the optimizer steps, beside the gradients themselves.

    BF16_Optimizer's flat fp32 gradients are reduced whole, as a copy in communication_data_type, which is bf16
    with the model (runtime/engine.py: buffered_allreduce_fallback, allreduce_bucket). ZeRO joins a shard's
    gradients into one tensor, and copies that to fp32; stage 1 has dropped those of the other shards by then, and
    stage 2 adds up micro-batches in one tensor (runtime/zero/stage_1_and_2.py: step; stage3.py:
    _prepare_fp32_grad_for_sub_group; all of 0.19.8).
    """
    if zero == 0:
        return 0.0
    if zero == 1 and accum > width:
        return float(width)
    copies = (accum + (4.0 if accum < 4 else 0.0)) / shards
    if zero == 1:
        return max(0.0, copies + accum / shards - accum)
    return copies if zero == 3 or accum < 4 else 0.0


ENGINE = Engine(
    name="deepspeed",
    versions=tuple(reversed(table().versions)),
    program="the user's script under deepspeed or torchrun",
    shardings=frozenset({"zero"}),
    deepspeed=True,
    per_component=False,
    single_decoder=False,
    degrees=frozenset({"tp", "cp"}),
    zero=frozenset({0, 1, 2, 3}),
    zero_with_pipeline=frozenset({0, 1}),
    offload=frozenset({"none", "cpu", "cpu_params", "nvme", "nvme_params"}),
    precisions=frozenset({"bf16", "fp16", "fp32"}),
    schedules=frozenset({"1f1b"}),
    sequence_parallel=False,
    even_stages=False,
    grad_accum=grad_accum,
    grad_accum_choices=grad_accum_choices,
    states=states,
    reduces_every_microbatch=frozenset({2, 3}),
    overlaps_reduction=True,
    source="deepspeed/runtime/pipe/engine.py, 0.19.8: ZeRO-2 and ZeRO-3 are incompatible with pipelines",
    limits=limits,
)
