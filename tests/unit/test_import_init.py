"""Recipes around scripts: what a script is, read and never run, and the arguments that it gets."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dslaunch.importing.scripts import read_script
from tests.command import CommandLine

WORDS = ["model=vla_tiny", "cluster=8xA100", "training.global_batch=64", "training.seq_len=32"]

TRAINER = """\
from dataclasses import dataclass
import transformers
from transformers import Trainer, TrainingArguments

@dataclass
class ModelArguments:
    model_name_or_path: str = "x"

def main():
    parser = transformers.HfArgumentParser((ModelArguments, TrainingArguments))
    model_args, training_args = parser.parse_args_into_dataclasses()
    Trainer(args=training_args).train()

if __name__ == "__main__":
    main()
"""
TRAINER_IN_CODE = """\
from trl import SFTTrainer
from transformers import TrainingArguments
SFTTrainer(args=TrainingArguments(output_dir="x", bf16=True)).train()
"""
LEROBOT_LIKE = """\
from accelerate import Accelerator
from lerobot.configs import parser
from lerobot.configs.train import TrainPipelineConfig

@parser.wrap()
def train(cfg: TrainPipelineConfig):
    accelerator = Accelerator(step_scheduler_with_optimizer=False)
    for step in range(cfg.steps):
        pass
"""
OPENVLA_LIKE = """\
from dataclasses import dataclass
import draccus
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

@dataclass
class FinetuneConfig:
    vla_path: str = "openvla/openvla-7b"
    batch_size: int = 16
    max_steps: int = 200_000
    learning_rate: float = 5e-4
    grad_accumulation_steps: int = 1
    run_root_dir: str = "runs"

@draccus.wrap()
def finetune(cfg: FinetuneConfig) -> None:
    vla = DDP(None)
"""
DEEPSPEED_LOOP = """\
import argparse
import deepspeed
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("-b", "--batch-size", type=int)
parser = deepspeed.add_config_arguments(parser)
engine, *_ = deepspeed.initialize(args=parser.parse_args())
"""
DEEPSPEED_FIXED = 'import deepspeed\nengine, *_ = deepspeed.initialize(config="ds.json")\n'
FSDP_LOOP = """\
import click
from torch.distributed.fsdp import fully_shard
@click.command()
@click.option("--seq-length", type=int)
@click.option("--steps")
def main(seq_length, steps):
    fully_shard(None)
