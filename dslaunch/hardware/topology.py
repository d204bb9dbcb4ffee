"""Which link joins the members of a group. Ranks fill nodes in order, and nodes fill NVLink domains."""

from __future__ import annotations

from dataclasses import dataclass

from dslaunch.schema.cluster import Cluster, Link


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: `size` of them, `stride` ranks apart."""

    size: int
    stride: int = 1

    @property
    def span(self) -> int:
        """Ranks from the first to the last."""
        return (self.size - 1) * self.stride + 1


def tensor_domain(cluster: Cluster) -> int:
    """GPUs within which a tensor-parallel group must stay: the NVLink domain; a node where there is none.

    A domain that spans nodes (72 GPUs in 18 nodes of GB200) counts the GPUs used in each of them, and no more
    than the cluster has.
    """
    domain, node = cluster.node.nvlink_domain, cluster.node.gpus
    if domain <= 1:
        return cluster.slots
    if domain <= node:
        return min(domain, cluster.slots)
    return min(domain // node * cluster.slots, cluster.world_size)


def group_link(cluster: Cluster, span: int) -> Link:
    """The slowest link inside a group whose first and last rank are `span` - 1 ranks apart.

    Where links run from GPU to GPU, a group of n uses n - 1 of a GPU's links, and the others lie idle.
    """
    fast = max(cluster.slots, tensor_domain(cluster))
    if span > fast and cluster.network is not None:
        return cluster.network
    link = cluster.intra
    if link.peer_gb_per_s is None or span < 2:
        return link
    return link.model_copy(update={"gb_per_s": min(link.gb_per_s, (span - 1) * link.peer_gb_per_s)})


def inside(cluster: Cluster, group: Group) -> int:
    """Members of the group that share a fast domain with one of them, itself included."""
    fast = max(cluster.slots, tensor_domain(cluster))
    return max(1, min(group.size, -(-fast // group.stride)))


def describe(cluster: Cluster) -> str:
    """The reading of the cluster's size, such as `64 GPUs = 8 nodes x 8 A100-SXM4-80GB`."""
    if cluster.gpu.accelerator == "cpu":
        return f"{_counted(cluster.world_size, 'process', 'es')} on {'this machine' if cluster.local else 'CPUs'}"
    if hosts := cluster.unequal:
        counts = " + ".join(f"{hosts.count(n)} x {n}" for n in dict.fromkeys(hosts))
        parts = f"planned as {cluster.node_count} parts of {cluster.slots}"
        return f"{_counted(cluster.world_size, 'GPU')} = {counts} {cluster.gpu.name}, {parts}"
    nodes = _counted(cluster.node_count, "node")
    return f"{_counted(cluster.world_size, 'GPU')} = {nodes} x {cluster.slots} {cluster.gpu.name}"


def _counted(count: int, word: str, plural: str = "s") -> str:
    return f"{count} {word}{'' if count == 1 else plural}"
