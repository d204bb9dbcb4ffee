"""A cluster: GPU, node and network, each figure with its unit in the key. Bandwidths are one-way per GPU."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from dslaunch.hosts import expanded
from dslaunch.schema.base import NonNegativeFloat, Part, Positive, PositiveFloat, Texts
from dslaunch.schema.slurm import Word


def _leaves(value: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    seen: dict[str, str] = {}
    for leaf, patterns in value.items():
        for host in (host for pattern in patterns for host in expanded(pattern)):
            if host in seen:
                raise ValueError(f"{host} stands under {seen[host]} and {leaf}; a host has one leaf switch")
            seen[host] = leaf
    return value


class Gpu(Part):
    """One device."""

    name: str
    """The full name, such as A100-SXM4-80GB."""
    accelerator: Literal["cuda", "rocm", "cpu"] = "cuda"
    """Whose software drives it: NVIDIA's, AMD's, or none."""
    memory_gib: PositiveFloat
    """Device memory, GiB (2**30 bytes)."""
    hbm_gb_per_s: PositiveFloat
    """Device memory bandwidth, GB/s."""
    peak_tflops: dict[Literal["fp32", "tf32", "fp16", "bf16", "fp8", "fp4"], PositiveFloat]
    """Dense peak by data type, TFLOPS; a type that the hardware lacks is left out."""
    context_gib: NonNegativeFloat
    """Memory that the device's context takes before the first tensor, GiB."""
    pcie_gb_per_s: PositiveFloat
    """Host to device, GB/s one way."""
    source: str
    """Where the figures were printed."""


class Link(Part):
    """A way from a GPU to its peers."""

    kind: Literal["nvlink", "xgmi", "pcie", "infiniband", "roce", "efa", "ethernet", "memory"]
    """The technology."""
    gb_per_s: PositiveFloat
    """One way, per GPU, all its peers together, GB/s."""
    peer_gb_per_s: PositiveFloat | None = None
    """One way to a single peer, GB/s, where links run from GPU to GPU; behind a switch it is left out."""
    latency_us: PositiveFloat
    """Latency of one message, microseconds."""
    source: str
    """Where these figures were printed or measured."""


class Node(Part):
    """One host."""

    gpus: Positive
    """GPUs in a node; the cluster name can ask for fewer of them (8x4xA100)."""
    nvlink_domain: Positive
    """GPUs that reach one another over NVLink or Infinity Fabric (1: none do); more than a node's in a rack."""
    cpu_cores: Positive
    """Cores of a host, all sockets together."""
    host_memory_gib: PositiveFloat
    """Main memory of a host, GiB."""
    nvme_gib: NonNegativeFloat = 0.0
    """Local NVMe, GiB; 0 is none."""
    nvme_gb_per_s: NonNegativeFloat = 0.0
    """Read bandwidth of the local NVMe, GB/s, all GPUs of the node together."""
    source: str
    """Where these figures were printed or measured."""


class Slots(Part):
    """Hosts that are alike, where a cluster is mixed."""

    nodes: Positive
    """Hosts of this kind."""
    gpus: Positive
    """GPUs in each of these hosts."""
    gpu: str = ""
    """Their cluster's name, such as A100-80GB, where it is another than the cluster's own."""
    partition: Word = ""
    """SLURM's partition of these hosts; launcher.slurm.partition where it is empty."""
    constraint: Word = ""
    """Features by which SLURM knows these hosts; launcher.slurm.constraint where it is empty."""


