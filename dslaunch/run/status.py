"""What `dslaunch status` tells of a run: where it stands, how far it is, and who failed first."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dslaunch.errors import ConfigError, listed
from dslaunch.planfile import Plan, plan_from_json
from dslaunch.run.attempts import attempt_of, logs_of
from dslaunch.run.checkpoints import SavedState, checkpoint_dir, newest_checkpoint
from dslaunch.run.find import word_for
from dslaunch.run.generations import generation_of
from dslaunch.run.kube import job_of
from dslaunch.run.now import KUBERNETES, Now, look
from dslaunch.run.records import RankRecord, first_failed, read_ranks

STATUS_SCHEMA = "dslaunch.status/1"


@dataclass(frozen=True)
class Status:
    """One run, now."""

    folder: Path
    plan: Plan
    now: Now
    attempt: int
    ranks: tuple[RankRecord, ...]
    """Of the newest attempt; those that have started."""
    checkpoint: SavedState | None
    at: float
    """When this was seen, Unix time."""

    @property
    def failed(self) -> list[RankRecord]:
        """The ranks that failed, the first to fail first."""
        return first_failed(self.ranks)

    @property
    def step(self) -> int | None:
        """The last step that every rank which tells has completed."""
        return min((each.step for each in self.ranks if each.step is not None), default=None)

    @property
    def steps_per_s(self) -> float | None:
        """Of the slowest rank."""
        return min((each.steps_per_s for each in self.ranks if each.steps_per_s), default=None)

    @property
    def progress_age_s(self) -> float | None:
        """Since any rank completed a step."""
        times = [each.stepped_at for each in self.ranks if each.stepped_at is not None]
        return max(0.0, self.at - max(times)) if times else None

    @property
    def behind(self) -> list[int]:
        """Ranks that are two steps or more behind the furthest: one step is the moment of looking."""
        steps = {each.rank: each.step for each in self.ranks if each.step is not None}
        furthest = max(steps.values(), default=0)
        return [rank for rank, step in steps.items() if step < furthest - 1]


def read_status(folder: Path) -> Status:
    """How the run in `folder` stands.

    Raises:
        ConfigError: no run folder, or one whose plan cannot be read.
    """
    plan = run_plan(folder)
    now, attempt = look(folder), attempt_of(folder)
    ranks = tuple(read_ranks(folder / "ranks"))
    saved = newest_checkpoint(checkpoint_dir(plan, folder, now.state.work_dir))
    return Status(folder, plan, now, attempt, ranks, saved, time.time())


def run_plan(folder: Path) -> Plan:
    """The plan that the run executes; raises ConfigError where it cannot be read."""
    where = folder / "plan.json"
    try:
        return plan_from_json(where.read_text(encoding="utf-8"), str(where))
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}. A run folder holds what was launched.") from error


def status_object(status: Status) -> dict[str, Any]:
    """`{"schema": "dslaunch.status/1", ...}`; None where nothing is known; times are Unix times."""
    now, failed = status.now, status.failed
    return {
        "schema": STATUS_SCHEMA,
        "run": str(status.folder),
        "state": now.standing,
        "why": now.why,
        "launcher": now.state.launcher,
        "host": now.state.host,
        "job": now.job,
        "attempt": status.attempt,
        "exit_status": now.state.exit_status,
        "step": status.step,
        "steps": status.plan.training.steps,
        "steps_per_s": status.steps_per_s,
        "progress_age_s": status.progress_age_s,
        "behind": status.behind,
        "first_failure": _failure_object(failed[0]) if failed else None,
        "checkpoint": _saved_object(status.checkpoint),
        "logs": str(logs_of(status.folder, status.attempt)),
        "world_size": status.plan.world_size,
        "ranks": [_rank_object(each) for each in status.ranks],
    }


def status_lines(status: Status) -> list[tuple[str, str]]:
    """(what, value) for people: one line each."""
    now, saved = status.now, status.checkpoint
    told = [
        ("state", now.standing + (f": {now.why}" if now.why else "")),
        ("attempt", str(status.attempt)),
        ("planned anew", _generation(status)),
        ("where", _where(status.folder, now)),
        ("step", step_words(status)),
        ("ranks", rank_words(status)),
        ("first failure", failure_words(status.failed) if now.standing != "stopped" else ""),
        ("checkpoint", f"{saved.path.name}, {age(status.at - saved.written_at)} ago" if saved else "none"),
        ("logs", str(logs_of(status.folder, status.attempt))),
        ("next", next_words(status)),
    ]
    return [(name, words) for name, words in told if words]


def _generation(status: Status) -> str:
    """Of an elastic run that lost or regained hosts."""
    number = generation_of(status.folder)
    return f"{number - 1} times, now for {status.plan.cluster.nodes} nodes" if number > 1 else ""


def plan_words(plan: Plan) -> str:
    """The plan in one line."""
    cluster = plan.cluster
    return (
        f"{plan.recipe} on {cluster.shape} {cluster.gpu}, {plan.world_size} ranks, "
        f"engine {plan.engine.name}, strategy {plan.strategy}"
    )


def step_words(status: Status) -> str:
    """How far, how fast, and since when not; empty where no rank tells."""
    if status.step is None or status.progress_age_s is None:
        return ""
    speed = f", {status.steps_per_s:.3g} steps/s" if status.steps_per_s else ""
    behind = status.behind
    late = f", rank {listed(behind, limit=8)} behind" if behind else ""
    return f"{status.step} of {status.plan.training.steps}{speed}, last {age(status.progress_age_s)} ago{late}"


def rank_words(status: Status) -> str:
    """How many ranks are in which state, such as `8 of 8: 7 running, 1 exit 5`."""
    kinds = Counter(_kind(each, status) for each in status.ranks)
    words = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
    return f"{len(status.ranks)} of {status.plan.world_size} started" + (f": {words}" if words else "")


def failure_words(failed: Sequence[RankRecord]) -> str:
    """Which rank failed first, when, and how many after it; empty where none did."""
    if not failed:
        return ""
    first = failed[0]
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(first.changed_ns / 1e9))
    on = f" on {first.host}" if first.host else ""
    after = f"; {len(failed) - 1} more after it" if failed[1:] else ""
    return f"rank {first.rank}{on} exits {first.status} at {when}{after}"


def next_words(status: Status) -> str:
    """What a user may type now; empty where nothing is to be done."""
    name = word_for(status.folder)
    saved = status.checkpoint is not None or status.now.state.launcher == KUBERNETES
    again = resume_words(status.folder, saved)
    match status.now.standing:
        case "failed" | "lost":
            logs = f"dslaunch logs {name} --first-error" if status.failed else f"dslaunch logs {name}"
            return f"{logs}, then {again}"
        case "stopped":
            return again
        case "unsupervised":
            return f"dslaunch stop {name}"
        case _:
            return ""


def resume_words(folder: Path, saved: bool) -> str:
    """The command that goes on with a run that ended, where a checkpoint is `saved` or not."""
    return f"dslaunch resume {word_for(folder)}{'' if saved else ' --from-scratch'}"


def age(seconds: float) -> str:
    """Such as `12 s`, `5 min`, `3.2 h`, `2.0 days`."""
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172800 else f"{seconds / 86400:.1f} days"


def _kind(record: RankRecord, status: Status) -> str:
    if record.status is not None:
        return "done" if record.status == 0 else f"exit {record.status}"
    return "running" if status.now.standing in ("running", "unsupervised", "unknown") else "killed"


def _where(folder: Path, now: Now) -> str:
    if now.state.launcher == KUBERNETES:
        return f"Kubernetes, {job_of(folder).resource}"
    if now.job:
        return f"SLURM job {now.job}" + (
            f" ({len(now.state.continuations)} continuations)" if now.state.continuations else ""
        )
    pid = f", process {now.state.supervisor.pid}" if now.state.supervisor else ""
    return f"{now.state.launcher} from {now.state.host}{pid}" if now.state.host else now.state.launcher


def _failure_object(record: RankRecord) -> dict[str, Any]:
    return {
        "rank": record.rank,
        "host": record.host,
        "exit_status": record.status,
        "ended_at": record.changed_ns / 1e9,
    }


def _saved_object(saved: SavedState | None) -> dict[str, Any] | None:
    return {**asdict(saved), "path": str(saved.path)} if saved else None


def _rank_object(record: RankRecord) -> dict[str, Any]:
    said = asdict(record)
    del said["changed_ns"]
    return said
