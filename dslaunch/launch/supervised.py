"""A command that is started until it succeeds, or until the policy of what ended it says stop.

Each start is an attempt in the same run folder, on the same rendered files. DSLAUNCH_RESUME=1 tells the program to
load its newest checkpoint, DSLAUNCH_ATTEMPT counts the starts.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dslaunch.errors import ConfigError, LaunchError, PlanError, listed
from dslaunch.launch.elastic import Elastic, name_of
from dslaunch.launch.spares import Hosts
from dslaunch.launch.steps import Execute
from dslaunch.launch.universal import Place, convert_newest
from dslaunch.launch.watching import Watch
from dslaunch.planfile import Plan
from dslaunch.run.attempts import attempt_of, begin_attempt, logs_of
from dslaunch.run.causes import Ending, Facts, judge
from dslaunch.run.checkpoints import checkpoint_dir, newest_checkpoint
from dslaunch.run.disk import full_disks, give_back, reserve
from dslaunch.run.interval import measured_interval
from dslaunch.run.kernel import Kernel
from dslaunch.run.notify import Notifier, notifier
from dslaunch.run.policy import Decision, Past, decide, policies
from dslaunch.run.processes import Process, identify
from dslaunch.run.ranks import fault
from dslaunch.run.records import furthest, read_ranks
from dslaunch.run.state import append_event, read_state, update_state
from dslaunch.run.status import resume_words, run_plan
from dslaunch.run.supervise import Ended, noted_signals, pause, supervise


@dataclass(frozen=True)
class Attempt:
    """How one start ended."""

    ended: Ended
    exit_status: int
    ending: Ending | None
    """None where it succeeded."""
    furthest: int
    log: Path


def run_attempts(
    step: Execute, plan: Plan, run_dir: Path, free_port: Callable[[], int], echo: Callable[[str], None]
) -> int:
    """Run `step` until it succeeds or is given up; returns 0 or 1."""
    number = attempt_of(run_dir)
    hosts = Hosts.of(step, plan)
    elastic = Elastic(run_dir) if plan.supervision.elastic_min_nodes else None
    outside = notifier(run_dir, plan, echo)
    past: list[Past] = []
    while True:
        chosen = {**_port(step, free_port), **hosts.variables()}
        begun = functools.partial(_supervising, run_dir)
        if stopped_by := _loadable(step, plan, run_dir, number, hosts, outside):
            return _stopped(run_dir, 1, stopped_by, echo)
        attempt = run_attempt(step, plan, run_dir, number, chosen, outside, begun)
        if attempt.ended.survivors:
            echo(f"still running after SIGKILL: process {listed(attempt.ended.survivors)}")
        if attempt.ending is None:
            _finish(run_dir, "finished", attempt, "", outside)
            _tell_interval(run_dir, plan, echo)
            return 0
        past.append(Past(attempt.ending.cause, attempt.furthest))
        decision = decide(plan.supervision, past)
        record(run_dir, number, attempt, decision, outside)
        if decision.action == "stop":
            return _give_up(run_dir, attempt, attempt.ending, decision, outside)
        elsewhere = decision.action == "retry_elsewhere"
        after = hosts.without(attempt.ending) if elsewhere and not elastic else hosts
        echo(
            f"attempt {number} ended: {attempt.ending.why}. {decision.why}; "
            f"it starts again in {decision.wait_s:.0f} s{hosts.changed(after)}"
        )
        hosts = after
        if stopped_by := pause(decision.wait_s):
            return _stopped(run_dir, attempt.exit_status, stopped_by, echo)
        if elastic:
            suspect = hosts.host_of(attempt.ending) if elsewhere else ""
            unfit = policies()[attempt.ending.cause].unfit
            try:
                with noted_signals() as signals:
                    start, step, said = elastic.turn(plan, hosts.words, suspect, number + 1, unfit=unfit)
            except (PlanError, ConfigError) as error:
                append_event(run_dir, "not_replanned", why=str(error))
                given_up = Decision("stop", f"it cannot be planned anew: {error}")
                return _give_up(run_dir, attempt, attempt.ending, given_up, outside)
            if signals:
                return _stopped(run_dir, attempt.exit_status, signals[0].name, echo)
            plan, hosts = start.plan, Hosts.of(step, start.plan)
            if said:
                echo(said)
        number = begin_attempt(run_dir, attempt.ending.cause)


def _loadable(
    step: Execute, plan: Plan, run_dir: Path, number: int, hosts: Hosts, outside: Notifier
) -> str:
    """Convert the newest checkpoint where the attempt loads it so; the stop signal that cut it short, or "".

    Raises:
        LaunchError: it cannot be converted, and the run has failed.
    """
    place = Place(run_dir, number, step.env, next(map(name_of, hosts.words), ""))
    try:
        work_dir = read_state(run_dir).work_dir
        return convert_newest(plan, place, work_dir, outside.echo, functools.partial(_supervising, run_dir))
    except LaunchError as error:
        update_state(run_dir, status="failed")
        append_event(run_dir, "failed", why=str(error))
        outside.tell("failed", f"failed: {error}")
        raise


def _stopped(run_dir: Path, exit_status: int, stopped_by: str, echo: Callable[[str], None]) -> int:
    """A stop signal came between two attempts."""
    update_state(run_dir, status="stopped")
    append_event(run_dir, "stopped", exit_status=exit_status, why=f"{stopped_by} ended it")
    echo(f"the job stopped: {stopped_by} ended it while it waited for its restart. {_to_go_on(run_dir)}")
    return 1


def _to_go_on(run_dir: Path) -> str:
    saved = newest_checkpoint(checkpoint_dir(run_plan(run_dir), run_dir, read_state(run_dir).work_dir))
    return f"To go on: {resume_words(run_dir, saved is not None)}"


def _supervising(run_dir: Path, process: Process) -> None:
    """Write down who supervises, and what."""
    supervisor = identify(os.getpid())
    update_state(run_dir, status="running", process=process, supervisor=supervisor, host=socket.gethostname())


def run_attempt(
    step: Execute,
    plan: Plan,
    run_dir: Path,
    number: int,
    chosen: Mapping[str, str],
    outside: Notifier,
    begun: Callable[[Process], None],
) -> Attempt:
    """One start, to its end.

    Args:
        chosen: variables of this start alone; the event `started` names them.
        begun: is told the started process.
    """
    shell = {name: value for name, value in os.environ.items() if name not in step.unset}
    again = {"DSLAUNCH_RESUME": "1", "DSLAUNCH_ATTEMPT": str(number)} if number > 1 else {}
    log = logs_of(run_dir, number) / step.log.name
    watch, kernel = Watch(run_dir, plan, number, outside), Kernel()

    def started(process: Process) -> None:
        begun(process)
        append_event(run_dir, "started", argv=step.argv, pid=process.pid, attempt=number, **chosen)

    env = {**shell, **step.env, **chosen, **again}
    reserve(run_dir)
    try:
        ended = supervise(step.argv, step.cwd, env, log, sys.stdout.buffer, started, watch=watch.look)
        places = (run_dir, checkpoint_dir(plan, run_dir, read_state(run_dir).work_dir))
        disks = full_disks(places) if ended.status else ()
    finally:
        give_back(run_dir)
    ranks = read_ranks(run_dir / "ranks")
    reached = furthest(ranks)
    found = fault(run_dir, step.ranks if ended.status == 0 else None)
    if not ended.stopped_by and not watch.given_up and found is None and ended.status == 0:
        return Attempt(ended, 0, None, reached, log)
    said = kernel.said({each.process.pid for each in ranks if each.process})
    facts = Facts(ended.status, ended.stopped_by, said, ranks, log.parent, found.why if found else "", disks)
    ending = watch.given_up if watch.given_up and not ended.stopped_by else judge(facts)
    return Attempt(ended, found.exit_status if found else ended.status, ending, reached, log)


def _tell_interval(run_dir: Path, plan: Plan, echo: Callable[[str], None]) -> None:
    """What the run's own checkpoints say of how often to save."""
    found = measured_interval(run_dir, plan)
    if found:
        append_event(run_dir, "checkpoint_interval", **dataclasses.asdict(found))
        words = f"checkpoint.every=auto checkpoint.save_seconds={found.save_s:.3g}"
        echo(f"{found.describe()}; to plan with it: {words}")


