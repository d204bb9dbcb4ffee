"""launcher=auto, by plan and machine."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from dslaunch.launch.choose import choose
from tests.launching import make_plan


def _commands(folder: Path, scontrol: str) -> dict[str, str]:
    """An environment whose PATH has an sbatch, and a scontrol of this body."""
    for name, body in (("sbatch", "exit 9"), ("scontrol", scontrol)):
        command = folder / name
        command.write_text(f"#!/bin/sh\n{body}\n")
        command.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


def test_what_the_user_names_is_taken(tmp_path: Path) -> None:
    environ = {"PATH": str(tmp_path), "SLURM_JOB_ID": "7"}
    assert choose(make_plan(name="torchrun"), environ) == "torchrun"
    assert choose(make_plan(nodes=2, local=False, name="ssh"), environ) == "ssh"


def test_this_machine_is_local_even_in_an_allocation() -> None:
    assert choose(make_plan(), {"PATH": "", "SLURM_JOB_ID": "7"}) == "local"


def test_an_allocation_goes_before_a_hostfile() -> None:
    plan = make_plan(nodes=2, local=False, hostfile="hosts")
    assert choose(plan, {"PATH": "", "SLURM_JOB_ID": "7"}) == "slurm"
    assert choose(plan, {"PATH": ""}) == "ssh"


def test_named_hosts_are_reached_over_ssh() -> None:
    assert choose(make_plan(nodes=2, local=False, hosts=("a", "b")), {"PATH": ""}) == "ssh"


def test_one_node_of_another_machine_is_not_launched_here(tmp_path: Path) -> None:
    assert choose(make_plan(local=False), {"PATH": str(tmp_path)}) == ""


@pytest.mark.parametrize(
    ("scontrol", "launcher"),
    [
        ("echo 'Slurmctld(primary) at c1 is UP'", "slurm"),
        ("echo 'Slurmctld(primary) at c1 is DOWN'", ""),
        ("echo 'error'; exit 1", ""),
    ],
)
def test_a_controller_must_answer(tmp_path: Path, scontrol: str, launcher: str) -> None:
    assert choose(make_plan(nodes=2, local=False), _commands(tmp_path, scontrol)) == launcher


def test_a_controller_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[choose.__module__], "_ANSWER_LIMIT_S", 0.5)
    start = time.monotonic()
    assert choose(make_plan(nodes=2, local=False), _commands(tmp_path, "exec sleep 60")) == ""
    assert time.monotonic() - start < 30
