"""Whether a checkpoint is whole: sizes and checksums of its files, written behind it, compared before it is read.

Each rank sums up what it wrote, and reads its share of the files: one more pass over them each, shared out. A
checkpoint without the list (one that was cut off, or of an earlier version) does not count as whole.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from dslaunch.runtime.world import World

LIST = "files.json"
_CHUNK = 1 << 22

Sum = list[int]
"""Bytes, and their CRC-32."""


def sums(folder: Path, names: Iterable[str]) -> dict[str, Sum]:
    """What the list says of some files."""
    return {name: _sum(folder / name) for name in names}


def list_of(shares: Iterable[Mapping[str, Sum]]) -> str:
    """The list of the files of a checkpoint, as JSON, from what each rank wrote of it."""
    return json.dumps({name: one for share in shares for name, one in share.items()}, sort_keys=True) + "\n"


def listed(folder: Path) -> str:
    """The list of what is in `folder`."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return list_of([sums(folder, names)])


def is_intact(folder: Path, world: World) -> bool:
    """Whether every file of the list is there, as it was written; every rank calls it and gets the same answer."""
    wrong = torch.tensor(float(not _share_is_intact(folder, world)), device=world.device)
    dist.all_reduce(wrong)
    return not float(wrong)


def _share_is_intact(folder: Path, world: World) -> bool:
    try:
        sums: dict[str, Sum] = json.loads((folder / LIST).read_text(encoding="utf-8"))
        return all(_sum(folder / name) == sums[name] for name in sorted(sums)[world.rank :: world.size])
    except (OSError, ValueError):
        return False


def _sum(path: Path) -> Sum:
    size = crc = 0
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return [size, crc]
