"""What our rules say of `accelerate launch` and of its configuration, against accelerate itself, generated."""

from __future__ import annotations

import argparse
import importlib
import os
import random
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.real.parts import need

need("accelerate", "torch")

from dslaunch.engines.trainer_catalogue import accelerate_options  # noqa: E402
from dslaunch.files.fileset import read_fileset  # noqa: E402
from dslaunch.files.switches import SWITCHES  # noqa: E402
from dslaunch.rules.registry import rules  # noqa: E402
from dslaunch.rules.settings import Settings  # noqa: E402
from tests.cases.load import all_cases  # noqa: E402

EXAMPLES = int(os.environ.get("DSLAUNCH_EXAMPLES", "600"))
SEED = int(os.environ.get("DSLAUNCH_SEED", "5"))
OF_COMMANDS = ("accelerate.option", "accelerate.together")
STARTS = ("accelerate.key", "accelerate.start", "accelerate.value")
OF_FILES = ("accelerate.key", "accelerate.fsdp", "accelerate.value")


def found(files: dict[str, str], names: Sequence[str]) -> dict[str, str]:
    """What these rules call errors; a notice about other versions is none."""
    read, known = read_fileset(files), Settings()
    hits = ((name, hit) for name in names for hit in rules()[name].check(None, read, known))
    return {name: hit.message for name, hit in hits if hit.severity not in ("info", "wrong")}


_RIGHT = {"int": "4", "float": "0.5", "str_to_bool": "off", "str_to_bools": "true,off,1"}


def words(chance: random.Random) -> list[str]:
    """One option with its value, or what somebody may have meant by one."""
    options = accelerate_options().arguments
    name = chance.choice(sorted(each for each in options if len(each) > 3 and each != "--help"))
    argument = options[name]
    if chance.random() < 0.06:
        return [chance.choice([name[:-1], "--frob", name.upper(), name + "s"]), "4"]
    if argument.nargs == "0":
        return [name + chance.choice(["", "", "", "=true"])]
    value = str(chance.choice(argument.choices or (_RIGHT.get(argument.type, "x"),)))
    if chance.random() < 0.15:
        value = chance.choice(["-1", "1e8", "no", "a b", "fp32", "--x", "2.5", ""])
    if chance.random() < 0.03:
        return [name]
    return [f"{name}={value}"] if chance.random() < 0.3 else [name, value]


def refused(parser: argparse.ArgumentParser, given: list[str]) -> str:
    """Which of our rules accelerate's own parser and validation ask for; empty where they take the words."""
    from accelerate.commands.launch import _validate_launch_command

    try:
        arguments = parser.parse_args(given)
    except SystemExit:
        return "accelerate.option"
    if arguments.module and arguments.no_python:
        return "accelerate.together"
    arguments.num_processes, arguments.config_file = arguments.num_processes or 2, None
    arguments.mixed_precision = "no"
    try:
        _validate_launch_command(arguments)
    except ValueError:
        return "accelerate.together"
    return ""


