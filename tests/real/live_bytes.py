"""Bytes of tensors that torch keeps and makes, counted while real modules run on the CPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages made inside the context that are alive, and their peak; on the meta device they take
    none."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._sizes or storage.device.type == "meta":
            return
        self._sizes[storage._cdata] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, storage._cdata)

    def _freed(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)


def peak_bytes(run: Callable[[], Any]) -> int:
    """Most bytes alive at once of what `run` makes."""
    with LiveBytes() as live:
        run()
    return live.peak


def saved_bytes(run: Callable[[], Tensor], owner: nn.Module) -> int:
    """Bytes of the distinct tensors of more than one dimension that autograd keeps of `run`, parameters of
    `owner` aside."""
    own = {parameter.untyped_storage().data_ptr() for parameter in owner.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and tensor.is_floating_point():
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = run()
    assert result.requires_grad
    return sum(kept.values())
