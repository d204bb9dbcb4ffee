"""Configurations of others, imported, rendered again, and compared with the original key by key."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.command import CommandLine, Ran

FOLDER = Path(__file__).parent / "imports"
LLAMA = ["model=llama3_8b", "training.seq_len=512", "strategy.llm.recompute=full"]
TINY = ["model=vla_tiny", "cluster=8xH100", "training.seq_len=32"]

CASES = [
    # (kind, file, words, keys in the file, keys that do not come back as they stood)
    ("deepspeed", "zero1_bf16.json", [*LLAMA, "cluster=16xH100"], 21, []),
    (
        "deepspeed", "zero2_offload_fp16.json", [*LLAMA, "cluster=8xH100"], 24,
        ["optimizer.type", "optimizer.params.adam_w_mode"],
    ),
    ("deepspeed", "zero3_host_params.json", [*LLAMA, "cluster=8xH100"], 27, []),
    (
        "deepspeed", "trainer_auto.json", [*LLAMA, "cluster=8xH100", "training.global_batch=64"], 17,
        [
            "fp16.enabled", "fp16.loss_scale_window", "zero_optimization.reduce_bucket_size",
            "zero_optimization.stage3_prefetch_bucket_size",
            "zero_optimization.stage3_param_persistence_threshold", "scheduler.type",
            "scheduler.params.warmup_min_lr", "scheduler.params.warmup_max_lr",
            "scheduler.params.warmup_num_steps",
        ],
    ),
    ("deepspeed", "zero2_line.json", TINY, 15, []),
    ("deepspeed", "zero3_plus_plus.json", [*LLAMA, "cluster=16xH100"], 13, []),
    ("deepspeed", "zero3_nvme.json", [*LLAMA, "cluster=8xH100"], 13, []),
    ("deepspeed", "monitored_cosine.hjson", TINY, 27, ["speling"]),
    (
        "deepspeed", "lamb.json", TINY, 11,
        [
            "optimizer.type", "optimizer.params.lr", "optimizer.params.max_coeff", "optimizer.params.min_coeff",
            "scheduler.type", "scheduler.params.cycle_min_lr", "scheduler.params.cycle_max_lr",
            "zero_optimization.cpu_offload",
        ],
    ),
    (
        "megatron", "llama_8b.sh", ["cluster=H100"], 52,
        ["--use-mcore-models", "--tensorboard-dir", "--no-such-flag"],
    ),
    (
        "megatron", "gpt3_175b.sbatch", ["cluster=A100"], 30,
        [
            "--num-layers-per-virtual-pipeline-stage", "--train-samples", "--lr-decay-samples",
            "--lr-warmup-samples",
        ],
    ),
    (
        "megatron", "llama2_70b.args", ["cluster=64xH100"], 30,
        ["--use-rotary-position-embeddings", "--lr-warmup-fraction", "--tokenizer-type"],
    ),
    ("megatron", "megatron_deepspeed.sh", ["cluster=A100"], 28, ["--deepspeed_config"]),
    ("megatron", "counted_ends.args", ["cluster=64xH100"], 21, ["--num-layers-per-virtual-pipeline-stage"]),
    ("megatron", "experts.args", ["cluster=16xH100"], 30, []),
    ("accelerate", "accelerate_zero3.yaml", [*LLAMA, "cluster=H100", "training.micro_batch=1"], 10, []),
    ("accelerate", "accelerate_file.yaml", [*LLAMA, "cluster=H100"], 24, []),
    ("accelerate", "accelerate_fsdp2.yaml", [*LLAMA, "cluster=H100", "training.global_batch=64"], 4, []),
    ("accelerate", "accelerate_fsdp1.yaml", [*LLAMA, "cluster=H100", "training.global_batch=64"], 4, []),
    (
        "accelerate", "accelerate_ddp.yaml",
        ["model=vla_tiny", "cluster=H100", "training.seq_len=32", "training.global_batch=64"], 4, [],
    ),
]  # fmt: skip


def imported(dslaunch: CommandLine, kind: str, file: str, *words: str) -> Ran:
    return dslaunch("import", kind, str(FOLDER / file), *words)


@pytest.mark.parametrize(("kind", "file", "words", "keys", "other"), CASES, ids=[case[1] for case in CASES])
def test_what_comes_back(
    dslaunch: CommandLine, kind: str, file: str, words: list[str], keys: int, other: list[str]
) -> None:
    ran = imported(dslaunch, kind, file, *words)
    assert ran.status == 0, ran.err
    assert f"{keys - len(other)} of {keys} keys are rendered again as they stood" in ran.err
    compared, _, notes = ran.err.partition("Not carried over as it stands:\n")
    assert re.findall(r"^  (\S+) = .* (?:is rendered as|is not rendered)", compared, re.MULTILINE) == other
    with_reason = {key for line in notes.splitlines() for key in line.strip().partition(": ")[0].split(", ")}
    assert set(other) - with_reason <= ({"optimizer.params.lr"} if "optimizer.type" in with_reason else set())


@pytest.mark.parametrize("case", [CASES[0], CASES[8], CASES[13]], ids=["deepspeed", "megatron", "accelerate"])
def test_a_written_recipe_plans_like_any_other(
    dslaunch: CommandLine, tmp_path: Path, case: tuple[str, str, list[str], int, list[str]]
) -> None:
    kind, file, words, _, _ = case
    ran = imported(dslaunch, kind, file, *words, "--name", "mine", "-o", str(tmp_path / "our site"))
    assert ran.status == 0, ran.err
    written = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    models = ["our site/conf/model/mine.yaml"] if kind == "megatron" else []
    assert written == [*models, "our site/recipes/mine.yaml"]
    planned = dslaunch("plan", "recipe=mine", f"--config-dir={tmp_path / 'our site'}", "--json")
    assert planned.status == 0, planned.err


def test_a_vocabulary_that_no_flag_tells(dslaunch: CommandLine, tmp_path: Path) -> None:
    text = (FOLDER / "experts.args").read_text().replace("--padded-vocab-size 32000", "--tokenizer-type Own")
    (tmp_path / "own.args").write_text(text)
    words = ["import", "megatron", str(tmp_path / "own.args"), "cluster=16xH100", "-o", str(tmp_path)]
    ran = dslaunch(*words)
    assert (ran.status, ran.out) == (2, "")
    assert "model.components.llm.vocab=32000" in ran.err
    ran = dslaunch(*words, "model.components.llm.vocab=50304")
    assert ran.status == 0, ran.err
    assert "vocab: 50304" in (tmp_path / "conf" / "model" / "own.yaml").read_text()


def test_a_rate_that_falls_for_a_part_of_the_run(dslaunch: CommandLine, tmp_path: Path) -> None:
    """A warm-up's fraction is one of the decay, not of the run; both come back when the recipe is rendered."""
    text = re.sub(r"--(train-iters|lr-(decay|warmup)-\w+) \S+", "", (FOLDER / "llama2_70b.args").read_text())
    more = "--train-iters 5000 --lr-decay-iters 3200 --lr-warmup-fraction 0.01 --lr-decay-style cosine"
    (tmp_path / "short.args").write_text(f"{text} {more}\n")
    words = ["--name", "mine", "-o", str(tmp_path)]
    ran = dslaunch("import", "megatron", str(tmp_path / "short.args"), "cluster=64xH100", *words)
    assert ran.status == 0, ran.err
    recipe = yaml.safe_load((tmp_path / "recipes" / "mine.yaml").read_text())
    assert recipe["training"]["optimizer"]["warmup_steps"] == 32
    assert recipe["engine"]["extra"]["lr-decay-iters"] == 3200
    out = tmp_path / "out"
    assert dslaunch("render", "recipe=mine", f"--config-dir={tmp_path}", "-o", str(out)).status == 0
    lines = (out / "megatron_args.txt").read_text().splitlines()
    assert {"--train-iters 5000", "--lr-decay-iters 3200", "--lr-warmup-iters 32"} <= set(lines)


