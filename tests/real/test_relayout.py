"""A training goes on under another layout than the one that saved it: the same losses as without a break."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.real.parts import need

need("torch", "deepspeed", "sklearn")

from tests.real.relayout_ranks import (  # noqa: E402
    BF16,
    BF16_UNIFORM,
    HALF,
    KEPT,
    NATIVE,
    UNIFORM,
    train_all,
    write_all,
)

FP32 = 1e-5
"""Relative; 1.5e-7 was seen over all pairs."""
BETWEEN_BF16 = 1e-2
PAIRS = [
    ("twin of vla70b", "four stages, four shards"),
    ("twin of vla70b", "zero3"),
    ("four stages, four shards", "three shards"),
    ("three shards", "separate ranks"),
    ("separate ranks", "optimizer in host memory"),
    ("optimizer in host memory", "fsdp2"),
    ("fsdp2", "twin of vla70b"),
    ("zero3", "separate ranks"),
    ("zero3", "zero1"),
    ("zero1", "ddp"),
    ("ddp", "zero2"),
    ("ddp", "ddp"),
    ("fsdp2", "zero3"),
    ("zero0", "twin of vla70b"),
    ("zero1", KEPT),
    (KEPT, "four stages, four shards"),
    ("twin of vla70b merged", "three shards"),
    ("zero3 merged", "four stages, four shards"),
]
ALONE = "interleaved, ZeRO-3"
"""Trained in `make test-full` alone."""
LAYOUTS = (*(name for name in NATIVE if name != ALONE), *UNIFORM, KEPT)
ALL = (*LAYOUTS, ALONE)
EVERY = [(a, b) for a in ALL for b in ALL if (a, b) not in PAIRS]
IN_BF16 = [(BF16, BF16_UNIFORM), (BF16_UNIFORM, BF16)]

Row = tuple[float, float, float]
"""Loss, gradient norm, learning rate."""


def trained(root: Path, layouts: Iterable[str], pairs: list[tuple[str, str]]) -> Path:
    write_all(root)
    train_all(root, [*layouts, BF16, BF16_UNIFORM], pairs)
    return root


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("relayout"), LAYOUTS, PAIRS + IN_BF16)


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("every"), ALL, EVERY)


def rows(root: Path, before: str, name: str) -> list[Row]:
    path = root / f"{before} to {name}.json"
    if not path.exists():
        logs = sorted(root.glob("rank*.txt"))
        pytest.fail("\n".join(f"{log.name}:\n{log.read_text()[-2000:]}" for log in logs), pytrace=False)
    return [tuple(row) for row in json.loads(path.read_text())]


def compare(root: Path, before: str, name: str, rel: float) -> None:
    """Behind the break, against the run of the layout that saved, which never stopped."""
    found = rows(root, before, name)
    unbroken = rows(root, "", before.removesuffix(" merged"))[HALF:]
    assert len(found) == HALF
    for mine, theirs in zip(found, unbroken, strict=True):
        assert mine == pytest.approx(theirs, rel=rel)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_alike_without_a_break(name: str, fast: Path) -> None:
    for mine, theirs in zip(rows(fast, "", name), rows(fast, "", LAYOUTS[0]), strict=True):
        assert mine == pytest.approx(theirs, rel=FP32)


@pytest.mark.parametrize(("before", "name"), PAIRS)
def test_another_layout_goes_on(before: str, name: str, fast: Path) -> None:
    """To the bit on the same layout; DDP lays out its buckets anew behind a process's first backward pass."""
    compare(fast, before, name, 0 if before == name else FP32)


@pytest.mark.parametrize(("before", "name"), IN_BF16)
def test_in_bf16_too(before: str, name: str, fast: Path) -> None:
    compare(fast, before, name, BETWEEN_BF16)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "name"), EVERY)
def test_every_pair(before: str, name: str, every: Path) -> None:
    compare(every, before, name, 0 if before == name else FP32)
