"""How long a question to many hosts takes, and how much memory: preflight's fan-out beside pdsh's.

    python -m benchmarks.fanout [--hosts 1000] [--handshake 0.3]

Both run a stand-in for ssh that sleeps as long as a handshake takes, reads its input and answers one line: what is
measured is the fan-out. pdsh is asked with all hosts at once, and with its default of 32 at a time. Memory is that
of the asking program; the stand-ins are the same for both.
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
echo '{{"answer": 1}}'
"""
_OURS = """
import json, resource, sys
from dslaunch.remote import on_all, over_ssh
hosts = [f"h{{n}}" for n in range({hosts})]
answers = on_all({{host: over_ssh(host, ["python3", "-"], 10) for host in hosts}}, "x" * 20000, 60.0)
assert all(answer.status == 0 and "answer" in answer.out for answer in answers.values()), "a host did not answer"
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@dataclass(frozen=True)
class Measured:
    name: str
    seconds: float
    memory_mib: float

    def describe(self) -> str:
        return f"{self.name:<34} {self.seconds:7.2f} s  {self.memory_mib:7.1f} MiB"


def measure(hosts: int, handshake_s: float) -> list[Measured]:
    """Ours, and pdsh where it is installed."""
    with tempfile.TemporaryDirectory() as name:
        stand_in = Path(name) / "ssh"
        stand_in.write_text(_STAND_IN.format(handshake=handshake_s))
        stand_in.chmod(0o755)
        env = {**os.environ, "PATH": f"{name}:{os.environ['PATH']}"}
        found = [_ours(hosts, env)]
        if shutil.which("pdsh"):
            found.append(_pdsh("pdsh -R ssh, all at once", ["-f", str(hosts)], hosts, env))
            found.append(_pdsh("pdsh -R ssh, 32 at a time (default)", [], hosts, env))
        return found


def _ours(hosts: int, env: dict[str, str]) -> Measured:
    start = time.monotonic()
    words = [sys.executable, "-c", _OURS.format(hosts=hosts)]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    return Measured("dslaunch preflight", time.monotonic() - start, int(done.stdout) / 1024)


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
    for each in measure(given.hosts, given.handshake):
        print(each.describe())


if __name__ == "__main__":
    main()
