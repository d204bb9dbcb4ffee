"""FLOPs of a step as a record's source counts them, so that printed TFLOPS are compared with their like.

Megatron's counter takes all of attention's scores, masked ones too: 72 B s L h^2 (1 + s/(6h) + V/(12hL)),
and with recompute 96 B s L h^2 (1 + s/(6h) + V/(16hL)) (arXiv:2104.04473, section 3 and appendix;
Megatron-DeepSpeed: megatron/utils.py throughput_calculator, with a factor of 4 in place of 3 where
activations are checkpointed; Megatron-LM: megatron/training/training.py num_floating_point_operations up to
core 0.12). So does llm-foundry (scripts/train/benchmarking/README.md: 6 N per token and 12 L d s). In all of
them the vocabulary's product runs once, whatever runs again.
"""

from __future__ import annotations

from benchmarks.records import Record
from dslaunch.model.flops import flops
from dslaunch.plan.case import Case


def step_flops(record: Record, case: Case) -> float:
    """FLOPs of one optimizer step, all GPUs, by the record's own count."""
    counted = flops(case.component, case.tokens * case.layout.cp, causal=False)
    samples = case.config.training.global_batch
    repeated = sum(counted.layers) if _with_recompute(record) else 0
    return float(samples * (3 * counted.total + repeated))


def _with_recompute(record: Record) -> bool:
    return "hardware" in (record.measured.tflops_kind or "") and (record.recompute or "").startswith("full")


def measured_step_s(record: Record, case: Case) -> float | None:
    """Seconds of the step that the record's printed speed means; None where it prints none."""
    measured, training = record.measured, case.config.training
    gpus = case.config.cluster.world_size
    if measured.step_time_s:
        return measured.step_time_s
    if measured.tokens_per_sec_per_gpu:
        return training.global_batch * training.seq_len / measured.tokens_per_sec_per_gpu / gpus
    if measured.tflops_per_gpu:
        return step_flops(record, case) / (measured.tflops_per_gpu * 1e12 * gpus)
    return training.global_batch / measured.samples_per_sec if measured.samples_per_sec else None
