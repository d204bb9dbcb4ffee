"""Sources with a value of the wrong kind end in a message that names it, never in a traceback."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dslaunch.errors import ConfigError
from dslaunch.importing.accelerate import import_accelerate
from dslaunch.importing.deepspeed import import_deepspeed
from dslaunch.importing.hf import import_hf

FOLDER = Path(__file__).parent / "imports"
WRONG: tuple[Any, ...] = (None, "x", [], 0, 1.5, {"a": 1}, float("inf"))
WORDS = ["model=gpt2", "cluster=8xA100", "training.seq_len=64", "training.global_batch=64"]
HF: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        "model_type": "deepseek_v2", "n_shared_experts": 2, "first_k_dense_replace": 1, "q_lora_rank": None,
        "num_experts_per_tok": 6, "routed_scaling_factor": 1.0, "rms_norm_eps": 1e-6, "rope_theta": 10000,
    },
    "gemma3_text": {
        "model_type": "gemma3_text", "head_dim": 256, "sliding_window_pattern": 6, "sliding_window": 512,
    },
    "qwen2_moe": {
        "model_type": "qwen2_moe", "decoder_sparse_step": 1, "mlp_only_layers": [], "max_window_layers": 1,
    },
    "gpt2": {"model_type": "gpt2", "n_inner": None, "layer_norm_epsilon": 1e-5},
    "dinov2": {"model_type": "dinov2", "mlp_ratio": 4, "image_size": 518},
    "clip": {"model_type": "clip", "vision_config": {"patch_size": 14}},
    "llava": {"model_type": "llava", "vision_feature_layer": -2, "vision_config": {}, "text_config": {}},
    "qwen2_5_vl": {"model_type": "qwen2_5_vl", "vision_config": {"fullatt_block_indexes": [7, 15, 23, 31]}},
    "internvl_chat": {
        "model_type": "internvl_chat", "downsample_ratio": 0.5, "select_layer": -1, "llm_config": {},
        "vision_config": {"qk_normalization": False},
    },
}  # fmt: skip


def places(tree: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in tree.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from places(value, (*path, key))


def variants(tree: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """`tree` with one value replaced, for every key and every wrong value."""
    for path in places(tree):
        for wrong in WRONG:
            changed = copy.deepcopy(tree)
            section = changed
            for key in path[:-1]:
                section = section[key]
            section[path[-1]] = wrong
            yield changed


def only_refusals(file: Path, texts: Iterator[str], read: Callable[[str], object]) -> int:
    """How many of the texts are refused; whatever else is raised fails the test."""
    refusals = []
    for text in texts:
        file.write_text(text)
        try:
            read(str(file))
        except ConfigError as error:
            refusals.append(str(error))
    assert [refusal for refusal in refusals if file.name not in refusal] == []
    return len(refusals)


@pytest.mark.parametrize("name", HF)
def test_hf(tmp_path: Path, name: str) -> None:
    assert only_refusals(tmp_path / "config.json", map(json.dumps, variants(HF[name])), import_hf) > 0


@pytest.mark.parametrize(
    "file", ["zero1_bf16.json", "lamb.json", "zero3_plus_plus.json", "trainer_auto.json"]
)
def test_deepspeed(tmp_path: Path, file: str) -> None:
    texts = map(json.dumps, variants(json.loads((FOLDER / file).read_text())))
    assert only_refusals(tmp_path / file, texts, lambda path: import_deepspeed(path, WORDS)) > 0


@pytest.mark.parametrize("file", ["accelerate_zero3.yaml", "accelerate_fsdp1.yaml", "accelerate_ddp.yaml"])
def test_accelerate(tmp_path: Path, file: str) -> None:
    texts = map(yaml.safe_dump, variants(yaml.safe_load((FOLDER / file).read_text())))
    assert only_refusals(tmp_path / file, texts, lambda path: import_accelerate(path, WORDS)) > 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "none of DeepSpeed's keys"),
        ('{"hidden_size": 8}', "none of DeepSpeed's keys"),
        (
            '{"train_batch_size": 8, "train_batch_size": 16}',
            ":1:25: the key 'train_batch_size' stands here again",
        ),
        ('{"zero_optimization": {"stage": 5}}', "zero_optimization.stage is 5. Allowed: 0 | 1 | 2 | 3"),
        ('{"train_batch_size": BATCH\n}', "train_batch_size is 'BATCH': a whole number"),
        (
            '{"train_batch_size": 16, "train_micro_batch_size_per_gpu": 16}',
            "= 1 replicas, and cluster=8xA100 has 8",
        ),
    ],
)
def test_deepspeed_files_that_are_none(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "ds.json").write_text(text)
    with pytest.raises(ConfigError) as raised:
        import_deepspeed(str(tmp_path / "ds.json"), WORDS[:3])
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("parallelism_config: {parallelism_config_cp_size: 2}", "parallelism_config_cp_size is 2"),
        ("num_processes: eight", "num_processes is 'eight': a whole number"),
        ("mixed_precision: int8", "mixed_precision is int8. Known are no, fp8, fp16, bf16"),
        ("  bad: : x", "a.yaml:3:"),
    ],
)
def test_accelerate_files_that_are_refused(tmp_path: Path, more: str, words: str) -> None:
    (tmp_path / "a.yaml").write_text(f"distributed_type: FSDP\nnum_machines: 1\n{more}\n")
    with pytest.raises(ConfigError) as raised:
        import_accelerate(str(tmp_path / "a.yaml"), WORDS)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("more", "written"),
    [
        ("fsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD}", "override strategy: hsdp"),
        ("parallelism_config: {parallelism_config_dp_replicate_size: 2}", "override strategy: hsdp"),
        ("fsdp_config: {fsdp_offload_params: true}", "FSDP_OFFLOAD_PARAMS: 'true'"),
        ("mixed_precision: no", "precision: fp32"),
    ],
)
def test_what_accelerate_says_is_kept(tmp_path: Path, more: str, written: str) -> None:
    (tmp_path / "a.yaml").write_text(f"distributed_type: FSDP\nnum_processes: 8\n{more}\n")
    (text,) = import_accelerate(str(tmp_path / "a.yaml"), WORDS).files.values()
    assert written in text
    assert "accelerate: true" in text


def test_ulysses_under_accelerate_keeps_its_degree(tmp_path: Path) -> None:
    more = "parallelism_config: {parallelism_config_sp_size: 2}"
    (tmp_path / "a.yaml").write_text(f"distributed_type: DEEPSPEED\nnum_processes: 8\n{more}\n")
    (text,) = import_accelerate(str(tmp_path / "a.yaml"), WORDS).files.values()
    assert "every: {cp: 2}" in text