"""
MEGATRON = """\
from megatron.training import pretrain
from megatron.core.enums import ModelType
pretrain(None, None, ModelType.encoder_or_decoder, None)
"""
PLAIN = "import argparse\nimport torch\nmodel = torch.nn.Linear(1, 1)\n"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (TRAINER, "hf_trainer"),
        (TRAINER_IN_CODE, "hf_trainer"),
        (LEROBOT_LIKE, "accelerate"),
        (OPENVLA_LIKE, "ddp"),
        (DEEPSPEED_LOOP, "deepspeed"),
        (FSDP_LOOP, "fsdp"),
        (MEGATRON, "megatron"),
        (PLAIN, ""),
    ],
)
def test_kinds(text: str, kind: str) -> None:
    assert read_script(text, "train.py").kind == kind


def test_options_of_argparse_click_and_dataclasses() -> None:
    assert read_script(DEEPSPEED_LOOP, "x").options == ("--lr", "--batch-size")
    assert read_script(FSDP_LOOP, "x").options == ("--seq-length", "--steps")
    assert "--grad_accumulation_steps" in read_script(OPENVLA_LIKE, "x").options


def made(dslaunch: CommandLine, folder: Path, text: str, *words: str) -> tuple[dict[str, object], str]:
    """The recipe that `init` prints, and what it says."""
    script = folder / "my train.py"
    script.write_text(text)
    ran = dslaunch("init", str(script), *(words or WORDS))
    assert ran.status == 0, ran.err
    recipe = yaml.safe_load(ran.out)
    assert recipe["script"] == str(script)
    return recipe, ran.err


def groups(recipe: dict[str, object]) -> dict[str, str]:
    defaults = recipe["defaults"]
    assert isinstance(defaults, list)
    return {k.split()[1]: v for entry in defaults if isinstance(entry, dict) for k, v in entry.items()}


def arguments(recipe: dict[str, object]) -> dict[str, str]:
    words = recipe.get("script_args", [])
    assert isinstance(words, list)
    return dict(zip(words[::2], words[1::2], strict=True))


def test_trainer(dslaunch: CommandLine, tmp_path: Path) -> None:
    recipe, said = made(dslaunch, tmp_path, TRAINER, *WORDS, "strategy=zero3", "training.micro_batch=2")
    given = arguments(recipe)
    assert groups(recipe) == {
        "model": "vla_tiny", "cluster": "8xA100", "strategy": "zero3", "engine": "deepspeed",
    }  # fmt: skip
    assert given["--deepspeed"] == "{ds_config}"
    assert given["--per_device_train_batch_size"] == "{micro_batch}"
    assert given["--gradient_accumulation_steps"] == "{num_microbatches}"
    assert (given["--bf16"], given["--lr_scheduler_type"], said) == ("True", "constant", "")


def test_trainer_with_its_arguments_in_the_code(dslaunch: CommandLine, tmp_path: Path) -> None:
    recipe, said = made(dslaunch, tmp_path, TRAINER_IN_CODE)
    assert "script_args" not in recipe
    assert (
        "TrainingArguments: are written in the script: set deepspeed=os.environ['DSLAUNCH_DS_CONFIG']" in said
    )


def test_what_the_script_sets_itself_is_the_recipes(dslaunch: CommandLine, tmp_path: Path) -> None:
    recipe, _ = made(dslaunch, tmp_path, OPENVLA_LIKE, *[w for w in WORDS if "global_batch" not in w])
    assert recipe["training"] == {
        "seq_len": 32, "global_batch": 128, "micro_batch": 16, "steps": 200_000, "optimizer": {"lr": 5e-4},
    }  # fmt: skip
    told, _ = made(dslaunch, tmp_path, OPENVLA_LIKE, *WORDS, "training.steps=7", "training.optimizer.lr=1e-5")
    assert told["training"] == {
        "global_batch": 64, "seq_len": 32, "steps": 7, "optimizer": {"lr": 1e-5},
    }  # fmt: skip


def test_training_arguments_in_the_code_are_read(dslaunch: CommandLine, tmp_path: Path) -> None:
    """A parser that is imported and not called reads nothing from the command line."""
    text = TRAINER_IN_CODE.replace("TrainingArguments\n", "HfArgumentParser, TrainingArguments\n", 1).replace(
        "bf16=True",
        "per_device_train_batch_size=2, gradient_accumulation_steps=4, learning_rate=1e-5, weight_decay=0.0, "
        "max_steps=-1, gradient_checkpointing=True",
    )
    recipe, _ = made(dslaunch, tmp_path, text, *[word for word in WORDS if "global_batch" not in word])
    assert "script_args" not in recipe
    assert recipe["training"] == {
        "seq_len": 32, "global_batch": 64, "micro_batch": 2, "optimizer": {"lr": 1e-5, "weight_decay": 0.0},
    }  # fmt: skip
    assert recipe["strategy"] == {"every": {"recompute": "full"}}
    assert recipe["engine"] == {"huggingface": True}


def test_lerobot_like(dslaunch: CommandLine, tmp_path: Path) -> None:
    recipe, _ = made(dslaunch, tmp_path, LEROBOT_LIKE, *WORDS, "--", "--steps=100")
    assert groups(recipe)["engine"] == "torch"
    assert recipe["script_args"] == ["--steps=100"]
    assert recipe["engine"] == {"accelerate": True}


def test_openvla_like(dslaunch: CommandLine, tmp_path: Path) -> None:
    recipe, _ = made(
        dslaunch, tmp_path, OPENVLA_LIKE, *WORDS, "training.optimizer.lr=5e-4", "training.steps=200"
    )
    assert groups(recipe)["strategy"] == "ddp"
    assert arguments(recipe) == {
        "--batch_size": "{micro_batch}",
        "--grad_accumulation_steps": "{num_microbatches}",
        "--max_steps": "{steps}",
        "--learning_rate": "{lr}",
        "--run_root_dir": "{checkpoint_dir}",
    }


@pytest.mark.parametrize(
    ("more", "batch"),
    [
        ([], "--batch_size 1 --grad_accumulation_steps 8 --max_steps 200000 --learning_rate 0.0005"),
        (
            ["training.micro_batch=4", "training.steps=7", "training.optimizer.lr=5e-4"],
            "--batch_size 4 --grad_accumulation_steps 2 --max_steps 7 --learning_rate 0.0005",
        ),
    ],
)
def test_arguments_follow_the_plan(
    dslaunch: CommandLine, tmp_path: Path, more: list[str], batch: str
) -> None:
    """Words that change the plan after `init` reach the script without a change of the recipe's arguments."""
    (tmp_path / "train.py").write_text(OPENVLA_LIKE)
    site, out = tmp_path / "site", tmp_path / "out"
    assert dslaunch("init", str(tmp_path / "train.py"), *WORDS, "-o", str(site)).status == 0
    ran = dslaunch("render", "recipe=train", f"--config-dir={site}", "-o", str(out), *more)
    assert ran.status == 0, ran.err
    assert f"{batch} --run_root_dir" in (out / "rank.sh").read_text()


