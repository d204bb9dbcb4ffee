"""Pipelines that split the backward pass: what a stage holds, and what it adds to filling and draining.

The gradient of a stage's input (B) is what the stage before waits for; that of its weights (W) can wait and fill
what would be idle. With F seconds forward, on p stages (arXiv:2401.10241 and arXiv:2405.15362; orders of
torch/distributed/pipelining/schedules.py, 2.13, and megatron/core/pipeline_parallel/deepspeed_zbh1_schedule.py of
deepspeedai/Megatron-DeepSpeed):

                  idle on each of p stages, by p - 1           micro-batches held, on every stage
    1f1b          F + B + W                                    p - stage
    zb-h1         F + B - W, v-th of it with v virtual stages  p
    zb-h2         F + B - 2 W                                  2 p - 1
    zb-v          max(F, B, 2 (B - W)) / 2                     p
    dualpipe-v    (F + B - W) / 2, (2 B - W) / 2 for long B    p + 1/2
    zb-v-half     B + F/2                                      p / 2 + 1
    zb-v-min      (5 F + 2 B) / 4                              p / 3 + 1

zb-v-half and zb-v-min wait in every round too, unless F, B and W are alike: a micro-batch takes at least 2 B + W/2
and 3 B (orders of sail-sg/zero-bubble-pipeline-parallelism, zerobubble/scheduler/zbv_greedy.py, run as events).

The last four give a rank two chunks, the first and the last of the model to rank 0. What waits for its W counts
like what waits for its B: inputs of products stay, and the gradients of their outputs come to them.
zb-h2 lets a stage step its optimizer while later ones still run (post-validation), the others end a step together.
"""

from __future__ import annotations

FOLDED = frozenset({"zb-v", "dualpipe-v", "zb-v-half", "zb-v-min"})
"""Values of training.schedule with which rank 0 has the first and the last part of the model."""
SPLIT = FOLDED | {"zb-h1", "zb-h2"}
"""Those whose backward pass is split."""


def held(schedule: str, stages: int, stage: int, micro_batches: int) -> float:
    """Micro-batches whose activations a stage holds at its fullest moment, of 1f1b and what is split."""
    most = {
        "zb-h1": float(stages),
        "zb-h2": 2.0 * stages - 1,
        "zb-v": float(stages),
        "dualpipe-v": stages + 0.5,
        "zb-v-half": stages / 2 + 1,
        "zb-v-min": stages / 3 + 1,
    }.get(schedule, float(stages - stage))
    return min(micro_batches, most)


def put_off(schedule: str, stage: int, micro_batches: int) -> int:
    """Of those, micro-batches whose W waits: they have what full recompute had dropped before their B."""
    return min(micro_batches, {"zb-h1": stage, "zb-h2": 2 * stage}.get(schedule, 0))


def filling_s(
    schedule: str, stages: int, chunks: int, forward: float, inputs: float, weights: float
) -> float:
    """Seconds that a stage beside the slowest adds to a step.

    Args:
        chunks: virtual stages of a rank.
        forward, inputs, weights: seconds F, B and W of one micro-batch on all of the stage's layers.
    """
    waiting = forward + max(0.0, inputs - weights)
    match schedule:
        case "zb-h1":
            return waiting / chunks
        case "zb-h2":
            return max(0.0, forward + inputs - 2 * weights)
        case "zb-v":
            return max(forward, inputs, 2 * (inputs - weights)) / 2
        case "dualpipe-v":
            return max(waiting, 2 * inputs - weights - forward / max(1, stages - 1)) / 2
        case "zb-v-half":
            return inputs + forward / 2
        case "zb-v-min":
            return (5 * forward + 2 * inputs) / 4
    return (forward + inputs + weights) / chunks


def waiting_s(schedule: str, forward: float, inputs: float, weights: float) -> float:
    """Seconds that a stage waits for others in every micro-batch, by those of `filling_s`."""
    longer, busy = max(forward, inputs), forward + inputs + weights
    least = {"zb-v-half": 2 * longer + weights / 2, "zb-v-min": 3 * longer}.get(schedule, busy)
    return max(0.0, least - busy)
