"""Where things go: the checkpoint folder, names and links of the network, the port, locks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dslaunch.preflight.common import most_common
from dslaunch.preflight.facts import Folder, Host
from dslaunch.preflight.target import Hit, Target

_GIB = 2**30
_SHARED = (
    "nfs", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "wekafs", "cifs", "smb", "9p", "virtiofs", "panfs",
    "pvfs2", "orangefs", "afs", "juicefs", "fuse.",
)  # fmt: skip
"""Beginnings of the types of file systems that several hosts share (/proc/mounts)."""
_STALE_LOCK_S = 600.0
"""A build of one extension writes something more often than that."""


def is_shared(folder: Folder) -> bool:
    return folder.kind.startswith(_SHARED)


def checkpoints(host: Host, target: Target) -> Iterator[Hit]:
    folder = host.folders.get("checkpoints")
    if folder is None:
        return
    where, free = f"{folder.path} ({folder.kind} of {folder.source})", folder.space.free
    if folder.fault:
        yield Hit("folder.writable", host.name, f"{where}: {folder.fault}; {_size(free)} free")
        return
    share = 1 if is_shared(folder) else len(target.hosts)
    one = target.preflight.checkpoint_bytes // share
    if free < one:
        yield Hit("folder.full", host.name, f"{where}: {_size(free)} free, a checkpoint takes {_size(one)}")
    elif free < one * target.preflight.checkpoints:
        count = target.preflight.checkpoints
        yield Hit("folder.small", host.name, f"{where}: {_size(free)} free, {count} take {_size(one * count)}")
    if target.several and not is_shared(folder):
        yield Hit("folder.local", host.name, where)


def _size(count: int) -> str:
    return f"{count / _GIB:.1f} GiB" if count >= _GIB / 10 else f"{count / 2**20:.1f} MiB"


def port(host: Host, target: Target) -> Iterator[Hit]:
    if fault := host.said.get("port", {}).get("fault"):
        yield Hit("net.port", host.name, f"port {target.port}: {fault}")


def locks(host: Host, target: Target) -> Iterator[Hit]:
    for lock in host.said.get("locks", ()):
        if lock["quiet_s"] > _STALE_LOCK_S:
            yield Hit("torch.lock", host.name, f"{lock['path']}, untouched for {lock['quiet_s'] / 60:.0f} minutes")


def adapters(host: Host, target: Target) -> Iterator[Hit]:
    if not target.preflight.infiniband:
        return
    for each in host.ports or ():
        if each.layer == "InfiniBand" and not each.up:
            state = f"{each.state}, {each.physical}"
            yield Hit("net.infiniband", host.name, f"{each.adapter} port {each.number}: {state}")


def names(hosts: Sequence[Host], target: Target) -> Iterator[Hit]:
    """Names that are unknown on a host, or mean itself there. Names that no host knows are ssh's own."""
    nowhere = names_of_ssh(hosts, target)
    for host in hosts:
        table = host.said.get("names")
        if not target.several or not table:
            continue
        unknown = target.names if table["none_known"] else table["unknown"]
        if missing := [name for name in unknown if name not in nowhere and name != _name(host)]:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            yield Hit("net.name", host.name, f"{missing[0]}{more}")
        for name, address in table["itself"].items():
            yield Hit("net.name", host.name, f"{name} means {address} there, which is the host itself")
        if table["own"] and all(address.startswith("127.") or address == "::1" for address in table["own"]):
            yield Hit("net.loopback", host.name, f"its own name means {table['own'][0]}")


def names_of_ssh(hosts: Sequence[Host], target: Target) -> tuple[str, ...]:
    """Hosts' names that no other host knows: this machine's ssh alone does."""
    tables = [(_name(host), host.said["names"]) for host in hosts if "names" in host.said]
    return tuple(
        name
        for name in target.names
        if all(own == name or table["none_known"] or name in table["unknown"] for own, table in tables)
    )


def _name(host: Host) -> str:
    return host.name.rpartition("@")[2]


def ethernet(hosts: Sequence[Host], target: Target) -> Iterator[Hit]:
    """Links that are up, and slower than most hosts' link of the same name."""
    for interface in sorted({name for host in hosts for name in host.links}):
        links = {host.name: host.links[interface] for host in hosts if interface in host.links}
        up = {host: link for host, link in links.items() if link.up}
        if not up:
            continue
        usual = float(most_common({host: str(link.gbit_per_s) for host, link in up.items()}))
        for host, link in up.items():
            if link.half_duplex or link.gbit_per_s < usual:
                how = ", half duplex" if link.half_duplex else ""
                found = f"{interface} at {link.gbit_per_s:g} Gbit/s{how}; {usual:g} on most hosts"
                yield Hit("net.ethernet", host, found)


PER_HOST = (checkpoints, port, locks, adapters)
ACROSS = (names, ethernet)
