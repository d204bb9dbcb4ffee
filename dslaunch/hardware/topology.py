"""Which link joins the members of a group. Ranks fill nodes in order."""

from __future__ import annotations

from dslaunch.schema.cluster import Cluster, Link


def tensor_domain(cluster: Cluster) -> int:
    """GPUs within which a tensor-parallel group must stay: the NVLink domain; a node where there is none."""
    domain = cluster.node.nvlink_domain
    return (
        cluster.slots
        if domain <= 1
        else min(domain, cluster.slots)
        if domain <= cluster.node.gpus
        else domain
    )


def group_link(cluster: Cluster, span: int) -> Link:
    """The slowest link inside a group whose first and last rank are `span` - 1 ranks apart."""
    fast = max(cluster.slots, tensor_domain(cluster))
    if span <= fast or cluster.network is None:
        return cluster.intra
    return cluster.network


def describe(cluster: Cluster) -> str:
    """The reading of the cluster's size, such as `64 GPUs = 8 nodes x 8 A100-SXM4-80GB`."""
    if cluster.gpu.accelerator == "cpu":
        return f"{cluster.world_size} processes on {'this machine' if cluster.local else 'CPUs'}"
    nodes = f"{cluster.node_count} node{'s' if cluster.node_count > 1 else ''}"
    return f"{cluster.world_size} GPUs = {nodes} x {cluster.slots} {cluster.gpu.name}"