def test_command_lines_are_judged_as_accelerate_judges_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from accelerate.commands import launch

    monkeypatch.setattr(launch, "default_config_file", str(tmp_path / "none.yaml"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    chance, parser, seen = random.Random(SEED), launch.launch_command_parser(), Counter[str]()
    for _ in range(EXAMPLES):
        given = [word for _ in range(chance.choice([1, 1, 2, 3])) for word in words(chance)]
        given += ["train.py", *chance.choice([[], ["--lr", "3"], ["--num_processes", "x"]])]
        raised = refused(parser, given)
        said = found({"run.sh": f"#!/bin/bash\naccelerate launch {shlex.join(given)}\n"}, OF_COMMANDS)
        assert raised in said if raised else not said, (given, raised, said)
        seen[raised] += 1
    capsys.readouterr()
    print(f"{seen.total()} command lines of accelerate launch: {dict(seen)}")
    assert seen[""] > EXAMPLES // 3
    assert seen["accelerate.option"] > EXAMPLES // 10
    assert seen["accelerate.together"]


def test_switches_are_those_that_the_files_are_read_with() -> None:
    known = accelerate_options().elsewhere.items()
    assert {name for name, spans in known if any(each.nargs == "0" for each in spans)} == SWITCHES["accelerate"]


VALUES: dict[str, tuple[Any, ...]] = {
    "fsdp_version": (1, 2, 2, "2", 3),
    "fsdp_sharding_strategy": ("FULL_SHARD", "hybrid_shard", 1, 5, "ZERO3", None),
    "fsdp_reshard_after_forward": (True, False, "yes", "FULL_SHARD"),
    "fsdp_auto_wrap_policy": ("TRANSFORMER_BASED_WRAP", "size_based_wrap", "NO_WRAP", "TRANSFORMER", None),
    "fsdp_min_num_params": (100, 0, "1e8", 1.5),
    "fsdp_backward_prefetch": ("BACKWARD_PRE", "NO_PREFETCH", 2, "PRE", None),
    "fsdp_state_dict_type": ("SHARDED_STATE_DICT", "FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED", 3, 2, None),
    "fsdp_offload_params": (True, False, "cpu"),
    "fsdp_use_orig_params": (True, "false", "auto"),
    "fsdp_cpu_ram_efficient_loading": (True, False),
    "fsdp_sync_module_states": (False, True),
    "fsdp_activation_checkpointing": (True, False, "selective"),
    "fsdp_activation_checkpointing_offload": (True, False, False),
    "offload_params": (True, "gpu"),
}
"""Values of FSDP's section that accelerate takes, and some that it doesn't."""
TOP: tuple[dict[str, Any], ...] = (
    {}, {}, {}, {}, {}, {"mixed_precision": "bf16"}, {"mixed_precison": "bf16"}, {"gpu_ids": 0},
    {"distributed_type": "FSDP2"}, {"num_machines": "1"}, {"fsdp_plugin": {}}, {"machine_rank": 0},
)  # fmt: skip


def drawn(chance: random.Random) -> dict[str, Any]:
    """A configuration for FSDP with some of the values."""
    names = chance.sample(sorted(VALUES), chance.choice([0, 1, 2, 3, 5]))
    right = {name: VALUES[name][0] for name in names}
    section = {name: chance.choice(VALUES[name]) if chance.random() < 0.4 else right[name] for name in names}
    common = {"compute_environment": "LOCAL_MACHINE", "num_machines": 1, "num_processes": 8, "use_cpu": False}
    return {"distributed_type": "FSDP", **common, "fsdp_config": section, **chance.choice(TOP)}


def launched(path: Path, monkeypatch: pytest.MonkeyPatch) -> Exception | None:
    """What accelerate raises on the way from its file to the plugin in a process."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.launch import prepare_multi_gpu_env

    given = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    with monkeypatch.context() as patch:
        try:
            arguments, _, _ = _validate_launch_command(given)
            arguments.main_process_port = 0
            for name, text in prepare_multi_gpu_env(arguments).items():
                patch.setenv(name, text)
            FullyShardedDataParallelPlugin()
        except RuntimeError as error:
            if "no available devices" not in str(error):
                raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            return error
    return None


def test_configurations_of_fsdp_are_judged_as_accelerate_judges_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance, seen = random.Random(SEED), [0, 0]
    path = tmp_path / "accelerate.yaml"
    for _ in range(EXAMPLES // 2):
        text = yaml.safe_dump(drawn(chance), sort_keys=False)
        path.write_text(text, encoding="utf-8")
        raised, said = launched(path, monkeypatch), found({"accelerate.yaml": text}, OF_FILES)
        assert bool(said) == (raised is not None), (text, raised, said)
        seen[raised is not None] += 1
    print(f"{sum(seen)} configurations of FSDP: {seen[0]} taken, {seen[1]} refused by both")
    assert min(seen) > EXAMPLES // 20


KINDS: dict[str, dict[str, Any]] = {
    "MULTI_GPU": {}, "NO": {"num_processes": 1}, "XLA": {}, "MULTI_CPU": {"use_cpu": True},
    "DEEPSPEED": {"deepspeed_config": {"zero_stage": 2}},
}  # fmt: skip
KEYS = (
    "num_processes", "num_machines", "machine_rank", "main_process_port", "main_process_ip", "same_network",
    "gpu_ids", "mixed_precision", "use_cpu", "debug", "enable_cpu_affinity", "downcast_bf16", "tpu_use_cluster",
    "main_training_function", "dynamo_backend", "compute_environment", "mpirun_hostfile", "dynamo_mode",
)  # fmt: skip
ODD: list[Any] = [
    None, True, False, 0, 1, 2, 70000, "2", "x", "", [], ["a"], "max-autotune", "max_autotune", "main",
]  # fmt: skip
ERRORS = (AssertionError, AttributeError, LookupError, OverflowError, RuntimeError, TypeError, ValueError)


def begun(path: Path, monkeypatch: pytest.MonkeyPatch) -> Exception | None:
    """What accelerate raises on the way from its file to the environment of the processes."""
    import torch
    from accelerate.commands import launch
    from accelerate.utils import TorchDynamoPlugin
    from accelerate.utils import launch as prepare
    from torch.distributed import run

    given = launch.launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    with monkeypatch.context() as patch:
        try:
            arguments, defaults, _ = launch._validate_launch_command(given)
            if arguments.tpu:
                prepare.prepare_tpu(arguments, {})
                getattr(SimpleNamespace(), arguments.main_training_function, None)  # as in the script
                return None
            if arguments.use_deepspeed:
                arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
                environment = prepare.prepare_deepspeed_cmd_env(arguments)[1]
            elif arguments.multi_gpu:
                environment = prepare.prepare_multi_gpu_env(arguments)
            if arguments.use_deepspeed or arguments.multi_gpu:
                script = ["--training_script", "train.py", "--training_script_args", ""]
                run.config_from_args(launch._filter_args(arguments, run.get_args_parser(), script))
            else:
                command, environment = prepare.prepare_simple_launcher_cmd_env(arguments)
                for text in (*command, *environment.values()):
                    os.fsencode(text)  # as a process is given it
            for name, value in environment.items():
                patch.setenv(name, str(value))
            plugin = TorchDynamoPlugin()
            if plugin.backend != "NO" and not arguments.use_deepspeed:
                torch.compile(torch.nn.Linear(2, 2), **plugin.to_kwargs())
        except ERRORS as error:
            return error
    return None


def test_configurations_are_judged_as_each_launcher_judges_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance, seen = random.Random(SEED), [0, 0]
    monkeypatch.setattr(importlib.import_module("accelerate.utils.launch"), "_get_mpirun_args", lambda: MPIRUN)
    path = tmp_path / "accelerate.yaml"
    for _ in range(EXAMPLES // 2):
        kind, key, value = chance.choice(sorted(KINDS)), chance.choice(KEYS), chance.choice(ODD)
        common = {"compute_environment": "LOCAL_MACHINE", "num_machines": 1, "num_processes": 8}
        config = {"distributed_type": kind, **common, **KINDS[kind]}
        if key == "mpirun_hostfile":
            config["mpirun_config"] = {key: value}
        elif key == "dynamo_mode":
            config["dynamo_config"] = {"dynamo_backend": chance.choice(["INDUCTOR", "EAGER", "NO"]), key: value}
        else:
            config[key] = value
        if key == "num_machines" and value == 70000:  # they wait for each other, which isn't seen here
            continue
        text = yaml.safe_dump(config, sort_keys=False)
        path.write_text(text, encoding="utf-8")
        raised, said = begun(path, monkeypatch), found({"accelerate.yaml": text}, STARTS)
        assert bool(said) == (raised is not None), (text, raised, said)
        seen[raised is not None] += 1
    print(f"{sum(seen)} configurations by launcher: {seen[0]} taken, {seen[1]} refused by both")
    assert min(seen) > EXAMPLES // 20


DEVICES = ("none", "cpu", "none", "nvme", "cuda", "auto", 1)
OF_DEEPSPEED: dict[str, tuple[Any, ...]] = {
    "zero_stage": (2, 3, 0, "2", 4, "auto", True), "offload_optimizer_device": DEVICES,
    "offload_param_device": DEVICES, "offload_optimizer_nvme_path": ("/local", None),
    "gradient_accumulation_steps": (1, "auto", 4, "2", None),
    "gradient_clipping": (1.0, "auto", "1", None, "none", True),
    "zero3_init_flag": (True, False, None, "yes", 1, "auto", 2, ""),
    "zero3_save_16bit_model": (True, False, None, "no"),
    "deepspeed_multinode_launcher": ("standard", "pdsh", None), "deepspeed_moe_layer_cls_names": ("Block", None),
    "deepspeed_config_file": ("none", None), "deepspeed_hostfile": ("hosts", None),
    "deepspeed_exclusion_filter": ("n1", None),
}  # fmt: skip
"""Values of DeepSpeed's section that accelerate takes, and some that it, or DeepSpeed behind it, doesn't."""


def plugged(path: Path, monkeypatch: pytest.MonkeyPatch) -> Exception | None:
    """What accelerate and DeepSpeed raise on the way from the file to the plugin in a process."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import DeepSpeedPlugin
    from accelerate.utils.launch import prepare_deepspeed_cmd_env
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    given = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    with monkeypatch.context() as patch:
        try:
            arguments, defaults, _ = _validate_launch_command(given)
            arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
            for name, text in prepare_deepspeed_cmd_env(arguments)[1].items():
                patch.setenv(name, text)
            DeepSpeedZeroConfig(**DeepSpeedPlugin().deepspeed_config["zero_optimization"])
        except ERRORS as error:
            return error
    return None


def test_configurations_of_deepspeed_are_judged_as_accelerate_judges_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance, seen = random.Random(SEED), [0, 0]
    path = tmp_path / "accelerate.yaml"
    for _ in range(EXAMPLES // 4):
        names = chance.sample(sorted(OF_DEEPSPEED), chance.choice([1, 2, 3, 5]))
        values = {name: OF_DEEPSPEED[name] if chance.random() < 0.3 else OF_DEEPSPEED[name][:3] for name in names}
        section = {name: chance.choice(each) for name, each in values.items()}
        common = {"compute_environment": "LOCAL_MACHINE", "num_machines": 1, "num_processes": 8}
        config = {"distributed_type": "DEEPSPEED", **common, "main_process_port": 0, "deepspeed_config": section}
        text = yaml.safe_dump({**config, **chance.choice(TOP)}, sort_keys=False)
        path.write_text(text, encoding="utf-8")
        raised, said = plugged(path, monkeypatch), found({"accelerate.yaml": text}, OF_SECTION)
        assert bool(said) == (raised is not None), (text, raised, said)
        seen[raised is not None] += 1
    print(f"{sum(seen)} configurations of DeepSpeed's section: {seen[0]} taken, {seen[1]} refused by both")
    assert min(seen) > EXAMPLES // 40


OF_SECTION = ("accelerate.key", "accelerate.start", "accelerate.value", "accelerate.fields")
MPIRUN = ("mpirun", "--hostfile", "-n", "--npernode", "--bind-to")
"""Open MPI's words, whether or not it is installed here."""


def test_processes_see_the_gpus_of_the_ids_and_no_more(tmp_path: Path) -> None:
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    for case in all_cases():
        if case.rule != "accelerate.gpu-count" or "accelerate.yaml" not in case.files or "run.sh" in case.files:
            continue
        path = tmp_path / "accelerate.yaml"
        path.write_text(case.files["accelerate.yaml"])
        given = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
        arguments, _, _ = _validate_launch_command(given)
        shown = prepare_multi_gpu_env(arguments).get("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
        few = len(shown.split(",")) < int(arguments.nproc_per_node)
        assert few == bool(found(case.files, ["accelerate.gpu-count"])), case.name
