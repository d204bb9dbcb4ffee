"""What launcher=ssh does where hosts, networks or processes fail, and where hosts share no file system."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dslaunch.run.state import read_state
from tests.real.conformance import done, left_of, only_run, wait_for
from tests.real.hosts import Host, Hosts, ssh_hosts
from tests.real.hosts import two_hosts as two_hosts  # a fixture

FOREVER = """
import os, pathlib, time
(pathlib.Path(os.environ["DSLAUNCH_RUN_DIR"]) / f"up-{os.environ['RANK']}").touch()
time.sleep(1000)
"""
SEEN = """
import json, os, sys
names = ("RANK", "MASTER_ADDR", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES")
print(json.dumps({name: os.environ.get(name) for name in names}))
sys.exit(3 * (sys.argv[1:] == [os.environ["RANK"]]))
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "forever.py").write_text(FOREVER)
    (tmp_path / "seen.py").write_text(SEEN)
    return tmp_path


@pytest.fixture
def start(home: Path, two_hosts: Hosts) -> Iterator[Start]:
    """Starts the command line; what is left on the hosts at the end is ended."""

    def begin(script: str, *words: str, hosts: Hosts = two_hosts) -> subprocess.Popen[str]:
        common = [
            "recipe=vla_tiny",
            "cluster=2x2xA100",
            "launcher=ssh",
            "preflight.enabled=false",
            "module=",
            "-y",
        ]
        named = [] if any(word.startswith("launcher.host") for word in words) else ["cluster.hosts=[n1,n2]"]
        python = f"launcher.python={sys.executable}"
        return subprocess.Popen(
            [sys.executable, "-m", "dslaunch", *common, *named, python, f"script={script}", *words],
            cwd=home, env=hosts.environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    yield begin
    for pid in left_of(home):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _up(home: Path, process: subprocess.Popen[str]) -> None:
    wait_for(lambda: len(list(home.glob("runs/*/up-*"))) == 4, process)


def _quiet(home: Path, limit_s: float) -> bool:
    limit = time.monotonic() + limit_s
    while left_of(home):
        if time.monotonic() > limit:
            return False
        time.sleep(0.2)
    return True


def _one(home: Path, of: str, host: Host) -> int:
    """The process of this run on a host whose command line holds `of`: one, once its short helpers are gone."""
    limit = time.monotonic() + 60
    while True:
        ours = left_of(home)
        found = [pid for pid, words in host.processes().items() if of in words and pid in ours]
        if len(found) == 1:
            return found[0]
        assert time.monotonic() < limit, ours
        time.sleep(0.1)


def test_no_rank_starts_where_a_host_cannot_be_reached(home: Path, start: Start, two_hosts: Hosts) -> None:
    (home / "hosts").write_text("n1 slots=2\nno-such-host.invalid slots=2\n")
    status, output = done(start("forever.py", "launcher.hostfile=hosts"))
    assert status == 1, output
    assert (
        "no-such-host.invalid: ssh exits 255: ssh: Could not resolve hostname no-such-host.invalid" in output
    )
    assert "1 of 2 hosts cannot be used; no rank was started" in output
    assert two_hosts.quiet()
    assert not (only_run(home / "runs") / "ranks").exists()


def test_a_python_that_is_not_there_is_named(home: Path, start: Start) -> None:
    status, output = done(start("seen.py", "launcher.python=/no/python"))
    assert status == 1, output
    assert "launcher.python: /no/python is not found on n1" in output


@pytest.mark.parametrize("victim", ["dslaunch.launch.remote", "supervisor"])
def test_the_ranks_end_with_the_launching_side(victim: str, home: Path, start: Start) -> None:
    process = start("forever.py")
    _up(home, process)
    launcher = read_state(only_run(home / "runs")).process
    assert launcher is not None
    os.kill(process.pid if victim == "supervisor" else launcher.pid, signal.SIGKILL)
    process.communicate(timeout=120)
    assert _quiet(home, 90), left_of(home)


def test_what_a_lost_agent_leaves_is_ended(home: Path, start: Start, two_hosts: Hosts) -> None:
    process = start("forever.py")
    _up(home, process)
    os.kill(_one(home, "-I -c", two_hosts.hosts[1]), signal.SIGKILL)
    status, output = done(process)
    assert status == 1, output
    assert "n2: lost: ssh exits" in output
    assert "processes of this run were still there and are ended" in output
    assert not left_of(home)


def test_both_sides_of_a_cut_network_end(home: Path, start: Start, two_hosts: Hosts) -> None:
    process = start("forever.py", "launcher.lost_after_s=4")
    _up(home, process)
    two_hosts.hosts[1].cut()
    try:
        status, output = done(process)
        assert status == 1, output
        assert "n2: lost: ssh exits 255" in output
        assert "n2: not reached; its agent ends the ranks after 4 s of silence" in output
        assert _quiet(home, 90), left_of(home)
    finally:
        two_hosts.hosts[1].restore()


def test_gpus_and_interfaces_are_chosen_on_each_host(home: Path, start: Start, two_hosts: Hosts) -> None:
    (home / "hosts").write_text("n1 slots=8\nn2 slots=8 type=A100\n")
    first = two_hosts.hosts[0].address
    network = first.rsplit(".", 1)[0] + ".0/24"
    words = ("launcher.hostfile=hosts", "launcher.include=n1:4,6@n2", f"launcher.subnet={network}")
    status, output = done(start("seen.py", *words, "env.GLOO_SOCKET_IFNAME=lo"))
    assert status == 0, output
    seen = [json.loads(line.split(": ", 1)[1]) for line in output.splitlines() if '"RANK"' in line]
    assert {each["RANK"]: each["CUDA_VISIBLE_DEVICES"] for each in seen} == {
        "0": "4,6", "1": "4,6", "2": None, "3": None
    }  # fmt: skip
    chosen = {(each["MASTER_ADDR"], each["NCCL_SOCKET_IFNAME"], each["GLOO_SOCKET_IFNAME"]) for each in seen}
    assert chosen == {(first, "=eth0", "lo")}
    status, output = done(start("seen.py", "launcher.subnet=192.0.2.0/24"))
    assert status == 1, output
    assert re.search(r"launcher\.subnet: no interface of n[12] has an address in 192\.0\.2\.0/24", output), output


def test_hosts_without_a_shared_file_system_get_the_files_and_give_their_records_back(start: Start) -> None:
    place = Path(tempfile.mkdtemp(prefix="dslaunch-private-", dir="/tmp"))
    (place / "code").mkdir()
    (place / "code" / "seen.py").write_text(SEEN)
    # The code is on every host; the run folder is each one's own.
    root = place / "runs"
    root.mkdir()
    try:
        with ssh_hosts(private=(root,)) as hosts:
            words = (f"run.root={root}", "--", "3")
            status, output = done(start(str(place / "code" / "seen.py"), *words, hosts=hosts))
            assert status == 1, output
            assert "n2: does not see this run folder; the files were copied to the same path" in output
            run = only_run(root)
            assert (run / "ranks" / "3.exit").read_text() == "3\n"
            assert read_state(run).exit_status == 3
            assert '"RANK": "3"' in (run / "logs" / "rank-3.log").read_text()
    finally:
        shutil.rmtree(place)
