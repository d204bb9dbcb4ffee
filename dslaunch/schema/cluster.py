"""A cluster: GPU, node and network, each figure with its unit in the key. Bandwidths are one-way per GPU."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from dslaunch.schema.base import NonNegativeFloat, Part, Positive, PositiveFloat, Texts


class Gpu(Part):
    """One device."""

    name: str
    """The full name, such as A100-SXM4-80GB."""
    accelerator: Literal["cuda", "cpu"] = "cuda"
    memory_gib: PositiveFloat
    """Device memory, GiB (2**30 bytes)."""
    hbm_gb_per_s: PositiveFloat
    """Device memory bandwidth, GB/s."""
    peak_tflops: dict[Literal["fp32", "tf32", "fp16", "bf16", "fp8"], PositiveFloat]
    """Dense peak by data type, TFLOPS; a type that the hardware lacks is left out."""
    context_gib: NonNegativeFloat
    """Memory that the CUDA context takes before the first tensor, GiB."""
    pcie_gb_per_s: PositiveFloat
    """Host to device, GB/s one way."""
    source: str
    """Where the figures were printed."""


class Link(Part):
    """A way from a GPU to its peers."""

    kind: Literal["nvlink", "pcie", "infiniband", "roce", "ethernet", "memory"]
    gb_per_s: PositiveFloat
    """One way, per GPU, GB/s."""
    latency_us: PositiveFloat
    """Latency of one message, microseconds."""
    source: str


class Node(Part):
    """One host."""

    gpus: Positive
    """GPUs in a node, unless the cluster name says otherwise (8x4xA100)."""
    nvlink_domain: Positive
    """GPUs that reach one another over NVLink (1: none do)."""
    cpu_cores: Positive
    host_memory_gib: PositiveFloat
    nvme_gib: NonNegativeFloat = 0.0
    """Local NVMe, GiB; 0 is none."""
    nvme_gb_per_s: NonNegativeFloat = 0.0
    """Read bandwidth of the local NVMe, GB/s, all GPUs of the node together."""
    source: str


class Cluster(Part):
    """GPUs, how they are joined, and how many."""

    gpus: Positive | None = None
    """GPUs in all; the 64 of 64xA100."""
    nodes: Positive | None = None
    """Nodes; the first 8 of 8x8xA100."""
    gpus_per_node: Positive | None = None
    """GPUs used in each node; node.gpus where it is not given."""
    local: bool = False
    """This machine."""
    hosts: Texts = ()
    """Host names, in rank order, for launches over ssh; a hostfile is written from them."""
    gpu: Gpu
    node: Node
    intra: Link
    """Between the GPUs of a node."""
    network: Link | None = Field(default=None)
    """Between nodes; without one only a single node can be used."""

    @model_validator(mode="after")
    def _whole_nodes(self) -> Cluster:
        per_node = self.slots
        if self.gpus is None and self.nodes is None:
            raise ValueError(
                f"how many GPUs? Write a number before the name, such as cluster=8x{self.gpu.name}"
            )
        if self.gpus is not None and self.nodes is not None and self.gpus != self.nodes * per_node:
            raise ValueError(
                f"gpus is {self.gpus}, but {self.nodes} nodes x {per_node} GPUs = {self.nodes * per_node}; "
                "give two of the three"
            )
        if self.gpus is not None and self.nodes is None and self.gpus % per_node:
            raise ValueError(
                f"{self.gpus} GPUs do not fill nodes of {per_node}: {self.gpus} = {self.gpus // per_node} x "
                f"{per_node} + {self.gpus % per_node}. Write NODESxGPUSxTYPE, such as "
                f"cluster=2x{max(1, self.gpus // 2)}xTYPE, or a multiple of {per_node}"
            )
        if self.node_count > 1 and self.network is None:
            raise ValueError(f"{self.node_count} nodes need a network; `network:` is missing")
        if self.hosts and len(self.hosts) != self.node_count:
            raise ValueError(
                f"hosts names {len(self.hosts)} hosts, but the cluster has {self.node_count} nodes"
            )
        return self

    @property
    def slots(self) -> int:
        """GPUs used per node: all of them where fewer than a node were asked for."""
        if self.gpus_per_node is not None:
            return self.gpus_per_node
        return (
            min(self.node.gpus, self.gpus) if self.gpus is not None and self.nodes is None else self.node.gpus
        )

    @property
    def node_count(self) -> int:
        return self.nodes if self.nodes is not None else (self.gpus or 0) // self.slots

    @property
    def world_size(self) -> int:
        """Ranks: one per GPU."""
        return self.node_count * self.slots
