"""DeepSpeed's hostfile, by the grammar of deepspeed/launcher/runner.py (_parse_hostfile, 0.19.8).

A line is `HOST slots=N`; what follows the digits is not read by DeepSpeed, and `type=GPU` there is dslaunch's own.
Blank lines and lines that begin with # are left out.
"""

from __future__ import annotations

import re

from dslaunch.errors import ConfigError
from dslaunch.hosts import HOST_FIX, is_host

_LINE = re.compile(r"^(\S+)\s+slots=(\d+)(?:\s.*?\btype=([^\s#]+))?")


def parse_hostfile(text: str, where: str, gpu: str = "") -> dict[str, int]:
    """Slots by host, in rank order.

    Args:
        gpu: the plan's GPU, such as A100-SXM4-80GB: a host whose `type=` is not how that begins is refused.

    Raises:
        ConfigError: a bad line, no name of a host, a host named twice, another type, or no host at all; `where`
            names the file.
    """
    hosts: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        entry = line.strip()
        if not entry or entry.startswith("#"):
            continue
        match = _LINE.search(entry)
        if not match:
            raise ConfigError(f"{where}:{number}: {entry!r} is no line of a hostfile. Write `HOST slots=N`")
        host, slots = match.group(1), int(match.group(2))
        if not is_host(host):
            raise ConfigError(f"{where}:{number}: {host!r} is no host name. {HOST_FIX}")
        kind = match.group(3) or ""
        if gpu and not gpu.lower().startswith(kind.lower()):
            raise ConfigError(
                f"{where}:{number}: {host} has type={kind}, but the plan is for {gpu}. Leave that host out of the "
                f"file, or plan for such GPUs: cluster=NODESxGPUSx{kind}"
            )
        if host in hosts:
            raise ConfigError(f"{where}:{number}: host {host} stands here for the second time. Name it once")
        hosts[host] = slots
    if not hosts:
        raise ConfigError(
            f"{where}: names no host. Write one line a node, `HOST slots=N`, or list the nodes in cluster.hosts"
        )
    return hosts


def check_hosts(hosts: dict[str, int], nodes: int, gpus_per_node: int, where: str) -> None:
    """Hosts against the planned cluster.

    Raises:
        ConfigError: another number of hosts than nodes, or fewer slots than GPUs per node.
    """
    if len(hosts) != nodes:
        raise ConfigError(
            f"{where}: names {len(hosts)} hosts, but the plan has {nodes} nodes of {gpus_per_node} GPUs. "
            f"Give a hostfile of {nodes} hosts, or plan for these: cluster={len(hosts)}x{gpus_per_node}xTYPE"
        )
    for host, slots in hosts.items():
        if slots < gpus_per_node:
            raise ConfigError(
                f"{where}: {host} has slots={slots}, but the plan uses {gpus_per_node} GPUs on each node. "
                f"{_fix(host, hosts, gpus_per_node)}"
            )


def _fix(host: str, hosts: dict[str, int], gpus_per_node: int) -> str:
    """What to do about a host with too few slots."""
    fewer = f"for fewer: cluster={len(hosts)}x{hosts[host]}xTYPE"
    counts = sorted(hosts.values(), reverse=True)
    if counts[0] < gpus_per_node or counts[0] == counts[-1]:
        return f"Write slots={gpus_per_node}, or plan {fewer}"
    kinds = ", ".join(f"{{nodes: {counts.count(slots)}, gpus: {slots}}}" for slots in dict.fromkeys(counts))
    return f"Plan for the hosts as they are, cluster=TYPE cluster.mixed=[{kinds}], or {fewer}"


def check_unequal(hosts: dict[str, int], slots: tuple[int, ...], where: str) -> None:
    """Hosts, the largest first, against a plan for unequal ones.

    Raises:
        ConfigError: another number of hosts, or one with fewer slots than the plan uses there.
    """
    found = tuple(hosts.values())
    if len(found) != len(slots) or any(has < used for has, used in zip(found, slots, strict=True)):
        raise ConfigError(
            f"{where}: its hosts have {', '.join(map(str, found))} slots, but the plan (cluster.mixed) is for "
            f"{', '.join(map(str, slots))}: {sum(found)} and {sum(slots)} GPUs. Name such hosts, or plan for these"
        )
