"""Chaos on real launchers: each fault ends as the policy says, loses no saved step, and leaves no process."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dslaunch.run.processes import identify
from dslaunch.run.state import read_state
from tests.real.chaos import (
    FAULTS,
    HOST_LOST,
    LIMIT_S,
    SEEDS,
    SMALL_DISK,
    STEPS,
    Chaos,
    Fault,
    Site,
    processes_of,
    seeded,
)
from tests.real.chaos_table import Trial
from tests.real.chaos_table import trial as trial  # a fixture
from tests.real.hosts import Hosts, ssh_hosts
from tests.real.hosts import two_hosts as two_hosts  # a fixture
from tests.real.parts import need

_LAUNCHERS = ("local", "torchrun", "ssh")
_QUICK = {("rank killed", "local"), ("master port taken", "local"), ("wrong world size", "torchrun")}
"""Beside the faults over ssh, where starting costs least; the rest is marked slow."""
_LONG = {"slow rank", "ranks with uneven data", "run folder's disk full", "master port taken"}
"""Marked slow over ssh too."""
_SMALL_DISK = "size=8m"
_WRONG = """#!/bin/sh
[ "${{RANK:-}}" = {rank} ] && exec {bare} -I -S "$@"
exec {good} "$@"
"""
"""An interpreter that is without the training's packages where one rank runs, as on a host that was left out."""


def _cases() -> Iterator[object]:
    for fault in FAULTS:
        for launcher in (name for name in fault.launchers if name in _LAUNCHERS):
            for seed in SEEDS:
                over_ssh = launcher == "ssh" and fault.name not in _LONG
                quick = seed == 1 and (over_ssh or (fault.name, launcher) in _QUICK)
                marks = [] if quick else [pytest.mark.slow]
                name = f"{fault.name}-{launcher}-{seed}".replace(" ", "-")
                yield pytest.param(fault, launcher, seed, marks=marks, id=name)


