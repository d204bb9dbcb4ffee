"""The small collective: run on all ranks, and judged against what the cluster's file promises."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from dslaunch.preflight.asking import program, run_python
from dslaunch.preflight.collective import MARK
from dslaunch.preflight.facts import Host
from dslaunch.preflight.target import Hit, Target
from dslaunch.remote import Answer

_GPU_BYTES, _CPU_BYTES = 2**26, 2**22
"""Of the message: large enough for a bandwidth, small enough for a second."""
_GB = 1e9
_ROUNDS = 32
"""Hosts that each host is measured with at most, where the whole is slow."""
_SLOW_PAIR = 0.5
"""Share of what is usual between hosts that are in order: the median of the faster half of all pairs."""
_NAMED_WAYS = 20
"""Single slow ways that are named; the slowest first."""
_SPARE_S = 3.0
_SYMPTOM = re.compile(
    r"timed? ?out|Connection (reset|closed|refused)|closed by peer|no answer|ended by signal", re.IGNORECASE
)
"""What a rank says when another one is the reason."""


@dataclass(frozen=True)
class Measured:
    hits: tuple[Hit, ...] = ()
    sentences: tuple[str, ...] = ()
    within_bytes_per_s: float | None = None
    """Bus bandwidth of the slowest host's own ranks."""
    across_bytes_per_s: float | None = None
    """Of all ranks."""


def measure(hosts: Sequence[Host], target: Target, limit_s: float) -> Measured:
    """Run the collective on `hosts`, which answered and are in order, within `limit_s` seconds."""
    part = replace(target, hosts=tuple(host.name for host in hosts))
    request = {
        "hosts": part.hosts,
        "ranks": part.plan.cluster.gpus_per_node,
        "backend": "nccl" if part.gpus else "gloo",
        "bytes": _GPU_BYTES if part.gpus else _CPU_BYTES,
        "address": master_address(hosts),
        "port": part.port or hosts[0].said["port"]["free"],
        "slow_below": _across_promise(part) * part.preflight.bandwidth_fraction,
        "rounds": _ROUNDS,
        "deadline_s": max(1.0, limit_s - _SPARE_S),
        "env": part.preflight.env,
        "env_defaults": part.preflight.env_defaults,
    }
    answers = run_python(part, program("collective.py", request), limit_s)
    said = {name: _ranks(answers[name]) for name in part.hosts}
    return judge_collective(said, part)


def master_address(hosts: Sequence[Host]) -> str:
    """The first host's IPv4 address: as the others know it by its name, or else its own that is no loopback."""
    master = hosts[0]
    if len(hosts) == 1:
        return "127.0.0.1"
    known = [address for host in hosts[1:] for address in host.said.get("names", {}).get("master", [])]
    own = list(master.system["addresses"].values())
    usable = [each for each in (*known, *own) if ":" not in each and not each.startswith("127.")]
    address: str = usable[0] if usable else own[0]
    return address


def _across_promise(target: Target) -> float:
    """Bus bandwidth of all ranks, bytes/s: that of a node's own links, or of all its ways to other nodes together,
    whichever is less (as dslaunch.hardware.collectives.ring). 0: nothing was promised."""
    wanted, ranks = target.preflight, target.plan.cluster.gpus_per_node
    far = wanted.network_gb_per_s * ranks
    return (min(far, wanted.intra_gb_per_s) if ranks > 1 else far) * _GB


def _ranks(answer: Answer) -> list[dict[str, Any]]:
    """What the ranks of one host say."""
    at = answer.out.rfind(MARK)
    if at < 0:
        return [{"error": answer.why}]
    found: list[dict[str, Any]] = json.loads(answer.out[at + len(MARK) :].splitlines()[0])["ranks"]
    return found


