"""Data of one's own by number: Hugging Face's datasets and WebDataset's shards, through their own libraries.

    def open_data(plan):                                  # data.path=my_package.data:open_data
        rows = hugging_face("/data/robot", split="train") # or web_shards("/data/shards")
        return Indexed(rows, as_batch, plan.training.seed)

Sample number n of the endless stream is row `shuffled(n % size, ...)` of epoch n // size: a function of the seed
and n alone, so that every layout, and a run that is resumed, reads the same samples in the same order, and a rank
opens those of its own micro-batches only.
"""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from dslaunch.errors import ConfigError, listed
from dslaunch.runtime.data import Batch

_ROUNDS = 4


class Rows(Protocol):
    """What can be read by number."""

    def __len__(self) -> int: ...
    def __getitem__(self, number: int, /) -> Any: ...


class Indexed:
    """Rows as the endless stream of samples that the runtime reads.

    Args:
        as_batch: makes a micro-batch of rows, in their order.
        seed: of the order; each epoch has another.
    """

    def __init__(self, rows: Rows, as_batch: Callable[[Sequence[Any]], Batch], seed: int) -> None:
        if not len(rows):
            raise ConfigError("data.path: the data set has no rows.")
        self.rows, self.as_batch, self.seed = rows, as_batch, seed

    def at(self, numbers: Iterable[int]) -> Batch:
        return self.as_batch([self.rows[self.row_of(number)] for number in numbers])

    def row_of(self, number: int) -> int:
        """The row that sample `number` is."""
        epoch, position = divmod(number, len(self.rows))
        return shuffled(position, len(self.rows), self.seed, epoch)


def shuffled(position: int, size: int, seed: int, epoch: int) -> int:
    """Where `position` of range(size) goes: a permutation for each seed and epoch, of which nothing is stored.

    A Feistel network over the next power of four, walked until it falls into the range (Black and Rogaway 2002,
    "Ciphers with arbitrary finite domains", methods 2 and 3).
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    while True:
        left, right = divmod(position, 1 << half)
        for step in range(_ROUNDS):
            left, right = right, left ^ _drawn(right, half, f"{seed} {epoch} {step}")
        position = (left << half) | right
        if position < size:
            return position


def _drawn(value: int, bits: int, key: str) -> int:
    """`bits` bits that follow from `value` and `key`."""
    digest = hashlib.blake2b(f"{key} {value}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - bits)


def hugging_face(path: str, split: str = "") -> Rows:
    """A data set that `Dataset.save_to_disk` wrote, memory-mapped: its rows as dictionaries.

    Raises:
        ConfigError: no such data set or split, or the library `datasets` is missing.
    """
    try:
        from datasets import Dataset, load_from_disk
    except ModuleNotFoundError as error:
        raise _missing(error, "datasets") from error
    if not Path(path).is_dir():
        raise ConfigError(f"data.path: no data set in {path}. Give the folder that Dataset.save_to_disk wrote.")
    found = load_from_disk(path)
    if not isinstance(found, Dataset):
        if split not in found:
            raise ConfigError(f"data.path: split '{split}' of {path}. Allowed: {listed(found)}.")
        found = found[split]
    return found  # type: ignore[no-any-return]


class Shards:
    """WebDataset's tar files on this host: files that share a name up to its first dot are one sample.

    Headers are read when it is opened, a sample's bytes when it is asked for.
    """

    def __init__(self, paths: Sequence[Path], images: str) -> None:
        try:
            from webdataset.autodecode import Decoder, imagehandler
        except ModuleNotFoundError as error:
            raise _missing(error, "webdataset") from error
        self.decode = Decoder([imagehandler(images)] if images else [])
        self.samples = [sample for path in paths for sample in _samples_in(path)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int, /) -> Any:
        path, key, places = self.samples[number]
        with path.open("rb") as file:
            read = {extension: _read(file, *place) for extension, place in places.items()}
        return self.decode({"__key__": key, "__url__": str(path), **read})


def web_shards(folder: str, images: str = "") -> Shards:
    """The shards `*.tar` in `folder`, in the order of their names: decoded samples by extension.

    Args:
        images: how WebDataset decodes images (`torchrgb`: [3, h, w] in 0..1); empty: images stay bytes.

    Raises:
        ConfigError: no shards, a compressed one, or the library `webdataset` is missing.
    """
    paths = sorted(Path(folder).glob("*.tar"))
    if not paths:
        raise ConfigError(f"data.path: no *.tar in {folder}. Give the folder of the shards.")
    return Shards(paths, images)


_Place = tuple[int, int]
"""Where a file's bytes stand in its shard: (offset, size)."""


def _samples_in(path: Path) -> list[tuple[Path, str, dict[str, _Place]]]:
    """(shard, key, place by extension) of each sample."""
    from webdataset.tariterators import base_plus_ext

    found: dict[str, dict[str, _Place]] = {}
    try:
        with tarfile.open(path, "r:") as shard:
            for member in shard:
                key, extension = base_plus_ext(member.name)
                if member.isfile() and key:
                    found.setdefault(key, {})[extension.lower()] = (member.offset_data, member.size)
    except tarfile.TarError as error:
        raise ConfigError(f"{path}: not an uncompressed tar file ({error}). Unpack it first.") from error
    return [(path, key, places) for key, places in found.items()]


def _read(file: BinaryIO, offset: int, size: int) -> bytes:
    file.seek(offset)
    return file.read(size)


def _missing(error: ModuleNotFoundError, package: str) -> ConfigError:
    return ConfigError(f"data.path: {error}. Install {package} in the training environment.")
