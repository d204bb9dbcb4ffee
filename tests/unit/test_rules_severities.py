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
TOKENIZER = f"torchrun {{}} {SIZES} --tokenizer-type OwnTokenizer\n"
READS = "import json\nprint(json.load(open(path)))\n"
PREPARES = (
    "from accelerate import Accelerator\naccelerator = Accelerator({})\n"
    "model, optimizer = accelerator.prepare(model, optimizer)\nloss = model(x)\n"
    "loss.backward()\noptimizer.step()\n"
)
HALVES = (
    "compute_environment: LOCAL_MACHINE\n"
    "distributed_type: MULTI_GPU\nmixed_precision: fp16\nnum_processes: 4\n"
)
SMALLER = '{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": "auto"}'
LARGER = '{"output_dir": "o", "deepspeed": "ds_config.json", "per_device_train_batch_size": 16%s}'
CLIPS = ', "clip_grad_norm": 1.0'
RESUMES = (
    "import torch\nimport torch.distributed as dist\n"
    "from torch.nn.parallel import DistributedDataParallel as DDP\n"
    "dist.init_process_group('nccl')\nmodel = build()\n{}model = DDP(model)\nloss = model(x)\n"
    "loss.backward()\nif dist.get_rank() == 0:\n    torch.save(model.state_dict(), 'last.pt')\n"
)
READS_EARLY = (
    "def load(path, rank):\n    if rank == 0 and not os.path.exists(path):\n        make(path)\n"
    "    return torch.load(path)\n"
)
DEFAULTED = "deepspeed train.py --deepspeed ds_config.json\n"
PARSES = (
    "from transformers import HfArgumentParser, TrainingArguments\n"
    "(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()\n"
)
STARTS = "import deepspeed\nengine, *_ = deepspeed.initialize(model=net)\n"


@pytest.mark.parametrize(
    ("rule", "texts", "severity"),
    [
        ("launcher.environment", {"run.sh": LINE}, "info"),
        ("launcher.environment", {"run.sh": LINE, "chat.py": READS}, "info"),
        ("launcher.environment", {"run.sh": LINE, "chat.py": STARTS}, "error"),
        ("launcher.environment", {"run.sh": TRAINERS}, "error"),
        ("script.accelerate-backward", {"train.py": PREPARES.format("")}, "info"),
        ("script.accelerate-backward", {"train.py": PREPARES.format(""), "acc.yaml": HALVES}, "error"),
        ("script.accelerate-backward", {"train.py": PREPARES.format("mixed_precision='fp16'")}, "error"),
        ("script.accelerate-backward", {"train.py": PREPARES.format("gradient_accumulation_steps=4")}, "wrong"),
        ("megatron.value", {"run.sh": TOKENIZER.format("pretrain_gpt.py")}, "error"),
        ("megatron.value", {"run.sh": TOKENIZER.format("inference.py")}, "info"),
        ("huggingface.mismatch", {"a.json": LARGER % "", "ds_config.json": SMALLER}, "error"),
        ("huggingface.mismatch", {"a.json": LARGER % CLIPS, "ds_config.json": SMALLER}, "info"),
        ("huggingface.mismatch", {"run.sh": DEFAULTED, "ds_config.json": SMALLER}, "info"),
        ("huggingface.mismatch", {"run.sh": DEFAULTED, "ds_config.json": SMALLER, "train.py": PARSES}, "error"),
        ("accelerate.section", {"run.sh": DEFAULTED, "ds_config.json": SMALLER, "train.py": PARSES}, "error"),
        ("script.module-prefix", {"train.py": RESUMES.format("")}, "wrong"),
        (
            "script.module-prefix",
            {"train.py": RESUMES.format("model.load_state_dict(torch.load('last.pt'))\n")},
            "error",
        ),
        ("script.read-early", {"data.py": f"import os\nimport torch\n{READS_EARLY}"}, "info"),
        ("script.read-early", {"data.py": f"import os\nimport torch\n{READS_EARLY}load(path, rank)\n"}, "error"),
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


def test_who_reads_a_json_is_not_guessed_from_a_script_that_is_not_here() -> None:
    texts = {"run.sh": DEFAULTED, "ds_config.json": SMALLER}
    for more, severity in (({}, "info"), ({"train.py": PARSES}, "error")):
        found = check(None, read_fileset(texts | more), Settings())
        assert {each.severity for each in found if each.rule == "accelerate.section"} == {severity}
