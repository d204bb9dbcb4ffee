"""Data of one's own by number: Hugging Face's datasets and WebDataset's shards, read through their libraries."""

from __future__ import annotations

import io
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.real.parts import need

need("torch")

import torch  # noqa: E402

from dslaunch.errors import ConfigError  # noqa: E402
from dslaunch.runtime.data import Batch  # noqa: E402
from dslaunch.runtime.datasets import Indexed, hugging_face, shuffled, web_shards  # noqa: E402

ROWS = 23


def as_batch(rows: Sequence[Any]) -> Batch:
    """Each row's own number as its only token."""
    numbers = [int(row["number"] if "number" in row else row["cls"]) for row in rows]
    tokens = torch.tensor(numbers)[:, None]
    return Batch(torch.zeros(len(rows), 1), tokens, tokens)


class Counted:
    """Rows that say which of them were opened."""

    def __init__(self) -> None:
        self.opened: list[int] = []

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, number: int, /) -> dict[str, int]:
        self.opened.append(number)
        return {"number": number}


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 1000])
def test_an_epoch_is_each_row_once(size: int) -> None:
    kinds = ((0, 0), (0, 1), (1, 0))
    orders = [tuple(shuffled(at, size, seed, epoch) for at in range(size)) for seed, epoch in kinds]
    assert all(sorted(order) == list(range(size)) for order in orders)
    if size > 4:
        assert len(set(orders)) == 3, "another seed or epoch has another order"


def test_neighbours_are_spread() -> None:
    """Rows next to each other land anywhere: the mean distance of two random numbers is a third of the range."""
    places = torch.tensor([shuffled(at, 10_000, 3, 0) for at in range(10_000)])
    assert float((places[1:] - places[:-1]).abs().float().mean()) == pytest.approx(10_000 / 3, rel=0.05)


def test_a_rank_opens_its_own_rows_only() -> None:
    """Two ranks of a step of 6, in blocks: together the step's samples, apart no row twice."""
    ranks = [Counted(), Counted()]
    data = [Indexed(rows, as_batch, seed=7) for rows in ranks]
    for step in range(3):
        for rank, each in enumerate(data):
            each.at(range(step * 6 + rank * 3, step * 6 + rank * 3 + 3))
    alone = Counted()
    Indexed(alone, as_batch, seed=7).at(range(18))
    assert sorted(ranks[0].opened + ranks[1].opened) == sorted(alone.opened)
    assert not set(ranks[0].opened) & set(ranks[1].opened)


def test_hugging_face(tmp_path: Path) -> None:
    need("datasets")
    import datasets
    import pyarrow

    # With a fingerprint given: dill can't hash a table of pyarrow 24 on every Python.
    table = datasets.table.InMemoryTable(pyarrow.table({"number": list(range(ROWS))}))
    rows = datasets.Dataset(table, fingerprint="rows")
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": rows}).save_to_disk(tmp_path / "splits")
    for found in (hugging_face(str(tmp_path / "one")), hugging_face(str(tmp_path / "splits"), "train")):
        data = Indexed(found, as_batch, seed=1)
        assert sorted(data.at(range(ROWS)).tokens.flatten().tolist()) == list(range(ROWS))
        assert torch.equal(data.at([30, 2]).tokens[1], data.at([2]).tokens[0])
    with pytest.raises(ConfigError, match=r"split 'test' of .*\. Allowed: train"):
        hugging_face(str(tmp_path / "splits"), "test")


def test_web_shards(tmp_path: Path) -> None:
    need("webdataset")
    for shard, numbers in enumerate((range(10), range(10, ROWS))):
        with tarfile.open(tmp_path / f"part-{shard}.tar", "w") as tar:
            for number in numbers:
                for extension, text in (("cls", str(number)), ("json", f'{{"twice": {2 * number}}}')):
                    member = tarfile.TarInfo(f"row{number:03}.{extension}")
                    member.size = len(text)
                    tar.addfile(member, io.BytesIO(text.encode()))
    rows = web_shards(str(tmp_path))
    assert [rows[number]["json"]["twice"] for number in (0, 9, 10, 22)] == [0, 18, 20, 44]
    data = Indexed(rows, as_batch, seed=1)
    assert sorted(data.at(range(ROWS)).tokens.flatten().tolist()) == list(range(ROWS))
    with tarfile.open(tmp_path / "part-0.tar", "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("a.cls"))
    with pytest.raises(ConfigError, match=r"part-0\.tar: not an uncompressed tar file"):
        web_shards(str(tmp_path))


@pytest.mark.parametrize(("library", "opened"), [("datasets", hugging_face), ("webdataset", web_shards)])
def test_a_library_that_is_missing_is_named(
    library: str, opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.tar").touch()
    for name in [*sys.modules, library]:
        if name.split(".")[0] == library:
            monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=f"Install {library} in the training environment"):
        opened(str(tmp_path))


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no \*\.tar in "):
        web_shards(str(tmp_path))
    with pytest.raises(ConfigError, match="the data set has no rows"):
        Indexed([], as_batch, 0)
