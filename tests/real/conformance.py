"""What every launcher has to hold. A launcher's test class inherits `Conformance` and gives it a `site`.

The programs need the standard library alone, and speak through files in the run folder, which all hosts share.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dslaunch.run.state import read_state
from tests.launching import HOSTILE

ARGUMENTS = [
    "plain", "two words", "", "it's", '"quoted"', "$HOME ${PATH} $(id)", "`id`", "; echo no", "a\nb", "*", "~",
    "\\n \\", "--flag=x y", "é 漢字", "-", "!x", "#no", "a=b", "%n",
]  # fmt: skip
NOTE = 'it\'s $5; a "quote" `id` \\ é'
SECRET = "two\nlines, $HOME; 'é' \"\\"
HELPER = "sleep 1000"
_LIMIT_S = 300.0
_PROGRAMS = {
    "pro be's.py": """
import json, os, pathlib, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NOTE", "EMPTY",
         "SECRET", "UNNAMED", "CUDA_VISIBLE_DEVICES")
seen = {name: os.environ.get(name) for name in names}
out = pathlib.Path(os.environ["DSLAUNCH_RUN_DIR"]) / f"probe-{os.environ['RANK']}.json"
out.write_text(json.dumps({**seen, "argv": sys.argv, "cwd": os.getcwd(), "host": os.uname().nodename}))
""",
    "fail.py": """
import os, sys, time
print(f"rank {os.environ['RANK']} speaks")
if os.environ["RANK"] == sys.argv[1]:
    sys.exit(7) if sys.argv[2] == "exit" else os.kill(os.getpid(), int(sys.argv[2]))
time.sleep(1000)
""",
    "meet.py": """
import os, pathlib, socket, subprocess, sys, time
run, rank = pathlib.Path(os.environ["DSLAUNCH_RUN_DIR"]), int(os.environ["RANK"])
world = int(os.environ["WORLD_SIZE"])
at = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
    pass  # torchrun itself holds that port, and the ranks have met there
elif rank == 0:
    server = socket.create_server(("", at[1]))
    for _ in range(world - 1):
        assert server.accept()[0].makefile().readline() == f"{run}\\n"
else:
    for attempt in range(3000):
        try:
            connection = socket.create_connection(at)
            break
        except ConnectionRefusedError:
            time.sleep(0.1)
    connection.sendall(f"{run}\\n".encode())
# A step of SLURM waits a minute for whoever holds its output.
out = subprocess.DEVNULL if "SLURM_JOB_ID" in os.environ else None
subprocess.Popen(["sleep", "1000"], start_new_session=True, stdout=out, stderr=out)
(run / f"met-{rank}").touch()
while not (run / "go").exists():
    time.sleep(0.1)
""",
}


@dataclass(frozen=True)
class Site:
    """Where a launcher starts ranks."""

    words: tuple[str, ...]
    """Of the command line: recipe, cluster and launcher."""
    environ: Mapping[str, str]
    """Of the user's shell."""
    nodes: int = 2
    per_node: int = 2
    slots: tuple[int, ...] = ()
    """Ranks of each host, in rank order, where they differ."""
    hosts: tuple[str, ...] = ()
    """Names of the hosts in rank order; none where all ranks are on this machine."""
    plain_paths: bool = False
    """The launcher cannot carry paths with blanks (and says so before it launches)."""
    before: tuple[str, ...] = ()
    """What the user typed first: the command that gives an allocation."""
    ends_all: bool = True
    """What a rank started in a session of its own ends with it. SLURM does so by cgroups, which this one lacks."""
    passes_secrets: bool = True
    """Values of launcher.pass_env arrive on other hosts."""

    @property
    def world(self) -> int:
        return len(self.places)

    @property
    def places(self) -> list[tuple[int, int, int]]:
        """Of each rank: its host, its number there, and how many the host has."""
        slots = self.slots or (self.per_node,) * self.nodes
        return [(host, local, size) for host, size in enumerate(slots) for local in range(size)]

    def left_of(self, folder: Path) -> dict[int, str]:
        """What should have ended, on any host."""
        return {pid: words for pid, words in left_of(folder).items() if self.ends_all or words != HELPER}


Start = Callable[..., "subprocess.Popen[str]"]


