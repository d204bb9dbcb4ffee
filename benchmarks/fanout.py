"""What many hosts take: time and memory of the fan-out beside pdsh's, and of a plan's files for 16,384 GPUs.

    python -m benchmarks.fanout [--hosts 1000] [--handshake 0.3]

All run a stand-in for ssh that sleeps as long as a handshake takes, reads its input and answers: what is measured
is the fan-out. preflight asks every host one question; a launch connects to every host and hears the agent's
hello, `launcher.connections` at a time. pdsh is asked with all hosts at once, and with its default of 32 at a
time. Memory is that of the asking program; the stand-ins are the same for all.

The files (hostfile, scripts, plan.json), the map of the ranks, and the hosts of the launch are made for 64 GPUs
and for 16,384, one after the other.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_STAND_IN = """#!/bin/sh
sleep {handshake}
case "$*" in
  *bash\\ -s) printf 'dslaunch-agent/1\\n{{"kind": "hello", "size": 0}}\\n'; exec cat >/dev/null ;;
  *) echo '{{"answer": 1}}' ;;
esac
"""
_OURS = """
import json, resource, sys
from dslaunch.remote import on_all, over_ssh
hosts = [f"h{{n}}" for n in range({hosts})]
answers = on_all({{host: over_ssh(host, ["python3", "-"], 10) for host in hosts}}, "x" * 20000, 60.0)
assert all(answer.status == 0 and "answer" in answer.out for answer in answers.values()), "a host did not answer"
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


_LAUNCH = """
import asyncio, resource
from dslaunch.launch.link import connect, preamble
hosts = [f"h{{n}}" for n in range({hosts})]
start = preamble({{"DSLAUNCH_PYTHON": "python3"}}, "")
async def one(host, limit):
    async with limit:
        return await connect(host, start, 60.0)
async def main():
    limit = asyncio.Semaphore({connections})
    links = await asyncio.gather(*(one(host, limit) for host in hosts))
    await asyncio.gather(*(link.close() for link in links))
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
asyncio.run(main())
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
_CONNECTIONS = 64
"""launcher.connections"""
_SIZES = (64, 16_384)


@dataclass(frozen=True)
class Measured:
    name: str
    seconds: float
    memory_mib: float

    def describe(self) -> str:
        return f"{self.name:<42} {self.seconds:7.2f} s  {self.memory_mib:7.1f} MiB"


def measure(hosts: int, handshake_s: float) -> list[Measured]:
    """Ours, and pdsh where it is installed."""
    with tempfile.TemporaryDirectory() as name:
        stand_in = Path(name) / "ssh"
        stand_in.write_text(_STAND_IN.format(handshake=handshake_s))
        stand_in.chmod(0o755)
        env = {**os.environ, "PATH": f"{name}:{os.environ['PATH']}"}
        launching = {"hosts": hosts, "connections": _CONNECTIONS}
        found = [
            _ours("dslaunch preflight", _OURS.format(hosts=hosts), env),
            _ours("dslaunch launch, all at once", _LAUNCH.format(hosts=hosts, connections=hosts), env),
            _ours(f"dslaunch launch, {_CONNECTIONS} at a time (default)", _LAUNCH.format(**launching), env),
        ]
        if shutil.which("pdsh"):
            found.append(_pdsh("pdsh -R ssh, all at once", ["-f", str(hosts)], hosts, env))
            found.append(_pdsh("pdsh -R ssh, 32 at a time (default)", [], hosts, env))
        return found


def _ours(name: str, program: str, env: dict[str, str]) -> Measured:
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    return Measured(name, time.monotonic() - start, int(done.stdout) / 1024)


def seconds_to_render(gpus: int) -> float:
    """The files, the map of the ranks and the hosts of a launch of `gpus` GPUs in nodes of 8, from its plan on."""
    # Imported here, for a child's peak memory counts from that of the process that started it.
    from dslaunch.flow import Request, planned
    from dslaunch.launch.hosts import host_words
    from dslaunch.launch.request import LaunchRequest
    from dslaunch.paths import data_dirs
    from dslaunch.render import render
    from dslaunch.review.rank_map import rows

    nodes = gpus // 8
    hosts = ",".join(f"node{number:05d}" for number in range(nodes))
    words = (
        "recipe=llama3_8b", f"cluster={nodes}x8xA100", f"cluster.hosts=[{hosts}]", "training.global_batch=65536",
        "training.micro_batch=1", "strategy.llm.tp=8", "strategy.llm.pp=1", "script=train.py", "launcher=ssh",
    )  # fmt: skip
    config, plan, prediction = planned(Request(words, None, (), ()))
    start = time.monotonic()
    files = render(plan, prediction, config, data_dirs("templates", None))
    assert sum(row.last - row.first + 1 for row in rows(plan, plan.components["llm"])) == nodes
    request = LaunchRequest(plan, files, Path("/runs/one"), Path("/"), {}, wait=False)
    assert host_words(request).count("=") == nodes
    return time.monotonic() - start


def _pdsh(name: str, options: Sequence[str], hosts: int, env: dict[str, str]) -> Measured:
    words = ["pdsh", "-R", "ssh", *options, "-w", f"h[0-{hosts - 1}]", "true"]
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    start = time.monotonic()
    process = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout
    output = process.stdout.read()
    _, _, used = os.wait4(process.pid, 0)
    seconds = time.monotonic() - start
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert output.count("answer") == hosts, f"{output.count('answer')} of {hosts} hosts answered {name}"
    return Measured(name, seconds, used.ru_maxrss / 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=1000)
    parser.add_argument("--handshake", type=float, default=0.3, help="seconds")
    given = parser.parse_args()
    print(f"{given.hosts} hosts, a handshake of {given.handshake} s, {os.cpu_count()} cores")
    found = measure(given.hosts, given.handshake)
    for each in found:
        print(f"{each.describe()}  {each.seconds / found[-1].seconds:6.2f} of the last")
    seconds_to_render(_SIZES[0])  # imports and templates
    small, large = (seconds_to_render(size) for size in _SIZES)
    print(f"files for {_SIZES[0]} GPUs {small:.2f} s, for {_SIZES[1]} {large:.2f} s: {large / small:.1f} times")


if __name__ == "__main__":
    main()