class Cluster(Part):
    """GPUs, how they are joined, and how many."""

    gpus: Positive | None = None
    """GPUs in all; the 64 of 64xA100."""
    nodes: Positive | None = None
    """Nodes; the first 8 of 8x8xA100."""
    gpus_per_node: Positive | None = None
    """GPUs used in each node; node.gpus where it is not given."""
    available_nodes: Positive | None = None
    """Nodes that a site has: as many as are planned for where no size is given, and the most that can be."""
    local: bool = False
    """This machine."""
    hosts: Texts = ()
    """Host names, in rank order, for launches over ssh; a hostfile is written from them."""
    switches: Annotated[dict[str, Texts], AfterValidator(_leaves)] = {}
    """Hosts by leaf switch, such as {leaf1: [n[1-8]], leaf2: [n[9-16]]}: ranks follow one another under a leaf,
    and then under the next, in launches over ssh and under SLURM."""
    mixed: Annotated[tuple[Slots, ...], Field(strict=False)] = ()
    """Hosts with unequal numbers of GPUs, such as [{nodes: 2, gpus: 8}, {nodes: 1, gpus: 4}]: they are planned as
    equal parts, of as many GPUs as divide each host's, and launched over ssh or as a heterogeneous job of SLURM.
    Hosts of other partitions or features may have equal numbers. Different GPUs are never planned."""
    price_per_gpu_hour: NonNegativeFloat | None = None
    """USD that one GPU costs for an hour."""
    price_source: str = ""
    """Where that price was printed, and when."""
    mtbf_hours: PositiveFloat = 6334.0
    """Mean hours between failures of one node, of those that end a job. The default is Llama 3's: 419 unexpected
    interruptions in 54 days on 2,048 nodes (16,384 H100), 54 * 24 * 2048 / 419."""
    mtbf_source: str = "The Llama 3 Herd of Models, arXiv:2407.21783, section 3.3.4 and table 5"
    """Where that was measured."""
    gpu: Gpu
    node: Node
    intra: Link
    """Between the GPUs of a node."""
    network: Link | None = Field(default=None)
    """Between nodes; without one only a single node can be used."""
    fabric: str = "auto"
    """Whose variables the ranks get: a file of conf/fabric, such as efa; auto: by network.kind; none. A rack whose
    NVLink joins nodes gets those of mnnvl beside. What env sets, or a host's own environment, wins."""

    @model_validator(mode="after")
    def _whole_nodes(self) -> Cluster:
        for fault in (_mixed_fault(self), _count_fault(self), _node_fault(self)):
            if fault:
                raise ValueError(fault)
        return self

    @property
    def unequal(self) -> tuple[int, ...]:
        """GPUs of each host, most first, where they differ; empty where they do not."""
        if not self.mixed:
            return ()
        counts = sorted((part.gpus for part in self.mixed for _ in range(part.nodes)), reverse=True)
        return tuple(counts) if len(set(counts)) > 1 else ()

    @property
    def kinds(self) -> tuple[Slots, ...]:
        """Hosts that SLURM is asked for apart, in rank order: most GPUs first; empty where all are alike."""
        alike: dict[tuple[int, str, str], int] = {}
        for part in sorted(self.mixed, key=lambda part: -part.gpus):
            key = (part.gpus, part.partition, part.constraint)
            alike[key] = alike.get(key, 0) + part.nodes
        if len(alike) < 2:
            return ()
        return tuple(
            Slots(nodes=nodes, gpus=gpus, partition=partition, constraint=constraint)
            for (gpus, partition, constraint), nodes in alike.items()
        )

    @property
    def slots(self) -> int:
        """GPUs used per node: all of them where fewer than a node were asked for; of unequal hosts, per part."""
        if unequal := self.unequal:
            return math.gcd(*unequal)
        if self.mixed:
            return self.mixed[0].gpus
        if self.gpus_per_node is not None:
            return self.gpus_per_node
        return (
            min(self.node.gpus, self.gpus) if self.gpus is not None and self.nodes is None else self.node.gpus
        )

    @property
    def node_count(self) -> int:
        """Nodes; of unequal hosts, parts."""
        if self.unequal:
            return sum(self.unequal) // self.slots
        if self.mixed:
            return sum(part.nodes for part in self.mixed)
        if self.nodes is not None:
            return self.nodes
        return self.gpus // self.slots if self.gpus is not None else self.available_nodes or 0

    @property
    def world_size(self) -> int:
        """Ranks: one per GPU."""
        return self.node_count * self.slots


