"""dslaunch.runtime, killed and damaged: it goes on from its newest whole checkpoint, to the same losses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dslaunch.progress import SAVE
from dslaunch.run.records import read_ranks
from dslaunch.run.state import read_events, read_state
from tests.real.parts import need

need("torch", "deepspeed", "sklearn")

_LIMIT_S = 300.0
_WORDS = [
    "launch", "--skip-preflight", "recipe=vla_tiny", "cluster=local", "launcher=torchrun", "strategy=ddp",
    "training.steps=8", "training.optimizer.warmup_steps=2", "training.global_batch=32", "checkpoint.every=2",
    "restart.wait_s=0.2",
]  # fmt: skip

Train = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Train]:
    """Starts the command line; what still runs at the end is ended, and its guard ends the job."""
    started: list[subprocess.Popen[str]] = []

    def begin(*words: str) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "dslaunch", *words],
                cwd=tmp_path,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()


def _losses(run: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 9))
    return {row["step"]: row["loss"] for row in rows}


def _wait_for(there: Callable[[], bool]) -> None:
    limit = time.monotonic() + _LIMIT_S
    while not there():
        assert time.monotonic() < limit
        time.sleep(0.05)


def test_a_killed_rank_and_a_damaged_checkpoint_cost_the_steps_since_alone(tmp_path: Path, train: Train) -> None:
    whole = train(*_WORDS, "run.root=whole")
    output, _ = whole.communicate(timeout=_LIMIT_S)
    assert whole.returncode == 0, output
    assert "loses least" in output
    expected = _losses(next((tmp_path / "whole").iterdir()))

    process = train(*_WORDS, "run.root=struck")
    _wait_for(lambda: any(tmp_path.glob("struck/*/checkpoints/step-00000004/dslaunch.json")))
    run = next((tmp_path / "struck").iterdir())
    saved = (run / "checkpoints" / "step-00000004").glob("rank-*.safetensors")
    damaged = max(saved, key=lambda path: path.stat().st_size)
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    (rank,) = [each.process for each in read_ranks(run / "ranks") if each.rank == 1]
    assert rank is not None
    os.kill(rank.pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=_LIMIT_S)
    assert process.returncode == 0, output
    assert "step-00000004 is broken and passed over" in output
    assert read_state(run).attempt == 2
    (ended,) = [event["details"] for event in read_events(run) if event["kind"] == "attempt_ended"]
    assert (ended["cause"], ended["rank"], len(ended["evidence"])) == ("killed", 1, 1)
    said = f"{os.uname().nodename}: rank 1 exits 137 (SIGKILL) while "
    assert ended["evidence"][0].startswith(said)
    assert "step " in ended["evidence"][0]
    assert _losses(run) == pytest.approx(expected, rel=1e-6)
    assert [json.loads(line)["step"] for line in (run / "checkpoints.jsonl").read_text().splitlines()][-1] == 8


@pytest.mark.slow
def test_a_breach_asks_for_a_checkpoint_which_is_saved_behind_a_step(tmp_path: Path, train: Train) -> None:
    """The first gradients of vla_tiny are larger than what is watched for."""
    process = train(*_WORDS, "training.steps=80", "checkpoint.every=0", "notify.breach.gradient_norm=checkpoint")
    output, _ = process.communicate(timeout=_LIMIT_S)
    assert process.returncode == 0, output
    run = next((tmp_path / "runs").iterdir())
    told = [event["details"]["threshold"] for event in read_events(run) if event["kind"] == "save_asked"]
    assert set(told) == {"gradient_norm"}
    *asked, last = sorted(path.name for path in (run / "checkpoints").glob("step-*"))
    assert last == "step-00000080"
    assert 1 <= len(asked) <= len(told)
    assert not (run / SAVE).exists()
