"""Elastic runs over ssh: before each start the hosts are asked, and the run is planned anew for those that answer.

Hosts that are left over, because nothing divides the global batch so, wait as spare ones do; a host that answers
again comes back with the next start.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dslaunch.launch import ssh
from dslaunch.launch.hosts import every_host_word
from dslaunch.launch.link import LinkError, connect, preamble
from dslaunch.launch.remote_job import RemoteJob
from dslaunch.launch.replan import NoPlanError, Replanned, layout_words, replan
from dslaunch.launch.request import LaunchRequest
from dslaunch.launch.steps import Execute
from dslaunch.launch.universal import saved_by_deepspeed
from dslaunch.planfile import Plan, plan_from_json
from dslaunch.render.blueprint import BLUEPRINT, read_blueprint
from dslaunch.run.folder import verify
from dslaunch.run.generations import begin_generation, first_files
from dslaunch.run.state import append_event, read_state

_ANSWER_LIMIT_S = 30.0
"""For a host to answer; ssh itself gives up after 20."""


@dataclass(frozen=True)
class Fleet:
    """Every host that a run may use."""

    words: tuple[str, ...]
    """HOST=DEVICES: those of the launch in rank order, and the spare ones."""
    wanted: int
    """Nodes of the plan that was launched."""

    def usable(self, silent: Iterable[str], unfit: Iterable[str], suspect: str) -> tuple[str, ...]:
        """The words that a start may use, in the fleet's order.

        Args:
            suspect: the host where the last attempt's end began. It comes last: it is used where nobody else is
                there.
        """
        left_out = {*silent, *unfit}
        fit = [word for word in self.words if name_of(word) not in left_out]
        return tuple(sorted(fit, key=lambda word: name_of(word) == suspect))


@dataclass(frozen=True)
class Start:
    """What the next attempt starts."""

    plan: Plan
    words: tuple[str, ...]
    """HOST=DEVICES in rank order."""
    idle: tuple[str, ...] = ()
    """Hosts that answered and are not used."""
    replanned: Replanned | None = None
    """None where the plan is the one before."""
    why: str = ""
    """Why it is not what it was before, in words; empty where it is."""


def fleet_of(run_dir: Path, environ: Mapping[str, str]) -> Fleet:
    """The fleet of the run's launch, its hostfile read again.

    Raises:
        ConfigError: the launch's files changed, or its hosts cannot be read.
    """
    files = first_files(run_dir)
    plan = plan_from_json(files["plan.json"], str(run_dir / "plan.json"))
    request = LaunchRequest(plan, files, run_dir, Path(read_state(run_dir).work_dir), environ, wait=False)
    named = every_host_word(request)
    spares = tuple(f"{host}=" for host in plan.supervision.spares if f"{host}=" not in named)
    return Fleet((*named, *spares), plan.cluster.nodes)


def next_start(
    request: LaunchRequest, fleet: Fleet, words: Sequence[str], unfit: Iterable[str] = (), suspect: str = ""
) -> Start:
    """Ask the hosts, and plan for those that answer, where their number is another.

    Args:
        request: of the attempt to come, with the plan and the files of the one before.
        words: HOST=DEVICES of the attempt before.

    Raises:
        NoPlanError: fewer than restart.min_nodes answer, or nothing can be planned for them.
        ConfigError: blueprint.json cannot be read.
    """
    silent = asyncio.run(_silent(request, [name_of(word) for word in fleet.words]))
    usable = fleet.usable(silent, unfit, suspect)
    left_out = [*(f"{host}: {said}" for host, said in silent.items()), *(f"{host}: unfit" for host in unfit)]
    why = "; ".join(left_out) or f"{len(usable)} hosts answer"
    least = request.plan.supervision.elastic_min_nodes
    if len(usable) < least:
        found = f"{len(usable)} of {len(fleet.words)} hosts can be used"
        raise NoPlanError(f"{found}, restart.min_nodes is {least}: {why}")
    most = min(len(usable), fleet.wanted)
    names = [name_of(word) for word in usable[:most]]
    made = None if most == request.plan.cluster.nodes else replanned(request, most, names)
    plan = made.plan if made else request.plan
    nodes = plan.cluster.nodes
    same = nodes == request.plan.cluster.nodes
    taken, idle = usable[:nodes], tuple(map(name_of, usable[nodes:]))
    why = "" if same and set(taken) == set(words) else why
    return Start(request.plan if same else plan, taken, idle, None if same else made, why)


def replanned(request: LaunchRequest, most: int, hosts: Sequence[str] = ()) -> Replanned:
    """The run's plan for at most so many nodes; `hosts` as `replan` takes them, and its errors."""
    blueprint = read_blueprint(request.files[BLUEPRINT], str(request.run_dir / BLUEPRINT))
    least = request.plan.supervision.elastic_min_nodes
    saved = saved_by_deepspeed(request.plan, request.run_dir, str(request.work_dir))
    return replan(
        blueprint, request.plan, most, least, hosts, request.work_dir, zero_saved=saved is not None
    )


