"""Folders of Megatron's checkpoints, by their names."""

from __future__ import annotations

from pathlib import Path

import pytest

from dslaunch.files.fileset import FileSet, joined, read_fileset, read_folder
from dslaunch.rules.checking import check
from dslaunch.rules.settings import Settings

_RUN = (
    "torchrun --nproc-per-node 4 pretrain_gpt.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 --max-position-embeddings 512 "
    "--micro-batch-size 1 --tokenizer-type NullTokenizer --vocab-size 1000 --lr 1e-4 --train-iters 10 --load ckpt"
)


def found(folder: Path) -> list[str]:
    files = joined([read_folder(folder), read_fileset({"run.sh": _RUN})])
    assert isinstance(files, FileSet)
    return [each.message for each in check(None, files, Settings()) if each.rule == "megatron.load"]


def made(folder: Path, tracker: str, *names: str) -> Path:
    for name in names:
        (folder / name).mkdir(parents=True)
    if tracker:
        (folder / "latest_checkpointed_iteration.txt").write_text(tracker)
    return folder


GRID = tuple(f"iter_0000100/mp_rank_{tensor:02d}_{stage:03d}" for tensor in (0, 1) for stage in (0, 1))


@pytest.mark.parametrize(
    ("tracker", "names", "told"),
    [
        ("100\n", GRID, ""),
        ("100", ("iter_0000100",), ""),
        ("", GRID, "no latest_checkpointed_iteration.txt"),
        ("200", GRID, "names iter_0000200, which isn't there"),
        ("rubbish", GRID, "names rubbish, which isn't there"),
        ("100", GRID[:3], "1 of 2 x 2 folders mp_rank_* missing"),
        ("100", tuple(name[:-4] for name in GRID[::2]), "--pipeline-model-parallel-size is 2"),
        ("release", ("release/mp_rank_00_000", "release/mp_rank_00_001"), "--tensor-model-parallel-size is 2"),
    ],
)
def test_what_is_told_of_a_folder(tmp_path: Path, tracker: str, names: tuple[str, ...], told: str) -> None:
    messages = found(made(tmp_path / "ckpt", tracker, *names))
    assert [told in message for message in messages] == ([True] if told else [])
