"""How each component is spread over the ranks. What is not given is derived, or searched by strategy=auto."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dslaunch.schema.base import Counts, Name, NonNegative, Part, Positive
from dslaunch.schema.deepspeed import Nvme, SuperOffload, ZenFlow, ZeroPlusPlus
from dslaunch.schema.torch import Ddp


class ComponentStrategy(Part):
    """The layout of one component."""

    tp: Positive | None = None
    """Tensor-parallel size: each layer's matrices are cut over this many ranks."""
    pp: Positive | None = None
    """Pipeline stages."""
    vpp: Positive | None = None
    """Virtual pipeline stages per rank (interleaved schedule)."""
    cp: Positive | None = None
    """Context-parallel size: each sequence is cut over this many ranks."""
    ep: Positive | None = None
    """Expert-parallel size."""
    etp: Positive | None = None
    """Expert tensor-parallel size: ranks that each routed expert is cut over; tp where it is not given."""
    dp: Positive | None = None
    """Replicas; what is left of the ranks where it is not given."""
    zero: Annotated[int, Field(ge=0, le=3)] | None = None
    """ZeRO stage: 0 nothing, 1 optimizer states, 2 and gradients, 3 and parameters sharded over dp."""
    offload: Literal["none", "cpu", "cpu_params", "nvme", "nvme_params"] | None = None
    """Optimizer states to host memory or NVMe; cpu_params and nvme_params move the parameters too (ZeRO-3)."""
    recompute: Literal["none", "selective", "full"] | None = None
    """Activations computed again in the backward pass: attention's core, or whole layers."""
    layers_per_stage: Counts | None = None
    """Layers of each stage, first to last, where an equal split is not wanted."""
    micro_batch: Positive | None = None
    """Samples per replica and pass; training.micro_batch where it is not given."""
    rank_offset: NonNegative | None = None
    """First rank of the component's grid, where components have ranks of their own."""


class Strategy(Part):
    """A named strategy, with what the user sets for single components."""

    name: Name
    """layouts: the recipe's layout for this number of GPUs; auto: searched; others: one for all components."""
    sharding: Literal["zero", "ddp", "fsdp2", "hsdp"] = "zero"
    """Who shards the states: ZeRO (DeepSpeed, Megatron), nobody (DDP), or PyTorch's fully_shard (FSDP2; HSDP:
    over some of the ranks, replicated over the others)."""
    shard: Positive | None = None
    """Ranks that share one copy of the states under hsdp; a node's GPUs where it is not given."""
    dispatcher: Literal["alltoall", "deepep"] = "alltoall"
    """How tokens reach their experts (Megatron): once for each expert, or, by DeepEP, once for each node."""
    ddp: Ddp = Ddp()
    zero_plus_plus: ZeroPlusPlus = ZeroPlusPlus()
    nvme: Nvme = Nvme()
    zenflow: ZenFlow = ZenFlow()
    super_offload: SuperOffload = SuperOffload()
    every: ComponentStrategy = ComponentStrategy()
    """What holds for each component that does not say otherwise."""
    components: dict[Name, ComponentStrategy] = {}
    """Per component; on the command line strategy.COMPONENT.KEY."""
