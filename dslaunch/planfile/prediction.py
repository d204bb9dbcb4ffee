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

    @property
    def said(self) -> str:
        """Message and fix as sentences of one line."""
        parts = (self.message, f"Fix: {self.fix}" if self.fix else "")
        return " ".join(part if part.endswith((".", "!", "?")) else f"{part}." for part in parts if part)


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
    own: int = 0
    """Runs of the site's own that it rests on, in place of published ones."""

    def describe(self) -> str:
        """Such as `-5 % to +8 %: 9 of 10 of 117 published runs`."""
        width = f"{self.low - 1:+.0%} to {self.high - 1:+.0%}".replace("%", " %")
        if self.own:
            whose = "run of yours leaves" if self.own == 1 else "runs of yours leave"
            return f"{width}: what {self.own} {whose} open"
        return f"{width}: 9 of 10 of {self.runs} published runs" if self.runs else width


@dataclass(frozen=True)
class EarlierRun:
    """What a run of the same plan measured."""

    run: str
    """Name of its folder."""
    step_time_s: float
    allocated_gib: float | None


@dataclass(frozen=True)
class Calibration:
    """What runs of the site's own, taught by `dslaunch calibrate`, changed of the figures."""

    key: str
    """GPU/software, such as `A100-SXM4-80GB/transformers`."""
    time: float
    """By which the shipped rates' seconds are multiplied."""
    memory: float
    """By which the components' GPU memory is multiplied."""
    runs: int
    plans: int
    """Different ones among the runs."""
    shipped_sha256: str
    """Hash of the rates that are corrected."""
    measured: tuple[EarlierRun, ...]
    """Runs of this very plan."""


@dataclass(frozen=True)
class CheckpointInterval:
    """How often to save: see dslaunch/plan/interval.py."""

    save_s: float
    """Seconds that training stands still for one checkpoint."""
    job_mtbf_hours: float
    """Mean hours between failures of the whole job."""
    best_s: float
    """Seconds of work between two checkpoints that lose the least time."""
    steps: int
    """The same in optimizer steps."""
    lost: float
    """Share of the time that saving, and work done again after failures, take at that interval."""

    def describe(self) -> str:
        """Such as `checkpoint.every=120 (31 min) loses least: ...`."""
        return (
            f"checkpoint.every={self.steps} ({self.best_s / 60:.3g} min) loses least, {self.lost:.1%} of the "
            f"time: it takes {self.save_s:.3g} s, and the job fails every {self.job_mtbf_hours:.3g} h (Young/Daly)"
        )


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
    pinned_gib_per_rank: float = 0.0
    """Of host_gib_per_rank, page-locked."""


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
    calibration: Calibration | None = None
    """None where the site's own runs say nothing of this GPU and software."""
    checkpoint: CheckpointInterval | None = None
    """None where checkpoint.save_seconds is not given."""
    host_loading_gib: float | None = None
    """Host memory needed on one node while a script has the whole model in each process, before it is cut; None
    where no process has it whole."""
    host_pinned_gib: float = 0.0
    """Of host_memory_gib, page-locked by DeepSpeed's offload: the system cannot swap it out. It has no limit but
    the node's memory."""
    schema: str = PREDICTION_SCHEMA
