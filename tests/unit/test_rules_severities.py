"""Findings that weigh less where less is known: the same place, another severity."""

from __future__ import annotations

import pytest

from dslaunch.files.fileset import read_fileset
from dslaunch.rules import check
from dslaunch.rules.settings import Settings

LINE = "python chat.py --deepspeed ds_config.json --device cpu\n"
TRAINERS = "python train.py --deepspeed ds_config.json --output_dir out --learning_rate 1e-4\n"
ACCUMULATION = '{"output_dir": "o", "deepspeed": "ds_config.json", "gradient_accumulation_steps": 4}'
SIZES = "--num-layers 2 --hidden-size 64 --num-attention-heads 2"
TOKENIZER = f"torchrun {{}} {SIZES} --tokenizer-type PretrainedFromHF\n"
READS = "import json\nprint(json.load(open(path)))\n"
STARTS = "import deepspeed\nengine, *_ = deepspeed.initialize(model=net)\n"


@pytest.mark.parametrize(
    ("rule", "texts", "severity"),
    [
        ("launcher.environment", {"run.sh": LINE}, "info"),
        ("launcher.environment", {"run.sh": LINE, "chat.py": READS}, "info"),
        ("launcher.environment", {"run.sh": LINE, "chat.py": STARTS}, "error"),
        ("launcher.environment", {"run.sh": TRAINERS}, "error"),
        ("megatron.value", {"run.sh": TOKENIZER.format("pretrain_gpt.py")}, "error"),
        ("megatron.value", {"run.sh": TOKENIZER.format("inference.py")}, "info"),
        ("huggingface.mismatch", {"a.json": ACCUMULATION, "ds_config.json": '{"train_batch_size": 32}'}, "info"),
        (
            "huggingface.mismatch",
            {
                "a.json": ACCUMULATION,
                "ds_config.json": '{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}',
            },
            "error",
        ),
    ],
)
def test_severity_by_what_is_known(rule: str, texts: dict[str, str], severity: str) -> None:
    found = check(None, read_fileset(texts), Settings(huggingface=True))
    assert {each.severity for each in found if each.rule == rule} == {severity}
