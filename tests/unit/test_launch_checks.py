"""Mistakes that are found before anything is written."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from dslaunch.errors import ConfigError, LaunchError
from dslaunch.launch.checks import check, check_hostfile, check_machine
from dslaunch.launch.request import LaunchRequest
from dslaunch.planfile import FilesPlan, Plan
from tests.launching import make_plan


def _check(plan: Plan, folder: Path, launcher: str = "local") -> None:
    (folder / "train.py").write_text("")
    (folder / "python3").unlink(missing_ok=True)
    (folder / "python3").symlink_to(sys.executable)
    environ = {"PATH": str(folder), "SET": ""}
    request = LaunchRequest(plan, {}, folder / "run", folder, environ, wait=False)
    check(request, launcher)
    check_machine(request, launcher)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (make_plan(script="missing.py"), "script: missing.py: there is no such file"),
        (make_plan(script="."), "it is a folder"),
        (make_plan(script=""), "none is named"),
        (make_plan(script="", engine="megatron"), "engine.path: empty"),
        (make_plan(script="", engine="megatron", engine_path="x"), "there is no .*/x/pretrain_gpt.py"),
        (make_plan(python="python9"), "launcher.python: python9 is no program"),
        (make_plan(python="./train.py"), "launcher.python: ./train.py is no program"),
        (make_plan(pass_env=("SET", "HF_TOKEN")), "launcher.pass_env: HF_TOKEN is not set"),
        (make_plan(files=FilesPlan(data_path="./data")), "data.path: ./data does not exist"),
        (make_plan(files=FilesPlan(weights="/no/weights")), "model.weights: /no/weights does not exist"),
        (make_plan(files=FilesPlan(checkpoint_load="~/no/such/step-5")), "checkpoint.load: "),
        (make_plan(nodes=2), "launcher.name=local: the plan has 2 nodes"),
    ],
)
def test_mistakes(plan: Plan, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        _check(plan, tmp_path)
    assert caught.value.status == 2


def test_a_port_in_use_is_refused(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"launcher.master_port: {port} cannot be used"):
            _check(make_plan(master_port=port), tmp_path)
    _check(make_plan(master_port=port), tmp_path)


def test_what_is_right_passes(tmp_path: Path) -> None:
    (tmp_path / "corpus.bin").write_text("")
    files = FilesPlan(data_path="./corpus", tokenizer="org/tokenizer", weights="hub-name")
    _check(make_plan(files=files, pass_env=("SET",)), tmp_path)


def test_paths_of_another_machine_are_not_looked_for_here(tmp_path: Path) -> None:
    files = FilesPlan(data_path="/cluster/data")
    plan = make_plan(nodes=2, local=False, python="/cluster/python", files=files)
    with pytest.raises(LaunchError, match=r"sbatch is not on this machine's PATH.*login node") as caught:
        _check(plan, tmp_path, launcher="slurm")
    assert caught.value.status == 5
    with pytest.raises(LaunchError, match="mpirun is not on this machine's PATH") as caught:
        _check(plan, tmp_path, launcher="openmpi")
    assert caught.value.status == 5


@pytest.mark.parametrize(
    ("launcher", "transport", "runner"),
    [
        ("openmpi", "ssh", "torchrun"),
        ("ssh", "pdsh", "direct"),
        ("torchrun", "ssh", "deepspeed"),
        ("local", "ssh", "direct"),
    ],
)
def test_a_runner_that_the_launcher_cannot_use_is_refused(
    launcher: str, transport: str, runner: str, tmp_path: Path
) -> None:
    plan = make_plan(transport=transport, runner=runner)
    with pytest.raises(ConfigError, match=rf"launcher\.runner: {runner} does not .*allowed are auto"):
        _check(plan, tmp_path, launcher=launcher)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "hosts: names no host"),
        ("n1 slots=2\nn1 slots=2\n", "hosts:2: host n1"),
        ("-oProxyCommand=id slots=2\nb slots=2\n", "hosts:1: '-oProxyCommand=id' is no host name"),
        ("n1 slots=2\n", "names 1 hosts, but the plan has 2 nodes"),
        ("\udcff", "no UTF-8"),
    ],
)
@pytest.mark.parametrize("launcher", ["", "slurm", "ssh"])
def test_a_hostfile_that_can_be_read_is_judged_for_each_launcher(
    text: str, message: str, launcher: str, tmp_path: Path
) -> None:
    plan = make_plan(nodes=2, local=False, hostfile="hosts")
    check_hostfile(plan, tmp_path)
    (tmp_path / "hosts").write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ConfigError, match=message):
        _check(plan, tmp_path, launcher=launcher)


@pytest.mark.parametrize(
    ("version", "refused"), [("slurm-wlm 22.05.8", True), ("slurm 24.05.1", False), ("", False)]
)
def test_an_older_slurm_does_not_know_segments(version: str, refused: bool, tmp_path: Path) -> None:
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(f"#!/bin/sh\necho '{version}'\n")
    sbatch.chmod(0o755)
    plan = make_plan(2, 4, placement=("--segment=2: every 8 ranks stand in one block",))
    if refused:
        with pytest.raises(ConfigError, match=r"segment: sbatch knows .* from SLURM 24\.05 on, .* is 22\.05"):
            _check(plan, tmp_path, "slurm")
    else:
        _check(plan, tmp_path, "slurm")
