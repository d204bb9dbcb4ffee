"""Real faults, repeated on one process: of a program, of its data, and one that only several ranks have."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from dslaunch.review.json_schema import json_schema
from tests.real.parts import need

need("torch", "deepspeed")

_LIMIT_S = 300.0
_RAISES = """
from dslaunch.progress import step
for number in range(1, 7):
    if number == 3:
        raise ValueError(f"a batch that nobody expected, at {id(step):#x}")
    step(number)
"""
_MISMATCH = """
import os
import torch, torch.distributed as dist
from dslaunch.progress import step
dist.init_process_group("gloo")
for number in range(1, 7):
    dist.all_reduce(torch.ones(1))
    if number == 3 and dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1000))
    step(number)
"""
_SPOILS = 'batch.images[place, 0, 0, 0] = float("nan")'
_KILLS = 'os.environ["RANK"] == "1" and os.kill(os.getpid(), 9)'
_NAN = """
import os
from dataclasses import replace
from dslaunch.runtime.data import Digits, open_data
class Broken(Digits):
    def at(self, numbers):
        numbers = list(numbers)
        batch = super().at(numbers)
        for place, number in enumerate(numbers):
            if number == 2 * 32 + 19:
                batch.images[place, 0, 0, 0] = float("nan")
        return batch
def samples(plan):
    made = open_data(replace(plan, files=replace(plan.files, data_path="digits")))
    made.__class__ = Broken
    return made
"""


def dslaunch(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(home), "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "dslaunch", *words],
        cwd=home, env=environ, capture_output=True, text=True, timeout=_LIMIT_S, check=False,
    )  # fmt: skip


def failed(home: Path, *words: str) -> Path:
    """The folder of a run that fails."""
    common = ("recipe=vla_tiny", "cluster=local", "launcher=torchrun", "--skip-preflight", "restart.max=0")
    done = dslaunch(home, "launch", *common, *words)
    assert done.returncode == 1, done.stdout + done.stderr
    (run,) = (home / "runs").iterdir()
    return run


def triage(home: Path, run: Path, *words: str) -> dict[str, Any]:
    done = dslaunch(home, "triage", run.name, "--json", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    jsonschema.validate(found, json_schema("dslaunch.triage/1"))
    return found


def script(home: Path, text: str) -> tuple[str, ...]:
    (home / "train.py").write_text(text)
    return ("module=", "script=train.py", "engine=torch", "strategy=ddp")


def test_what_the_program_does_on_any_number_of_ranks_is_its_own(tmp_path: Path) -> None:
    run = failed(tmp_path, *script(tmp_path, _RAISES))
    found = triage(tmp_path, run)
    assert (found["verdict"], found["step"], found["repeated_to"]) == ("model_and_data", 3, 2)
    assert found["error"].startswith("ValueError: a batch that nobody expected")
    assert "at the same step 3" in found["why"]
    told = dslaunch(tmp_path, "triage", run.name)
    assert told.returncode == 0, told.stderr
    assert "verdict        the model or its data: alone it fails likewise, at the same step 3" in told.stdout
    assert f"bash {run}/triage/2/rank.sh" in told.stdout


@pytest.mark.slow
def test_what_only_several_ranks_do_is_their_communication(tmp_path: Path) -> None:
    run = failed(tmp_path, *script(tmp_path, _MISMATCH))
    found = triage(tmp_path, run)
    assert found["verdict"] == "communication", found
    assert found["repeated_error"] == ""
    assert found["repeated_to"] >= found["step"]
    assert "collective" in found["next"]


@pytest.mark.slow
def test_a_sample_that_is_not_a_number_is_found_at_its_step(tmp_path: Path) -> None:
    need("sklearn")
    (tmp_path / "broken.py").write_text(_NAN)
    words = ("data.path=broken:samples", "strategy=zero1", "checkpoint.every=1", "training.steps=6")
    run = failed(tmp_path, *words)
    found = triage(tmp_path, run)
    assert (found["verdict"], found["step"], found["repeated_to"]) == ("model_and_data", 3, 2), found
    assert "at the same step 3" in found["why"]
    assert found["repeated_from"] == "step-00000002"
    assert found["repeated_error"].startswith("FloatingPointError: the loss of step 3 is nan")
    assert sorted(path.name for path in (run / "checkpoints").glob("step-*")) == ["step-00000001", "step-00000002"]


@pytest.mark.slow
def test_a_model_too_large_for_one_process_is_repeated_as_its_twin(tmp_path: Path) -> None:
    need("sklearn")
    (tmp_path / "broken.py").write_text(_NAN.replace("2 * 32 + 19", "19"))
    large = tuple(f"model.components.llm.{each}" for each in ("hidden=512", "ffn=2048", "layers=8"))
    short = ("training.steps=2", "training.optimizer.warmup_steps=1", "strategy=zero3")
    projector = "model.components.projector.dims=[64,128,512]"
    run = failed(tmp_path, *large, *short, projector, "data.path=broken:samples")
    leave_memory(run, 0.75)
    found = triage(tmp_path, run)
    assert found["verdict"] == "model_and_data", found
    assert "its twin of 1/" in found["repeated_as"]
    assert found["repeated_error"].startswith("FloatingPointError: the loss of step 1 is nan")
    assert "at the same step 1" in found["why"]


def leave_memory(run: Path, gib: float) -> None:
    """As if the run's machine had so little for a process; the manifest goes with the change."""
    before = (run / "blueprint.json").read_text()
    blueprint = json.loads(before)
    blueprint["config"]["cluster"]["gpu"]["memory_gib"] = gib
    after = json.dumps(blueprint)
    (run / "blueprint.json").write_text(after)
    old, new = (hashlib.sha256(text.encode()).hexdigest() for text in (before, after))
    manifest = run / "manifest.json"
    manifest.write_text(manifest.read_text().replace(old, new))


@pytest.mark.slow
def test_a_rank_that_somebody_kills_is_no_fault_of_the_model(tmp_path: Path) -> None:
    need("sklearn")
    (tmp_path / "killing.py").write_text(_NAN.replace(_SPOILS, _KILLS))
    run = failed(tmp_path, "data.path=killing:samples", "strategy=zero1", "training.steps=6")
    found = triage(tmp_path, run)
    assert (found["verdict"], found["cause"]) == ("environment", "killed"), found
    assert found["repeated_error"] == ""
    assert found["repeated_to"] >= found["step"]
    assert "the run ended because a process was killed" in found["why"]


def test_a_run_that_did_not_fail_is_not_repeated(tmp_path: Path) -> None:
    done = dslaunch(tmp_path, "triage", "nowhere")
    assert done.returncode == 2
    assert "nowhere: no run" in done.stderr
