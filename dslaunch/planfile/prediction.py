"""What the ledgers say of a plan: what prediction.json holds."""

from __future__ import annotations

from dataclasses import dataclass

PREDICTION_SCHEMA = "dslaunch.prediction/1"


@dataclass(frozen=True)
class Finding:
    """One judgement of a plan or file."""

    rule: str
    severity: str
    """error | hang | memory | wrong | slow | deprecated | info"""
    message: str
    where: str = ""
    """file:line:column, or a key."""
    fix: str = ""


@dataclass(frozen=True)
class Candidate:
    """One layout that the search considered."""

    layout: str
    """In words, such as `llm TP8 PP4 DP2 ZeRO-1`."""
    peak_memory_gib: float
    step_time_s: float
    verdict: str
    """chosen | slower | refused: why, with its figure"""


@dataclass(frozen=True)
class MemoryGib:
    """Bytes on one GPU of one stage, in GiB (2**30), by term. `total` is the sum of the other terms."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    boundary: float
    """Inputs and outputs kept for other stages or components."""
    logits: float
    buffers: float
    """Communication buckets and gathered parameters."""
    total: float


@dataclass(frozen=True)
class StagePrediction:
    """The ledgers of one stage."""

    stage: int
    memory_gib: MemoryGib
    host_gib_per_rank: float
    time_s: dict[str, float]
    """Seconds in one optimizer step, by term: compute, recompute, tp, dp, pp, optimizer, offload."""


@dataclass(frozen=True)
class WorstRank:
    """The rank that decides whether the plan fits."""

    rank: int
    memory_gib: dict[str, float]
    """By `component/term` with the stage the rank holds, and `overhead`."""


@dataclass(frozen=True)
class Prediction:
    """What the ledgers say of a plan. Written as prediction.json."""

    components: dict[str, tuple[StagePrediction, ...]]
    overhead_gib: float
    """CUDA context, communicators and allocator, per GPU."""
    worst: WorstRank
    peak_memory_gib: float
    gpu_memory_gib: float
    memory_limit_gib: float
    """gpu_memory_gib * goal.memory_fraction."""
    host_memory_gib: float
    """Host memory needed on one node."""
    host_limit_gib: float
    step_time_s: float
    tokens_per_s: float
    samples_per_s: float
    mfu: float
    """Model FLOPs (no recompute) over what the GPUs' dense peak allows."""
    hfu: float
    """The same with recomputed FLOPs counted."""
    bubble: float
    """Share of the trunk's part of the step in which its stages idle."""
    usd_per_step: float | None
    """Price of a step, US dollars; None where the cluster file has no price."""
    band: str
    """The error band of these figures."""
    findings: tuple[Finding, ...]
    candidates: tuple[Candidate, ...]
    tables_sha256: str
    """Hash of the efficiency tables used."""
    plan_sha256: str
    """Hash of the plan.json that these figures belong to."""
    schema: str = PREDICTION_SCHEMA