def in_parts(cluster: Cluster) -> Cluster:
    """The same where a part of an unequal host has its share of the largest host's cores, memory and disk."""
    if not cluster.unequal:
        return cluster
    share = cluster.slots / cluster.unequal[0]
    node = cluster.node
    shared = {
        "cpu_cores": max(1, int(node.cpu_cores * share)),
        "host_memory_gib": node.host_memory_gib * share,
        "nvme_gib": node.nvme_gib * share,
        "nvme_gb_per_s": node.nvme_gb_per_s * share,
    }
    return cluster.model_copy(update={"node": node.model_copy(update=shared)})


def _count_fault(cluster: Cluster) -> str:
    """What is wrong with gpus, nodes and gpus_per_node; empty where nothing is."""
    slots, gpus, nodes = cluster.slots, cluster.gpus, cluster.nodes
    if cluster.mixed:
        return ""
    if gpus is None and nodes is None and cluster.available_nodes is None:
        return "how many GPUs? Write a number before the name, such as cluster=64xA100, or NODESxGPUSxNAME"
    if slots > cluster.node.gpus:
        return (
            f"{slots} GPUs per node, but a node has {cluster.node.gpus} {cluster.gpu.name}. Give at most as "
            f"many, or cluster.node.gpus={slots} where yours have more"
        )
    if gpus is not None and nodes is not None and gpus != nodes * slots:
        return f"gpus is {gpus}, but {nodes} nodes x {slots} GPUs = {nodes * slots}; give two of the three"
    if gpus is not None and nodes is None and gpus % slots:
        fewer = max(n for n in range(1, cluster.node.gpus + 1) if gpus % n == 0)
        return (
            f"{gpus} GPUs do not fill nodes of {slots}: {gpus} = {gpus // slots} x {slots} + {gpus % slots}. "
            f"Write NODESxGPUSxTYPE, such as cluster={gpus // fewer}x{fewer}xTYPE, or a multiple of {slots}"
        )
    return ""


def _node_fault(cluster: Cluster) -> str:
    """What is wrong with the nodes that the counts come to; empty where nothing is."""
    count, most = cluster.node_count, cluster.available_nodes
    if most is not None and count > most:
        return (
            f"{count} nodes, but available_nodes is {most}: {most} x {cluster.slots} = {most * cluster.slots} "
            "GPUs can be used at most"
        )
    if count > 1 and cluster.network is None:
        return f"{count} nodes need a network; `network:` is missing"
    hosts = len(cluster.unequal) or count
    if cluster.hosts and len(cluster.hosts) != hosts:
        return (
            f"hosts names {len(cluster.hosts)} hosts, but the cluster has {hosts} nodes. "
            "Give cluster.hosts=[...] with as many names"
        )
    return ""


def _mixed_fault(cluster: Cluster) -> str:
    """Why a mixed cluster is not planned for, and what can be instead; empty where it is none, or can be."""
    if not cluster.mixed:
        return ""
    least = min(part.gpus for part in cluster.mixed)
    nodes = sum(part.nodes for part in cluster.mixed)
    kinds = list(dict.fromkeys(part.gpu or cluster.gpu.name for part in cluster.mixed))
    alone = ", ".join(f"{p.nodes}x{p.gpus}x{p.gpu or 'TYPE'}" for p in cluster.mixed)
    if len(kinds) > 1:
        return (
            f"mixed: {' and '.join(kinds)} in one run are not planned for: every collective waits for the slower "
            f"GPU, and the smaller memory decides what fits. Plan a run for each (cluster= {alone}), or all "
            f"{nodes} nodes as the GPU with less memory: cluster={nodes}x{least}xTYPE, or cluster=TYPE and mixed "
            "without gpu, where partition or constraint tells SLURM's nodes apart"
        )
    given = [key for key in ("gpus", "nodes", "gpus_per_node") if getattr(cluster, key) is not None]
    if given:
        return f"mixed says how many GPUs there are, and {given[0]} does too. Give one: cluster=TYPE has no size"
    most = max(part.gpus for part in cluster.mixed)
    if most > cluster.node.gpus:
        return f"mixed: {most} GPUs in a host, but a node has {cluster.node.gpus} {cluster.gpu.name}"
    if not cluster.kinds:
        return (
            f"mixed: every host has {least} GPUs. Write cluster={nodes}x{least}xTYPE, or give those of another "
            "partition or constraint of SLURM's its name"
        )
    return ""