def test_own_options_of_a_trainer_script(dslaunch: CommandLine, tmp_path: Path) -> None:
    text = TRAINER.replace('    model_name_or_path: str = "x"', "    max_seq_length: int = 1")
    recipe, _ = made(dslaunch, tmp_path, text)
    assert arguments(recipe)["--max_seq_length"] == "{seq_len}"


def test_deepspeed_loops(dslaunch: CommandLine, tmp_path: Path) -> None:
    recipe, _ = made(dslaunch, tmp_path, DEEPSPEED_LOOP)
    assert arguments(recipe)["--deepspeed_config"] == "{ds_config}"
    _, said = made(dslaunch, tmp_path, DEEPSPEED_FIXED)
    assert "deepspeed.initialize: hand it config=os.environ['DSLAUNCH_DS_CONFIG']" in said


def test_arguments_of_the_user_win(dslaunch: CommandLine, tmp_path: Path) -> None:
    recipe, _ = made(dslaunch, tmp_path, DEEPSPEED_LOOP, *WORDS, "--", "--lr", "1")
    assert arguments(recipe)["--lr"] == "1"


def test_megatron_shell_script(dslaunch: CommandLine, tmp_path: Path) -> None:
    script = Path(__file__).parent / "imports" / "llama_8b.sh"
    ran = dslaunch("init", str(script), "cluster=H100", "-o", str(tmp_path))
    assert ran.status == 0, ran.err
    assert [str(p.relative_to(tmp_path)) for p in sorted(tmp_path.rglob("*.yaml"))] == [
        "conf/model/llama_8b.yaml",
        "recipes/llama_8b.yaml",
    ]


def test_sizes_that_a_chosen_model_decides(dslaunch: CommandLine, tmp_path: Path) -> None:
    """One note for all of them; of the sizes only the one that differs from the model's is named."""
    text = (Path(__file__).parent / "imports" / "llama_8b.sh").read_text()
    (tmp_path / "other.sh").write_text(text.replace("--num-layers 32", "--num-layers 40"))
    ran = dslaunch("init", str(tmp_path / "other.sh"), "model=llama3_8b", "cluster=H100")
    assert ran.status == 0, ran.err
    assert "--num-layers = 40 is rendered as 32" in ran.err
    assert "model=llama3_8b decides" in ran.err
    assert "--hidden-size =" not in ran.err


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (
            "model = get_peft_model(model, LoraConfig(r=32, lora_alpha=64, target_modules='all-linear'))",
            "model.components.NAME.train=lora 'model.components.NAME.lora={rank: 32, alpha: 64}'",
        ),
        (
            "model = load(quantization_config=BitsAndBytesConfig(load_in_4bit=True))\n"
            "model = get_peft_model(model, LoraConfig(r=cfg.rank))",
            "model.components.NAME.train=qlora 'model.components.NAME.lora={rank: 16, alpha: 16}'",
        ),
        ("model.vision_tower.requires_grad_(False)", "model.components.NAME.train=nothing"),
    ],
)
def test_what_the_script_trains(dslaunch: CommandLine, tmp_path: Path, more: str, told: str) -> None:
    """Adapters and frozen parts are the script's own; the words that tell the plan are shown, and are accepted."""
    _, said = made(dslaunch, tmp_path, f"{OPENVLA_LIKE}\n{more}\n")
    assert told in said
    words = [word.replace("NAME", "llm") for word in shlex.split(told)]
    _, said = made(dslaunch, tmp_path, f"{OPENVLA_LIKE}\n{more}\n", *WORDS, *words)
    assert "counts every parameter" not in said


