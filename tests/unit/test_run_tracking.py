"""What a supervisor logs to Weights & Biases; the package itself where it is installed."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dslaunch.planfile import Plan
from dslaunch.run import tracking
from dslaunch.run.tracking import Tracker
from tests.command import CommandLine
from tests.launching import make_plan

_RECORDER = """
class Settings:
    def __init__(self, **given):
        self.given = given
class _Run:
    def __init__(self):
        self.logged, self.summary, self.ended = [], {}, None
    def log(self, figures, step):
        self.logged.append((step, figures))
    def finish(self, exit_code):
        self.ended = exit_code
run = _Run()
asked = {}
def init(**given):
    asked.update(given)
    return run
"""


def _plan() -> Plan:
    plan = make_plan()
    return dataclasses.replace(plan, supervision=dataclasses.replace(plan.supervision, wandb="vla"))


def _row(run: Path, step: int, **figures: Any) -> None:
    (run / "ranks").mkdir(exist_ok=True)
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write(json.dumps({"step": step, "memory_kind": "host", **figures}) + "\n")


def test_every_step_is_logged_once_and_the_run_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the package, which records what it is asked."""
    place = tmp_path / "stand-in"
    place.mkdir()
    (place / "wandb.py").write_text(_RECORDER)
    monkeypatch.syspath_prepend(place)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    run = tmp_path / "vla-1"
    run.mkdir()
    tracker = Tracker(run, _plan(), pytest.fail)
    recorded: Any = sys.modules.pop("wandb")
    asked = recorded.asked
    assert (asked["project"], asked["name"], asked["mode"], asked["dir"]) == ("vla", "vla-1", "offline", str(run))
    tracker.write()
    _row(run, 1, loss=2.0)
    tracker.write()
    tracker.write()
    _row(run, 2, loss=1.5, grad_norm=None)
    tracker.tell("breach", "step 2: grad_norm 40 is above 10")
    tracker.end(succeeded=False)
    steps = [(step, figures["train/loss"]) for step, figures in recorded.run.logged]
    assert steps == [(1, 2.0), (2, 1.5)]
    assert recorded.run.logged[0][1]["dslaunch/attempt"] == 1
    assert "train/memory_kind" not in recorded.run.logged[0][1]
    assert recorded.run.summary == {"dslaunch/breach": "step 2: grad_norm 40 is above 10"}
    assert recorded.run.ended == 1


def test_what_the_package_raises_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "stand-in"
    place.mkdir()
    broken = _RECORDER.replace("self.logged.append((step, figures))", "raise OSError('full')")
    (place / "wandb.py").write_text(broken)
    monkeypatch.syspath_prepend(place)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    said: list[str] = []
    tracker = Tracker(tmp_path, _plan(), said.append)
    sys.modules.pop("wandb")
    for step in (1, 2):
        _row(tmp_path, step, loss=1.0)
        tracker.write()
    tracker.end(succeeded=True)
    assert said == ["notify.wandb: nothing more is logged: full"]


def test_the_package_writes_into_the_run_folder_and_nowhere_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    key = "0123456789abcdef0123456789abcdef01234567"
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "vla-1"
    run.mkdir()
    tracker = Tracker(run, _plan(), pytest.fail)
    _row(run, 1, loss=2.0)
    tracker.end(succeeded=True)
    (log,) = run.glob("wandb/offline-run-*/*.wandb")
    limit = time.monotonic() + 90
    while b"train/loss" not in log.read_bytes():  # its service writes the file a moment after `finish`
        assert time.monotonic() < limit
        time.sleep(0.1)
    assert [path.name for path in tmp_path.iterdir()] == ["vla-1"]
    assert not [path for path in run.rglob("*") if path.is_file() and key.encode() in path.read_bytes()]


def test_without_the_package_nothing_is_launched(
    dslaunch: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tracking, "find_spec", lambda _: None)
    done = dslaunch("launch", "recipe=vla_tiny", "cluster=local", "notify.wandb=vla")
    assert done.status == 2
    assert "notify.wandb: " in done.err
    assert "has no package wandb. Install it there (pip install wandb), or take notify.wandb out" in done.err
    assert not Path("runs").exists()
    done = dslaunch("plan", "recipe=vla_tiny", "notify.wandb_mode=online")
    assert done.status == 2
    assert "wandb is empty" in done.err
