"""What must be the same on all hosts: versions, and the training's code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dslaunch.preflight.catalogue import checks
from dslaunch.preflight.common import most_common
from dslaunch.preflight.facts import Host
from dslaunch.preflight.target import Hit, Target

_NEEDED = {
    "deepspeed": ("torch", "deepspeed"),
    "native": ("torch", "deepspeed"),
    "megatron_deepspeed": ("torch", "deepspeed"),
}
_MISSING = "missing"


def needed(host: Host, target: Target) -> Iterator[Hit]:
    """What the engine imports."""
    if target.container or "software" not in host.said:
        return
    for name in _NEEDED.get(target.plan.engine.name, ("torch",)):
        if name not in host.versions:
            yield Hit("host.package", host.name, f"{name} is not installed for {target.python}")


def programs(host: Host, target: Target) -> Iterator[Hit]:
    """What a profiled rank is started under, on the hosts of such ranks."""
    profiled = {target.hosts[target.plan.cluster.host_of(rank)] for rank in target.plan.profile.ranks}
    if target.container or host.name not in profiled:
        return
    for name, place in host.said.get("software", {}).get("programs", {}).items():
        if place is None:
            yield Hit("host.profiler", host.name, f"{name} is not on the PATH; profile.ranks names ranks here")


def versions(hosts: Sequence[Host], target: Target) -> Iterator[Hit]:
    """Hosts whose version is another one than most have; where none is, than the master has."""
    asked = [host for host in hosts if "software" in host.said]
    if target.container:
        return
    for name in sorted({name for host in asked for name in host.versions}):
        found = {host.name: host.versions.get(name, _MISSING) for host in asked}
        usual = most_common(found)
        check = f"version.{name}" if f"version.{name}" in checks() else "version.package"
        for host, version in found.items():
            if version != usual:
                yield Hit(check, host, f"{name} {version}; {name} {usual} on {_share(found, usual)}")


def _share(found: Mapping[str, str], usual: str) -> str:
    count = sum(version == usual for version in found.values())
    return f"{count} of {len(found)} hosts"


def code(hosts: Sequence[Host], target: Target) -> Iterator[Hit]:
    if not target.script or target.container:
        return
    trees = {host.name: tree for host in hosts if (tree := host.code) is not None}
    for name, tree in trees.items():
        if not tree.digest:
            yield Hit("code.missing", name, target.script)
    there = {name: tree.digest for name, tree in trees.items() if tree.digest}
    if not there:
        return
    usual = most_common(there)
    reference = next(trees[name] for name, digest in there.items() if digest == usual)
    for name, digest in there.items():
        if digest != usual:
            what = _first_difference(trees[name].named, reference.named)
            yield Hit("code.differs", name, f"{what}; the others agree on {_share(there, usual)}")


def _first_difference(found: Mapping[str, str], usual: Mapping[str, str]) -> str:
    """Which file it is, as far as the files are named."""
    different = sorted(name for name in {*found, *usual} if found.get(name) != usual.get(name))
    if not different:
        return "a file below the script's folder differs"
    first = different[0]
    how = "is missing" if first not in found else "is there alone" if first not in usual else "differs"
    more = f" and {len(different) - 1} more" if len(different) > 1 else ""
    return f"{first} {how}{more}"


PER_HOST = (needed, programs)
ACROSS = (versions, code)
