"""Hosts that are lost for good, and come back: the run is planned anew, and its losses go on as if nothing was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dslaunch.run.records import read_ranks
from dslaunch.run.state import read_events, read_state
from tests.real.chaos import HOST_BACK, HOST_GONE, TOO_FEW, Fault, dice, processes_of, seeded
from tests.real.chaos_table import Trial
from tests.real.chaos_table import trial as trial  # a fixture
from tests.real.elastic_train import curve
from tests.real.hosts import Hosts, ssh_hosts
from tests.real.parts import need

PROGRAM = Path(__file__).with_name("elastic_train.py")
_STEPS = 30
_BATCH = 48
_LIMIT_S = 300.0
_WORDS = (
    "recipe=vla_tiny", "cluster=3x1xA100", "cluster.hosts=[n1,n2,n3]", "launcher=ssh", "-y", "--skip-preflight",
    "engine=torch", "strategy=ddp", "module=", f"script={PROGRAM}", f"launcher.python={sys.executable}",
    f"training.global_batch={_BATCH}", "training.micro_batch=4", "checkpoint.every=2", "restart.wait_s=0.2",
    "restart.elastic=true", "launcher.lost_after_s=8", f"env.PYTHONPATH={PROGRAM.parents[2]}",
)  # fmt: skip


@dataclass
class Elastic:
    """A run on hosts that a test cuts off and gives back."""

    home: Path
    environ: Mapping[str, str]
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def dslaunch(self, *words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "dslaunch", *words],
            cwd=self.home, env={**self.environ, "COLUMNS": "200"}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.started.append(process)
        return process

    def launch(self, *words: str) -> subprocess.Popen[str]:
        return self.dslaunch("launch", *_WORDS, *words, "--", str(_STEPS))

    @property
    def run(self) -> Path:
        (folder,) = (self.home / "runs").iterdir()
        return folder

    def wait(
        self, reached: Callable[[], bool], process: subprocess.Popen[str], limit_s: float = _LIMIT_S
    ) -> None:
        limit = time.monotonic() + limit_s
        while not reached():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < limit
            time.sleep(0.05)

    def wait_for_step(self, step: int, world: int, process: subprocess.Popen[str]) -> None:
        """Until `world` ranks have completed that step."""
        self.wait(lambda: any(at >= step and size == world for at, _, size in self.rows()), process)

    def rows(self) -> list[tuple[int, float, int]]:
        """Step, loss and number of ranks, as they were written."""
        path = next((self.home / "runs").glob("*/losses"), None)
        lines = path.read_text().splitlines() if path else []
        rows = [line.split() for line in lines if len(line.split()) == 3]
        return [(int(step), float(loss), int(world)) for step, loss, world in rows]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event["details"] for event in read_events(self.run) if event["kind"] == kind]

    def check_losses(self, whole: list[float]) -> None:
        """Those of an uninterrupted run."""
        found = {step: loss for step, loss, _ in self.rows()}
        assert [found[step] for step in sorted(found)] == pytest.approx(whole, rel=1e-12)

    def end(self) -> None:
        for process in self.started:
            process.kill()
            process.wait()


def kill_rank(run: Path, rank: int, hosts: Hosts) -> None:
    """End a rank on its host, as this machine numbers its processes."""
    (host,) = [each.host for each in read_ranks(run / "ranks") if each.rank == rank]
    place = next(each for each in hosts.hosts if each.name == host)
    limit = time.monotonic() + 60
    while len(found := [pid for pid, words in place.processes().items() if _is_program(words)]) != 1:
        assert time.monotonic() < limit, place.processes()  # a child that becomes another program may be seen too
        time.sleep(0.05)
    os.kill(found[0], signal.SIGKILL)


def _is_program(words: str) -> bool:
    return PROGRAM.name in words and "bash" not in words


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    need("sshd")
    if os.geteuid() != 0:
        pytest.skip("hosts on one machine are started as root")
    with ssh_hosts(3) as made:
        yield made


@pytest.fixture
def elastic(tmp_path: Path, hosts: Hosts) -> Iterator[Elastic]:
    made = Elastic(tmp_path, hosts.environ)
    yield made
    made.end()


@pytest.mark.parametrize(("fault", "launcher", "seed"), seeded(HOST_GONE, "ssh", quick=True))
def test_a_run_goes_on_without_a_host_that_dies(
    trial: Trial, fault: Fault, seed: int, elastic: Elastic, hosts: Hosts
) -> None:
    draw = dice(fault, seed)
    step, dies = draw.randrange(3, 9), draw.randrange(2)
    trial.starts()
    process = elastic.launch("cluster=2x1xA100", "cluster.hosts=[n1,n2]")
    elastic.wait_for_step(step, 2, process)
    os.kill(hosts.hosts[dies].init, signal.SIGKILL)
    output, _ = process.communicate(timeout=_LIMIT_S)
    trial.ends()
    assert process.returncode == 0, output
    (shrunk,) = elastic.events("replanned")
    assert (shrunk["nodes"], shrunk["hosts"]) == (1, [hosts.names[1 - dies]])
    elastic.check_losses(curve(_STEPS, _BATCH))
    assert not processes_of(elastic.run)
    trial.passes()


@pytest.mark.parametrize(("fault", "launcher", "seed"), seeded(HOST_BACK, "ssh", quick=False))
def test_a_run_shrinks_to_the_hosts_that_are_left_and_grows_again(
    trial: Trial, fault: Fault, seed: int, elastic: Elastic, hosts: Hosts
) -> None:
    draw = dice(fault, seed)
    step, cut = draw.randrange(3, 9), draw.randrange(3)
    trial.starts()
    process = elastic.launch()
    elastic.wait_for_step(step, 3, process)
    hosts.hosts[cut].cut()
    elastic.wait_for_step(step + 4, 2, process)
    hosts.hosts[cut].restore()
    kill_rank(elastic.run, draw.randrange(2), hosts)
    output, _ = process.communicate(timeout=_LIMIT_S)
    trial.ends()
    assert process.returncode == 0, output
    shrunk, grown = elastic.events("replanned")
    left = [name for name in hosts.names if name != hosts.names[cut]]
    assert (shrunk["nodes"], shrunk["hosts"], shrunk["generation"]) == (2, left, 2)
    assert (grown["nodes"], grown["hosts"], grown["generation"]) == (3, list(hosts.names), 3)
    assert f"{hosts.names[cut]}: ssh exits 255" in shrunk["why"]
    assert "3 nodes x 1 GPUs" in shrunk["before"]
    assert "dp 2" in shrunk["after"]
    assert [event["cause"] for event in elastic.events("attempt_ended")] == ["host_lost", "killed"]
    elastic.check_losses(curve(_STEPS, _BATCH))
    assert [world for _, _, world in elastic.rows()][-1] == 3
    kept = [(elastic.run / "generations" / str(number) / "plan.json").read_text() for number in (1, 2, 3)]
    assert kept[0] != kept[1]
    said, _ = elastic.dslaunch("status").communicate(timeout=_LIMIT_S)
    assert "2 times, now for 3 nodes" in said
    assert kept[2] == (elastic.run / "plan.json").read_text()
    assert not processes_of(elastic.run)
    trial.passes()


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["direct", "torchrun"])
def test_survivors_wait_where_the_batch_does_not_divide(runner: str, elastic: Elastic, hosts: Hosts) -> None:
    """Three hosts take a batch of nine, two do not: one trains alone, and the other takes its place later."""
    process = elastic.launch("training.global_batch=9", "training.micro_batch=3", f"launcher.runner={runner}")
    elastic.wait_for_step(3, 3, process)
    hosts.hosts[2].cut()
    elastic.wait_for_step(5, 1, process)
    (alone,) = elastic.events("replanned")
    assert (alone["hosts"], alone["idle"]) == (["n1"], ["n2"])
    assert "9" in alone["refused"][0]
    hosts.hosts[0].cut()
    output, _ = process.communicate(timeout=_LIMIT_S)
    assert process.returncode == 0, output
    assert "the hosts are n2: n1: ssh exits 255" in output
    assert len(elastic.events("replanned")) == 1
    elastic.check_losses(curve(_STEPS, 9))
    for host in (hosts.hosts[0], hosts.hosts[2]):
        host.restore()


@pytest.mark.parametrize(("fault", "launcher", "seed"), seeded(TOO_FEW, "ssh", quick=False))
def test_below_the_fewest_nodes_a_run_stops_and_resumes_with_more(
    trial: Trial, fault: Fault, seed: int, elastic: Elastic, hosts: Hosts
) -> None:
    draw = dice(fault, seed)
    step, stays = draw.randrange(3, 9), draw.choice(hosts.hosts)
    lost = [host for host in hosts.hosts if host != stays]
    trial.starts()
    process = elastic.launch("restart.min_nodes=2")
    elastic.wait_for_step(step, 3, process)
    for host in lost:
        host.cut()
    output, _ = process.communicate(timeout=_LIMIT_S)
    trial.ends()
    assert process.returncode == 1, output
    assert f"1 of 3 hosts can be used, restart.min_nodes is 2: {lost[0].name}: ssh exits 255" in output
    assert read_state(elastic.run).status == "failed"
    assert not elastic.events("replanned")
    refused = elastic.dslaunch("resume", elastic.run.name, "--skip-preflight")
    said, _ = refused.communicate(timeout=_LIMIT_S)
    assert refused.returncode == 3, said
    assert "restart.min_nodes is 2" in said
    lost[draw.randrange(2)].restore()
    resumed = elastic.dslaunch("resume", elastic.run.name, "--skip-preflight")
    said, _ = resumed.communicate(timeout=_LIMIT_S)
    assert resumed.returncode == 0, said
    assert "planned anew, generation 2: 2 nodes x 1 GPUs" in said
    elastic.check_losses(curve(_STEPS, _BATCH))
    assert not processes_of(elastic.run)
    trial.passes()
