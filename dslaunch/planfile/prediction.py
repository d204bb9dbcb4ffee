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
    """chosen | by how much slower and larger | refused: why, with its figure"""


@dataclass(frozen=True)
class Search:
    """What strategy=auto looked for, and what it passed over."""

    goal: str
    """In words, with the size of the cluster that was taken where the goal leaves it open."""
    considered: int
    """Layouts that were looked at, or that a bound stands for."""
    front: tuple[Candidate, ...]
    """The layouts that none beats in memory and time, ascending in memory."""
    engines: dict[str, str]
    """By engine that was allowed: chosen, its best, or why it is out."""


@dataclass(frozen=True)
class Band:
    """How far a measured figure may be from the predicted one: 9 of 10 published runs are inside."""

    low: float
    """Measured by predicted, at the low end; at most 1."""
    high: float
    """At the high end; at least 1."""
    runs: int = 0
    """Published runs of the same kind of software that it rests on."""
    sources: int = 0
    """How many publications printed them."""

    def describe(self) -> str:
        """Such as `-5 % to +8 %: 9 of 10 of 117 published runs`."""
        width = f"{self.low - 1:+.0%} to {self.high - 1:+.0%}".replace("%", " %")
        return f"{width}: 9 of 10 of {self.runs} published runs" if self.runs else width


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
    """Seconds in one optimizer step, by term: compute, recompute, tp, cp, ep, pp, launch (the GPU waits
    for its host), dp, optimizer, offload."""


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
    allocated_gib: float
    """What torch.cuda.max_memory_allocated will show on the worst rank: its tensors."""
    reserved_gib: float
    """What max_memory_reserved will show: with the blocks that the allocator holds and cannot use."""
    nvidia_smi_gib: float
    """What nvidia-smi will show: with the device context and the communicators' buffers."""
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
    """The error band of these figures, in words."""
    findings: tuple[Finding, ...]
    candidates: tuple[Candidate, ...]
    tables_sha256: str
    """Hash of the efficiency tables used."""
    plan_sha256: str
    """Hash of the plan.json that these figures belong to."""
    memory_band: Band | None = None
    """Of peak_memory_gib; None where no run of that kind was published."""
    time_band: Band | None = None
    """Of step_time_s."""
    search: Search | None = None
    """None where the layout was pinned."""
    schema: str = PREDICTION_SCHEMA