def _failures(said: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[Hit]:
    """Hosts whose ranks failed by themselves; where all only waited for one another, the first that did."""
    errors = {host: [rank["error"] for rank in ranks if "error" in rank] for host, ranks in said.items()}
    own = {host: [each for each in found if not _SYMPTOM.search(each)] for host, found in errors.items()}
    if any(own.values()):
        yield from (Hit("collective.failed", host, found[0]) for host, found in own.items() if found)
    elif waiting := [(host, found[0]) for host, found in errors.items() if found]:
        yield Hit("collective.failed", *waiting[0])


def judge_collective(said: Mapping[str, Sequence[Mapping[str, Any]]], target: Target) -> Measured:
    """What the ranks of each host say, in findings and sentences."""
    if failures := tuple(_failures(said)):
        return Measured(failures)
    hits: list[Hit] = []
    for host, ranks in said.items():
        if any(not rank["within"]["right"] for rank in ranks if "within" in rank):
            hits.append(Hit("collective.wrong", host, "all_reduce of this host's own ranks"))
        elif any(not rank["across"]["right"] for rank in ranks if "across" in rank):
            hits.append(Hit("collective.wrong", host, "all_reduce over all ranks"))
    within = {host: value for host, ranks in said.items() if (value := _bandwidth(ranks, "within"))}
    across = [value for ranks in said.values() if (value := _bandwidth(ranks, "across"))]
    hits += _slow_within(within, target)
    sentences = _sentences(within, across, target)
    if across and min(across) < target.preflight.bandwidth_fraction * _across_promise(target):
        pairs = {host: dict(map(tuple, ranks[0].get("pairs", []))) for host, ranks in said.items()}
        slow, said_of_pairs = _slow_pairs(pairs, target.hosts)
        promise = _across_promise(target) / _GB
        hits.append(Hit("collective.slow", "all hosts", f"{min(across) / _GB:.2f} of {promise:g} GB/s"))
        hits += slow
        sentences += said_of_pairs
    slowest = min(within.values(), default=None)
    return Measured(tuple(hits), tuple(sentences), slowest, min(across, default=None))


def _bandwidth(ranks: Sequence[Mapping[str, Any]], part: str) -> float:
    """The slowest rank's bytes/s; 0 where there was nothing to measure."""
    return min((rank[part]["bytes_per_s"] for rank in ranks if part in rank), default=0.0)


def _slow_within(within: Mapping[str, float], target: Target) -> Iterator[Hit]:
    wanted = target.preflight
    if target.plan.cluster.local:
        return
    for host, found in within.items():
        if found < wanted.bandwidth_fraction * wanted.intra_gb_per_s * _GB:
            promise = f"{wanted.intra_gb_per_s:g} GB/s"
            yield Hit("collective.slow", host, f"its own ranks: {found / _GB:.2f} of {promise}")


def _sentences(within: Mapping[str, float], across: Sequence[float], target: Target) -> list[str]:
    wanted, kind = target.preflight, "NCCL" if target.gpus else "Gloo"
    found = []
    if within:
        promise = "" if target.plan.cluster.local else f", promised {wanted.intra_gb_per_s:g}"
        found.append(f"all_reduce ({kind}) within a host: {min(within.values()) / _GB:.2f} GB/s at least{promise}")
    if across:
        promise = f"promised {_across_promise(target) / _GB:g}"
        found.append(f"all_reduce ({kind}) over all ranks: {min(across) / _GB:.2f} GB/s, {promise}")
    return found


def _slow_pairs(pairs: Mapping[str, Mapping[int, float]], hosts: Sequence[str]) -> tuple[list[Hit], list[str]]:
    """Hosts that are slow even with their best partner, and single slow ways between hosts that are not."""
    every = sorted(value for found in pairs.values() for value in found.values())
    if not every:
        return [], []
    usual = median(every[len(every) // 2 :])
    best = {host: max(found.values()) for host, found in pairs.items() if found}
    slow = [host for host, value in best.items() if value < _SLOW_PAIR * usual]
    is_usual = f"{usual / _GB:.3f} is usual"
    hits = [
        Hit("collective.pair", host, f"{best[host] / _GB:.3f} GB/s with other hosts at best; {is_usual}")
        for host in slow
    ]
    ways = [
        (value, host, hosts[other])
        for host, found in pairs.items()
        for other, value in found.items()
        if value < _SLOW_PAIR * usual and hosts.index(host) < other and not {host, hosts[other]} & set(slow)
    ]
    for value, host, other in sorted(ways)[:_NAMED_WAYS]:
        hits.append(Hit("collective.pair", host, f"{value / _GB:.3f} GB/s with {other}"))
    each = max(len(found) for found in pairs.values())
    return hits, [f"pairs: each host was measured with {each} of the {len(hosts) - 1} others"]
