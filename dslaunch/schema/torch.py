"""What DistributedDataParallel can do beside averaging gradients. Defaults are PyTorch's own."""

from __future__ import annotations

from typing import Literal

from dslaunch.schema.base import Part, Positive


class Ddp(Part):
    """Settings of torch.nn.parallel.DistributedDataParallel."""

    bucket_cap_mb: Positive = 25
    """Size of a gradient bucket, MiB."""
    static_graph: bool = False
    """The graph and the parameters that it uses are the same in each step."""
    find_unused_parameters: bool = False
    """Parameters that a step does not use are looked for, so that it does not hang."""
    gradient_as_bucket_view: bool = False
    """Gradients are views of the buckets, not copies: 4 bytes a parameter less."""
    sync_batchnorm: bool = False
    """BatchNorm layers take their statistics over all ranks (torch.nn.SyncBatchNorm)."""
    comm_hook: Literal["none", "fp16", "bf16", "power_sgd"] = "none"
    """How gradients travel: compressed to 16 bits, or to a matrix of low rank."""
