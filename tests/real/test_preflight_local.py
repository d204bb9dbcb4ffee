"""`dslaunch preflight` on this machine, of a recipe and of a rendered folder, and what it cannot ask."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.command import CommandLine, Ran
from tests.real.parts import need

need("torch", "deepspeed")
LOCAL = ("recipe=vla_tiny", "cluster=local")


@pytest.fixture
def ask(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> CommandLine:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return CommandLine(capsys)


def test_this_machine_reduces_and_becomes_a_profile(ask: CommandLine, tmp_path: Path) -> None:
    profile = tmp_path / "mine.yaml"
    ran = ask("preflight", *LOCAL, "-o", str(profile))
    assert ran.status == 0, ran.err
    assert "all_reduce (Gloo) within a host: " in ran.out
    assert "preflight passed: 1 host, " in ran.out
    written = yaml.safe_load(profile.read_text())
    assert written["defaults"] == ["local", "_self_"]
    assert written["intra"]["gb_per_s"] > 0


def _folder(ask: CommandLine, tmp_path: Path, *words: str) -> Path:
    folder = tmp_path / "out"
    ran = ask("render", *LOCAL, "preflight.collective=false", "-o", str(folder), *words)
    assert ran.status == 0, ran.err
    return folder


def _checks(ran: Ran) -> set[str]:
    return {finding["check"] for finding in ran.json["findings"]}


def test_a_rendered_folder(ask: CommandLine, tmp_path: Path) -> None:
    folder = _folder(ask, tmp_path)
    ran = ask("preflight", str(folder), "--json")
    assert ran.status == 0, ran.err
    assert "collective: turned off" in ran.json["not_checked"]
    refused = ask("preflight", str(folder), "training.steps=3")
    assert refused.status == 2
    assert "only launcher= can be given" in refused.err


def test_a_checkpoint_folder_that_is_too_small_blocks_a_launch(ask: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('started')\n")
    full = "/proc/self"  # a folder in which nobody can write a file
    ran = ask(*LOCAL, "script=train.py", "module=", f"checkpoint.dir={full}")
    assert ran.status == 4
    assert "folder.writable" in ran.err
    assert not (tmp_path / "runs").exists()


def test_a_stale_lock_and_a_package_that_is_missing(ask: CommandLine, tmp_path: Path) -> None:
    lock = tmp_path / "extensions" / "py311_cpu" / "shm" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    subprocess.run(["touch", "-d", "1 hour ago", lock, lock.parent], check=True)
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    ran = ask("preflight", *LOCAL, f"launcher.python={bare}", "--json")
    assert ran.status == 4
    assert _checks(ran) - {"host.memory"} == {"torch.lock", "host.package"}
    assert str(lock) in json.dumps(ran.json)


def test_hosts_that_this_machine_cannot_ask(ask: CommandLine) -> None:
    ran = ask("preflight", "recipe=vla70b", "cluster=64xA100", "launcher=slurm")
    assert ran.status == 5
    assert "a SLURM job does it as its first step" in ran.err
