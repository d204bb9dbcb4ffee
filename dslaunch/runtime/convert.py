"""A checkpoint merged: whole tensors in place of the pieces that ranks wrote."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from math import prod
from pathlib import Path

import torch

from dslaunch.errors import ConfigError
from dslaunch.runtime.checkpoints import NOTE, PLAN, find, read_note
from dslaunch.runtime.checkpoints import replace as replace_file
from dslaunch.runtime.held import Cut
from dslaunch.runtime.intact import LIST, listed
from dslaunch.runtime.store import INDEX, Source, Stored, index_text
from dslaunch.runtime.tensorfile import Entry, write

FILE_BYTES = 4 * 2**30
"""A file is closed before it gets larger, unless one tensor is."""
_FP32 = torch.float32


def convert(checkpoint: Path, to: Path) -> int:
    """Write the checkpoint in `checkpoint` into `to`, which the same programs can go on from; its tensors.

    One tensor is held at a time.

    Raises:
        ConfigError: no checkpoint, or one that is not whole; something in `to`.
    """
    folder = find(checkpoint)
    note, source = read_note(folder), Source(folder)
    if to.exists() and any(to.iterdir()):
        raise ConfigError(f"-o {to}: not empty. Name a new folder.")
    to.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Stored] = {}
    for number, names in enumerate(_shared_out(source)):
        file = f"tensors-{number:05d}.safetensors"
        write(to / file, [_entry(source, name, kind) for name in names for kind in source.tensors[name].kinds])
        for name in names:
            stored = source.tensors[name]
            tensors[name] = replace(stored, cut=Cut(), pieces=((file, 0, 0, prod(stored.shape)),))
    (to / INDEX).write_text(index_text(tensors, source.frozen, source.extra), encoding="utf-8")
    shutil.copyfile(folder / PLAN, to / PLAN)
    replace_file(to / LIST, listed(to))
    replace_file(to / NOTE, json.dumps(asdict(replace(note, layout=f"whole tensors, from {note.layout}"))) + "\n")
    return len(tensors)


def _entry(source: Source, name: str, kind: str) -> Entry:
    shape = (prod(source.tensors[name].shape),)
    return Entry(f"{kind}/{name}", _FP32, shape, partial(_flat, source, name, kind))


def _flat(source: Source, name: str, kind: str) -> torch.Tensor:
    return source.whole(name, kind).reshape(-1)


def _shared_out(source: Source) -> Iterator[list[str]]:
    """The names of each file's tensors."""
    names: list[str] = []
    size = 0
    for name, stored in source.tensors.items():
        more = prod(stored.shape) * _FP32.itemsize * len(stored.kinds)
        if names and size + more > FILE_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += more
    yield names