def record(run_dir: Path, number: int, attempt: Attempt, decision: Decision, outside: Notifier) -> None:
    """The event of an attempt that did not succeed, and what is done now."""
    assert attempt.ending is not None
    append_event(
        run_dir, "attempt_ended", attempt=number, cause=attempt.ending.cause, rank=attempt.ending.rank,
        host=attempt.ending.host, evidence=[str(each) for each in attempt.ending.evidence],
        exit_status=attempt.exit_status, furthest_step=attempt.furthest, action=decision.action, why=decision.why,
    )  # fmt: skip
    outside.tell(
        "attempt_ended", f"attempt {number} ended: {attempt.ending.why}. {decision.why}", attempt=number,
        cause=attempt.ending.cause, action=decision.action, step=attempt.furthest,
    )  # fmt: skip


def _give_up(
    run_dir: Path, attempt: Attempt, ending: Ending, decision: Decision, outside: Notifier
) -> int:
    outcome = "stopped" if ending.cause == "user" else "failed"
    _finish(run_dir, outcome, attempt, ending.why, outside)
    tail = (
        f" {_to_go_on(run_dir)}."
        if ending.cause == "user"
        else f" {decision.why}. Next: {policies()[ending.cause].next}."
    )
    outside.echo(f"the job {outcome} ({ending.cause}): {ending.why}.{tail} Its output is in {attempt.log}")
    return 1


def _finish(run_dir: Path, outcome: str, attempt: Attempt, why: str, outside: Notifier) -> None:
    update_state(run_dir, status=outcome, exit_status=attempt.exit_status)
    append_event(run_dir, outcome, exit_status=attempt.exit_status, why=why, left_over=attempt.ended.left_over)
    outside.tell(outcome, f"{outcome}{f': {why}' if why else ''}", step=attempt.furthest)
    outside.write(up=False, now=True)
    outside.tracker.end(succeeded=outcome == "finished")


def _port(step: Execute, free_port: Callable[[], int]) -> dict[str, str]:
    return {step.free_port: str(free_port())} if step.free_port else {}
