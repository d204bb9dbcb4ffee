"""What the verbs that look after runs and hosts print under --json. Times are Unix times, in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dslaunch.review.lessons import Taught
from dslaunch.run.processes import Process


@dataclass(frozen=True)
class RankState:
    """One rank of the newest attempt."""

    rank: int
    host: str
    process: Process | None
    status: int | None
    """Exit status; 128 + N: signal N ended it; null: it runs, or was killed with its shell."""
    step: int | None
    """The last step that it completed."""
    stepped_at: float | None
    steps_per_s: float | None
    phase: str
    """What it said it was about to do (dslaunch.progress); empty where it said nothing."""


@dataclass(frozen=True)
class FirstFailure:
    """The rank that failed first."""

    rank: int
    host: str
    exit_status: int | None
    ended_at: float


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint that a resumed program would load."""

    path: str
    step: int | None
    written_at: float


@dataclass(frozen=True)
class RunStatus:
    """`dslaunch status --json`"""

    run: str
    """Its folder."""
    state: str
    why: str
    launcher: str
    host: str
    job: str
    """The SLURM job that runs, waits, or ended last."""
    attempt: int
    exit_status: int | None
    step: int | None
    """The last step that every rank which tells has completed."""
    steps: int
    steps_per_s: float | None
    progress_age_s: float | None
    behind: tuple[int, ...]
    """Ranks two steps or more behind the furthest."""
    first_failure: FirstFailure | None
    checkpoint: Checkpoint | None
    logs: str
    world_size: int
    ranks: tuple[RankState, ...]
    """Those that have started."""
    schema: str = "dslaunch.status/1"


@dataclass(frozen=True)
class RunOfSweep:
    """One run of a sweep."""

    number: int
    values: tuple[str, ...]
    """Its values of the overrides that have several, as KEY=VALUE."""
    refused: str
    """Why it was not launched; empty where it was."""
    status: RunStatus | None
    """Null where it has no run folder."""


@dataclass(frozen=True)
class SweepStatus:
    """`dslaunch status SWEEP --json`"""

    sweep: str
    """Its folder."""
    runs: tuple[RunOfSweep, ...]
    schema: str = "dslaunch.sweep-status/1"


@dataclass(frozen=True)
class Frame:
    """`dslaunch watch --json`: a line of JSON for each time that the run was looked at."""

    status: RunStatus
    measured: dict[str, Any] | None
    """The newest line of the run's metrics.jsonl; null where nothing has been measured."""
    events: tuple[dict[str, Any], ...]
    """The newest, the last one last."""
    log: tuple[str, ...]
    """Last lines of the attempt's common log."""
    schema: str = "dslaunch.frame/1"


@dataclass(frozen=True)
class RunLog:
    """`dslaunch logs --json`"""

    run: str
    path: str
    whose: str
    failed_ranks: tuple[int, ...]
    """The first to fail first."""
    lines: tuple[str, ...]
    schema: str = "dslaunch.logs/1"


@dataclass(frozen=True)
class Stopped:
    """`dslaunch stop --json`"""

    run: str
    said: tuple[str, ...]
    """What was done, a sentence each."""
    schema: str = "dslaunch.stop/1"


@dataclass(frozen=True)
class HostFinding:
    """What preflight found on a host."""

    check: str
    host: str
    severity: str
    stops: bool
    found: str
    fix: str


@dataclass(frozen=True)
class PreflightReport:
    """`dslaunch preflight --json`"""

    hosts: tuple[str, ...]
    findings: tuple[HostFinding, ...]
    exclude: tuple[str, ...]
    """Hosts to leave out; none where what is wrong is wrong on all of them."""
    measured: tuple[str, ...]
    not_checked: tuple[str, ...]
    seconds: float
    schema: str = "dslaunch.preflight-report/1"


@dataclass(frozen=True)
class Unfit:
    """A run that teaches nothing."""

    run: str
    why: str


@dataclass(frozen=True)
class Calibrated:
    """`dslaunch calibrate --json`"""

    corrections: tuple[Taught, ...]
    refused: tuple[Unfit, ...]
    file: str | None
    """The efficiency.yaml that was written; null: nothing was written."""
    schema: str = "dslaunch.calibrated/1"


@dataclass(frozen=True)
class CheckpointForm:
    """One folder that was written."""

    folder: str
    component: str
    """Empty: all of them."""
    tensors: int
    """Weights; `convert` writes their moments beside them."""
    architecture: str
    """The class of transformers that reads it; empty: none does."""


@dataclass(frozen=True)
class Forms:
    """`dslaunch convert --json` and `dslaunch export --json`; dslaunch.runtime.forms prints it."""

    verb: str
    forms: tuple[CheckpointForm, ...]
    schema: str = "dslaunch.forms/1"
