"""Each of DeepSpeed's modes as rendered: read by DeepSpeed's parser, and started where a CPU can.

The old releases are read from DSLAUNCH_DEEPSPEED_SDISTS, a folder of unpacked sdists (deepspeed-0.17.6 and so on);
without it pip fetches those that the test needs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.golden.cases import planned, rendered
from tests.real.parts import need

need("torch", "deepspeed", "transformers")

from dslaunch.engines.deepspeed_keys import newest, table  # noqa: E402
from dslaunch.errors import PlanError  # noqa: E402
from tests.real.test_rendered_deepspeed import job, judged  # noqa: E402

LLAMA = [
    "recipe=llama3_8b", "cluster=64xA100", "engine=deepspeed", "script=train.py",
    "training.optimizer.schedule=constant", "training.optimizer.warmup_steps=0",
]  # fmt: skip
ONCE = "training.global_batch=64"
STRATEGIES = {
    "zero0": ["strategy=zero0"],
    "zero1": ["strategy=zero1"],
    "zero2": ["strategy=zero2"],
    "zero3": ["strategy=zero3"],
    "zero1_cpu": ["strategy=zero1_cpu_offload"],
    "zero2_cpu": ["strategy=zero2_cpu_offload"],
    "zero3_cpu": ["strategy=zero3_cpu_offload"],
    "nvme": ["strategy=zero3_nvme_offload", "strategy.nvme.path=/nvme/x", "strategy.every.offload=nvme"],
    "nvme_params": ["strategy=zero3_nvme_offload", "strategy.nvme.path=/nvme/x"],
    "hpz": ["strategy=zero3_hpz"],
    "zero_plus_plus": ["strategy=zero3_plus_plus"],
    "autotp_zero0": ["strategy=autotp", "strategy.every.zero=0"],
    "autotp_zero1": ["strategy=autotp"],
    "autotp_zero2": ["strategy=autotp", "strategy.every.zero=2"],
    "autotp_zero3": ["strategy=autotp", "strategy.every.zero=3"],
    "autotp_zero3_cpu": ["strategy=autotp", "strategy.every.zero=3", "strategy.every.offload=cpu_params"],
    "ulysses_zero1": ["strategy=ulysses", "strategy.every.zero=1"],
    "ulysses_zero3": ["strategy=ulysses"],
    "ulysses_zero3_cpu": ["strategy=ulysses", "strategy.every.offload=cpu"],
    "zenflow_zero2": ["strategy=zenflow", ONCE],
    "zenflow_zero3": ["strategy=zenflow", "strategy.every.zero=3", ONCE],
    "super_offload": ["strategy=super_offload"],
    "sections": [
        "strategy=zero2", "checkpoint.universal=true", "engine.activation_checkpointing.enabled=true",
        "engine.monitor.csv.enabled=true", "engine.monitor.tensorboard.enabled=true",
        "engine.monitor.wandb.enabled=true", "engine.monitor.comet.enabled=true",
    ],
}  # fmt: skip
CPU_CANNOT = {
    "nvme": "async_io",
    "nvme_params": "async_io",
    "zero_plus_plus": "not been implemented on CPU",
    "super_offload": "only supports NVIDIA CUDA GPUs",
}
"""What stops the start on a machine without GPUs and libaio; everything before it went well."""
NOT_STARTED = {"sections"}
"""The monitors need their packages."""
OLD = ("0.16.9", "0.17.6", "0.18.9", "0.19.3", "0.19.6")


def mode_job(name: str, initialize: int = 0) -> dict[str, Any]:
    """AutoTP and Ulysses make their own groups; AutoTP cuts a model that it knows."""
    plan, _, _ = planned(*LLAMA, *STRATEGIES[name])
    (part,) = plan.components.values()
    own = part.tp > 1 or part.cp > 1
    made = job(rendered(*LLAMA, *STRATEGIES[name])["ds_config.json"], part.dp, initialize)
    if "zenflow" in name:
        # Its own Adam is compiled; the process that it would start beside this one has no other ranks to meet.
        del made["config"]["optimizer"]["params"]["torch_adam"]
        made["config"]["zero_optimization"]["zenflow"]["overlap_step"] = False
    return {**made, "own_groups": own, "model": "llama" if part.tp > 1 else ""}


def test_each_strategy_is_read_at_its_world_size() -> None:
    results = judged([mode_job(name) for name in STRATEGIES])
    for name, result in zip(STRATEGIES, results, strict=True):
        plan, _, _ = planned(*LLAMA, *STRATEGIES[name])
        (part,) = plan.components.values()
        # Under AutoTP DeepSpeed counts every rank, so each sample tp times.
        total = plan.global_batch * part.tp
        assert result == {"batch": [total, part.micro_batch, part.num_microbatches], "stage": part.zero}, name


def test_autotp_cuts_a_model_and_ulysses_makes_its_groups() -> None:
    names = ["autotp_zero1", "ulysses_zero3", "hpz"]
    autotp, ulysses, hpz = judged([mode_job(name, initialize=1) for name in names])
    whole, vocabulary = 43_200, 2 * 64 * 64
    assert autotp["groups"] == [8, 8, 1]
    assert vocabulary < autotp["elements"] < whole / 4
    assert ulysses["groups"] == [1, 8, 8]
    assert hpz["optimizer"] == "DeepSpeedZeroOptimizer_Stage3"


@pytest.mark.slow
def test_each_strategy_starts_or_stops_where_a_cpu_must() -> None:
    names = [name for name in STRATEGIES if name not in NOT_STARTED]
    for name, result in zip(names, judged([mode_job(name, initialize=1) for name in names]), strict=True):
        assert CPU_CANNOT.get(name, "") in result.get("error", ""), (name, result)
        assert ("error" in result) == (name in CPU_CANNOT), (name, result)


@pytest.fixture(scope="module")
def sdists(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the unpacked sources of the old releases."""
    given = os.environ.get("DSLAUNCH_DEEPSPEED_SDISTS")
    if given:
        return Path(given)
    folder = tmp_path_factory.mktemp("sdists")
    for version in OLD:
        fetched = subprocess.run(
            [sys.executable, "-m", "pip", "download", f"deepspeed=={version}", "--no-deps", "--no-binary",
             "deepspeed", "--no-build-isolation", "-q", "-d", str(folder)],
            capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "DS_BUILD_OPS": "0"},
        )  # fmt: skip
        if fetched.returncode:
            pytest.skip(f"deepspeed {version} can't be fetched: {fetched.stderr.strip()[-200:]}")
        with tarfile.open(folder / f"deepspeed-{version}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
    return folder


def asked_of(version: str, sdists: Path, jobs: list[dict[str, Any]]) -> dict[str, Any]:
    """What an old release says of the jobs."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.real.old_deepspeed"], input=json.dumps(jobs), capture_output=True, text=True,
        timeout=300, check=False,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(sdists / f"deepspeed-{version}")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout)
    assert answer["version"] == version
    return answer


def old_job(words: list[str]) -> dict[str, Any]:
    plan, _, _ = planned(*LLAMA, *words)
    (part,) = plan.components.values()
    config = json.loads(rendered(*LLAMA, *words)["ds_config.json"])
    return {"config": config, "world": plan.world_size, "replicas": part.dp * part.tp}


@pytest.mark.slow
@pytest.mark.parametrize("version", OLD)
def test_an_old_release_takes_what_is_rendered_for_it_and_refuses_the_rest(version: str, sdists: Path) -> None:
    offered, withheld = {}, {}
    for name, words in STRATEGIES.items():
        try:
            offered[name] = old_job([*words, f"engine.version={version}"])
        except PlanError:
            withheld[name] = old_job(words)
    answer = asked_of(version, sdists, [*offered.values(), *withheld.values()])
    results = dict(zip([*offered, *withheld], answer["results"], strict=True))
    assert {name: results[name] for name in offered if results[name]} == {}
    by_parser = {name for name in withheld if name not in ("autotp_zero3", "autotp_zero3_cpu", "zenflow_zero3")}
    assert all("ValidationError" in results[name] for name in by_parser), results
    assert set(withheld) == EXPECTED_WITHHELD[version]


EXPECTED_WITHHELD = {
    "0.16.9": {"autotp_zero3", "autotp_zero3_cpu", "zenflow_zero2", "zenflow_zero3", "super_offload"},
    "0.17.6": {"autotp_zero3", "autotp_zero3_cpu", "zenflow_zero3", "super_offload"},
    "0.18.9": {"autotp_zero3", "autotp_zero3_cpu"},
    "0.19.3": {"autotp_zero3", "autotp_zero3_cpu"},
    "0.19.6": set(),
}


@pytest.mark.slow
@pytest.mark.parametrize("version", OLD)
def test_the_key_table_is_that_of_an_old_releases_models(version: str, sdists: Path) -> None:
    for path, names in asked_of(version, sdists, [])["keys"].items():
        keys = table().sections[path].keys
        there = {name for name, key in keys.items() if not key.lacks(version) and not key.gone(version)}
        assert there == set(names), path


def test_the_trainer_fills_in_what_the_plan_says(tmp_path: Path) -> None:
    """transformers' own reader of both files, in a process of its own."""
    words = [*LLAMA, "strategy=zero3", "training.clip=0.5", "training.optimizer.lr=2e-5"]
    plain = json.loads(rendered(*words)["ds_config.json"])
    for name, text in rendered(*words, "engine.huggingface=true").items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    here = {**json.loads((tmp_path / "hf_args.json").read_text()), "use_cpu": True}
    (tmp_path / "hf_args.json").write_text(json.dumps(here))
    code = """
import json, sys
from transformers import HfArgumentParser, TrainingArguments
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig
class OfAll(TrainingArguments):
    world_size = property(lambda self: 64)
(arguments,) = HfArgumentParser(OfAll).parse_json_file("hf_args.json")
config = HfTrainerDeepSpeedConfig("ds_config.json")
config.trainer_config_process(arguments)
config.trainer_config_finalize(arguments, None, arguments.max_steps)
print(json.dumps(config.config))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == plain


def test_the_newest_version_is_the_one_that_is_installed() -> None:
    import deepspeed

    assert deepspeed.__version__.startswith(newest())
