"""Supervision inside a SLURM job: `python -m dslaunch.launch.job SRUN WORDS`, run by job.sbatch on the first node.

It starts the srun step, watches over it as a launch from a terminal is watched over, and starts it again within
the allocation as the cause's policy says: without a node that failed, where launcher.slurm.spare_nodes has one
waiting. What SLURM or job.sbatch has to do then stands in RUN/job.verdict: finished | failed | refused, and the
exit status. While the submitting command may still be writing state.json, nothing here writes it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dslaunch.errors import ConfigError, DslaunchError, LaunchError, PlanError
from dslaunch.launch.elastic import adopt, launched_nodes, planned_for
from dslaunch.launch.request import LaunchRequest
from dslaunch.launch.steps import Execute
from dslaunch.launch.supervised import Attempt, record, run_attempt
from dslaunch.launch.universal import Place, convert_newest
from dslaunch.planfile import ClusterPlan, Plan, plan_from_json
from dslaunch.run.attempts import attempt_of, begin_attempt, logs_of
from dslaunch.run.causes import Ending, Evidence
from dslaunch.run.folder import verify, write_file
from dslaunch.run.generations import complete
from dslaunch.run.notify import Notifier, notifier
from dslaunch.run.now import STOP
from dslaunch.run.policy import Decision, Past, decide, policies
from dslaunch.run.slurm_jobs import ask, components, end_steps, own_job
from dslaunch.run.state import append_event, read_events
from dslaunch.run.supervise import pause

VERDICT = "job.verdict"
LOG = "srun.log"
"""What the step says, by attempt; the job's own output has it too."""
ORDER = "job.hosts"
_ARBITRARY = "--distribution=arbitrary"
_NODE_FAILURE = re.compile(r"srun: error: Node failure on (\S+)")
"""src/srun/libsrun/launch.c 22.05; the ranks of other nodes only say that they lost their peers."""
_PORTS, _FIRST_PORT, _STRIDE = 12000, 20000, 101
"""20000 to 31999, as job.sbatch has it; a restart takes another one, for the first may be taken."""


@dataclass(frozen=True)
class Nodes:
    """The allocation's nodes in SLURM's order, and those that are left out."""

    all: tuple[str, ...]
    wanted: int
    bad: tuple[str, ...] = ()
    overlapping: bool = False
    """A step that SLURM cannot see the end of still counts as using its nodes."""
    components: tuple[int, ...] = ()
    """Nodes of each component of a heterogeneous job, in rank order; it has no spare ones."""

    @property
    def chosen(self) -> tuple[str, ...]:
        """The nodes of the next start, in rank order."""
        return tuple(name for name in self.all if name not in self.bad)[: self.wanted]

    def without(self, ending: Ending, cluster: ClusterPlan) -> Nodes:
        """The same without the node where `ending` began, where a spare one waits and that one is known."""
        after = self.lacking(ending, cluster)
        return after if len(after.chosen) == self.wanted else self

    def lacking(self, ending: Ending, cluster: ClusterPlan) -> Nodes:
        """The same without the node where `ending` began, where that is known: fewer, if no spare one waits."""
        name = self._node(ending, cluster)
        return replace(self, bad=(*self.bad, name)) if name else self

    def _node(self, ending: Ending, cluster: ClusterPlan) -> str:
        if ending.rank is not None:
            return self.chosen[cluster.host_of(ending.rank)]
        return ending.host if ending.host in self.chosen else ""


