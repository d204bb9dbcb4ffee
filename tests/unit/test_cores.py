"""Which cores a rank is kept to: on folders made as the kernel's /sys has them, and on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dslaunch.render import cores
from tests.command import CommandLine

SMI = "\n".join(f"{gpu}, 00000000:{bus}:00.0" for gpu, bus in enumerate(("1B", "43", "52", "9D"))) + "\n"
"""The form of `nvidia-smi --query-gpu=index,pci.bus_id --format=csv,noheader`."""


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """Two sockets of 4 cores with 2 threads each: CPUs 0-3 and 8-11, 4-7 and 12-15; GPU 0 alone on the first."""
    for cpu in range(16):
        place = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        place.mkdir(parents=True)
        (place / "physical_package_id").write_text(f"{cpu % 8 // 4}\n")
        (place / "core_id").write_text(f"{cpu % 4}\n")
    for node, cpus in enumerate(("0-3,8-11", "4-7,12-15")):
        place = tmp_path / f"sys/devices/system/node/node{node}"
        place.mkdir(parents=True)
        (place / "cpulist").write_text(f"{cpus}\n")
    for bus, node in (("1b", 0), ("43", 1), ("52", 1), ("9d", 1)):
        place = tmp_path / f"sys/bus/pci/devices/0000:{bus}:00.0"
        place.mkdir(parents=True)
        (place / "numa_node").write_text(f"{node}\n")
    return tmp_path


def _ranks(host: Path, allowed: set[int], visible: str, size: int) -> list[str]:
    nodes = cores.nodes_of_gpus(SMI, visible, size, host)
    found = cores.cores_by_node(allowed, host)
    return [cores.ranges(cores.chosen(rank, size, found, nodes)) for rank in range(size)]


def test_a_rank_gets_whole_cores_of_its_gpus_node(host: Path) -> None:
    every = set(range(16))
    assert _ranks(host, every, "", 4) == ["0-3,8-11", "4,12", "5,13", "6-7,14-15"]
    assert _ranks(host, every, "1,0", 2) == ["4-7,12-15", "0-3,8-11"]
    assert _ranks(host, {0, 8, 4, 12, 5, 13}, "2,3", 2) == ["4,12", "5,13"]


def test_where_the_gpus_place_is_not_known_the_cores_are_cut_in_order(host: Path) -> None:
    (host / "sys/bus/pci/devices/0000:9d:00.0/numa_node").write_text("-1\n")
    assert _ranks(host, set(range(16)), "", 4) == ["0-1,8-9", "2-3,10-11", "4-5,12-13", "6-7,14-15"]
    assert _ranks(host, set(range(16)), "GPU-1b,GPU-43", 2) == ["0-3,8-11", "4-7,12-15"]
    assert _ranks(host, {0, 8, 1, 9}, "1,2", 2) == ["0,8", "1,9"]  # none of its GPUs' node may be used
    assert _ranks(host, {0, 8}, "1,2", 2) == ["0", "8"]
    assert _ranks(host, {0}, "1,2", 2) == ["", ""]


def _started(starter: str, rank: int, size: int) -> tuple[set[int], str]:
    show = "import os, sys; print(*os.sched_getaffinity(0), os.getpid())"
    words = [sys.executable, "-I", str(Path(cores.__file__)), starter, str(rank), str(size)]
    process = subprocess.Popen(
        [*words, sys.executable, "-c", show], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"},
    )  # fmt: skip
    out, err = process.communicate(timeout=180)
    *cpus, pid = map(int, out.split())
    assert pid == process.pid, "the program has another process id"
    return set(cpus), err


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one CPU")
def test_the_program_runs_on_its_own_cores() -> None:
    here = os.sched_getaffinity(0)
    (first, said), (second, _) = _started("launcher", 0, 2), _started("launcher", 1, 2)
    assert f"cores.py: local rank 0 is kept to CPUs {cores.ranges(first)}" in said
    assert first
    assert second
    assert not first & second
    assert first | second == here
    many, said = _started("launcher", 0, len(here) + 1)
    assert many == here
    assert "is kept to none" in said


def test_the_file_stands_in_the_folder_where_it_is_asked_for(dslaunch: CommandLine, tmp_path: Path) -> None:
    words = ["recipe=vla_tiny", "cluster=local", "launcher.bind_cpus=true", "-o", str(tmp_path / "out")]
    assert dslaunch("render", *words).status == 0
    assert '"$DSLAUNCH_RUN_DIR/cores.py" "${1:-launcher}"' in (tmp_path / "out" / "rank.sh").read_text()
    assert (tmp_path / "out" / "cores.py").read_text() == Path(cores.__file__).read_text()
