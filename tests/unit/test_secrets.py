"""Secrets, by the name of a variable and by the shape of a value: one list for the configuration and for files."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from dslaunch.secrets import in_arguments, is_secret_name, shaped
from tests.command import CommandLine

_PLAN = ["render", "recipe=vla_tiny", "cluster=local"]
_HF = "hf_" + "Ab1" * 12

SHAPED = [
    _HF,
    "sk-" + "Ab1-" * 6,
    "ghp_" + "a1B" * 12,
    "AKIA" + "ABCD2345EFGH6789",
    "xoxb-" + "1234567890-abc",
    "postgres://u:pw@db/x",
    "https://:pw@host/x",
]
PLAIN = [
    "hf_home",
    "sk-learn-is-a-library-of-note",
    "task-2024-abcdefghijklmnopqrst",
    "s3://bucket/a:b/c@d",
    "postgres://u:$PW@db/x",
    "https://user@host:80/x",
    "tcp://localhost:6006",
    "org/model@main",
]


@pytest.mark.parametrize("value", SHAPED)
@pytest.mark.parametrize("key", ["env.NOTE", "data.path", "script_args", "launcher.slurm.comment"])
def test_a_value_with_a_secrets_shape_is_refused_before_a_file_is_written(
    key: str, value: str, dslaunch: CommandLine, tmp_path: Path
) -> None:
    tail = ["script=train.py", "--", f"--key={value}"] if key == "script_args" else [f"{key}='{value}'"]
    ran = dslaunch(*_PLAN, "-o", f"{tmp_path}/out", *tail)
    assert ran.status == 2, ran.err
    assert key in ran.err
    assert "launcher.pass_env" in ran.err
    assert value not in ran.err


@pytest.mark.parametrize("value", PLAIN)
def test_what_only_resembles_a_secret_is_taken(value: str) -> None:
    assert not list(shaped({"env": {"A": value}, "args": [value]}))


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("HF_TOKEN", True), ("PGPASSWORD", True), ("WANDB_API_KEY", True), ("AWS_SECRET_ACCESS_KEY", True),
        ("client_secret", True), ("TOKENIZERS_PARALLELISM", False), ("MAX_TOKENS", False),
        ("HF_TOKEN_PATH", False), ("SECRETARY", False),
    ],
)  # fmt: skip
def test_a_variables_name(name: str, secret: bool) -> None:
    assert is_secret_name(name) == secret


@pytest.mark.parametrize("setting", ["TOKENIZERS_PARALLELISM=false", "HF_TOKEN_PATH=/run/hf", "PAD_TOKEN=0"])
def test_settings_of_a_tokenizer_are_no_secrets(setting: str, dslaunch: CommandLine) -> None:
    ran = dslaunch("plan", "recipe=vla_tiny", "cluster=local", f"env.{setting}")
    assert ran.status == 0, ran.err


@pytest.mark.parametrize("words", [["--token", "A1b2C3d4E5f6"], ["--wandb-api-key=f0e1d2c3f0e1d2c3"]])
def test_a_secret_among_the_scripts_arguments_is_refused(
    words: list[str], dslaunch: CommandLine, tmp_path: Path
) -> None:
    ran = dslaunch(*_PLAN, "-o", f"{tmp_path}/out", "module=", "script=train.py", "--", "--steps", "3", *words)
    assert ran.status == 2, ran.err
    assert f"script_args: {words[0].partition('=')[0]}: its value looks like a secret" in ran.err
    assert (words[-1].partition("=")[2] or words[-1]) not in ran.err


@pytest.mark.parametrize(
    "words",
    [
        ["--pad-token", "[PAD]"],
        ["--image-token=32000"],
        ["--token-file", "/run/hf1234567"],
        ["--max-tokens", "9" * 12],
    ],
)
def test_a_tokenizers_arguments_are_no_secrets(words: list[str]) -> None:
    assert not list(in_arguments(words))


@pytest.mark.parametrize("value", SHAPED)
def test_check_finds_the_same_shapes_in_files_written_elsewhere(
    value: str, dslaunch: CommandLine, tmp_path: Path
) -> None:
    path = f"{tmp_path}/run.sh"
    with open(path, "w") as stream:
        stream.write(f"#!/bin/bash\npython train.py --key {shlex.quote(value)}\n")
    ran = dslaunch("check", path)
    assert ran.status == 6
    assert "env.secret" in ran.out
