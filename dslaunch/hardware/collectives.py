"""Seconds of a collective in a group of ranks, by where its members stand."""

from __future__ import annotations

from dslaunch.hardware.efficiency import GpuRates
from dslaunch.hardware.topology import Group, group_link, inside
from dslaunch.schema.cluster import Cluster

_PEER_US = 0.5
"""What each further peer costs in an all-to-all: its sends are posted one after the other."""


def ring(cluster: Cluster, group: Group, moved: float, rates: GpuRates) -> float:
    """A reduce-scatter or all-gather in which every rank sends `moved` bytes to its neighbour, in all its
    steps.

    A ring crosses from node to node once for each network port of its members there, so that `local` members
    use `local` ports together; the groups beside it use the others. Latency is that of size - 1 steps.
    """
    if group.size < 2 or moved <= 0:
        return 0.0
    local = inside(cluster, group)
    near = group_link(cluster, min(local, cluster.slots))
    steps = (group.size - 1) * near.latency_us
    speed = near.gb_per_s * rates.link
    if local < group.size:
        assert cluster.network is not None, "nodes need a network"
        hops = -(-group.size // local)
        steps += hops * (cluster.network.latency_us - near.latency_us)
        far = local * cluster.network.gb_per_s * rates.network
        speed = min(speed, far) if local > 1 else far
    return moved / (speed * 1e9) + steps * 1e-6


def scatter(cluster: Cluster, group: Group, size: float, rates: GpuRates) -> float:
    """A reduce-scatter or an all-gather of `size` bytes in all: each rank moves (n-1)/n of them."""
    return ring(cluster, group, size * (group.size - 1) / group.size, rates)


def exchange(cluster: Cluster, group: Group, size: float, rates: GpuRates, far_share: float = 1.0) -> float:
    """An all-to-all in which a rank has `size` bytes for all members, itself included, in equal parts.

    Args:
        far_share: part of what is for other nodes that really crosses; less than 1 where tokens for several
            experts of a node are sent once.
    """
    if group.size < 2 or size <= 0:
        return 0.0
    local = inside(cluster, group)
    near = group_link(cluster, min(local, cluster.slots))
    seconds = size * (local - 1) / group.size / (near.gb_per_s * 1e9 * rates.link)
    latency = near.latency_us
    if local < group.size:
        assert cluster.network is not None, "nodes need a network"
        latency = cluster.network.latency_us
        far = size * (group.size - local) / group.size * far_share
        seconds = max(seconds, far / (cluster.network.gb_per_s * 1e9 * rates.network))
    return seconds + (latency + _PEER_US * (group.size - 1)) * 1e-6


def send(cluster: Cluster, stride: int, size: float, rates: GpuRates) -> float:
    """`size` bytes to a rank that stands `stride` further."""
    fast = inside(cluster, Group(2, stride)) == 2
    link = cluster.intra if fast else cluster.network
    assert link is not None, "nodes need a network"
    return size / (link.gb_per_s * 1e9 * (rates.link if fast else rates.network)) + link.latency_us * 1e-6
