"""Pieces of tensors on disk: whatever cuts wrote them, any other cut reads its own elements."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dslaunch.errors import ConfigError

torch = pytest.importorskip("torch")

from dslaunch.runtime.held import Cut, Held, shared_out  # noqa: E402
from dslaunch.runtime.proof import hash_of  # noqa: E402
from dslaunch.runtime.store import INDEX, Source, Stored, check_fits, index_text  # noqa: E402
from dslaunch.runtime.tensorfile import Entry, TensorFile, write  # noqa: E402

NAME = "parts.llm.head.weight"
FROZEN = "parts.tower.norm.weight"
WHOLE = torch.arange(24 * 12, dtype=torch.float32).view(24, 12)
CUTS = [(-1, 1, 1), (0, 1, 2), (0, 3, 4), (1, 1, 3), (1, 2, 2)]


def stored(folder: Path, alike: tuple[int, int, int], replicas: int) -> Source:
    """WHOLE in `folder`, cut over shards and each slice over replicas."""
    pieces = []
    for rank in range(alike[2]):
        flat = Cut(*alike, rank).slice_of(WHOLE).reshape(-1)
        for replica in range(replicas):
            start, stop = shared_out(len(flat), replica, replicas)
            file = f"rank-{rank}-{replica}.safetensors"
            part = flat[start:stop].clone()
            write(folder / file, [Entry(f"weight/{NAME}", part.dtype, tuple(part.shape), lambda part=part: part)])
            pieces.append((file, rank, start, stop))
    stored = Stored((24, 12), Cut(*alike), 7, ("weight",), tuple(pieces))
    (folder / INDEX).write_text(index_text({NAME: stored}, [], {}), encoding="utf-8")
    return Source(folder)


@pytest.mark.parametrize("written", CUTS)
@pytest.mark.parametrize("read", CUTS)
def test_every_cut_reads_what_every_other_wrote(
    written: tuple[int, int, int], read: tuple[int, int, int], tmp_path: Path
) -> None:
    source = stored(tmp_path, written, replicas=3)
    assert torch.equal(source.whole(NAME, "weight"), WHOLE)
    for rank in range(read[2]):
        cut = Cut(*read, rank)
        flat = cut.slice_of(WHOLE).reshape(-1)
        for start, stop in ((0, len(flat)), (5, 17), (len(flat) - 1, len(flat)), (3, 3)):
            assert torch.equal(source.piece(NAME, "weight", cut, start, stop), flat[start:stop])


@given(count=st.integers(0, 50), size=st.integers(1, 9))
def test_holders_share_out_every_element_once(count: int, size: int) -> None:
    shares = [range(*shared_out(count, rank, size)) for rank in range(size)]
    assert [element for share in shares for element in share] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_piece_that_is_missing_is_named(tmp_path: Path) -> None:
    source = stored(tmp_path, (0, 1, 2), replicas=2)
    index = json.loads((tmp_path / "index.json").read_text())
    del index["tensors"][NAME]["pieces"][1]
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"lacks elements 72 to 144 of parts.llm.head.weight \(weight\)"):
        Source(tmp_path).whole(NAME, "weight")
    assert torch.equal(source.whole(NAME, "weight"), WHOLE)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"tensors": {}}', '{"frozen": [], "extra": {}, "tensors": {"a": {}}}']
)
def test_an_index_that_is_none_is_one_message(text: str, tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(ConfigError, match=r"index.json: not an index of dslaunch.tensors/1: "):
        Source(tmp_path)


@pytest.mark.parametrize(
    ("shapes", "start", "message"),
    [
        ({}, "seed 1", "the model of this plan has no parameter parts.llm.head.weight"),
        ({NAME: (24, 12), "parts.llm.norm": (12,)}, "seed 1", "the checkpoint has no parameter parts.llm.norm"),
        ({NAME: (12, 24)}, "seed 1", r"of shape \[24, 12\]; the model of this plan \[12, 24\]"),
        ({NAME: (24, 12), FROZEN: (12,)}, "seed 2", "which follow from seed 1; this plan has seed 2"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(
    shapes: dict[str, tuple[int, ...]], start: str, message: str, tmp_path: Path
) -> None:
    stored(tmp_path, (0, 1, 2), replicas=1)
    index = json.loads((tmp_path / "index.json").read_text())
    index["frozen"] = [FROZEN]
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=message):
        check_fits(Source(tmp_path), shapes, ("seed 1", start))
    check_fits(Source(tmp_path), {NAME: (24, 12), FROZEN: (12,)}, ("seed 1", "seed 1"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_the_files_are_safetensors(dtype: object, tmp_path: Path) -> None:
    load_file = pytest.importorskip("safetensors.torch").load_file
    tensors = {name: torch.randn(shape).to(dtype) for name, shape in (("a", (3, 5)), ("b/c", ()), ("none", (0,)))}
    path = tmp_path / "x.safetensors"
    entries = [
        Entry(name, each.dtype, tuple(each.shape), lambda each=each: each) for name, each in tensors.items()
    ]
    write(path, entries)
    found, mine = load_file(path), TensorFile(path)
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor)
        assert torch.equal(mine.tensor(name), tensor)


def test_a_hash_knows_every_bit_and_its_place() -> None:
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    other, swapped = tensor.clone(), tensor.clone()
    other[500] = torch.nextafter(other[500], torch.tensor(10.0))
    swapped[:2] = tensor[:2].flip(0)
    assert hash_of(tensor) == hash_of(tensor.clone().view(10, 100))
    assert len({hash_of(tensor), hash_of(other), hash_of(swapped), hash_of(tensor.bfloat16())}) == 4


def test_a_moment_is_read_where_its_piece_lies() -> None:
    flat = torch.arange(10.0)
    piece = Held("parts.a.b", (4,), Cut(), 1, flat[5:8], {"exp_avg": flat * 2, "step": 3}, offset=5)
    assert piece.kinds == ("weight", "exp_avg")
    assert piece.tensor("exp_avg").tolist() == [10.0, 12.0, 14.0]
