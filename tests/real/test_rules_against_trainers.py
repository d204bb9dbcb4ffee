"""Rules about the Trainer's arguments and accelerate's YAML, against transformers and accelerate themselves."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.real.parts import need

need("transformers", "accelerate", "deepspeed")

from accelerate.utils import DistributedType  # noqa: E402

from dslaunch.files.fileset import read_fileset  # noqa: E402
from dslaunch.rules import check  # noqa: E402
from dslaunch.rules.settings import Settings  # noqa: E402
from tests.cases.load import Case, all_cases  # noqa: E402
from tests.real.explained import leads_to  # noqa: E402


def of(rule: str, name: str) -> list[Case]:
    return [case for case in all_cases() if case.rule == rule and name in case.files]


def found(case: Case) -> set[str]:
    return {finding.rule for finding in check(None, case.fileset(), case.settings)}


@pytest.mark.parametrize(
    "rule", ["huggingface.argument", "huggingface.removed", "huggingface.together", "huggingface.value"]
)
def test_arguments_are_judged_as_the_trainer_judges_them(rule: str) -> None:
    import transformers

    for case in of(rule, "hf_args.json"):
        (file,) = (file for file in case.fileset().files if file.name == "hf_args.json")
        try:
            transformers.TrainingArguments(**file.value, use_cpu=True)
            raised = None
        except (TypeError, ValueError) as error:
            raised = error
        assert (rule in found(case)) == (raised is not None), (case.name, raised)
        assert raised is None or leads_to(repr(raised), [rule])


def launched(tmp_path: Path, case: Case) -> tuple[Any, dict[str, str]]:
    """What `accelerate launch` reads of the file, and what the processes would find in their environment."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    path = tmp_path / "accelerate.yaml"
    common = "compute_environment: LOCAL_MACHINE\nmachine_rank: 0\nuse_cpu: false\nmain_process_port: 0\n"
    path.write_text(common + case.files["accelerate.yaml"], encoding="utf-8")
    given = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    arguments, defaults, _ = _validate_launch_command(given)
    arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
    if arguments.use_deepspeed:
        return arguments, prepare_deepspeed_cmd_env(arguments)[1]
    return arguments, prepare_multi_gpu_env(arguments)


def test_values_are_judged_as_accelerate_and_deepspeed_judge_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate.utils import DeepSpeedPlugin
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    for case in of("accelerate.value", "accelerate.yaml"):
        with monkeypatch.context() as patch:
            try:
                arguments, environment = launched(tmp_path, case)
                for name, text in environment.items():
                    patch.setenv(name, text)
                if arguments.use_deepspeed:
                    DeepSpeedZeroConfig(**DeepSpeedPlugin().deepspeed_config["zero_optimization"])
                raised = None
            except (AttributeError, ValueError) as error:
                raised = error
        assert ("accelerate.value" in found(case)) == (raised is not None), (case.name, raised)


def test_an_address_that_each_machine_takes_for_itself_is_where_they_meet(tmp_path: Path) -> None:
    for case in of("accelerate.address", "accelerate.yaml"):
        arguments, _ = launched(tmp_path, case)
        endpoint = getattr(arguments, "rdzv_endpoint", "") or str(arguments.main_process_ip)
        lost = endpoint.partition(":")[0] in ("localhost", "127.0.0.1") or endpoint.startswith("None:")
        assert ("accelerate.address" in found(case)) == (lost and arguments.num_machines > 1), case.name


def test_a_section_for_another_type_is_not_read(tmp_path: Path) -> None:
    for case in of("accelerate.kind", "accelerate.yaml"):
        arguments, environment = launched(tmp_path, case)
        unread = {"deepspeed_config": not arguments.use_deepspeed, "fsdp_config": not arguments.use_fsdp}
        (file,) = case.fileset().files
        given = [name for name in unread if file.get(name)]
        assert ("accelerate.kind" in found(case)) == any(unread[name] for name in given), case.name
        assert ("ACCELERATE_DEEPSPEED_ZERO_STAGE" in environment) == arguments.use_deepspeed


def test_meshes_are_judged_as_accelerate_judges_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.parallelism_config import ParallelismConfig

    trainer = SimpleNamespace(
        multi_device=True, num_processes=8, is_fsdp2=True, is_main_process=False,
        distributed_type=DistributedType.FSDP,
    )  # fmt: skip
    for case in of("accelerate.parallelism", "accelerate.yaml"):
        (file,) = case.fileset().files
        given = file.get("parallelism_config").items()
        raised = None
        with monkeypatch.context() as environment:
            for name, value in given:  # `accelerate launch` hands them on so
                environment.setenv(name.upper(), str(value))
            try:
                ParallelismConfig()._validate_accelerator(trainer)
            except ValueError as error:
                raised = error
        assert ("accelerate.parallelism" in found(case)) == (raised is not None), (case.name, raised)


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"save_strategy": "best"}, "huggingface.together"), ({"report_to": "wand"}, "huggingface.value"),
        ({"log_level": "warn"}, "huggingface.value"),
        ({"save_strategy": "best", "metric_for_best_model": "loss"}, ""),
    ],
)  # fmt: skip
def test_the_trainer_refuses_some_itself(tmp_path: Path, given: dict[str, str], rule: str) -> None:
    import torch
    import transformers

    files = read_fileset({"hf_args.json": json.dumps({"per_device_train_batch_size": 4, **given})})
    said = {finding.rule for finding in check(None, files, Settings())}
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **given)
    model = torch.nn.Linear(1, 1)
    with pytest.raises((KeyError, ValueError)) if rule else contextlib.nullcontext():
        transformers.Trainer(model=model, args=arguments)
    assert ({rule} if rule else set()) == said
