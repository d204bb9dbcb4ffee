"""How a run stands now: its state.json, held against the processes and the jobs that it names.

state.json alone says what was so when it was written; a supervisor that was killed could not change it.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dslaunch.errors import LaunchError
from dslaunch.run import kube
from dslaunch.run.policy import policies
from dslaunch.run.processes import Process, is_alive
from dslaunch.run.records import read_ranks
from dslaunch.run.slurm_jobs import JobState, ask
from dslaunch.run.state import State, read_events, read_state

Standing = Literal[
    "prepared", "queued", "running", "unsupervised", "lost", "unknown", "finished", "failed", "stopped"
]
"""queued: SLURM has not started it. unsupervised: processes of it live, and nobody watches over them. lost:
nothing of it lives, and nobody recorded its end. unknown: nobody here can tell."""
ENDED = ("finished", "failed", "stopped", "lost")
OUTCOME = "job.outcome"
"""A file that job.sbatch writes at its end: finished | failed | refused, and the exit status."""

KUBERNETES = "kubernetes"
"""The launcher whose jobs kubectl is asked about."""
STOP = "job.stop"
"""A file by which `dslaunch stop` tells job.sbatch that its ranks were ended on purpose."""


@dataclass(frozen=True)
class Now:
    """How a run stands."""

    state: State
    standing: Standing
    why: str = ""
    """What is behind it, as a sentence without its stop."""
    job: str = ""
    """The SLURM job that runs, waits, or ended last."""


def here() -> str:
    """This host's name, as state.json holds it."""
    return socket.gethostname()


def look(folder: Path) -> Now:
    """How the run in `folder` stands.

    Raises:
        ConfigError: no run folder.
    """
    state = read_state(folder)
    if state.slurm_job:
        return _job_now(folder, state)
    if state.status in ("finished", "failed", "stopped"):
        return Now(state, state.status, _recorded_why(folder))
    if state.launcher == KUBERNETES and state.status == "submitted":
        return Now(state, *kube.standing(kube.job_of(folder)))
    if state.supervisor is None and state.process is None:
        return Now(state, "prepared", "its files are written, and nothing was started")
    if state.host not in ("", here()):
        return Now(state, "unknown", f"it was started on {state.host}; ask there")
    if state.supervisor and is_alive(state.supervisor):
        return Now(state, "running")
    if living := recorded(folder, state):
        pids = ", ".join(str(each.pid) for each in living[:8])
        return Now(state, "unsupervised", f"its supervisor is gone, process {pids} lives on")
    return Now(state, "lost", "its supervisor ended without a word: it was killed, or its host went down")


def recorded(folder: Path, state: State) -> list[Process]:
    """The recorded processes of a run that live on this host: the launcher's and its ranks'."""
    ranks = [each.process for each in read_ranks(folder / "ranks") if each.host == here() and each.process]
    return [each for each in (state.process, *ranks) if each and is_alive(each)]


def _recorded_why(folder: Path) -> str:
    """Why the run ended, as its last event of an end says; empty where it succeeded."""
    ends = [event for event in read_events(folder) if event["kind"] in ("finished", "failed", "stopped")]
    return str(ends[-1]["details"].get("why", "")) if ends else ""


def refused(folder: Path) -> bool:
    """Whether job.sbatch found that starting the same files again would fail again."""
    path = folder / OUTCOME
    return path.exists() and path.read_text(encoding="utf-8").startswith("refused")


def _job_now(folder: Path, state: State) -> Now:
    """The first job of the chain that has not ended, or else the last that ran."""
    answers = [(job, _asked(job)) for job in (state.slurm_job, *state.continuations)]
    open_jobs = [(job, answer) for job, answer in answers if answer and not answer.ended]
    if open_jobs:
        job, answer = open_jobs[0]
        assert answer is not None
        return Now(state, *_open(answer), job)
    if state.status in ("finished", "failed", "stopped"):
        return Now(state, state.status, _recorded_why(folder), state.slurm_job)
    if outcome := _outcome(folder):
        return Now(state, *outcome, state.slurm_job)
    return Now(state, *_ended(answers))


def _asked(job: str) -> JobState | None:
    """None where SLURM does not know the job any more."""
    try:
        return ask(job)
    except LaunchError:
        return None


def _open(answer: JobState) -> tuple[Standing, str]:
    if answer.state == "no answer":
        return "unknown", f"SLURM does not answer: {answer.reason}"
    if answer.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "CONFIGURING"):
        return "queued", f"{answer.state}: {answer.reason}"
    return "running", "" if answer.state == "RUNNING" else answer.state


def _outcome(folder: Path) -> tuple[Standing, str] | None:
    """What job.sbatch wrote at its end."""
    path = folder / OUTCOME
    words = path.read_text(encoding="utf-8").split() if path.exists() else []
    if len(words) != 2:
        return None
    if words[0] == "finished":
        return "finished", ""
    return "failed", "; ".join([*_said_in_job(folder), f"its job exits {words[1]}"])


def _said_in_job(folder: Path) -> list[str]:
    """What the last start of a job told of its end: its preflight, or the supervisor in it."""
    kinds = ("job_started", "attempt_ended", "preflight_failed")
    last = next((event for event in reversed(read_events(folder)) if event["kind"] in kinds), None)
    if last is None or last["kind"] == "job_started":
        return []
    if last["kind"] == "preflight_failed":
        return ["preflight, the first step of its job, found what stops a launch; its output says what"]
    cause = policies().get(last["details"]["cause"])
    return [*([cause.says] if cause else []), *last["details"]["evidence"]]


def _ended(answers: Sequence[tuple[str, JobState | None]]) -> tuple[Standing, str, str]:
    """Of a chain without an outcome: SLURM itself ended the last job, by its time limit, say."""
    known = [(job, answer) for job, answer in answers if answer]
    if not known:
        return "unknown", "SLURM no longer knows its job, and job.sbatch recorded no end", answers[0][0]
    job, answer = known[-1]
    if answer.succeeded:
        return "finished", "", job
    return ("stopped" if answer.state == "CANCELLED" else "failed"), f"SLURM says {answer.state}", job
