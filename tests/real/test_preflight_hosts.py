"""`dslaunch preflight`, and a launch, on four real hosts over ssh of which some are not as they should be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.real.hosts import ssh_hosts
from tests.real.parts import need
from tests.real.preflight_hosts import TORCH, Place, private_folders

need("sshd", "torch", "deepspeed")
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="hosts on one machine are started as root")


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("preflight")
    with ssh_hosts(4, private_folders(root)) as hosts:
        yield Place(root, hosts)


@pytest.fixture
def place(four: Place) -> Place:
    """The four hosts, all alike and in order."""
    four.prepare()
    return four


def _json(place: Place, *words: str) -> tuple[int, dict[str, Any]]:
    status, output, errors = place.dslaunch("preflight", *place.words(*words), "--json")
    assert output, errors
    return status, json.loads(output)


def _findings(report: dict[str, Any]) -> dict[str, set[str]]:
    """Hosts by check; the load of the machine that plays all of them is left out."""
    found: dict[str, set[str]] = {}
    for each in report["findings"]:
        if each["check"] not in ("host.load", "folder.local"):
            found.setdefault(each["check"], set()).add(each["host"])
    return found


def _wrong_torch(place: Place, host: str) -> None:
    """Let the host's Python find another torch."""
    folder = place.root / "env" / "other" / f"torch-{TORCH}.dist-info"
    place.on(host, f"mkdir -p {folder} && printf 'Metadata-Version: 2.1\\nName: torch\\nVersion: {TORCH}\\n' "
                   f">{folder}/METADATA")  # fmt: skip
    place.put_python(host, str(folder.parent))


def _fill(place: Place, host: str) -> None:
    where = place.checkpoints
    place.on(host, f"mount -o remount,size=64k {where} && ! head -c 1M /dev/zero >{where}/rest 2>/dev/null")


def _empty(place: Place, host: str) -> None:
    where = place.checkpoints
    place.on(host, f"rm -f {where}/rest && mount -o remount,size=1g {where}")


def test_hosts_that_are_alike_pass_and_reduce(place: Place) -> None:
    status, report = _json(place)
    assert status == 0, report
    assert _findings(report) == {}
    assert report["exclude"] == []
    within, across = report["measured"]
    assert "Gloo" in within
    assert "over all ranks" in across
    assert any(each.startswith("GPUs: ") for each in report["not_checked"])


def test_a_wrong_version_a_full_disk_and_a_host_that_is_down(place: Place) -> None:
    _wrong_torch(place, "n2")
    _fill(place, "n3")
    place.hosts.hosts[3].cut()
    try:
        start = time.monotonic()
        status, output, errors = place.dslaunch("preflight", *place.words("preflight.host_seconds=20"))
        seconds = time.monotonic() - start
    finally:
        place.hosts.hosts[3].restore()
        _empty(place, "n3")
    assert status == 4, output + errors
    rows = [line.partition("  FAIL  ") for line in output.splitlines() if "  FAIL  " in line]
    failed = {(host.strip(), finding.split(":")[0]) for host, _, finding in rows}
    assert failed == {("n2", "version.torch"), ("n3", "folder.writable"), ("n4", "host.unreachable")}
    assert f"torch {TORCH}; torch " in output
    assert "No space left on device" in output
    assert "launcher.exclude=n2@n3@n4" in output
    assert seconds < 90  # a connection that nobody refuses takes minutes


def test_a_launch_is_blocked_and_says_what_to_do(place: Place) -> None:
    _wrong_torch(place, "n2")
    status, output, errors = place.dslaunch(*place.words("preflight.collective=false"))
    assert status == 4, output + errors
    assert "nothing was launched" in errors
    assert "version.torch" in errors
    assert "preflight.ignore" in errors
    assert not (place.root / "runs").exists()


def test_what_is_ignored_or_skipped_does_not_block(place: Place) -> None:
    _wrong_torch(place, "n2")
    words = place.words("preflight.collective=false")
    status, report = _json(place, "preflight.collective=false", "preflight.ignore=[version.torch]")
    assert (status, _findings(report)) == (0, {"version.torch": {"n2"}})
    status, output, errors = place.dslaunch("preflight", *words, "preflight.ignore=[version.torhc]")
    assert status == 2
    assert "Did you mean 'version.torch'?" in errors
    status, output, errors = place.dslaunch(*words, "--skip-preflight", "--dry-run")
    assert status == 0, errors
    assert "preflight: " not in output


def test_code_that_differs_is_named_with_its_file(place: Place) -> None:
    code = place.root / "code"
    place.on("n3", f"echo 'print(2)' >{code}/train.py")
    place.on("n4", f"rm {code}/train.py")
    status, report = _json(place, "preflight.collective=false")
    assert status == 4
    assert _findings(report) == {"code.differs": {"n3"}, "code.missing": {"n4"}}
    (differs,) = (each for each in report["findings"] if each["check"] == "code.differs")
    assert differs["found"].startswith("train.py differs; the others agree on 2 of 3 hosts")


def test_no_python_a_taken_port_and_a_lock(place: Place) -> None:
    lock = place.root / "extensions" / "py311_cpu" / "fused_adam" / "lock"
    place.on("n2", f"mkdir -p {lock.parent} && touch {lock} && touch -d '2 hours ago' {lock} {lock.parent}")
    place.on("n3", f"rm {place.python}")
    listen = "import socket; s = socket.create_server(('', 29411)); print(flush=True); input()"
    taker = subprocess.Popen(
        ["ssh", "n1", f"{sys.executable} -c \"{listen}\""], env=place.hosts.environ, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert taker.stdout
        taker.stdout.readline()
        status, report = _json(place, "launcher.master_port=29411", "preflight.collective=false")
    finally:
        taker.communicate(b"\n")
        place.on("n2", f"rm {lock}")
    assert status == 4
    assert _findings(report) == {"torch.lock": {"n2"}, "host.python": {"n3"}, "net.port": {"n1"}}
    assert report["exclude"] == ["n1", "n3"]


def test_a_slow_host_is_found_by_pairs(place: Place) -> None:
    slow = place.hosts.hosts[2]
    shape = ["tbf", "rate", "40mbit", "burst", "64kb", "latency", "400ms"]
    subprocess.run(["tc", "qdisc", "add", "dev", slow.link, "root", *shape], check=True)
    try:
        promised = ["cluster.intra.gb_per_s=0.05", "cluster.network.gb_per_s=0.02"]
        status, report = _json(place, *promised)
    finally:
        subprocess.run(["tc", "qdisc", "del", "dev", slow.link, "root"], check=True)
    assert status == 0
    assert _findings(report)["collective.slow"] == {"all hosts"}
    # A single way may look slow on a machine that plays four hosts; a host does not.
    named = [each["host"] for each in report["findings"] if "with other hosts at best" in each["found"]]
    assert named == ["n3"]
    assert "pairs: each host was measured with 3 of the 3 others" in report["measured"]
