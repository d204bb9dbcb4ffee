"""Launches on this machine through the real runners of DeepSpeed and PyTorch, by the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dslaunch.errors import ConfigError
from dslaunch.launch.hostfile import parse_hostfile
from dslaunch.run.processes import Process, identify, is_alive
from dslaunch.run.state import read_events, read_state
from tests.launching import HOSTILE
from tests.real.parts import need

need("torch", "deepspeed")

ARGUMENTS = ["two words", "it's", '"q"', "$HOME;`id`", "a=b", "é", "", "*", "--flag=1 2"]
PROBE = """
import json, os, sys, time
from pathlib import Path
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
record = {**{name: os.environ.get(name) for name in names}, "args": sys.argv[1:], "cwd": os.getcwd()}
Path(os.environ["DSLAUNCH_RUN_DIR"], f"probe-{os.environ['RANK']}.json").write_text(json.dumps(record))
"""
RECIPE = ["recipe=vla_tiny", "cluster=local", "module="]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A working folder with a hostile name, and the probe in it."""
    folder = tmp_path / HOSTILE
    folder.mkdir()
    (folder / "the probe.py").write_text(PROBE)
    return folder


@pytest.fixture
def start(home: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts the command line in `home`; what still runs at the end is stopped by its process id."""
    started: list[subprocess.Popen[str]] = []

    def begin(*words: str) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "dslaunch", *words],
                cwd=home,
                env={**os.environ, "COLUMNS": "200"},
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
            process.wait(60)


Start = Callable[..., "subprocess.Popen[str]"]


def _launch(launcher: str, script: str, *arguments: str) -> list[str]:
    python = f"launcher.python={sys.executable}"
    return [*RECIPE, f"launcher={launcher}", python, f"script={script}", "--", *arguments]


def _done(process: subprocess.Popen[str], limit_s: float = 300) -> tuple[int, str]:
    output, _ = process.communicate(timeout=limit_s)
    return process.returncode, output


def _runs(home: Path) -> list[Path]:
    return sorted((home / "runs").iterdir())


def _probes(run: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(run.glob("probe-*.json"))]


@pytest.mark.parametrize("launcher", ["local", "torchrun"])
def test_every_rank_gets_its_place_and_the_arguments_unchanged(launcher: str, home: Path, start: Start) -> None:
    status, output = _done(start(*_launch(launcher, "the probe.py", *ARGUMENTS)))
    assert status == 0, output
    (run,) = _runs(home)
    probes = _probes(run)
    assert [(probe["RANK"], probe["LOCAL_RANK"], probe["WORLD_SIZE"]) for probe in probes] == [
        ("0", "0", "2"),
        ("1", "1", "2"),
    ]
    assert all(probe["args"] == ARGUMENTS for probe in probes)
    assert len({(probe["MASTER_ADDR"], probe["MASTER_PORT"]) for probe in probes}) == 1
    state = read_state(run)
    assert (state.status, state.exit_status, state.launcher) == ("finished", 0, launcher)
    kinds = [event["kind"] for event in read_events(run) if event["kind"] != "not_watched"]  # told after 5 s
    assert kinds == ["prepared", "started", "finished"]


@pytest.mark.parametrize("launcher", ["local", "torchrun"])
def test_a_rank_that_fails_fails_the_launch(launcher: str, home: Path, start: Start) -> None:
    (home / "fail.py").write_text(
        "import os, sys\nprint(f'rank {os.environ[\"RANK\"]} speaks')\nsys.exit(3 * int(os.environ['RANK']))\n"
    )
    status, output = _done(start(*_launch(launcher, "fail.py")))
    assert status == 1, output
    assert "rank 1 speaks" in output
    (run,) = _runs(home)
    assert "rank 1 speaks" in (run / "logs" / "launcher.log").read_text()
    assert (read_state(run).status, read_state(run).exit_status) == ("failed", 3)
    assert "rank 1 exits 3" in read_events(run)[-1]["details"]["why"]


_FOREVER = """
import os, subprocess, time
from pathlib import Path
helper = subprocess.Popen(["sleep", "1000"], start_new_session=True)
Path(os.environ["DSLAUNCH_RUN_DIR"], f"pids-{os.environ['RANK']}").write_text(f"{os.getpid()} {helper.pid}")
time.sleep(1000)
"""


def _wait_for(paths: Callable[[], list[Path]], count: int, process: subprocess.Popen[str]) -> list[Path]:
    limit = time.monotonic() + 240
    while len(found := [path for path in paths() if path.stat().st_size]) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit
        time.sleep(0.1)
    return found


def _started(run: Path, process: subprocess.Popen[str]) -> list[Process]:
    files = _wait_for(lambda: list(run.glob("runs/*/pids-*")), 2, process)
    found = [identify(int(pid)) for file in files for pid in file.read_text().split()]
    return [process for process in found if process is not None]


@pytest.mark.parametrize("launcher", ["local", "torchrun"])
def test_ctrl_c_ends_every_process_of_the_run_and_no_other(launcher: str, home: Path, start: Start) -> None:
    (home / "forever.py").write_text(_FOREVER)
    bystander = subprocess.Popen(["sleep", "1000"])
    try:
        process = start(*_launch(launcher, "forever.py"))
        ranks_and_helpers = _started(home, process)
        assert len(ranks_and_helpers) == 4
        process.send_signal(signal.SIGINT)
        status, output = _done(process)
        assert status == 1, output
        assert not [each for each in ranks_and_helpers if is_alive(each)]
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
    state = read_state(_runs(home)[0])
    assert state.status == "stopped"
    assert state.process is not None
    assert not is_alive(state.process)


def test_a_killed_launcher_is_no_success(home: Path, start: Start) -> None:
    """DeepSpeed's runner exits 0 where a signal killed the launcher that it started."""
    (home / "forever.py").write_text(_FOREVER)
    process = start(*_launch("local", "forever.py"))
    ranks_and_helpers = _started(home, process)
    rank = int((next(home.glob("runs/*/pids-0"))).read_text().split()[0])
    os.kill(_deepspeed_launcher_of(rank), signal.SIGKILL)
    status, output = _done(process)
    assert status == 1, output
    assert read_state(_runs(home)[0]).status == "failed"
    assert not [each for each in ranks_and_helpers if is_alive(each)]


def _deepspeed_launcher_of(pid: int) -> int:
    while b"deepspeed.launcher.launch" not in Path(f"/proc/{pid}/cmdline").read_bytes():
        pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    return pid


def test_two_runs_at_the_same_time_do_not_meet(home: Path, start: Start) -> None:
    (home / "meet.py").write_text(
        "import os, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "everyone = [None] * dist.get_world_size()\n"
        "dist.all_gather_object(everyone, os.environ['DSLAUNCH_RUN_DIR'])\n"
        "assert set(everyone) == {os.environ['DSLAUNCH_RUN_DIR']}, everyone\n"
        "dist.destroy_process_group()\n" + PROBE
    )
    processes = [start(*_launch("torchrun", "meet.py")) for _ in range(2)]
    for process in processes:
        status, output = _done(process)
        assert status == 0, output
    ports = [{probe["MASTER_PORT"] for probe in _probes(run)} for run in _runs(home)]
    assert len(ports) == 2
    assert ports[0].isdisjoint(ports[1])


def test_a_reviewed_folder_is_launched_as_it_is_or_not_at_all(home: Path, start: Start) -> None:
    words = _launch("torchrun", "the probe.py", "a b")
    status, output = _done(start("render", "-o", "out put", *words))
    assert status == 0, output
    launch_sh = home / "out put" / "launch.sh"
    reviewed = launch_sh.read_text()
    launch_sh.write_text(reviewed + "\n# changed\n")
    status, output = _done(start("launch", "out put"))
    assert status == 2
    assert "launch.sh: changed since it was rendered" in output
    assert "render again" in output.lower()
    assert not (home / "runs").exists()

    launch_sh.write_text(reviewed)
    status, output = _done(start("launch", "out put"))
    assert status == 0, output
    (run,) = _runs(home)
    assert [probe["args"] for probe in _probes(run)] == [["a b"], ["a b"]]
    names = [path.name for path in (home / "out put").iterdir()]
    assert all((run / name).read_bytes() == (home / "out put" / name).read_bytes() for name in names)


HOSTFILES = [
    "n1 slots=8\nn2 slots=4\n",
    "  n1\tslots=8 # x\n#n2 slots=2\n\n",
    "n1 slots=8x\n",
    "",
    "#\n",
    "n1 slots=2\nn1 slots=2\n",
    "n1\n",
    "n1 slots=\n",
    "n1 slots=-1\n",
    "n1 slots =2\n",
    "n1  slots=2 slots=3\n",
    "a b slots=2\n",
    "10.0.0.1 slots=٣\n",
]


@pytest.mark.parametrize("text", HOSTFILES)
def test_the_hostfile_is_read_as_deepspeed_reads_it(text: str, tmp_path: Path) -> None:
    from deepspeed.launcher.runner import fetch_hostfile

    path = tmp_path / "hostfile"
    path.write_text(text)
    try:
        theirs = list(fetch_hostfile(str(path)).items())
    except ValueError:
        with pytest.raises(ConfigError):
            parse_hostfile(text, "h")
    else:
        assert list(parse_hostfile(text, "h").items()) == theirs
