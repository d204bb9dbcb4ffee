"""Checkpoints that are written while training goes on: exact, whole or not there, and one at a time."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import threading
import time
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from dslaunch.planfile import prediction_from_json
from tests.golden.cases import rendered, written
from tests.real.parts import need
from tests.real.ranks import Outcome, run_ranks

need("torch", "deepspeed", "sklearn")

WORLD, STEPS = 2, 6
WORDS = (
    "recipe=vla_tiny", "cluster=local", f"cluster.gpus_per_node={WORLD}", "strategy=zero1",
    "training.optimizer.warmup_steps=1", "training.global_batch=32", "strategy.every.micro_batch=8",
    f"training.steps={STEPS}", "checkpoint.every=2", "checkpoint.async=true",
)  # fmt: skip


def run(folder: Path, *words: str, spoil: Any = None) -> Outcome:
    plan = folder / "plan.json"
    if not plan.exists():
        written(folder, rendered(*WORDS, *words))
    return run_ranks(plan, WORLD, spoil=spoil)


def again(folder: Path, _rank: int) -> None:
    os.environ.update(DSLAUNCH_RUN_DIR=str(folder), DSLAUNCH_RESUME="1")


SLOW_S = (2.0, 0.5)
"""What writing the first checkpoint takes, and each other: as long as several steps."""


def slow(_rank: int) -> None:
    store: Any = import_module("dslaunch.runtime.store")
    true, seconds = store.write, iter(SLOW_S)

    def late(*args: Any) -> None:
        time.sleep(next(seconds, SLOW_S[-1]))
        true(*args)

    store.write = late


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in rows(folder / "metrics.jsonl")]


def whole(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in (folder / "checkpoints").glob("step-*/dslaunch.json"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps, with three checkpoints of which two are kept."""
    folder = tmp_path_factory.mktemp("saving") / "run"
    outcome = run(folder, "checkpoint.keep=2", spoil=slow)
    assert outcome.statuses == [0] * WORLD, outcome.output
    return folder


def test_the_last_ones_are_kept_and_the_end_waits_for_the_last(trained: Path) -> None:
    assert whole(trained) == ["step-00000004", "step-00000006"]
    assert {path.name for path in (trained / "checkpoints").iterdir()} == {*whole(trained), "latest"}
    assert (trained / "checkpoints" / "latest").read_text() == "step-00000006\n"


def test_training_does_not_wait_for_what_the_writer_does(trained: Path) -> None:
    """The first one had steps to be written in."""
    saved = rows(trained / "checkpoints.jsonl")
    assert [row["step"] for row in saved] == [2, 4, 6]
    assert saved[0]["save_time_s"] < SLOW_S[0] < saved[0]["written_in_s"]


def test_each_rank_writes_and_copies_what_the_plan_reckons_of_its_host(trained: Path) -> None:
    """Names and places of tensors, which stand before them in a file, aside."""
    prediction = prediction_from_json((trained / "prediction.json").read_text(), "prediction.json")
    gib = sum(stages[0].host_gib_per_rank for stages in prediction.components.values())
    for rank in range(WORLD):
        file = trained / "checkpoints" / "step-00000006" / f"rank-{rank:05d}.safetensors"
        assert file.stat().st_size == pytest.approx(gib * 2**30, rel=0.02)


def test_it_goes_on_exactly(trained: Path, tmp_path: Path) -> None:
    """What was written is the state of its step, though training went on meanwhile."""
    outcome = run(tmp_path / "run", f"checkpoint.load={trained / 'checkpoints' / 'step-00000004'}")
    assert outcome.statuses == [0] * WORLD, outcome.output
    assert losses(tmp_path / "run") == losses(trained)[4:]


def test_a_checkpoint_that_is_named_and_broken_is_refused(trained: Path, tmp_path: Path) -> None:
    """One byte is another: what trained on would be another model."""
    broken = tmp_path / "broken"
    shutil.copytree(trained / "checkpoints" / "step-00000004", broken)
    file = broken / "rank-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    outcome = run(tmp_path / "run", f"checkpoint.load={broken}")
    assert outcome.statuses == [2] * WORLD, outcome.output
    assert f"checkpoint.load: {broken} is broken: a file that its files.json names is missing" in outcome.output
    assert "Traceback" not in outcome.output


def full(folder: Path, rank: int) -> None:
    """The disk of rank 1 is full when it writes the second checkpoint."""
    if rank == 1:
        place = folder / "checkpoints" / "step-00000004"
        place.mkdir(parents=True)
        (place / "rank-00001.safetensors").symlink_to("/dev/full")


def test_a_full_disk_ends_the_job_with_rank_and_path_and_leaves_the_last_one(
    trained: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    outcome = run(folder, spoil=partial(full, folder))
    assert outcome.statuses == [1] * WORLD
    said = f"the checkpoint of step 4 could not be written into {folder / 'checkpoints' / 'step-00000004'}"
    assert said in outcome.output
    assert f"rank 1: OSError: [Errno {errno.ENOSPC}] No space left on device" in outcome.output
    assert whole(folder) == ["step-00000002"]
    (folder / "checkpoints" / "step-00000004" / "rank-00001.safetensors").unlink()
    resumed = run(folder, spoil=partial(again, folder))
    assert resumed.statuses == [0] * WORLD, resumed.output
    assert losses(folder) == losses(trained)


def killed_while_writing(folder: Path, rank: int) -> None:
    """Rank 1 dies in the thread that writes the checkpoint of step 4, when half of it is written."""
    os.environ["DSLAUNCH_RUN_DIR"] = str(folder)
    if rank != 1:
        return
    store: Any = import_module("dslaunch.runtime.store")
    true, calls = store._rows, [0]

    def counted(*args: Any) -> Any:
        if threading.current_thread() is not threading.main_thread() and whole(folder):
            calls[0] += 1
            if calls[0] == 20:
                os.kill(os.getpid(), signal.SIGKILL)
        return true(*args)

    store._rows = counted


@pytest.mark.slow
def test_a_crash_while_it_is_written_leaves_the_last_one(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    outcome = run(folder, spoil=partial(killed_while_writing, folder))
    assert outcome.statuses == [1, -signal.SIGKILL], outcome.output
    assert whole(folder) == ["step-00000002"]
    assert (folder / "checkpoints" / "step-00000004" / "rank-00001.safetensors").exists()
    resumed = run(folder, spoil=partial(again, folder))
    assert resumed.statuses == [0] * WORLD, resumed.output
    assert losses(folder) == losses(trained)