@pytest.fixture
def site(launcher: str, checkpoints: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    if launcher != "ssh":
        need("torch", "deepspeed")
        yield Site(launcher, ("recipe=vla_tiny", "cluster=local", f"launcher={launcher}"), os.environ, world=2)
    elif os.path.ismount(checkpoints):
        # Hosts see what was mounted before they were started.
        with ssh_hosts() as hosts:
            yield _over_ssh(hosts)
    else:
        yield _over_ssh(request.getfixturevalue("two_hosts"))


def _over_ssh(hosts: Hosts) -> Site:
    words = ("recipe=vla_tiny", "cluster=2x1xA100", "cluster.hosts=[n1,n2]", "launcher=ssh", "-y")
    return Site("ssh", (*words, "training.micro_batch=1"), hosts.environ, world=2)


@pytest.fixture
def checkpoints(fault: Fault, tmp_path: Path) -> Iterator[Path]:
    """Their folder; a disk of its own, and small, where that is to fill up."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    if fault.name not in SMALL_DISK:
        yield folder
        return
    if os.geteuid() != 0:
        pytest.skip("a disk of its own is mounted as root")
    subprocess.run(["mount", "-t", "tmpfs", "-o", _SMALL_DISK, "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def chaos(site: Site, fault: Fault, seed: int, checkpoints: Path, tmp_path: Path) -> Iterator[Chaos]:
    home = tmp_path / "home"
    home.mkdir()
    made = Chaos(site, fault, seed, home, checkpoints)
    wrong = home / "python"
    bare = shutil.which("python3", path="/usr/bin")
    wrong.write_text(_WRONG.format(rank=made.place[0], bare=bare, good=sys.executable))
    wrong.chmod(0o755)
    if fault.name == "run folder's disk full":
        (checkpoints / "runs").mkdir()
        (home / "runs").symlink_to(checkpoints / "runs")
    yield made
    for state in (home / "runs").glob("*/state.json"):
        for process in (read_state(state.parent).supervisor, read_state(state.parent).process):
            if process and identify(process.pid) == process:
                os.kill(process.pid, 9)


@pytest.mark.parametrize(("fault", "launcher", "seed"), list(_cases()))
def test_a_fault_ends_as_the_policy_says(trial: Trial, chaos: Chaos) -> None:
    fault = chaos.fault
    trial.starts()
    process = chaos.launch()
    try:
        with chaos.taken_port(process):
            chaos.strike(process)
            output, _ = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
        process.wait()
    trial.ends()
    if fault.name == "supervisor killed":
        _wait_for_status(chaos, "failed")
    assert not processes_of(chaos.run), output
    if fault.cause:
        assert set(chaos.causes()) == {fault.cause}, (chaos.causes(), output)
    if fault.cause == "hang":
        told, *_ = (event["details"] for event in chaos.events("hang"))
        assert told["behind"] == chaos.place[0]
        assert "is stopped (SIGSTOP)" in told["ranks"][chaos.place[0]]
        assert sum("in _ask (" in each or "in total (" in each for each in told["ranks"]) == 1, told
    if fault.outcome == "restarted":
        assert process.returncode == 0, output
        assert read_state(chaos.run).attempt == len(chaos.causes()) + 1
    elif fault.outcome == "unharmed":
        assert process.returncode == 0, output
        assert not chaos.causes()
    else:
        assert process.returncode == (-9 if fault.name == "supervisor killed" else 1), output
        assert read_state(chaos.run).status == "failed"
    if fault.outcome == "stopped":
        _resume(chaos)
    if fault.outcome != "ended":
        assert chaos.losses() == pytest.approx(chaos.whole(), rel=1e-12)
    nothing_saved_was_done_again(chaos)
    assert not processes_of(chaos.run)
    trial.passes()


@pytest.mark.parametrize(("fault", "launcher", "seed"), seeded(HOST_LOST, "ssh", quick=True))
def test_a_spare_host_takes_the_place_of_one_that_is_cut_off(
    trial: Trial, fault: Fault, seed: int, checkpoints: Path, tmp_path: Path
) -> None:
    with ssh_hosts(3) as hosts:
        site = _over_ssh(hosts)
        words = (*site.words, "restart.spares=[n3]", "launcher.lost_after_s=5")
        chaos = Chaos(replace(site, words=words), fault, seed, tmp_path, checkpoints)
        trial.starts()
        process = chaos.launch()
        try:
            chaos.wait_until_struck(process)
            hosts.hosts[1].cut()
            output, _ = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
            process.wait()
        trial.ends()
        hosts.hosts[1].restore()
        assert process.returncode == 0, output
        assert "on n3 in place of n2" in output
        assert chaos.causes() == ["host_lost"]
        assert chaos.losses() == pytest.approx(chaos.whole(), rel=1e-12)
        assert hosts.quiet(), [host.processes() for host in hosts.hosts]
    trial.passes()


def _wait_for_status(chaos: Chaos, status: str) -> None:
    limit = time.monotonic() + 180
    while read_state(chaos.run).status != status or processes_of(chaos.run):
        assert time.monotonic() < limit, read_state(chaos.run)
        time.sleep(0.1)


def _resume(chaos: Chaos) -> None:
    (chaos.checkpoints / "filler").unlink(missing_ok=True)
    process = chaos.dslaunch("resume", "--skip-preflight", chaos.run.name)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output
    assert read_state(chaos.run).status == "finished"


def nothing_saved_was_done_again(chaos: Chaos) -> None:
    """Each attempt goes on behind the newest whole checkpoint; a broken one costs those since the one before."""
    path = chaos.run / "losses"
    steps = [int(line.split()[0]) for line in path.read_text().splitlines()] if path.exists() else []
    again = [(before, after) for before, after in itertools.pairwise(steps) if after <= before]
    lost = 4 if chaos.fault.name == "newest checkpoint corrupt" else 2
    assert all(before - after < lost for before, after in again), again
    assert not steps or max(steps) <= STEPS
