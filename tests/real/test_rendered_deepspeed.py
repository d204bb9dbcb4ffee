"""DeepSpeed reads what is rendered for it: the configurations, the hostfile, the environment file."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.golden.cases import rendered
from tests.real.parts import need

need("torch", "deepspeed")

LLAMA = ["recipe=llama3_8b", "cluster=64xA100", "engine=deepspeed", "script=train.py"]
STEPS, WARMUP = 20, 5


def judged(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What DeepSpeed makes of the jobs, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.real.rendered_deepspeed"],
        input=json.dumps(jobs), capture_output=True, text=True, timeout=900, check=False,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    results: list[dict[str, Any]] = json.loads(done.stdout)
    return results


def job(text: str, dp: int, initialize: int = 0) -> dict[str, Any]:
    """`initialize`: steps of the schedule to record; 0 reads the configuration only.

    This machine's accelerator is the CPU, where DeepSpeed's GPU Adam would have to be compiled.
    """
    config = json.loads(text)
    config["optimizer"]["params"]["torch_adam"] = True
    return {"config": config, "world": 64, "dp": dp, "initialize": initialize}


@pytest.mark.slow
def test_each_component_of_the_64_gpu_layout() -> None:
    files = rendered("recipe=vla70b", "cluster=64xA100")
    dps = {"vision_encoder": 32, "projector": 64, "llm": 2}
    results = judged([job(files[f"ds_config.{name}.json"], dp, initialize=1) for name, dp in dps.items()])
    assert [result.get("batch") for result in results] == [[512, 1, 16], [512, 1, 8], [512, 1, 256]]
    assert [result["stage"] for result in results] == [2, 2, 1]
    assert [result["optimizer"] for result in results] == [
        "DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer", "BF16_Optimizer",
    ]  # fmt: skip


@pytest.mark.slow
def test_every_strategy_initialises_at_64_ranks() -> None:
    strategies = ["zero1", "zero2", "zero3"]
    texts = [rendered(*LLAMA, f"strategy={name}")["ds_config.json"] for name in strategies]
    texts.append(rendered(*LLAMA, "strategy=zero2", "training.precision=fp32")["ds_config.json"])
    results = judged([job(text, 64, initialize=1) for text in texts])
    assert [result.get("error") for result in results] == [None] * 4
    assert [result["stage"] for result in results] == [1, 2, 3, 2]
    assert results[2]["optimizer"] == "DeepSpeedZeroOptimizer_Stage3"


def test_offload_and_fp16_are_read() -> None:
    offload = rendered(*LLAMA, "strategy=zero3_cpu_offload")["ds_config.json"]
    fp16 = rendered(*LLAMA, "strategy=zero2", "training.precision=fp16")["ds_config.json"]
    assert judged([job(offload, 64), job(fp16, 64)]) == [
        {"batch": [128, 1, 2], "stage": 3}, {"batch": [128, 1, 2], "stage": 2},
    ]  # fmt: skip


def test_what_is_refused_here_is_refused_by_deepspeed_too() -> None:
    text = rendered(*LLAMA, "strategy=zero2")["ds_config.json"]
    made = json.loads(text)
    wrong = [
        {**made, "zero_optimization": {**made["zero_optimization"], "reduce_bucket": 1}},
        {**made, "elasticity": {"enabled": True}},
        {**made, "zero_optimization": {"stage": 0}},
        {**made, "train_batch_size": 120},
    ]
    results = judged([job(json.dumps(each), 64, initialize=1) for each in wrong])
    assert "reduce_bucket" in results[0]["error"]
    assert "Elastic training has been removed" in results[1]["error"]
    assert "unsupported mix" in results[2]["error"]
    assert "train_batch_size" in results[3]["error"]


def expected_lr(schedule: str, step: int, floor: float, warmup: int) -> float:
    """The rate of one optimizer step, with a peak of 1.

    DeepSpeed counts the warm-up and the linear decay from the step before; a cosine without warm-up is held at its
    peak for the shortest warm-up there is.
    """
    late, held = step - 1, warmup or 2
    if late < held:
        return 0.0 if late < 0 else late / warmup if warmup else 1.0
    if schedule == "constant":
        return 1.0
    if schedule == "linear":
        return 1 - (late - held) / (STEPS - held)
    return floor + (1 - floor) * (1 + math.cos(math.pi * (step - held) / (STEPS - held))) / 2


def scheduled(schedule: str, floor: float, warmup: int, *words: str) -> str:
    """ds_config.json with a peak of 1e-3."""
    settings = {"lr": 1e-3, "min_lr": floor * 1e-3, "schedule": schedule, "warmup_steps": warmup}
    words += tuple(f"training.optimizer.{key}={value}" for key, value in settings.items())
    return rendered(*LLAMA, "strategy=zero2", f"training.steps={STEPS}", *words)["ds_config.json"]


def test_a_script_gets_the_schedule_that_was_asked_for() -> None:
    schedules = [("cosine", 0.1, WARMUP), ("linear", 0.0, WARMUP), ("constant", 0.0, WARMUP), ("cosine", 0.1, 0)]
    results = judged([job(scheduled(*each), 64, initialize=STEPS) for each in schedules])
    for (schedule, floor, warmup), result in zip(schedules, results, strict=True):
        wanted = [1e-3 * expected_lr(schedule, step, floor, warmup) for step in range(STEPS)]
        assert [lr for (lr,) in result["lrs"]] == pytest.approx(wanted, abs=1e-9), (schedule, warmup)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_components_keep_rates_of_their_own(schedule: str) -> None:
    """The script makes a group a component; none of the schedules levels their rates."""
    text = scheduled(schedule, 0.0, WARMUP, "model.components.llm.lr=3e-4")
    rates = [3e-4, 1e-3]
    (result,) = judged([{**job(text, 64, initialize=STEPS), "rates": rates}])
    for step, lrs in enumerate(result["lrs"]):
        assert lrs == pytest.approx([lr * expected_lr(schedule, step, 0.0, WARMUP) for lr in rates], abs=1e-9)


def test_deepspeeds_own_reader_takes_the_hostfile(tmp_path: Path) -> None:
    from deepspeed.launcher.runner import fetch_hostfile

    words = ["recipe=llama3_8b", "cluster=2x8xA100", "engine=deepspeed", "strategy=zero2", "script=t.py"]
    for name, extra in (("remote", ["cluster.hosts=[node-2,node-1]"]), ("local", [])):
        local = ["recipe=vla_tiny", "cluster=local"]
        text = rendered(*(words + extra if extra else local))["hostfile"]
        (tmp_path / name).write_text(text)
    assert list(fetch_hostfile(str(tmp_path / "remote")).items()) == [("node-2", 8), ("node-1", 8)]
    assert dict(fetch_hostfile(str(tmp_path / "local"))) == {"localhost": 2}


def test_deepspeeds_runner_exports_the_environment_file_unchanged() -> None:
    from deepspeed.launcher import runner

    env = {"LIST": "a,b:c=d", "SPACED": "two words", "QUOTE": 'a"b', "DOLLAR": "$HOME", "EMPTY": ""}
    words = ["recipe=llama3_8b", "cluster=2x8xA100", "engine=deepspeed", "strategy=zero2", "script=t.py"]
    text = rendered(*words, "cluster.hosts=[a,b]", env=env)["ds_env"]
    pdsh = runner.PDSHRunner(runner.parse_args(["train.py"]), "")
    for line in text.splitlines(keepends=True):
        pdsh.add_export(*line.split("=", maxsplit=1))
    exports = "".join(f"export {name}={value}; " for name, value in pdsh.exports.items())
    command = exports + 'printf "%s\\0" ' + " ".join(f'"${name}"' for name in pdsh.exports)
    values = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True).stdout.split("\0")
    seen = dict(zip(pdsh.exports, values, strict=False))
    for name in ("LIST", "SPACED", "EMPTY"):
        assert seen[name] == env[name]
    assert not {"QUOTE", "DOLLAR"} & seen.keys()