def supervise_job(argv: Sequence[str], job: str, run_dir: Path) -> int:
    """Run srun until it succeeds or is given up; returns the exit status of the rank that failed first."""
    complete(run_dir)
    where = run_dir / "plan.json"
    plan = plan_from_json(where.read_text(encoding="utf-8"), str(where))
    outside = notifier(run_dir, plan, _say)
    named, cluster = tuple(os.environ["DSLAUNCH_NODES"].split()), plan.cluster
    nodes = Nodes(named, len(cluster.by_host), components=cluster.kinds)
    plan, nodes = _fitted(run_dir, plan, nodes, f"job {job} has {len(nodes.all)} nodes")
    past = _earlier(run_dir)
    while True:
        number = attempt_of(run_dir)
        place = Place(run_dir, number, os.environ)
        if convert_newest(plan, place, os.environ["DSLAUNCH_WORK_DIR"], _say, lambda _: None):
            write_file(run_dir / VERDICT, "failed 1\n")  # a signal of SLURM's: what is converted is done again
            return 1
        chosen = {"DSLAUNCH_ATTEMPT": str(number), **_rendezvous(plan, nodes, number)}
        step = _step(argv, run_dir, number, nodes)
        attempt = run_attempt(step, plan, run_dir, number, chosen, outside, lambda _: None)
        if attempt.ending is None:
            return _verdict(run_dir, "finished", attempt, outside)
        ending = _by_slurm(attempt, attempt.ending, job)
        if (run_dir / STOP).exists():
            ending = Ending("user", (Evidence("dslaunch stop", "ended the ranks"),))
        attempt = replace(attempt, ending=ending)
        past.append(Past(ending.cause, attempt.furthest))
        decision = _within_job(decide(plan.supervision, past))
        record(run_dir, number, attempt, decision, outside)
        if decision.action not in ("retry", "retry_elsewhere") or attempt.ended.stopped_by:
            return _give_up(run_dir, ending, decision, attempt, outside)
        nodes = replace(nodes, overlapping=nodes.overlapping or not end_steps(components(os.environ) or (job,)))
        elsewhere = decision.action == "retry_elsewhere"
        leave = nodes.lacking if _shrinks(plan, ending) else nodes.without
        after = leave(ending, plan.cluster) if elsewhere else nodes
        left_out = f", without {after.bad[-1]}" if after is not nodes else ""
        _say(
            f"attempt {number} ended: {ending.why}. {decision.why}; again in {decision.wait_s:.0f} s{left_out}"
        )
        if after is not nodes:
            append_event(run_dir, "node_left_out", node=after.bad[-1], cause=ending.cause)
        nodes = after
        if pause(decision.wait_s):
            return _verdict(run_dir, "failed", attempt, outside)
        try:
            plan, nodes = _fitted(run_dir, plan, nodes, f"{ending.cause}: {', '.join(nodes.bad)} left out")
        except (PlanError, ConfigError) as error:
            append_event(run_dir, "not_replanned", why=str(error))
            _say(f"it cannot be planned anew: {error}")
            return _give_up(run_dir, ending, decision, attempt, outside)
        begin_attempt(run_dir, ending.cause)


def _shrinks(plan: Plan, ending: Ending) -> bool:
    """Whether an elastic run goes on without the node, also where no spare one waits."""
    lost = ending.cause == "host_lost" or policies()[ending.cause].unfit
    return lost and plan.supervision.elastic_min_nodes > 0


def _fitted(run_dir: Path, plan: Plan, nodes: Nodes, why: str) -> tuple[Plan, Nodes]:
    """The plan, and the nodes that it takes: an elastic run is planned anew for those that are left.

    A job that starts again may have as many as the first again.

    Raises:
        NoPlanError: nothing can be planned for them.
    """
    if not plan.supervision.elastic_min_nodes:
        return plan, nodes
    left = sum(name not in nodes.bad for name in nodes.all)
    most = min(left, launched_nodes(run_dir))
    if most == plan.cluster.nodes:
        return plan, nodes
    work_dir = Path(os.environ["DSLAUNCH_WORK_DIR"])
    request = LaunchRequest(plan, verify(run_dir), run_dir, work_dir, os.environ, wait=False)
    start = planned_for(request, most, why)
    if said := adopt(run_dir, plan, start):
        _say(said)
    return start.plan, replace(nodes, wanted=start.plan.cluster.nodes)


def _earlier(run_dir: Path) -> list[Past]:
    """Attempts that earlier starts of the job ended with: the limits on restarts hold for all together."""
    events = read_events(run_dir)
    begun = max((at for at, each in enumerate(events) if each["kind"] in ("submitted", "resume")), default=0)
    details = [each["details"] for each in events[begun:] if each["kind"] == "attempt_ended"]
    return [Past(each["cause"], each["furthest_step"]) for each in details]


def _rendezvous(plan: Plan, nodes: Nodes, number: int) -> dict[str, str]:
    fixed, job = plan.launcher.master_port, int(os.environ["SLURM_JOB_ID"])
    port = fixed or _FIRST_PORT + (job + _STRIDE * (number - 1)) % _PORTS
    given = os.environ.get("DSLAUNCH_MASTER_PORT", "")
    return {
        "DSLAUNCH_NODES": "\n".join(nodes.chosen),
        "MASTER_ADDR": nodes.chosen[0],
        "MASTER_PORT": given or str(port),
    }


