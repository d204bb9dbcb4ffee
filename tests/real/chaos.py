"""Faults, and runs that meet them: what is struck, when, and what the policy makes of it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dslaunch.run.processes import children_of
from dslaunch.run.state import read_events, read_state
from tests.real.chaos_train import EVERY, curve

STEPS = 16
LIMIT_S = 240.0
PROGRAM = Path(__file__).with_name("chaos_train.py")
SEEDS = (1, 2, 3)
SMALL_DISK = ("disk full", "run folder's disk full")
"""Faults whose checkpoints have a disk of their own, which fills up; in the second the run folder is on it too."""
FIXED_PORT = 47311
_LISTENER = "import socket, sys; server = socket.create_server(('', {port})); sys.stdin.read()"
"""Until ssh ends: its standard input closes then."""


@dataclass(frozen=True)
class Fault:
    """One fault, and how a run that meets it ends."""

    name: str
    cause: str
    """As causes.yaml names it; empty: nothing is left to judge it."""
    outcome: str
    """restarted: it goes on by itself. stopped: it ends, and `dslaunch resume` goes on. ended: that is all.
    unharmed: it does not notice. shrunk, grown: it is planned anew for fewer hosts or for more, and goes on."""
    launchers: tuple[str, ...] = ("local", "torchrun", "ssh", "slurm")
    rank: int | None = None
    """Where it must strike; None: any."""


FAULTS = (
    Fault("rank killed", "killed", "restarted"),
    Fault("all ranks killed", "killed", "restarted"),
    Fault("launcher killed", "killed", "restarted"),
    Fault("supervisor killed", "", "stopped"),
    Fault("rank frozen", "hang", "restarted"),
    Fault("rank out of memory", "host_memory", "restarted"),
    Fault("disk full", "disk_full", "stopped", rank=0),
    Fault("run folder's disk full", "disk_full", "stopped", rank=0),
    Fault("newest checkpoint corrupt", "killed", "restarted", rank=0),
    Fault("master port taken", "port_taken", "restarted"),
    Fault("program fails", "program", "restarted"),
    Fault("program fails again", "program", "ended"),
    Fault("configuration wrong", "configuration", "ended"),
    Fault("wrong Python on one host", "wrong_program", "ended"),
    Fault("wrong world size", "configuration", "ended", launchers=("local", "torchrun")),
    Fault("slow rank", "", "unharmed"),
    Fault("ranks with uneven data", "communication", "ended"),
)
SLURM_FAULTS = (
    Fault("node drained", "", "unharmed", launchers=("slurm",)),
    Fault("job preempted", "preempted", "restarted", launchers=("slurm",)),
    Fault("slurmd killed", "host_lost", "restarted", launchers=("slurm",), rank=1),
    Fault("time limit", "preempted", "restarted", launchers=("slurm",)),
)
HOST_LOST = Fault("host cut off the network", "host_lost", "restarted", launchers=("ssh",), rank=1)
"""Struck by its own test, which needs a spare host."""

HOST_GONE = Fault("host lost for good, elastic", "host_lost", "shrunk", launchers=("ssh", "slurm"))
HOST_BACK = Fault("lost host comes back, elastic", "killed", "grown", launchers=("ssh",))
TOO_FEW = Fault("fewer hosts than restart.min_nodes", "host_lost", "stopped", launchers=("ssh",))
ELASTIC_FAULTS = (HOST_GONE, HOST_BACK, TOO_FEW)
"""Struck by the tests of elastic runs (test_elastic_*.py), whose losses hang on no number of ranks."""


def dice(fault: Fault, seed: int) -> random.Random:
    """Throws the same for the same fault and seed."""
    return random.Random(f"{fault.name} {seed}")


def seeded(fault: Fault, launcher: str, *, quick: bool) -> list[Any]:
    """What a test of one fault is run with: (fault, launcher, seed); all but the first seed are slow.

    Args:
        quick: the first is not.
    """
    return [
        pytest.param(fault, launcher, seed, id=str(seed), marks=[] if quick and seed == 1 else pytest.mark.slow)
        for seed in SEEDS
    ]


@dataclass(frozen=True)
class Site:
    """Where a launcher starts ranks."""

    launcher: str
    words: tuple[str, ...]
    environ: Mapping[str, str]
    world: int


@dataclass(frozen=True)
class Chaos:
    """One run with one fault; the seed decides where and when it strikes."""

    site: Site
    fault: Fault
    seed: int
    home: Path
    checkpoints: Path

    @property
    def place(self) -> tuple[int, int]:
        """Rank and step: after the second checkpoint, before the last."""
        draw = dice(self.fault, self.seed)
        rank = draw.randrange(self.site.world) if self.fault.rank is None else self.fault.rank
        return rank, draw.randrange(2 * EVERY + 1, STEPS - EVERY)

    @property
    def run(self) -> Path:
        """The run folder."""
        (folder,) = (self.home / "runs").iterdir()
        return folder

    def dslaunch(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "dslaunch", *words],
            cwd=self.home, env={**self.site.environ, "COLUMNS": "200"}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    def launch(self) -> subprocess.Popen[str]:
        """The run; with a world of another size than the plan's only a folder that was changed by hand starts."""
        if self.fault.name != "wrong world size":
            return self.dslaunch("launch", "--skip-preflight", *self._words())
        rendered = self.dslaunch("render", "-o", "out", *self._words())
        assert rendered.wait(LIMIT_S) == 0, rendered.communicate()
        start, manifest = self.home / "out" / "launch.sh", self.home / "out" / "manifest.json"
        before = start.read_text()
        after = re.sub(r"(--num_gpus|--nproc-per-node) 2", r"\1 3", before)
        start.write_text(after)
        old, new = (hashlib.sha256(text.encode()).hexdigest() for text in (before, after))
        manifest.write_text(manifest.read_text().replace(old, new))
        return self.dslaunch("launch", "--skip-preflight", "out")

    def _words(self) -> list[str]:
        rank, step = self.place
        python = self.home / "python" if self.fault.name == "wrong Python on one host" else sys.executable
        port = [f"launcher.master_port={FIXED_PORT}"] if self._host_has_port else []
        return [
            *self.site.words, *port, "module=", f"script={PROGRAM}", f"launcher.python={python}",
            f"checkpoint.every={EVERY}", f"checkpoint.dir={self.checkpoints}", "restart.wait_s=0.2",
            f"watchdog.minutes={0.2 if self.fault.cause == 'hang' else 2}", "--",
            str(self.checkpoints), str(STEPS), self.fault.name, str(rank), str(step),
        ]  # fmt: skip

    def strike(self, process: subprocess.Popen[str]) -> None:
        """What is done to the run from outside."""
        if self.fault.name == "launcher killed":
            self.wait_until_struck(process)
            guard = read_state(self.run).process
            assert guard is not None
            for child in children_of(guard.pid):
                os.kill(child.pid, signal.SIGKILL)
        if self.fault.name == "supervisor killed":
            self.wait_until_struck(process)
            process.kill()

    def wait_until_struck(self, process: subprocess.Popen[str]) -> None:
        """Until rank 0 has come to the step at which the fault is to happen."""
        self.wait(self._reached, process)

    def wait(self, reached: Callable[[], bool], process: subprocess.Popen[str]) -> None:
        """Until `reached`; a run that ended before is a failure."""
        limit = time.monotonic() + LIMIT_S
        while not reached():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < limit
            time.sleep(0.02)

    def losses(self) -> list[float]:
        """By step; of a step that was done again, the last."""
        rows = [line.split() for line in (self.run / "losses").read_text().splitlines()]
        found = {int(step): float(loss) for step, loss in rows}
        return [found[step] for step in sorted(found)]

    def whole(self) -> list[float]:
        """The losses of an uninterrupted run."""
        return curve(STEPS, self.site.world)

    def causes(self) -> list[str]:
        """Of the attempts that ended, in order."""
        return [event["details"]["cause"] for event in self.events("attempt_ended")]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.run) if event["kind"] == kind]

    @contextlib.contextmanager
    def taken_port(self, process: subprocess.Popen[str]) -> Iterator[None]:
        """Listen on the port that the first attempt is given, before its launcher does; else nothing.

        A host over ssh names a free port just before the ranks start: there it is one that the user chose.
        """
        if self._host_has_port:
            words = [sys.executable, "-c", f'"{_LISTENER.format(port=FIXED_PORT)}"']
            with subprocess.Popen(["ssh", "n1", *words], env=self.site.environ, stdin=subprocess.PIPE):
                self.wait(lambda: self._has_events() and bool(self.causes()), process)
        elif self.fault.name == "master port taken":
            self.wait(lambda: self._has_events() and bool(self.events("started")), process)
            started = self.events("started")[0]["details"]
            port = started.get("DSLAUNCH_MASTER_PORT") or started["MASTER_PORT"]
            with socket.create_server(("", int(port))):
                yield
            return
        yield

    @property
    def _host_has_port(self) -> bool:
        return self.fault.name == "master port taken" and self.site.launcher == "ssh"

    def _has_events(self) -> bool:
        return any((self.home / "runs").glob("*/events.jsonl"))

    def _reached(self) -> bool:
        path = self.home / "runs"
        steps = [file.read_text().split() for file in path.glob("*/ranks/0.step")]
        return any(words and int(words[0]) >= self.place[1] for words in steps)


def processes_of(run: Path) -> list[int]:
    """Every process of this machine, in whatever name space, that belongs to the run: its environment says so."""
    mark = f"DSLAUNCH_RUN_DIR={run}".encode()
    found = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError):
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
    return found
