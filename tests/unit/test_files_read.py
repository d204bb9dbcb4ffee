"""What a text becomes, and what happens to a file that isn't one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dslaunch.errors import ConfigError
from dslaunch.files.fileset import MAX_BYTES, MAX_FILES, File, read_fileset, read_folder, read_paths
from dslaunch.files.position import Position

CONFIG = """\
// both tests use this one
{
  "train_micro_batch_size_per_gpu": 2,
  zero_optimization: {
    "stage": 3, 'offload_param': {"device": "cpu"}
  },
  "betas": [0.9, 0.95,],
}
"""


def read(name: str, text: str) -> File:
    (file,) = read_fileset({name: text}).files
    return file


@pytest.mark.parametrize(
    ("path", "line", "column"),
    [
        (("train_micro_batch_size_per_gpu",), 3, 3),
        (("zero_optimization",), 4, 3),
        (("zero_optimization", "stage"), 5, 5),
        (("zero_optimization", "offload_param", "device"), 5, 35),
        (("betas", 1), 7, 18),
        (("zero_optimization", "no_such_key"), 4, 3),
        (("no_such_key",), 1, 1),
    ],
)
def test_position_of_a_key_or_the_nearest_above(path: tuple[str | int, ...], line: int, column: int) -> None:
    assert read("ds_config.json", CONFIG).at(*path) == Position(line, column)


def test_value_by_path() -> None:
    file = read("ds_config.json", CONFIG)
    assert file.get("zero_optimization", "offload_param", "device") == "cpu"
    assert file.get("zero_optimization", "stage", "below") is None


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("ds_config.json", "{}", "deepspeed_json"),
        ("anything", '{"zero_optimization": {}}', "deepspeed_json"),
        ("conf/zero3.json", '{"a": 1}', "deepspeed_json"),
        ("multi_gpu", "distributed_type: MULTI_GPU\nnum_processes: 8\n", "accelerate"),
        ("conf/fsdp.json", '{"distributed_type": "FSDP", "num_processes": 8}', "accelerate"),
        ("args.txt", "output_dir: out\nlearning_rate: 1e-4\nwarmup_steps: 10\n", "hf_arguments"),
        ("job", "apiVersion: batch/v1\nkind: Job\n", "kubernetes"),
        ("notes.txt", "learning_rate: as before\noutput_dir: a: b\nwarmup_steps: 1\n", "other"),
        ("notes.md", "distributed_type: MULTI_GPU\nnum_processes: 8\n", "other"),
        ("train.log", "num_processes: 8\nnum_machines: 1\n[INFO] started: {a\n", "other"),
        ("zero_stage2_config.json", '{"a": 1}', "deepspeed_json"),
        ("test_zero_shot.json", '{"a": {"b": 1}}', "json"),
        ("config.json", '{"hidden_size": 64}', "json"),
        ("x", '{"schema": "dslaunch.plan/1"}', "plan"),
        ("x", '{"schema": "dslaunch.prediction/1"}', "prediction"),
        ("x", '{"schema": "dslaunch.manifest/1"}', "manifest"),
        ("nodes", "# all\nworker-1 slots=8\n", "hostfile"),
        ("hostfile", "", "hostfile"),
        ("x", "--num-layers 4\n--bf16\n", "megatron_args"),
        ("run", "#!/bin/bash\ntrue\n", "shell"),
        ("job.sbatch", "srun train\n", "shell"),
        ("env.sh", "export A=1\n", "env"),
        (".deepspeed_env", "A=1\n", "deepspeed_env"),
        ("x", "A=1\nexport B='two words'\n", "env"),
        ("x", "A=1 deepspeed train.py\n", "shell"),
        ("hostfile.patch", "+a slots=8\n", "other"),
        ("README.txt", "Run deepspeed with --help to see more.\n", "other"),
        ("train.py", "x = 1\n", "python"),
        ("x", "import torch\n", "python"),
        ("train.py", "# Databricks notebook source\n!deepspeed train.py\n", "other"),
        ("a.yaml", "distributed_type: DEEPSPEED\nnum_processes: 8\n", "accelerate"),
        ("a.yml", "output_dir: o\nlearning_rate: 1e-4\nper_device_train_batch_size: 2\n", "hf_arguments"),
        ("a.yaml", "services: []\n", "yaml"),
        ("a.json", '{"output_dir": "o", "learning_rate": 1, "bf16": true}', "hf_arguments"),
        ("hf_args.json", '{"fp16": false}', "hf_arguments"),
        ("a.json", '{"fp16": false}', "deepspeed_json"),
        ("a.json", '{"bf16": {"enabled": true}, "optimizer": {}}', "deepspeed_json"),
        ("page.json", '{"model": "x", "layers": [], "optimizer": {"time_us": 4}}', "json"),
        ("a.json", '{"optimiser": {}, "batch": 1, "fp16": {"enabled": true}}', "deepspeed_json"),
        ("a.yaml", "defaults: [x, _self_]\noutput_dir: o\nper_device_train_batch_size: 2\n", "yaml"),
        ("a.yaml", "output_dir: o\nper_device_train_batch_size: 2\noptim: {_target_: x.AdamW}\n", "yaml"),
        ("x", "", "other"),
    ],
)
def test_kind_by_content_with_the_name_as_a_hint(name: str, text: str, kind: str) -> None:
    assert read(name, text).kind == kind


def test_hostfile_in_the_grammar_of_deepspeed() -> None:
    lines = read("hostfile", "# x\n\n  a slots=8 # fast\nb slots = 8\nc  slots=2x\n").value
    assert [(line.line, line.host, line.slots, line.rest) for line in lines] == [
        (3, "a", 8, "# fast"), (4, "", 0, ""), (5, "c", 2, "x"),
    ]  # fmt: skip


def test_megatron_flags_with_their_values() -> None:
    args = read("megatron_args.txt", "--lr 1e-4\n--data-path 'a b' c\n--lr=2e-4\n--bf16\n").value
    assert args.value("--lr") == "2e-4"
    assert args.position("--lr") == Position(3, 1)
    assert args.flags[1].values == ("a b", "c")
    assert args.value("--bf16") is None


def test_assignments_outside_comments() -> None:
    found = read("env.sh", "# A=1\nexport B='$x' C=\"$y\"; D=z\n#SBATCH --export=ALL,E=1\n").value
    assert [(a.name, a.value, a.at, a.literal) for a in found] == [
        ("B", "$x", Position(2, 8), True), ("C", "$y", Position(2, 15), False), ("D", "z", Position(2, 23), True),
        ("E", "1", Position(3, 22), True),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "line", "column", "words"),
    [
        ('{"a": 1,\n "b": {"c": 2', 2, 7, "ends inside an object"),
        ('{"a": [1, 2', 1, 7, "ends inside a list"),
        ('{"a": "x\ny"}', 1, 7, "end of its line"),
        ('{"a" 1}', 1, 6, "':' is missing"),
        ('{"a": 1} x', 1, 10, "after the end"),
        ('{"a": "\\q"}', 1, 7, "no escape"),
        ('{"a": /* x', 1, 7, "not closed"),
        ('{"a": 1e999}', 1, 7, "too long"),
        ("{,}", 1, 2, "expected a key"),
        ("[" * 5000, 1, 102, "nested deeper"),
    ],
)
def test_syntax_error_stands_where_the_mistake_is(text: str, line: int, column: int, words: str) -> None:
    file = read("ds_config.json", text)
    (problem,) = file.problems
    assert (problem.at, file.value) == (Position(line, column), None)
    assert words in problem.message


YAML = """\
distributed_type: DEEPSPEED
deepspeed_config: &ds
  zero_stage: 3
  "zero3_init_flag": true