def test_notes_stand_where_the_recipe_is_refused(dslaunch: CommandLine, tmp_path: Path) -> None:
    """A model that fits only with its adapters: the note is what helps."""
    (tmp_path / "train.py").write_text(f"{OPENVLA_LIKE}\npeft.get_peft_model(vla, peft.LoraConfig(r=8))\n")
    words = ["model=openvla_7b", "cluster=8xA100", "training.global_batch=64", "training.seq_len=300"]
    ran = dslaunch("init", str(tmp_path / "train.py"), *words, "strategy=ddp")
    assert ran.status == 3
    assert "LoraConfig: the plan counts every parameter as trained" in ran.err


def test_written_planned_and_rendered(dslaunch: CommandLine, tmp_path: Path) -> None:
    site, out = tmp_path / "site", tmp_path / "out"
    (tmp_path / "train.py").write_text(TRAINER)
    assert dslaunch("init", str(tmp_path / "train.py"), *WORDS, "-o", str(site), "--name", "mine").status == 0
    ran = dslaunch("render", "recipe=mine", f"--config-dir={site}", "-o", str(out))
    assert ran.status == 0, ran.err
    assert '--deepspeed "$DSLAUNCH_RUN_DIR"/ds_config.json' in (out / "rank.sh").read_text()
    subprocess.run(["bash", "-n", str(out / "rank.sh")], check=True)


@pytest.mark.parametrize(
    ("text", "words", "status", "parts"),
    [
        (PLAIN, WORDS, 2, ["nothing in it shares work among GPUs", "--kind", "hf_trainer"]),
        ("def (", WORDS, 2, ["train.py:1", "not Python"]),
        (
            TRAINER,
            [],
            2,
            ["does not say model, cluster, training.global_batch, training.seq_len", "cluster=8xH100"],
        ),
        (TRAINER, [*WORDS, "--kind", "trainer"], 2, ["--kind trainer", "Did you mean 'hf_trainer'?"]),
        (TRAINER, [*WORDS, "training.global_batch=65"], 3, ["global_batch", "not written"]),
        (TRAINER, [*WORDS, "training.precison=bf16"], 2, ["training.precison", "'precision'"]),
        (TRAINER, ["model=llama3_70b", "cluster=8xA10G", *WORDS[2:]], 3, ["memory.gpu", "not written"]),
        (LEROBOT_LIKE, [*WORDS, "strategy=zero2"], 3, ["zero"]),
    ],
)
def test_mistakes_write_nothing(
    dslaunch: CommandLine, tmp_path: Path, text: str, words: list[str], status: int, parts: list[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    ran = dslaunch("init", str(script), *words, "-o", str(tmp_path / "site"))
    assert (ran.status, ran.out, (tmp_path / "site").exists()) == (status, "", False)
    assert [part for part in parts if part not in ran.err] == []


def test_a_plain_script_with_its_kind(dslaunch: CommandLine, tmp_path: Path) -> None:
    _, said = made(dslaunch, tmp_path, PLAIN, *WORDS, "--kind", "ddp")
    assert "no option of the script is known" in said


def test_the_script_is_not_run(dslaunch: CommandLine, tmp_path: Path) -> None:
    made(dslaunch, tmp_path, TRAINER + f"\nopen({str(tmp_path / 'ran')!r}, 'w')\n")
    assert not (tmp_path / "ran").exists()


def test_no_script(dslaunch: CommandLine) -> None:
    assert "init takes one script, found none" in dslaunch("init", *WORDS).err
    assert "can't be read" in dslaunch("init", "/nowhere/train.py", *WORDS).err


def test_on_a_terminal_it_asks_for_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINER)
    keyboard, terminal = os.openpty()
    os.write(keyboard, b"vla_tiny\n64\n")
    words = ["init", "train.py", "cluster=8xA100", "training.seq_len=32", "-o", "site"]
    done = subprocess.run(
        [sys.executable, "-m", "dslaunch", *words],
        cwd=tmp_path,
        stdin=terminal,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    os.close(keyboard)
    os.close(terminal)
    assert done.returncode == 0, done.stderr
    recipe = yaml.safe_load((tmp_path / "site" / "recipes" / "train.yaml").read_text())
    assert (groups(recipe)["model"], recipe["training"]["global_batch"]) == ("vla_tiny", 64)
    assert "Cluster" not in done.stderr
