"""What a rank holds of the training's state, the same for every engine: pieces of parameters and of their moments.

A parameter may be cut over tensor-parallel shards (a slice each), and a slice, flattened, over replicas (an
interval each: ZeRO, FSDP). Engines give their state as such pieces, so that a checkpoint knows nothing of engines,
and is read under any other layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dslaunch.runtime.tensor_parallel import Shard, parts_of, put_together

MOMENTS = ("exp_avg", "exp_avg_sq")
WEIGHT = "weight"
KINDS = (WEIGHT, *MOMENTS)


@dataclass(frozen=True)
class Cut:
    """How a parameter is cut over tensor-parallel shards, and which slice of it this is."""

    dim: int = -1
    """-1: it is whole on each shard."""
    parts: int = 1
    """Matrices that stand one after another in `dim`, each cut by itself."""
    size: int = 1
    rank: int = 0

    @property
    def alike(self) -> tuple[int, int, int]:
        """Equal for all slices of one cutting."""
        return self.dim, self.parts, self.size

    def whole_shape(self, slice_shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(n * self.size if dim == self.dim else n for dim, n in enumerate(slice_shape))

    def slice_shape(self, whole_shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(n // self.size if dim == self.dim else n for dim, n in enumerate(whole_shape))

    def slice_of(self, whole: Tensor) -> Tensor:
        if self.dim < 0:
            return whole
        slices = [part.chunk(self.size, self.dim)[self.rank] for part in whole.chunk(self.parts, self.dim)]
        return torch.cat(slices, self.dim)

    def joined(self, slices: list[Tensor]) -> Tensor:
        return slices[0] if self.dim < 0 else put_together(slices, self.dim, self.parts)


def cut_of(parameter: Tensor, shard: Shard) -> Cut:
    dim = getattr(parameter, "tp_dim", None)
    return Cut() if dim is None else Cut(dim, parts_of(parameter), shard.size, shard.rank)


@dataclass(frozen=True)
class Held:
    """A piece of one parameter on this rank, and of its moments; the tensors are the engine's own."""

    name: str
    """In the whole model."""
    shape: tuple[int, ...]
    """Of this shard's slice."""
    cut: Cut
    start: int
    """The first element, in the flattened slice."""
    weight: Tensor
    """[n], in the precision that the optimizer updates."""
    states: Mapping[str, Any] = field(default_factory=dict)
    """The optimizer's, whose moments are [m]; empty before the first update."""
    offset: int = 0
    """Where the piece begins in the moments."""
    written: tuple[int, int] = (0, 0)
    """The elements of it that this rank writes into a checkpoint: replicas share that out."""
    trains: bool = True

    def tensor(self, kind: str) -> Tensor:
        """[n], a view of the weight or of a moment."""
        if kind == WEIGHT:
            return self.weight
        moments: Tensor = self.states[kind]
        return local(moments).view(-1).narrow(0, self.offset, self.weight.numel())

    @property
    def kinds(self) -> tuple[str, ...]:
        """What is there of it."""
        return (WEIGHT, *(kind for kind in MOMENTS if kind in self.states))


def local(tensor: Tensor) -> Tensor:
    """This rank's own part of a tensor that FSDP2 has cut, or the tensor itself; a view, without a graph."""
    found: Tensor = tensor.detach()
    return found.to_local() if hasattr(found, "to_local") else found


def shared_out(count: int, rank: int, size: int) -> tuple[int, int]:
    """The part of `count` equal elements that one of `size` holders writes."""
    return count * rank // size, count * (rank + 1) // size


def fresh_states(optimizer: Any, flat: Tensor) -> dict[str, Any]:
    """The Adam states that `optimizer` would make for `flat` before its first update, made now.

    torch counts updates in a tensor (torch/optim/adamw.py, 2.13), DeepSpeed's own Adams in an int
    (deepspeed/ops/adam/fused_adam.py and cpu_adam.py, 0.19.8).
    """
    states: dict[str, Any] = optimizer.state[flat]
    if not states:
        counts = type(optimizer).__module__.startswith("torch.")
        states["step"] = torch.zeros(()) if counts else 0
        states |= {kind: torch.zeros_like(flat, requires_grad=False) for kind in MOMENTS}
    return states


def updates_of(states: Mapping[str, Any]) -> int:
    """Updates that the optimizer has made."""
    return int(states.get("step", 0))


def set_updates(states: Any, updates: int) -> None:
    states["step"] = torch.full_like(states["step"], updates) if torch.is_tensor(states["step"]) else updates
