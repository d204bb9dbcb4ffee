"""accelerate.yaml, read by accelerate's own loader and launcher, and the plugins that its environment makes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.golden.cases import rendered
from tests.real.parts import need

need("torch", "accelerate")

LLAMA = [
    "recipe=llama3_8b", "cluster=64xH100", "engine=torch", "script=train.py", "training.global_batch=128",
    "strategy.every.recompute=none",
]  # fmt: skip
CASES = {
    "fsdp2": ["strategy=fsdp2"],
    "hsdp": ["strategy=hsdp"],
    "hsdp_16": ["strategy=hsdp", "strategy.shard=16", "strategy.llm.recompute=full"],
    "ddp": ["strategy=ddp", "goal.memory_fraction=1", "launcher.master_port=29511"],
    "fp32": ["strategy=fsdp2", "training.precision=fp32"],
}


def environment(case: str, folder: Path) -> dict[str, str]:
    """What `accelerate launch` would hand to the script on the first node."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import launch

    file = folder / "accelerate.yaml"
    file.write_text(rendered(*LLAMA, *CASES[case])["accelerate.yaml"], encoding="utf-8")
    args = launch_command_parser().parse_args(["--config_file", str(file), "train.py"])
    args, _, _ = _validate_launch_command(args)
    return {name: str(value) for name, value in launch.prepare_multi_gpu_env(args).items()}


@pytest.mark.parametrize("case", CASES)
def test_accelerates_loader_takes_every_key(case: str, tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    file = tmp_path / "accelerate.yaml"
    file.write_text(rendered(*LLAMA, *CASES[case])["accelerate.yaml"], encoding="utf-8")
    config = load_config_from_file(str(file))
    assert (config.num_processes, config.num_machines) == (64, 8)
    assert config.distributed_type.value == ("MULTI_GPU" if case == "ddp" else "FSDP")
    assert config.mixed_precision == ("no" if case == "fp32" else "bf16")


@pytest.mark.parametrize(("case", "replicas", "shard"), [("hsdp", 8, 8), ("hsdp_16", 4, 16)])
def test_a_mesh_of_replicas_and_shards(
    case: str, replicas: int, shard: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate.parallelism_config import ParallelismConfig

    for name, value in environment(case, tmp_path).items():
        monkeypatch.setenv(name, value)
    made = ParallelismConfig()
    assert (made.dp_replicate_size, made.dp_shard_size, made.total_size) == (replicas, shard, 64)
    settings = json.loads(rendered(*LLAMA, *CASES[case])["torch.json"])
    assert settings["mesh"] == {"dp_replicate": replicas, "dp_shard": shard}


@pytest.mark.parametrize("case", ["fsdp2", "hsdp_16"])
def test_the_plugin_shards_weights_and_recomputes_as_planned(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate import FullyShardedDataParallelPlugin

    for name, value in environment(case, tmp_path).items():
        monkeypatch.setenv(name, value)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is True
    assert plugin.activation_checkpointing is (case == "hsdp_16")


def test_ddp_settings_are_the_arguments_of_ddp() -> None:
    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

    words = ["strategy.ddp.bucket_cap_mb=50", "strategy.ddp.static_graph=true", "strategy.ddp.comm_hook=bf16"]
    settings: dict[str, Any] = json.loads(rendered(*LLAMA, *CASES["ddp"], *words)["torch.json"])["ddp"]
    arguments = {k: v for k, v in settings.items() if k not in ("sync_batchnorm", "comm_hook")}
    made = DistributedDataParallelKwargs(**arguments, comm_hook=DDPCommunicationHookType(settings["comm_hook"]))
    assert (made.bucket_cap_mb, made.static_graph, made.find_unused_parameters) == (50, True, False)


def handed_on(case: str) -> dict[str, str]:
    """What env.sh sets for each rank of an accelerate script, as a shell reads it."""
    text = rendered(*LLAMA, *CASES[case], "engine.accelerate=true")["env.sh"]
    words, plain = ["bash", "-c", f"{text}\nenv -0"], {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=plain)
    pairs = [line.split("=", 1) for line in done.stdout.split("\0") if "=" in line]
    return {name: value for name, value in pairs if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_"))}


@pytest.mark.parametrize("case", CASES)
def test_a_rank_is_told_what_accelerates_own_launcher_would_tell_it(case: str, tmp_path: Path) -> None:
    """Each variable but the accumulation, which `accelerate launch` leaves to the script."""
    told, theirs = handed_on(case), environment(case, tmp_path)
    assert told.pop("ACCELERATE_GRADIENT_ACCUMULATION_STEPS") == "2"
    assert told == {name: theirs[name] for name in told}
    switches = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG", "ACCELERATE_MIXED_PRECISION")
    assert {name: told.get(name) for name in switches} == {name: theirs.get(name) for name in switches}


@pytest.mark.parametrize("case", ["fsdp2", "hsdp_16", "ddp"])
def test_a_script_of_accelerate_follows_the_plan(case: str) -> None:
    """One CPU rank, on which an Accelerator never shards; so the plugin that it makes elsewhere is made beside it.

    The mesh of 64 ranks is left out: it is held against the ranks that live.
    """
    told = {name: value for name, value in handed_on(case).items() if "PARALLELISM" not in name}
    code = """
import json, os
from accelerate import Accelerator, FullyShardedDataParallelPlugin
made, plugin = Accelerator(cpu=True), FullyShardedDataParallelPlugin()
sharded = [plugin.fsdp_version, plugin.reshard_after_forward, plugin.activation_checkpointing]
print(json.dumps([made.mixed_precision, made.gradient_accumulation_steps, sharded]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, **told},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    precision, steps, sharded = json.loads(done.stdout.splitlines()[-1])
    assert (precision, steps) == ("bf16", 2)
    if case != "ddp":
        assert sharded == [2, True, case == "hsdp_16"]


def test_accelerates_loader_can_refuse(tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    file = tmp_path / "accelerate.yaml"
    text = rendered(*LLAMA, *CASES["fsdp2"])["accelerate.yaml"]
    file.write_text(text + "gradient_clipping: 1.0\n", encoding="utf-8")
    with pytest.raises(ValueError, match="unknown keys"):
        load_config_from_file(str(file))