num_processes: 16
again: *ds
"""


@pytest.mark.parametrize(
    ("path", "line", "column"),
    [
        (("deepspeed_config", "zero_stage"), 3, 3),
        (("deepspeed_config", "zero3_init_flag"), 4, 3),
        (("num_processes",), 5, 1),
        (("again", "zero_stage"), 3, 3),
    ],
)
def test_positions_in_yaml(path: tuple[str, ...], line: int, column: int) -> None:
    file = read("accelerate.yaml", YAML)
    assert file.at(*path) == Position(line, column)
    assert file.get("deepspeed_config", "zero_stage") == 3


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: [1\nb: 2\n", 2, "no YAML"),
        ("a: 1\nb: 2\na: 3\n", 3, "the key 'a' stands here again"),
        ("a: &x [*x]\n", 1, "an alias inside its own anchor"),
        ("a: " + "[" * 500, 1, "nested deeper"),
        ("a: !!python/object/apply:os.system [ls]\n", 1, "no YAML"),
        ("a: \0\n", 1, "no YAML"),
    ],
)
def test_what_is_wrong_with_yaml(text: str, line: int, words: str) -> None:
    file = read("a.yaml", text)
    assert words in file.problems[0].message
    assert file.problems[0].at.line == line


def test_what_cannot_be_read_is_one_clear_message(tmp_path: Path) -> None:
    loop, fifo = tmp_path / "loop.json", tmp_path / "fifo"
    loop.symlink_to(loop)
    os.mkfifo(fifo)
    contents = {
        "binary.json": b"{\0}", "latin.json": b'{"a": "\xe9"}', "large.json": b" " * (MAX_BYTES + 1),
        "utf16.json": "{}".encode("utf-16"),
    }  # fmt: skip
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
    expected = {
        "binary.json": "binary", "latin.json": "byte 7 is no UTF-8", "large.json": "larger than",
        "utf16.json": "UTF-16. Save the file as UTF-8",
        "loop.json": "can't be read", "fifo": "neither a file nor a folder", "missing": "can't be read",
        ".": "a folder",
    }  # fmt: skip
    for name, words in expected.items():
        with pytest.raises(ConfigError, match=words) as caught:
            read_paths([tmp_path / name])
        assert str(tmp_path / name) in str(caught.value)


def test_a_folder_is_read_with_what_it_happens_to_hold(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"PK\0")
    (tmp_path / "latin.sh").write_bytes(b"echo \xe9")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "below").mkdir()
    (tmp_path / "hostfile").write_text("a slots=8\n", encoding="utf-8")
    found = {file.name.rpartition("/")[2]: file for file in read_folder(tmp_path).files}
    assert found["hostfile"].kind == "hostfile"
    said = {name: file.problems[0].message for name, file in found.items() if file.problems}
    expected = {
        "fifo": "neither a file nor a folder", "latin.sh": "no UTF-8", "loop": "can't be read",
        "model.pt": "binary",
    }  # fmt: skip
    assert said.keys() == expected.keys()
    assert all(words in said[name] for name, words in expected.items()), said
    for number in range(MAX_FILES):
        (tmp_path / f"{number}.txt").touch()
    with pytest.raises(ConfigError, match="at most 500 are read"):
        read_folder(tmp_path)


def test_config_of_a_model_is_told_from_that_of_a_job() -> None:
    texts = {
        "config.json": '{"model_type": "llama", "hidden_size": 64, "architectures": ["LlamaForCausalLM"]}',
        "ds_config.json": '{"train_batch_size": 8, "model_type": "llama"}',
        "args.json": '{"model_type": "llama", "hidden_size": 64, "per_device_train_batch_size": 1}',
    }
    kinds = {file.name: file.kind for file in read_fileset(texts).files}
    assert kinds == {"config.json": "hf_model", "ds_config.json": "deepspeed_json", "args.json": "hf_arguments"}


def saved(folder: Path, tag: str, *names: str) -> Path:
    (folder / tag).mkdir(parents=True)
    (folder / "latest").write_text(tag, encoding="utf-8")
    for name in names:
        (folder / tag / name).write_bytes(b"\0" * 10)
    return folder


def test_checkpoint_is_read_by_the_names_in_it(tmp_path: Path) -> None:
    names = [f"bf16_zero_pp_rank_{data}_mp_rank_{model:02}_optim_states.pt" for data in (0, 1) for model in (0, 1)]
    folder = saved(tmp_path / "a; b", "global_step10", *names, "mp_rank_00_model_states.pt", "notes.txt")
    (folder / "config.json").write_text('{"model_type": "llama", "hidden_size": 64}', encoding="utf-8")
    (folder / "model.safetensors").write_bytes(b"\0" * 100)
    model, file = read_folder(folder).files
    assert (model.kind, file.kind, file.name) == ("hf_model", "checkpoint", f"{folder}/latest")
    assert (file.value.tag, file.value.data_parallel, file.value.model_parallel) == ("global_step10", 2, 2)
    assert not file.value.universal
    (own,) = read_folder(folder / "global_step10").files
    assert (own.value, own.name) == (file.value, f"{folder}/global_step10")


def test_checkpoint_that_was_converted_has_its_parameters_in_a_folder(tmp_path: Path) -> None:
    folder = saved(tmp_path, "step", "mp_rank_00_model_states.pt")
    (folder / "step" / "zero").mkdir()
    (file,) = read_folder(folder).files
    assert (file.value.universal, file.value.data_parallel) == (True, 0)


@pytest.mark.parametrize("latest", ["", "gone", "../..", "a" * 5000, "\0", "notes"])
def test_latest_that_names_no_step_makes_no_checkpoint(tmp_path: Path, latest: str) -> None:
    saved(tmp_path, "notes", "readme.txt")
    (tmp_path / "latest").write_text(latest, encoding="utf-8")
    assert "checkpoint" not in {file.kind for file in read_folder(tmp_path).files}
