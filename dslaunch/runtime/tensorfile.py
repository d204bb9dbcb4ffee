"""Files of tensors in the safetensors format, written tensor after tensor and read slice by slice.

Neither side holds more than one tensor at a time. The format: eight bytes with the length of a JSON header, the
header with type, shape and place of each tensor, the data (huggingface/safetensors:README.md, "Format").
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

_NAMES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64", torch.int64: "I64",
    torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_ALIGNMENT = 8


@dataclass(frozen=True)
class Entry:
    """A tensor to write; `make` gives it when its turn comes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write(path: Path, entries: Sequence[Entry]) -> None:
    """Write `path`, and have it on the disk."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for entry in entries:
        header[entry.name] = {
            "dtype": _NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [place, place + entry.bytes],
        }  # fmt: skip
        place += entry.bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in entries:
            tensor = entry.make().detach().to("cpu", entry.dtype).contiguous()
            assert tuple(tensor.shape) == entry.shape, (entry.name, tensor.shape, entry.shape)
            file.write(tensor.view(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


class TensorFile:
    """A file of tensors, mapped into memory and read where it is asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            self.header: dict[str, Any] = json.loads(file.read(length))
        self._start = 8 + length

    @cached_property
    def _data(self) -> Any:
        return np.memmap(self.path, dtype=np.uint8, mode="r")

    def flat(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Elements `start` to `stop` of a tensor, as a copy in one dimension."""
        entry = self.header[name]
        dtype, first = _DTYPES[entry["dtype"]], self._start + entry["data_offsets"][0]
        stop = prod(entry["shape"]) if stop is None else stop
        if stop <= start:
            return torch.empty(0, dtype=dtype)
        data = self._data[first + start * dtype.itemsize : first + stop * dtype.itemsize]
        return torch.from_numpy(np.array(data)).view(dtype)

    def tensor(self, name: str) -> Tensor:
        return self.flat(name).view(self.header[name]["shape"])
