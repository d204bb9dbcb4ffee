"""Rules about the Trainer's arguments and accelerate's YAML, against transformers and accelerate themselves."""

from __future__ import annotations

import contextlib
import json
import random
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.real.parts import need

need("transformers", "accelerate", "deepspeed")

from accelerate.utils import DistributedType  # noqa: E402

from dslaunch.files.fileset import read_fileset  # noqa: E402
from dslaunch.rules import check  # noqa: E402
from dslaunch.rules.scripts.families import FAMILIES  # noqa: E402
from dslaunch.rules.settings import Settings  # noqa: E402
from tests.cases.load import Case, all_cases  # noqa: E402
from tests.real.explained import leads_to  # noqa: E402


def of(rule: str, name: str) -> list[Case]:
    return [case for case in all_cases() if case.rule == rule and name in case.files]


def found(case: Case) -> set[str]:
    return {finding.rule for finding in check(None, case.fileset(), case.settings)}


@pytest.mark.parametrize(
    "rule",
    [
        "huggingface.argument", "huggingface.removed", "huggingface.schedule", "huggingface.together",
        "huggingface.value",
    ],
)  # fmt: skip
def test_arguments_are_judged_as_the_trainer_judges_them(rule: str) -> None:
    import transformers

    for case in of(rule, "hf_args.json"):
        (file,) = (file for file in case.fileset().files if file.name == "hf_args.json")
        try:
            arguments = transformers.TrainingArguments(**file.value, use_cpu=True)
            if rule in ("huggingface.schedule", "huggingface.value"):
                begin(arguments)
            raised = None
        except (TypeError, ValueError) as error:
            raised = error
        assert (rule in found(case)) == (raised is not None), (case.name, raised)
        assert raised is None or leads_to(repr(raised), [rule])


