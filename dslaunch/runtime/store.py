"""The state of a training on disk, in a form that knows no layout: pieces of tensors, and where each belongs.

    rank-00003.safetensors    the pieces that one rank wrote: `weight/NAME`, `exp_avg/NAME`, `exp_avg_sq/NAME`
    index.json                by tensor: its whole shape, how it is cut, which file holds which elements

Weights are those that the optimizer updates (fp32). Frozen parameters are left out where they follow from the
plan; those that were read from a checkpoint, in which they trained, are written again. A rank reads the elements
that it holds, whatever the layout that wrote them; where the tensor-parallel cut is another, it holds one whole
tensor at a time.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dslaunch.errors import ConfigError
from dslaunch.runtime.held import WEIGHT, Cut, Held, set_updates, updates_of
from dslaunch.runtime.tensorfile import Entry, TensorFile, write
from dslaunch.runtime.world import World

INDEX = "index.json"
INDEX_SCHEMA = "dslaunch.tensors/1"

Extra = dict[str, Any]
"""What an engine keeps besides weights and moments, as JSON."""


class Keeper(Protocol):
    """What an engine tells of its state, and takes."""

    def held(self, anew: bool = False) -> Iterator[Held]:
        """The pieces on this rank; `anew` makes moments where there are none yet."""
        ...

    def extra(self) -> Extra:
        """What it keeps besides."""
        ...

    def settle(self, step: int, extra: Extra) -> None:
        """Go on after `step` steps with what was filled into the pieces; every rank calls it."""
        ...


@dataclass(frozen=True)
class Stored:
    """One tensor of an index."""

    shape: tuple[int, ...]
    """Whole."""
    cut: Cut
    """rank counts for nothing here."""
    updates: int
    """Updates of its moments."""
    kinds: tuple[str, ...]
    pieces: tuple[tuple[str, int, int, int], ...]
    """(file, tensor-parallel slice, first element in the flattened slice, the one behind the last)"""


@dataclass(frozen=True)
class Share:
    """What one rank writes of a state."""

    file: str
    entries: list[Entry]
    index: str
    """Rank 0 writes it; empty on the others."""

    def write(self, folder: Path) -> list[str]:
        """The names of the files; none where there is nothing to write."""
        names = []
        if self.entries:
            write(folder / self.file, self.entries)
            names.append(self.file)
        if self.index:
            (folder / INDEX).write_text(self.index, encoding="utf-8")
            names.append(INDEX)
        return names


def share(keeper: Keeper, world: World, copied: bool, kept: Collection[str] = ()) -> Share:
    """What this rank has to write; every rank calls it.

    Args:
        kept: parameters that are written though they may not train, since they do not follow from the plan.
        copied: take the state as it is now to the host's memory, so that training may go on before it is written;
            else the tensors are the engine's own.
    """
    file = f"rank-{world.rank:05d}.safetensors"
    pieces = list(keeper.held())
    if kept:
        pieces = _with_kept(pieces, kept, world)
    written = [piece for piece in pieces if piece.written[0] < piece.written[1]]
    entries = [_entry(piece, kind, copied) for piece in written for kind in piece.kinds]
    rows = [(piece.name, _stored(piece, file)) for piece in written]
    frozen = [piece.name for piece in pieces if not (piece.trains or piece.name in kept)]
    gathered: list[Any] | None = [None] * world.size if world.rank == 0 else None
    dist.gather_object((rows, frozen), gathered)
    if gathered is None:
        return Share(file, entries, "")
    every = _together(row for rows, _ in gathered for row in rows)
    names = {name for _, names in gathered for name in names}
    return Share(file, entries, index_text(every, names, keeper.extra()))


def _with_kept(pieces: list[Held], kept: Collection[str], world: World) -> list[Held]:
    """`pieces`, of which the frozen ones in `kept` are written by the first rank that holds them."""
    mine = {_place(piece): piece for piece in pieces if piece.name in kept and not piece.trains}
    told: list[Any] = [None] * world.size
    dist.all_gather_object(told, list(mine))
    elsewhere = {place for places in told[: world.rank] for place in places}
    return [
        replace(piece, written=(0, piece.weight.numel()))
        if _place(piece) in mine and _place(piece) not in elsewhere
        else piece
        for piece in pieces
    ]


def _place(piece: Held) -> tuple[str, int, int, bool]:
    """The same for those that hold the same elements."""
    return piece.name, piece.cut.rank, piece.start, piece.trains


def _entry(piece: Held, kind: str, copied: bool) -> Entry:
    start, stop = piece.written
    tensor = piece.tensor(kind)
    make = partial(_rows, tensor, start, stop)
    if copied:
        make = partial(_rows, make().detach().to("cpu", copy=True), 0, stop - start)
    return Entry(f"{kind}/{piece.name}", tensor.dtype, (stop - start,), make)


def _rows(tensor: Tensor, start: int, stop: int) -> Tensor:
    return tensor[start:stop]


def _stored(piece: Held, file: str) -> Stored:
    first, last = (piece.start + place for place in piece.written)
    where = (file, piece.cut.rank, first, last)
    whole = piece.cut.whole_shape(piece.shape)
    return Stored(whole, Cut(*piece.cut.alike), updates_of(piece.states), piece.kinds, (where,))


def _together(rows: Iterable[tuple[str, Stored]]) -> dict[str, Stored]:
    pieces: dict[str, list[tuple[str, int, int, int]]] = {}
    found = {}
    for name, stored in rows:
        pieces.setdefault(name, []).extend(stored.pieces)
        found[name] = stored
    return {
        name: Stored(one.shape, one.cut, one.updates, one.kinds, tuple(sorted(pieces[name])))
        for name, one in found.items()
    }


def index_text(tensors: dict[str, Stored], frozen: Iterable[str], extra: Extra) -> str:
    text = json.dumps(
        {
            "schema": INDEX_SCHEMA,
            "frozen": sorted(frozen),
            "extra": extra,
            "tensors": {name: asdict(stored) for name, stored in tensors.items()},
        },
        sort_keys=True,
    )
    return text + "\n"


class Source:
    """What `Share.write` wrote, read piece by piece."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError where `folder` has no index."""
        self.folder = folder
        try:
            index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            self.frozen = frozenset(index["frozen"])
            self.extra: Extra = index["extra"]
            self.tensors = {name: _read_stored(row) for name, row in index["tensors"].items()}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"checkpoint.load: {folder / INDEX}: not an index of {INDEX_SCHEMA}: {error!r}. Name another "
                "checkpoint, such as an earlier step of the run."
            ) from error
        self._files: dict[str, TensorFile] = {}

    def whole(self, name: str, kind: str) -> Tensor:
        """A whole tensor, as it was stored."""
        stored = self.tensors[name]
        shape = stored.cut.slice_shape(stored.shape)
        flat = [self._interval(name, kind, which, 0, prod(shape)) for which in range(stored.cut.size)]
        return stored.cut.joined([each.view(shape) for each in flat])

    def piece(self, name: str, kind: str, cut: Cut, start: int, stop: int) -> Tensor:
        """Elements `start` to `stop` of the flattened slice that `cut` makes of a tensor."""
        if cut.alike == self.tensors[name].cut.alike:
            return self._interval(name, kind, cut.rank, start, stop)
        return cut.slice_of(self.whole(name, kind)).reshape(-1)[start:stop]

    def _interval(self, name: str, kind: str, which: int, start: int, stop: int) -> Tensor:
        found = []
        place = start
        for file, rank, first, last in sorted(self.tensors[name].pieces, key=lambda piece: piece[2]):
            if rank == which and first <= place < last and place < stop:
                end = min(last, stop)
                found.append(self._file(file).flat(f"{kind}/{name}", place - first, end - first))
                place = end
        if place < stop:
            raise ConfigError(
                f"checkpoint.load: {self.folder} lacks elements {place} to {stop} of {name} ({kind}): it is not "
                "whole. Name another checkpoint."
            )
        return torch.cat(found) if found else torch.empty(0)

    def _file(self, name: str) -> TensorFile:
        if name not in self._files:
            self._files[name] = TensorFile(self.folder / name)
        return self._files[name]