def _step(argv: Sequence[str], run_dir: Path, number: int, nodes: Nodes) -> Execute:
    """srun on the chosen nodes; `argv` begins with `srun`, and may name the first nodes that were chosen."""
    logs = logs_of(run_dir, number)
    logs.mkdir(parents=True, exist_ok=True)
    words = _over_components(argv, nodes) if nodes.components else _over_nodes(argv, run_dir, nodes)
    return Execute(words, Path.cwd(), {}, logs / LOG)


def _over_components(argv: Sequence[str], nodes: Nodes) -> tuple[str, ...]:
    """As it stands: every component's nodes are all used."""
    if not nodes.overlapping:
        return tuple(argv)
    # After the option that names each component, whose first it is.
    each = ((word, "--overlap") if word.startswith("--het-group=") else (word,) for word in argv)
    return tuple(word for words in each for word in words)


def _over_nodes(argv: Sequence[str], run_dir: Path, nodes: Nodes) -> tuple[str, ...]:
    options = [word for word in argv[1:] if not word.startswith(("--nodelist=", "--nodes=", "--ntasks="))]
    # Without --ntasks srun takes SLURM_NTASKS, which counts the nodes that the job began with.
    shape = [f"--nodes={len(nodes.chosen)}", f"--ntasks={len(nodes.chosen) * _per_node(options)}"]
    if _ARBITRARY in options:
        _write_order(options, run_dir, nodes)
    else:
        shape = [f"--nodelist={','.join(nodes.chosen)}", *shape]
    ours = [*shape, *(["--overlap"] if nodes.overlapping else [])]
    return (argv[0], *ours, *options)


def _write_order(options: Sequence[str], run_dir: Path, nodes: Nodes) -> None:
    """RUN/job.hosts, which job.sbatch names in SLURM_HOSTFILE: the node of each task, a line each."""
    write_file(run_dir / ORDER, "".join(f"{name}\n" * _per_node(options) for name in nodes.chosen))


def _per_node(options: Sequence[str]) -> int:
    """Tasks of a node."""
    return next(int(word.partition("=")[2]) for word in options if word.startswith("--ntasks-per-node="))


def _by_slurm(attempt: Attempt, ending: Ending, job: str) -> Ending:
    """What SLURM itself says of the end: a node that failed, or why it sent the job a signal."""
    if attempt.ended.stopped_by:
        return _by_signal(ending, job)
    lines = attempt.log.read_text(encoding="utf-8", errors="replace").splitlines()
    found = next((match for line in lines if (match := _NODE_FAILURE.search(line))), None)
    if found is None:
        return ending
    return Ending("host_lost", (Evidence("SLURM", found[0]),), None, found[1])


def _by_signal(ending: Ending, job: str) -> Ending:
    """scancel's, which is the user's, or SLURM's own: a preemption, the time limit."""
    try:
        state = ask(job).state
    except LaunchError:
        return ending
    if state == "CANCELLED":
        return ending
    return Ending("preempted", (Evidence("SLURM", f"ends job {job}, whose state is {state}"),), None, "")


def _within_job(decision: Decision) -> Decision:
    """`requeue` is job.sbatch's to do, once this process has ended."""
    return replace(decision, wait_s=0.0) if decision.action == "requeue" else decision


def _give_up(run_dir: Path, ending: Ending, decision: Decision, attempt: Attempt, outside: Notifier) -> int:
    never = policies()[ending.cause].action == "stop" and ending.cause != "user"
    _say(
        f"the step failed ({ending.cause}): {ending.why}. {decision.why}. Next: {policies()[ending.cause].next}"
    )
    return _verdict(run_dir, "refused" if never else "failed", attempt, outside)


def _verdict(run_dir: Path, outcome: str, attempt: Attempt, outside: Notifier) -> int:
    status = 0 if outcome == "finished" else attempt.exit_status or 1
    if outcome == "finished":
        outside.tell("finished", "finished", step=attempt.furthest)
    outside.write(up=False, now=True)
    outside.tracker.end(succeeded=outcome == "finished")
    write_file(run_dir / VERDICT, f"{outcome} {status}\n")
    return status


def _say(message: str) -> None:
    print(f"job.sbatch: {message}", file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> int:
    """Returns the exit status of the rank that failed first, 0 where the run succeeded."""
    try:
        return supervise_job(argv, own_job(os.environ), Path(os.environ["DSLAUNCH_RUN_DIR"]))
    except DslaunchError as error:
        _say(str(error))
        return error.status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