def adopt(run_dir: Path, before: Plan, start: Start) -> str:
    """Make a new plan the run's own: its files, and the event that says so. Returns what there is to say."""
    made = start.replanned
    if made is None:
        return f"the hosts are {', '.join(map(name_of, start.words))}: {start.why}" if start.why else ""
    number = begin_generation(run_dir, made.files)
    old, new = layout_words(before), layout_words(made.plan)
    append_event(
        run_dir, "replanned", generation=number, why=start.why, before=old, after=new,
        nodes=made.plan.cluster.nodes, world_size=made.plan.world_size, strategy=made.plan.strategy,
        hosts=list(made.plan.cluster.hosts), idle=list(start.idle), refused=list(made.refused),
    )  # fmt: skip
    idle = f"; {', '.join(start.idle)} wait" if start.idle else ""
    refused = f" ({made.refused[0].splitlines()[0]})" if start.idle and made.refused else ""
    return f"planned anew, generation {number}: {new}; before: {old}{idle}{refused}; {start.why}"


class Elastic:
    """The hosts of a supervised run from start to start."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._fleet = fleet_of(run_dir, os.environ)
        self._unfit: set[str] = set()

    def turn(
        self, plan: Plan, words: Sequence[str], suspect: str, attempt: int, *, unfit: bool
    ) -> tuple[Start, Execute, str]:
        """The next start, its step, and what to say of it, its files in place; raises like `next_start`.

        Args:
            plan, words: of the attempt before.
            suspect: the host where that ended; empty where it is not known.
            attempt: the number of the attempt to come.
            unfit: `suspect` is no good, though it may answer.
        """
        if unfit and suspect:
            self._unfit.add(suspect)
        folder, work_dir = self._run_dir, Path(read_state(self._run_dir).work_dir)
        files = verify(folder)
        request = LaunchRequest(plan, files, folder, work_dir, os.environ, wait=False, attempt=attempt)
        start = next_start(request, self._fleet, words, sorted(self._unfit), suspect)
        said = adopt(self._run_dir, plan, start)
        return start, executed(on_hosts(request, start), start.words), said


def resumed(request: LaunchRequest, launcher: str, nodes: int) -> tuple[Start, LaunchRequest]:
    """What a resume starts, and the request for it; raises like `next_start`.

    Args:
        request: with the plan and the files that the run had last.
        nodes: at most so many; 0: as many as the launch had, or that the allocation has.
    """
    if launcher == "ssh":
        fleet = fleet_of(request.run_dir, request.environ)
        words = [f"{host}=" for host in request.plan.cluster.hosts]
        start = next_start(request, replace(fleet, wanted=nodes or fleet.wanted), words)
        return start, on_hosts(request, start)
    given = request.environ.get("SLURM_JOB_NUM_NODES", "") if request.inside_allocation else ""
    most = nodes or int(given or launched_nodes(request.run_dir))
    start = planned_for(request, most, f"{most} nodes are asked for")
    files = start.replanned.files if start.replanned else request.files
    return start, replace(request, plan=start.plan, files=files)


def planned_for(request: LaunchRequest, most: int, why: str) -> Start:
    """A start on at most so many nodes, which the scheduler names; raises NoPlanError where there is none."""
    made = None if most == request.plan.cluster.nodes else replanned(request, most)
    if made is None or made.plan.cluster.nodes == request.plan.cluster.nodes:
        return Start(request.plan, ())
    return Start(made.plan, (), replanned=made, why=why)


def launched_nodes(run_dir: Path) -> int:
    """Nodes of the plan that was launched."""
    return plan_from_json(first_files(run_dir)["plan.json"], str(run_dir / "plan.json")).cluster.nodes


def on_hosts(request: LaunchRequest, start: Start) -> LaunchRequest:
    """The request for a start on its hosts and no others, whatever a hostfile says."""
    files = start.replanned.files if start.replanned else request.files
    launcher = replace(start.plan.launcher, hostfile="", hosts_command="", include="", exclude="")
    lines = "".join(f"{name_of(word)} slots={start.plan.cluster.gpus_per_node}\n" for word in start.words)
    return replace(request, plan=replace(start.plan, launcher=launcher), files={**files, "hostfile": lines})


def executed(request: LaunchRequest, words: Sequence[str]) -> Execute:
    """The step that starts the request's plan on these hosts."""
    (step,) = ssh.prepare(request)
    assert isinstance(step, Execute)
    return replace(step, env={**step.env, "DSLAUNCH_HOSTS": " ".join(words)})


def name_of(word: str) -> str:
    """The host of HOST=DEVICES."""
    return word.partition("=")[0]


async def _silent(request: LaunchRequest, hosts: Sequence[str]) -> dict[str, str]:
    """The hosts that no rank could be started on, each with what it says."""
    variables = {**os.environ, **request.variables(local_python=False), "DSLAUNCH_RUNNER": "direct"}
    job = RemoteJob.read({**variables, "DSLAUNCH_HOSTS": " ".join(f"{host}=" for host in hosts)})
    start = preamble(job.variables, job.files["env.sh"])
    limit = asyncio.Semaphore(job.launcher.connections)

    async def one(host: str) -> str:
        try:
            async with limit, asyncio.timeout(_ANSWER_LIMIT_S):
                link = await connect(host, start, job.launcher.lost_after_s)
                await link.close()
        except LinkError as error:
            return str(error)
        except TimeoutError:
            return f"no answer within {_ANSWER_LIMIT_S:.0f} s"
        return ""

    answers = await asyncio.gather(*map(one, hosts))
    return {host: said for host, said in zip(hosts, answers, strict=True) if said}
