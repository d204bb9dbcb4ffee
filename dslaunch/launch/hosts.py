"""Which hosts and which of their GPUs a launch uses: a hostfile, cluster.hosts or a command's output, filtered.

include and exclude are in DeepSpeed's grammar (deepspeed/launcher/runner.py, parse_resource_filter, 0.19.8):
HOST[:SLOT[,SLOT...]], several joined by @. A host that stands twice gets the slots of both.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from dslaunch.errors import ConfigError, listed
from dslaunch.hosts import leaf_of
from dslaunch.launch.hostfile import check_hosts, check_unequal, parse_hostfile
from dslaunch.launch.request import LaunchRequest
from dslaunch.planfile import Plan

_COMMAND_LIMIT_S = 60.0
Slots = dict[str, tuple[int, ...]]
"""Numbers of GPUs by host, in rank order."""


def hosts_of(request: LaunchRequest) -> tuple[str, ...]:
    """Names of the hosts, in rank order; raises ConfigError like `slots_of`."""
    return tuple(slots_of(request))


def host_words(request: LaunchRequest) -> str:
    """DSLAUNCH_HOSTS, as dslaunch.launch.remote_job reads it; GPUs are named where not the first ones are used."""
    return " ".join(_words(slots_of(request), request.plan))


def every_host_word(request: LaunchRequest) -> tuple[str, ...]:
    """The same words of all hosts that are named and have the GPUs, however many the plan is for.

    Raises:
        ConfigError: no host is named, or they cannot be read.
    """
    text, where = _text(request)
    slots, per_node = _chosen(request.plan, text, where), request.plan.cluster.gpus_per_node
    return _words({host: each for host, each in slots.items() if len(each) >= per_node}, request.plan)


def _words(hosts: Slots, plan: Plan) -> tuple[str, ...]:
    counts = plan.cluster.slots or (plan.cluster.gpus_per_node,) * len(hosts)
    return tuple(
        f"{host}={'' if slots[:count] == tuple(range(count)) else ','.join(map(str, slots[:count]))}"
        for (host, slots), count in zip(hosts.items(), counts, strict=True)
    )


def slots_of(request: LaunchRequest) -> Slots:
    """The hosts of a launch, in rank order, and their GPUs.

    Raises:
        ConfigError: no host is named, they cannot be read, or they do not fit the plan.
    """
    text, where = _text(request)
    return fitting(request.plan, text, where)


def fitting(plan: Plan, text: str, where: str) -> Slots:
    """The hosts of a hostfile that the launcher takes; raises ConfigError where they do not fit the plan."""
    launcher, cluster = plan.launcher, plan.cluster
    slots = _chosen(plan, text, where)
    chosen = f"{where} with launcher.{'include' if launcher.include else 'exclude'}"
    where = chosen if launcher.include or launcher.exclude else where
    counts = {host: len(each) for host, each in slots.items()}
    if cluster.slots:
        check_unequal(counts, cluster.slots, where)
    else:
        check_hosts(counts, cluster.nodes, cluster.gpus_per_node, where)
    return slots


def _chosen(plan: Plan, text: str, where: str) -> Slots:
    """The hosts of a hostfile that include and exclude leave, in rank order.

    Those of one leaf switch come after one another; where the plan's hosts are unequal, the largest come first.
    """
    hosts = parse_hostfile(text, where, plan.cluster.gpu)
    slots = {host: tuple(range(count)) for host, count in hosts.items()}
    kept, leaves = filtered(slots, plan.launcher.include, plan.launcher.exclude), leaf_of(plan.cluster.switches)
    last = len(plan.cluster.switches)
    order = sorted(kept, key=lambda name: leaves.get(name.split("@")[-1], last))
    if plan.cluster.slots:
        order.sort(key=lambda name: -len(kept[name]))
    return {host: kept[host] for host in order}


def filtered(hosts: Mapping[str, Sequence[int]], include: str, exclude: str) -> Slots:
    """What is left of `hosts`; raises ConfigError for a host or GPU that is not among them."""
    key, text = ("include", include) if include else ("exclude", exclude)
    named = _specification(hosts, key, text) if text else {}
    kept: Slots = {}
    for host, slots in hosts.items():
        if include:
            kept[host] = named.get(host, ())
        else:
            kept[host] = tuple(slot for slot in slots if slot not in named.get(host, ()))
    return {host: slots for host, slots in kept.items() if slots}


def _specification(hosts: Mapping[str, Sequence[int]], key: str, text: str) -> Slots:
    named: Slots = {}
    for word in text.split("@"):
        host, colon, rest = word.partition(":")
        if host not in hosts:
            raise ConfigError(
                f"launcher.{key}: {host!r} is not among the hosts {listed(hosts, limit=8)}. Write HOST or "
                "HOST:GPU,GPU, several joined by @"
            )
        slots = _numbers(key, word, rest) if colon else tuple(hosts[host])
        missing = [slot for slot in slots if slot not in hosts[host]]
        if missing:
            raise ConfigError(
                f"launcher.{key}: {host} has no GPU {missing[0]}; it has {listed(hosts[host], limit=16)}"
            )
        named[host] = tuple(sorted({*named.get(host, ()), *slots}))
    return named


def _numbers(key: str, word: str, text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if wrong := [part for part in parts if not part.strip().isdecimal()]:
        raise ConfigError(f"launcher.{key}: {word!r} names {wrong[0]!r} where a GPU's number belongs, such as 0,2")
    return tuple(int(part) for part in parts)


def _text(request: LaunchRequest) -> tuple[str, str]:
    """A hostfile's text, and what to call it in a message."""
    launcher = request.plan.launcher
    if launcher.hosts_command:
        return _answer(request, launcher.hosts_command), "launcher.hosts_command"
    if not launcher.hostfile:
        if "hostfile" not in request.files:
            raise ConfigError(
                f"launcher.name={launcher.name}: no host is named. Give launcher.hostfile=FILE (lines of "
                "`HOST slots=N`), launcher.hosts_command=COMMAND, or cluster.hosts=[HOST,...] when the "
                "files are rendered"
            )
        return request.files["hostfile"], "hostfile"
    try:
        return Path(request.hostfile).read_text(encoding="utf-8"), launcher.hostfile
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"launcher.hostfile: {request.hostfile} cannot be read: {error}. Its lines are `HOST slots=N`"
        ) from error


def _answer(request: LaunchRequest, command: str) -> str:
    """What the command prints: lines of a hostfile, or names of hosts alone, which have the plan's GPUs."""
    try:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=request.work_dir,
            env=dict(request.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_COMMAND_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"launcher.hosts_command: `{command}` gives no answer within {_COMMAND_LIMIT_S:.0f} s. Run it by hand"
        ) from error
    if done.returncode:
        said = done.stderr.strip() or "nothing is said about it"
        raise ConfigError(
            f"launcher.hosts_command: `{command}` exits {done.returncode}: {said}. Run it by hand"
        )
    slots = request.plan.cluster.gpus_per_node
    lines = [line.strip() for line in done.stdout.splitlines()]
    return "".join(f"{line} slots={slots}\n" if len(line.split()) == 1 else f"{line}\n" for line in lines)
