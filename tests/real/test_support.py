"""Every recipe on every engine and version: what is rendered is read by the framework itself, and by its table.

docs/support.md is made of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dslaunch.engines.megatron_catalogue import (
    megatron_catalogue,
    megatron_deepspeed_catalogue,
    megatron_mimo_catalogue,
)
from dslaunch.engines.registry import ENGINES
from tests.megatron_parser import parsed
from tests.real.parts import need
from tests.real.support import OWN_CODE, RECIPES, Attempt, page, taken

PAGE = Path(__file__).parents[2] / "docs" / "support.md"
DEEPSPEED = ("deepspeed", "native", "megatron_deepspeed")
OLDER_CORES = {"0.12.0": "0.12.3", "0.14.0": "0.14.0"}
"""Megatron-LM's version -> the release of megatron-core that belongs to it."""


def configurations(attempts: list[Attempt]) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """What DeepSpeed is given, and what it must make of it, each once."""
    found = {}
    for each in attempts:
        assert each.plan
        for name, component in each.plan.components.items():
            text = each.files.get(f"ds_config.{name}.json") or each.files.get("ds_config.json")
            if not text or not component.trainable:
                continue
            job = {"config": json.loads(text), "world": each.plan.world_size, "dp": component.dp, "initialize": 0}
            batch = [each.plan.global_batch, component.micro_batch, component.num_microbatches]
            found[json.dumps(job)] = (job, {"batch": batch, "stage": component.zero})
    return found


def starting(job: dict[str, Any]) -> dict[str, Any]:
    """The same, for deepspeed.initialize; PyTorch's Adam need not be compiled."""
    config = job["config"]
    params = {**config["optimizer"]["params"], "torch_adam": True}
    return {**job, "initialize": 1, "config": {**config, "optimizer": {**config["optimizer"], "params": params}}}


def require_read(pairs: Iterable[tuple[dict[str, Any], dict[str, Any]]], path: str = "") -> None:
    """DeepSpeed, the installed one or the one in `path`, reads the plan's batch and stage."""
    jobs, wanted = zip(*pairs, strict=True)
    env = {"DS_ACCELERATOR": "cpu", "PYTHONPATH": path}
    results = json.loads(_run("tests.real.rendered_deepspeed", jobs, env))
    for job, want, result in zip(jobs, wanted, results, strict=True):
        assert {key: result.get(key) for key in want} == want, (job, result)
        assert ("optimizer" in result) == bool(job["initialize"]), (job, result)


def require_built(attempts: list[Attempt], path: str = "") -> None:
    """megatron-core, the installed one or the one in `path`, makes stages of the plan's layers and ranks."""
    jobs = []
    for each in attempts:
        assert each.plan
        flags = parsed(each.files["megatron_args.txt"], megatron_catalogue(each.version))
        component = each.plan.components["llm"]
        jobs.append({"flags": flags, "dp": component.dp, "vpp": component.vpp, "fields": []})
    assert jobs
    results = json.loads(_run("tests.real.rendered_megatron", jobs, {"PYTHONPATH": path}))
    for each, result in zip(attempts, results, strict=True):
        assert each.plan
        stages = each.plan.components["llm"].stages
        assert result.get("layers") == [stage.layers for stage in stages], (each.recipe, result)
        assert result["stages"] == [list(stage.ranks) for stage in stages], each.recipe


def _run(module: str, jobs: Sequence[dict[str, Any]], env: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-m", module], input=json.dumps(jobs), capture_output=True, text=True, timeout=500,
        check=False, env={**os.environ, **env},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def _installed(requirement: str, folder: Path) -> str:
    """A folder with that release of a framework, for PYTHONPATH; a skip where it cannot be had."""
    words = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    done = subprocess.run(
        [*words, "--target", str(folder), requirement], capture_output=True, text=True, check=False,
        env={**os.environ, "DS_BUILD_OPS": "0"},
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"{requirement} cannot be installed: {done.stderr[-300:]}")
    return str(folder)


@pytest.mark.parametrize(
    "engine", ["deepspeed", "megatron_deepspeed", pytest.param("native", marks=pytest.mark.slow)]
)
def test_deepspeed_reads_every_recipe_it_takes(engine: str) -> None:
    need("torch", "deepspeed")
    require_read(configurations(taken(engine)).values())


@pytest.mark.slow
def test_deepspeed_starts_each_stage_and_schedule() -> None:
    need("torch", "deepspeed")
    kinds = {}
    for job, want in configurations(taken("deepspeed")).values():
        config = job["config"]
        if "offload_optimizer" not in config.get("zero_optimization", {}):
            kinds[want["stage"], config.get("scheduler", {}).get("type")] = (starting(job), want)
    assert {stage for stage, _ in kinds} >= {2, 3}
    require_read(kinds.values())


@pytest.mark.slow
@pytest.mark.parametrize("version", OWN_CODE["deepspeed"][1:])
def test_older_deepspeeds_read_every_recipe(version: str, tmp_path: Path) -> None:
    need("torch", "deepspeed")
    pairs = configurations(taken(*DEEPSPEED, version=version)).values()
    require_read(pairs, _installed(f"deepspeed=={version}", tmp_path))


@pytest.mark.parametrize("version", ENGINES["megatron"].versions)
def test_each_version_of_megatron_takes_the_arguments(version: str) -> None:
    for each in taken("megatron", version=version):
        assert parsed(each.files["megatron_args.txt"], megatron_catalogue(version))["--bf16"], each.recipe


def test_the_other_megatron_scripts_take_their_arguments() -> None:
    for each in taken("megatron_deepspeed"):
        parsed(each.files["megatron_args.txt"], megatron_deepspeed_catalogue())
    for each in taken("megatron_mimo"):
        parsed(each.files["megatron_args.txt"], megatron_mimo_catalogue(each.version))


def test_megatron_core_builds_every_recipe_it_takes() -> None:
    need("torch", "megatron")
    require_built(taken("megatron"))


@pytest.mark.slow
@pytest.mark.parametrize("version", OLDER_CORES)
def test_older_cores_build_every_recipe(version: str, tmp_path: Path) -> None:
    need("torch", "megatron")
    path = _installed(f"megatron-core=={OLDER_CORES[version]}", tmp_path)
    require_built(taken("megatron", version=version), path)


def test_accelerate_loads_every_recipe_that_torch_takes(tmp_path: Path) -> None:
    need("torch", "accelerate")
    from accelerate.commands.config.config_args import load_config_from_file

    for each in taken("torch"):
        assert each.plan
        if each.plan.cluster.accelerator == "cpu":
            # accelerate does not shard on CPUs: no file is rendered for it.
            assert "accelerate.yaml" not in each.files
            continue
        file = tmp_path / f"{each.recipe}.yaml"
        file.write_text(each.files["accelerate.yaml"], encoding="utf-8")
        assert load_config_from_file(str(file)).num_processes == each.plan.world_size, each.recipe


@pytest.mark.parametrize("engine", ENGINES)
def test_the_page_has_what_the_default_version_takes(engine: str) -> None:
    section = PAGE.read_text(encoding="utf-8").split(f"## {engine}\n")[1].split("## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines()[3:] if line]
    default = ENGINES[engine].versions[0]
    assert [row[0] for row in rows] == RECIPES
    assert [row[0] for row in rows if default in row[2] + row[3]] == [each.recipe for each in taken(engine)]


@pytest.mark.slow
def test_the_page_is_up_to_date(update_golden: bool) -> None:
    made = page()
    if update_golden:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(made, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == made