def test_what_a_scripts_caller_gives_is_asked_for_by_its_key(dslaunch: CommandLine, tmp_path: Path) -> None:
    text = (FOLDER / "experts.args").read_text()
    (tmp_path / "own.args").write_text(f"{text} --save $1 --data-path $2 --tensorboard-dir $3\n")
    ran = dslaunch("import", "megatron", str(tmp_path / "own.args"), "cluster=16xH100")
    assert ran.status == 0, ran.err
    for flag, key in (
        ("--save: $1", "checkpoint.dir"),
        ("--data-path: $2", "data.path"),
        ("--tensorboard-dir: $3", "engine.extra.tensorboard-dir"),
    ):
        assert f"  {flag}: nothing in the script sets it; give {key}\n" in ran.err, key


def test_values_beside_those_that_the_trainer_fills_in(dslaunch: CommandLine, tmp_path: Path) -> None:
    config = json.loads((FOLDER / "trainer_auto.json").read_text())
    config["optimizer"] = {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.98], "eps": "auto"}}
    (tmp_path / "mixed.json").write_text(json.dumps(config))
    words = [*LLAMA, "cluster=8xH100", "training.global_batch=64"]
    ran = dslaunch("import", "deepspeed", str(tmp_path / "mixed.json"), *words)
    assert ran.status == 0, ran.err
    assert "betas: [0.9, 0.98]" in ran.out
    assert "optimizer.params.betas: auto is written as for the others" in ran.err