def _read_stored(row: dict[str, Any]) -> Stored:
    pieces = tuple((str(file), int(rank), int(first), int(last)) for file, rank, first, last in row["pieces"])
    return Stored(tuple(row["shape"]), Cut(**row["cut"]), row["updates"], tuple(row["kinds"]), pieces)


def restore(keeper: Keeper, source: Source, step: int) -> None:
    """Fill the engine's pieces from `source`; every rank calls it."""
    with torch.no_grad():
        for piece in keeper.held(anew=True):
            stored = source.tensors.get(piece.name)
            if stored is not None:
                _fill(piece, stored, source)
    keeper.settle(step, source.extra)


def _fill(piece: Held, stored: Stored, source: Source) -> None:
    stop = piece.start + piece.weight.numel()
    for kind in stored.kinds if piece.trains else (WEIGHT,):
        piece.tensor(kind).copy_(source.piece(piece.name, kind, piece.cut, piece.start, stop))
    if piece.trains:
        set_updates(piece.states, stored.updates)


def check_fits(source: Source, shapes: dict[str, tuple[int, ...]], start: tuple[str, str]) -> None:
    """Refuse a checkpoint whose tensors are not those of the model.

    Args:
        shapes: by name, of the model's parameters.
        start: what frozen weights follow from, in the checkpoint's plan and in this one.
    """
    unknown = sorted(source.tensors.keys() - shapes.keys())
    missing = sorted(shapes.keys() - source.tensors.keys() - source.frozen)
    if unknown or missing:
        name, lacks = (unknown[0], "the model of this plan") if unknown else (missing[0], "the checkpoint")
        raise ConfigError(
            f"checkpoint.load: {source.folder}: {lacks} has no parameter {name}. Continue with the model that "
            "wrote it, or start without checkpoint.load."
        )
    for name, stored in source.tensors.items():
        if stored.shape != shapes[name]:
            raise ConfigError(
                f"checkpoint.load: {source.folder} has {name} of shape {list(stored.shape)}; the model of this "
                f"plan {list(shapes[name])}. Continue with the model that wrote it."
            )
    if source.frozen and start[0] != start[1]:
        raise ConfigError(
            f"checkpoint.load: {source.folder} leaves out frozen weights, which follow from {start[0]}; this plan "
            f"has {start[1]}. Use the same."
        )