class Conformance:
    """The suite; `site` is a fixture of the class that inherits it."""

    @pytest.fixture
    def home(self, site: Site, tmp_path: Path) -> Path:
        """Where the user stands, with the programs in it."""
        folder = tmp_path / ("home" if site.plain_paths else HOSTILE)
        folder.mkdir()
        for name, text in _PROGRAMS.items():
            (folder / name).write_text(text)
        return folder

    @pytest.fixture
    def start(self, site: Site, home: Path) -> Iterator[Start]:
        """Starts the command line; what still runs at the end is stopped."""
        started: list[subprocess.Popen[str]] = []

        def begin(script: str, *words: str, root: str = "runs") -> subprocess.Popen[str]:
            python = f"launcher.python={sys.executable}"
            common = ["preflight.enabled=false", python, "module=", f"run.root={root}"]
            settings = [*site.words, *common, f"script={script}"]
            secret = ["launcher.pass_env=[SECRET]"] if site.passes_secrets else []
            command = [
                sys.executable,
                "-m",
                "dslaunch",
                *settings,
                *secret,
                f"env.NOTE={NOTE}",
                "env.EMPTY=",
                *words,
            ]
            # Its own process id, which an allocation's command stands before.
            shell = ["bash", "-c", 'echo $$ >"$0"; exec "$@"', str(home.parent / f"pid-{root}")]
            started.append(
                subprocess.Popen(
                    [*site.before, *shell, *command],
                    cwd=home,
                    env={**site.environ, "SECRET": SECRET, "UNNAMED": "1"},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
            return started[-1]

        yield begin
        for process in started:
            if process.poll() is None:
                process.terminate()
                process.communicate(timeout=_LIMIT_S)
        for pid in left_of(home):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def test_every_rank_has_its_place_and_gets_each_word_unchanged(
        self, site: Site, home: Path, start: Start
    ) -> None:
        status, output = done(start("pro be's.py", "--", *ARGUMENTS))
        assert status == 0, output
        run = only_run(home / "runs")
        probes = [json.loads((run / f"probe-{rank}.json").read_text()) for rank in range(site.world)]
        for rank, (seen, (host, local, size)) in enumerate(zip(probes, site.places, strict=True)):
            assert seen["argv"] == ["pro be's.py", *ARGUMENTS]
            assert seen["cwd"] == str(home)
            place = [seen[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")]
            assert place == [
                str(number) for number in (rank, local, site.world, size)
            ]
            assert (seen["NOTE"], seen["EMPTY"], seen["UNNAMED"] if site.hosts else None) == (NOTE, "", None)
            assert seen["SECRET"] == (SECRET if site.passes_secrets else None)
            if site.hosts:
                assert seen["host"] == site.hosts[host]
        assert len({(seen["MASTER_ADDR"], seen["MASTER_PORT"]) for seen in probes}) == 1
        texts = [path.read_text() for path in run.rglob("*") if path.is_file() and "probe-" not in path.name]
        assert not [text for text in texts if "two\nlines" in text]

    @pytest.mark.parametrize(("how", "expected"), [("exit", 7), ("9", 137)])
    def test_a_rank_that_fails_ends_the_others_and_its_status_is_kept(
        self, how: str, expected: int, site: Site, home: Path, start: Start
    ) -> None:
        failing = site.world - 1
        status, output = done(start("fail.py", "--", str(failing), how))
        assert status == 1, output
        run = only_run(home / "runs")
        # In its own log; mpirun may drop from the common one what a rank said last.
        assert f"rank {failing} speaks" in (run / "logs" / f"rank-{failing}.log").read_text()
        state = read_state(run)
        assert (state.status, state.exit_status) == ("failed", expected), output
        assert not site.left_of(home)

    def test_two_runs_do_not_meet_and_ctrl_c_ends_one_alone(
        self, site: Site, home: Path, start: Start
    ) -> None:
        first, second = start("meet.py", root="first"), start("meet.py", root="second")
        for process, root in ((first, home / "first"), (second, home / "second")):
            wait_for(lambda root=root: len(list(root.glob("*/met-*"))) == site.world, process)  # type: ignore[misc]
        os.kill(int((home.parent / "pid-first").read_text()), signal.SIGINT)
        status, output = done(first)
        assert status == 1, output
        assert read_state(only_run(home / "first")).status == "stopped"
        assert not site.left_of(home / "first")
        still_there = left_of(home / "second")
        assert len([words for words in still_there.values() if words == HELPER]) == site.world
        (only_run(home / "second") / "go").touch()
        status, output = done(second)
        assert status == 0, output
        assert not site.left_of(home / "second")


def done(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit status and output."""
    output, _ = process.communicate(timeout=_LIMIT_S)
    return process.returncode, output


def only_run(root: Path) -> Path:
    """The one run folder under `root`."""
    (folder,) = root.iterdir()
    return folder


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[Any]) -> None:
    """Until `condition` holds, while `process` runs."""
    limit = time.monotonic() + _LIMIT_S
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit
        time.sleep(0.1)


def left_of(folder: Path) -> dict[int, str]:
    """Processes on any host, ended helpers aside, that have a folder under `folder` in their environment."""
    found = {}
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError):
            if os.fsencode(folder) + b"/" in Path(f"/proc/{pid}/environ").read_bytes():
                found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    return {pid: words for pid, words in found.items() if words}