def test_a_variant_of_adam_keeps_its_learning_rate(dslaunch: CommandLine, tmp_path: Path) -> None:
    params = {"lr": 3e-5, "weight_decay": 0, "freeze_step": 400}
    config = {"train_batch_size": 64, "bf16": {"enabled": True}}
    config["optimizer"] = {"type": "OnebitAdam", "params": params}
    (tmp_path / "onebit.json").write_text(json.dumps(config))
    ran = dslaunch("import", "deepspeed", str(tmp_path / "onebit.json"), *TINY)
    assert ran.status == 0, ran.err
    assert yaml.safe_load(ran.out)["training"]["optimizer"] == {
        "lr": 3e-5, "eps": 1e-8, "weight_decay": 0.0, "betas": [0.9, 0.999],
        "schedule": "constant", "warmup_steps": 0,
    }  # fmt: skip
    assert "optimizer.params.freeze_step: a parameter of OnebitAdam" in ran.err


def test_a_recipe_of_that_name_is_not_written_over(dslaunch: CommandLine, tmp_path: Path) -> None:
    words = [*TINY, "--name", "mine", "-o", str(tmp_path)]
    assert imported(dslaunch, "deepspeed", "lamb.json", *words).status == 0
    (tmp_path / "recipes" / "mine.yaml").write_text("mine: own\n")
    again = imported(dslaunch, "deepspeed", "lamb.json", *words)
    assert (again.status, (tmp_path / "recipes" / "mine.yaml").read_text()) == (2, "mine: own\n")
    assert "mine.yaml: is there already" in again.err
    assert imported(dslaunch, "deepspeed", "lamb.json", *words, "--force").status == 0


def test_what_does_not_fit_is_not_written(dslaunch: CommandLine, tmp_path: Path) -> None:
    words = ["model=llama3_70b", "cluster=8xA10G", "training.seq_len=4096"]
    ran = imported(dslaunch, "deepspeed", "zero3_host_params.json", *words, "-o", str(tmp_path))
    assert (ran.status, list(tmp_path.iterdir())) == (3, [])
    assert "memory.gpu" in ran.err
    assert "The recipe was not written." in ran.err


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["deepsped", "x.json"], ["'deepsped'", "Did you mean 'deepspeed'?"]),
        (["deepspeed"], ["takes one source, found none"]),
        (["deepspeed", "missing.json", *TINY], ["missing.json", "can't be read"]),
        (
            ["deepspeed", "zero1_bf16.json"],
            ["does not say model, cluster, training.seq_len", "model=llama3_8b"],
        ),
        (
            ["deepspeed", "trainer_auto.json"],
            ["does not say model, cluster, training.seq_len, training.global_batch"],
        ),
        (["deepspeed", "trainer_auto.json", *TINY], ["does not say training.global_batch"]),
        (["deepspeed", "llama_8b.sh", *TINY], ["llama_8b.sh", "Give a DeepSpeed configuration"]),
        (["deepspeed", "zero1_bf16.json", *TINY, "model=llama8b"], ["no such model", "'llama3_8b'"]),
        (["megatron", "llama_8b.sh"], ["does not say which GPU", "4x8xA100"]),
        (["megatron", "zero1_bf16.json", "cluster=A100"], ["no command"]),
        (
            ["accelerate", "accelerate_ddp.yaml"],
            ["does not say model, cluster, training.seq_len, training.global_batch", "cluster=H100 "],
        ),
        (["accelerate", "zero1_bf16.json", *TINY], ["neither distributed_type nor num_processes"]),
        (["accelerate", "accelerate_zero3.yaml", *LLAMA, "cluster=H100"], ["training.global_batch=128"]),
        (["hf", "zero1_bf16.json"], ["no model_type"]),
        (["hf", "nowhere/config.json"], ["no such file"]),
        (["hf", "zero1_bf16.json", "cluster=8xA100"], ["takes no cluster="]),
    ],
)
def test_mistakes(dslaunch: CommandLine, words: list[str], parts: list[str]) -> None:
    placed = [str(FOLDER / word) if word.endswith((".json", ".yaml", ".sh")) else word for word in words]
    ran = dslaunch("import", *placed)
    assert (ran.status, ran.out) == (2, "")
    assert [part for part in parts if part not in ran.err] == []
    assert "Traceback" not in ran.err
