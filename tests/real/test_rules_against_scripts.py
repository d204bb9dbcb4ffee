"""Rules about scripts, models and checkpoints against DeepSpeed: each case's own files are run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.real.parts import need

need("torch", "deepspeed", "transformers", "accelerate")

from dslaunch.files.fileset import joined, read_fileset, read_folder  # noqa: E402
from dslaunch.rules import check  # noqa: E402
from dslaunch.rules.settings import Settings  # noqa: E402
from tests.cases.load import Case, all_cases  # noqa: E402
from tests.real.checkpoint_worker import CONFIG  # noqa: E402
from tests.real.engine_worker import WORLD  # noqa: E402
from tests.real.explained import leads_to  # noqa: E402

RAISED = (
    "accelerate.optimizer", "autotp.model", "autotp.model-init", "experts.model", "moe.experts", "moe.groups",
    "moe.options", "moe.zero3", "script.no-optimizer", "script.untested-optimizer",
    "script.client-state", "script.inner-type", "script.input-type", "script.pipeline-layer",
    "script.zero-init-copies",
    "optimizer.muon-dense", "optimizer.muon-heads", "optimizer.muon-parameters", "script.no-sync",
    "pipeline.dualpipev", "script.pipeline-module", "script.pipeline-mpu",
    "script.fsdp2-load", "script.sharded-weights", "script.weights-only",
    "ulysses.attention", "ulysses.heads",
    "ulysses.length", "ulysses.ranks", "zero.leaf-input", "zero.leaf-script", "zero.quantized-size",
)  # fmt: skip
"""Rules whose findings are what DeepSpeed raises."""
LOGGED = {
    "experts.model": "no MoE layers detected",
    "script.outer-autocast": "torch.autocast is enabled outside DeepSpeed but disabled within",
    "hybrid.model": "No compatible DeepSpeed inference policy found",
    "zero.granularity": "The smallest module granularity is",
    "zero.leaf-class": "did not match any modules",
}
"""Rules whose findings DeepSpeed says in its log, and goes on."""
EMPTY = "pipeline.empty-stage"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Runs a case's files in DeepSpeed: what was raised, and what was logged."""
    own = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path_factory.mktemp("extensions"))}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.real.case_worker"], env=own,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def ask(files: dict[str, str], rank: int = 0) -> dict[str, Any]:
        stdin.write(json.dumps({"files": files, "rank": rank}) + "\n")
        stdin.flush()
        answer = stdout.readline()
        assert answer, f"the process ended at {files}"
        found: dict[str, Any] = json.loads(answer)
        return found

    yield ask
    stdin.close()
    process.wait(timeout=60)


def judged(*names: str) -> list[Case]:
    return [case for case in all_cases() if case.rule in names and case.plan is None and case.real != "unjudged"]


def named(case: Case) -> str:
    return f"{case.rule}: {case.name}"


@pytest.mark.parametrize("case", judged(*RAISED), ids=named)
def test_what_is_called_an_error_is_raised(case: Case, run: Any) -> None:
    found = check(case.plan, case.fileset(), case.settings)
    ours = [finding.rule for finding in found if finding.severity == "error"]
    answer = run(case.files)
    assert bool(ours) == (answer["raised"] is not None), (ours, answer)
    assert answer["raised"] is None or leads_to(answer["raised"], ours), answer


@pytest.mark.parametrize("case", [case for case in all_cases() if case.rule == EMPTY], ids=named)
def test_the_last_stage_is_empty_where_layers_are_too_few(case: Case, run: Any) -> None:
    ours = [f.rule for f in check(None, case.fileset(), case.settings) if f.severity == "error"]
    raised = [run(case.files, rank)["raised"] for rank in (0, WORLD - 1)]
    assert raised == [None, "ValueError('optimizer got an empty parameter list')" if EMPTY in ours else None]


@pytest.mark.parametrize("case", judged(*LOGGED), ids=named)
def test_what_is_passed_over_is_logged(case: Case, run: Any) -> None:
    found = check(case.plan, case.fileset(), case.settings)
    ours = [finding.rule for finding in found if finding.severity != "error"]
    assert (case.rule in ours) == (LOGGED[case.rule] in run(case.files)["log"])


SCHEDULE = """
import deepspeed
import torch

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
engine, own, *_ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), lr_scheduler=schedule, config="ds_config.json")
for _ in range(3):
    engine.backward(engine(torch.ones(1, 8)).sum())
    engine.step()
assert own.param_groups[0]["lr"] == 0.0001, own.param_groups[0]["lr"]
assert optimizer.param_groups[0]["lr"] < 0.01
"""


def test_a_scheduler_of_another_optimizer_moves_that_one_alone(run: Any) -> None:
    files = {"ds_config.json": json.dumps(CONFIG), "train.py": SCHEDULE}
    assert "script.client-scheduler" in {f.rule for f in check(None, read_fileset(files), Settings())}
    assert run(files)["raised"] is None


AUTOCAST = """
import deepspeed
import torch

model = torch.nn.Linear(8, 8)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config="ds_config.json")
torch.set_autocast_enabled("cuda", True)  # as torch.autocast("cuda") does where there is a GPU
try:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(torch.ones(1, 8)).dtype == torch.bfloat16
        assert engine(torch.ones(1, 8)).dtype == torch.float32
finally:
    torch.set_autocast_enabled("cuda", False)
"""


def test_an_engine_switches_an_outer_autocast_off(run: Any) -> None:
    answer = run({"ds_config.json": json.dumps(CONFIG), "train.py": AUTOCAST})
    assert answer["raised"] is None
    assert LOGGED["script.outer-autocast"] in answer["log"]


def saved(folder: Path, world: int) -> set[str]:
    """The rules that a checkpoint's folder breaks for a job of that many ranks."""
    files = joined([read_fileset({"ds_config.json": json.dumps(CONFIG)}), read_folder(folder)])
    return {finding.rule for finding in check(None, files, Settings(world_size=world))}


def worker(world: int, folder: Path, *actions: str) -> list[str | None]:
    command = [sys.executable, "-m", "tests.real.checkpoint_worker", str(world), str(folder), *actions]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_checkpoints_are_judged_as_deepspeed_loads_them(tmp_path: Path) -> None:
    folder = tmp_path / "check points"
    loaded, serial = worker(8, folder, "save", "load", "load-serial")
    assert loaded is None
    assert saved(folder, 8) == set()
    assert "Only stage3 support" in str(serial)
    (fewer,) = worker(4, folder, "load")
    assert "used a DP world size of 8" in str(fewer)
    assert saved(folder, 4) == {"checkpoint.ranks"}
    next(folder.glob("*/zero_pp_rank_0_*")).unlink()
    (missing,) = worker(8, folder, "load")
    assert "FileNotFoundError" in str(missing)
    assert saved(folder, 8) == {"checkpoint.files"}