@pytest.mark.parametrize(
    "rule",
    [
        "script.stream-steps", "script.trainer-method", "huggingface.chat-template", "huggingface.embeddings",
        "huggingface.no-eval-dataset",
        pytest.param("huggingface.pad-token", marks=pytest.mark.slow),
        pytest.param("script.resume-always", marks=pytest.mark.slow),
        pytest.param("huggingface.unused-columns", marks=pytest.mark.slow),
        pytest.param("huggingface.no-labels", marks=pytest.mark.slow),
        pytest.param("huggingface.best-metric", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_scripts_are_judged_as_the_trainer_judges_them(
    rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_gpt2()
    for case in of(rule, "train.py"):
        if case.real == "unjudged":
            continue
        Path("train.py").write_text(case.files["train.py"])
        try:
            runpy.run_path("train.py")
            raised = None
        except (AssertionError, IndexError, KeyError, TypeError, ValueError) as error:
            raised = error
        assert (rule in found(case)) == (raised is not None), (case.name, raised)
        of_row = isinstance(raised, KeyError) and rule == "huggingface.unused-columns"
        assert raised is None or of_row or leads_to(repr(raised), [rule])


def save_gpt2() -> None:
    """A small GPT-2 and its kind of tokenizer in a folder, which goes before the hub's of that name."""
    import transformers

    words = {"<|endoftext|>": 0, "a": 1, "b": 2, "\u0120b": 3}
    transformers.GPT2Tokenizer(vocab=words, merges=[]).save_pretrained("gpt2")
    config = transformers.GPT2Config(vocab_size=len(words), n_embd=8, n_layer=1, n_head=1)
    transformers.GPT2LMHeadModel(config).save_pretrained("gpt2")


def test_families_have_the_modules_and_layers_that_the_table_gives() -> None:
    import torch
    import transformers
    from accelerate import FullyShardedDataParallelPlugin

    for family in FAMILIES:
        config = transformers.AutoConfig.for_model(family.type)
        for name in {"num_hidden_layers", "n_layer"} & set(dir(config)):
            setattr(config, name, 1)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        kinds = {"Linear", "Conv1D", "FalconLinear"}
        named = [name for name, module in model.named_modules() if type(module).__name__ in kinds]
        linear = {name.rpartition(".")[2] for name in named}
        assert linear - {"lm_head", "embed_out"} == set(family.linear), family.type
        for other in FAMILIES:
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=1, auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=[other.layer],
            )  # fmt: skip
            if other is family:
                plugin.set_auto_wrap_policy(model)
                continue
            with pytest.raises(ValueError, match=other.layer) as raised:
                plugin.set_auto_wrap_policy(model)
            assert leads_to(repr(raised.value), ["accelerate.fsdp-layer"])


def test_adapters_for_another_family_are_refused() -> None:
    need("peft")
    import peft
    import transformers

    config = transformers.AutoConfig.for_model(
        "qwen2", hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, vocab_size=8,
    )  # fmt: skip
    (own,) = (family for family in FAMILIES if family.type == "qwen2")
    for family in FAMILIES:
        model = transformers.AutoModelForCausalLM.from_config(config)
        adapters = peft.LoraConfig(target_modules=list(family.linear))
        if set(family.linear) & set(own.linear):
            peft.get_peft_model(model, adapters)
            continue
        with pytest.raises(ValueError, match="not found in the base model") as raised:
            peft.get_peft_model(model, adapters)
        assert leads_to(repr(raised.value), ["script.lora-targets"])


def begin(arguments: Any) -> None:
    """What the Trainer makes before its first step."""
    import torch
    import transformers

    arguments.report_to = []  # its packages may be missing here
    transformers.set_seed(arguments.seed)
    rows = [{"x": torch.ones(1)}] * 8
    trainer = transformers.Trainer(
        model=torch.nn.Linear(1, 1), args=arguments, train_dataset=rows, eval_dataset=rows
    )
    trainer.create_optimizer_and_scheduler(num_training_steps=100)
    trainer.get_train_dataloader()


GIVEN: dict[str, list[Any]] = {
    "per_device_train_batch_size": [8, 4], "gradient_accumulation_steps": [1, 4], "max_grad_norm": [1.0, 0.3],
    "learning_rate": [5e-5, 1e-4], "adam_beta2": [0.999, 0.95], "adam_epsilon": [1e-8], "weight_decay": [0.1],
    "fp16": [False], "fp16_full_eval": [True], "warmup_steps": [0, 1, 100, 0.1], "max_steps": [-1, 500],
}  # fmt: skip
WRITTEN: dict[str, list[Any]] = {
    "train_micro_batch_size_per_gpu": ["auto", 8, 4], "gradient_accumulation_steps": ["auto", 1, 4],
    "train_batch_size": ["auto", 64, 32, 128, 256], "gradient_clipping": ["auto", 1, 0.3, 0.5],
    "zero_optimization": [{"stage": 2}], "fp16": [{"enabled": "auto"}, {"enabled": True}, {"enabled": False}],
    "bf16": [{"enabled": "auto"}, {"enabled": False}],
    "optimizer": [
        {"type": "AdamW", "params": {"lr": rate, "betas": betas, "weight_decay": decay}}
        for rate in ("auto", 5e-5, 1e-4) for betas in ("auto", [0.9, 0.999], [0.9, 0.95])
        for decay in ("auto", 0.1)
    ],
    "scheduler": [
        {
            "type": "WarmupDecayLR",
            "params": {"warmup_num_steps": warm, "total_num_steps": steps, "warmup_max_lr": rate},
        }
        for warm in ("auto", 1, 100) for steps in ("auto", 500) for rate in ("auto", 5e-5)
    ],
}  # fmt: skip
ALWAYS = ("train_micro_batch_size_per_gpu", "zero_optimization")


def some(chance: random.Random, values: dict[str, list[Any]], share: float) -> dict[str, Any]:
    drawn = (name for name in values if chance.random() < share or name in ALWAYS)
    return {name: chance.choice(values[name]) for name in drawn}


def matched(config: dict[str, Any], given: dict[str, Any], path: Path) -> Exception | None:
    """What is raised by the Trainer's comparison, and by DeepSpeed where it reads what was filled in."""
    import deepspeed.runtime.config as read
    from transformers import TrainingArguments

    path.write_text(json.dumps(config), encoding="utf-8")
    try:
        arguments = TrainingArguments(output_dir=str(path.parent), use_cpu=True, deepspeed=str(path), **given)
        filled = arguments.deepspeed_plugin.hf_ds_config
        model = SimpleNamespace(config=SimpleNamespace(hidden_size=64))
        filled.trainer_config_finalize(arguments, model, arguments.max_steps if arguments.max_steps > 0 else 500)
        read.DeepSpeedConfig(filled.config)
    except (AssertionError, ValueError) as error:
        return error
    return None


def test_a_deepspeed_json_is_matched_as_the_trainer_matches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import deepspeed.runtime.config as read
    from transformers import TrainingArguments

    class World:
        def __getattr__(self, _: str) -> Any:
            return lambda *_: 8

    monkeypatch.setattr(TrainingArguments, "world_size", property(lambda _: 8))
    monkeypatch.setattr(read, "dist", World())
    chance, seen = random.Random(7), [0, 0]
    for _ in range(200):
        config, given = some(chance, WRITTEN, 0.4), some(chance, GIVEN, 0.3)
        if given.get("warmup_steps") == 0.1:  # of a number of steps that the arguments tell
            given["max_steps"] = 500
        raised = matched(config, given, tmp_path / "ds_config.json")
        files = read_fileset({
            "ds_config.json": json.dumps(config),
            "hf_args.json": json.dumps({"output_dir": "out", "deepspeed": "ds_config.json", **given}),
            "train.py": "from transformers import TrainingArguments as Arguments\n\nkind = TrainingArguments\n",
        })  # fmt: skip
        found = check(None, files, Settings(world_size=8, huggingface=True))
        errors = {each.rule for each in found if each.severity == "error"}
        assert bool(errors) == (raised is not None), (config, given, raised, errors)
        seen[raised is not None] += 1
    print(f"{sum(seen)} configurations matched: {seen[0]} taken, {seen[1]} refused by both")
    assert min(seen) > 20


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
        errors = {each.rule for each in check(None, case.fileset(), case.settings) if each.severity == "error"}
        assert ("accelerate.value" in errors) == (raised is not None), (case.name, raised)


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
