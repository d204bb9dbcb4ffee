"""Every check of preflight finds what it is about, on four hosts of which one is not as the others."""

from __future__ import annotations

import ast
import copy
import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dslaunch.flow import Request, configured
from dslaunch.hardware.efficiency import SHIPPED
from dslaunch.planfile import PreflightPlan
from dslaunch.planfile.plan import ProfilePlan
from dslaunch.preflight import Report, Target
from dslaunch.preflight.catalogue import checks
from dslaunch.preflight.facts import Host, host_from
from dslaunch.preflight.measuring import Measured, judge_collective
from dslaunch.preflight.probe import MARK, SCHEMA
from dslaunch.preflight.profile import write_profile
from dslaunch.preflight.report import judge, table, unseen
from dslaunch.remote import Answer
from tests.command import CommandLine
from tests.launching import make_plan

ROOT = Path(__file__).parents[2]
PREFLIGHT = ROOT / "dslaunch" / "preflight"
DOCUMENTATION = ROOT / "docs" / "preflight.md"
NAMES = ("n1", "n2", "n3", "n4")
GIB = 2**30
Said = dict[str, Any]
Change = Callable[[Said], object]


def _target(profiled: tuple[int, ...] = (), **changes: Any) -> Target:
    plan = dataclasses.replace(make_plan(4, 2, local=False), profile=ProfilePlan("nsys", profiled, 5, 3))
    plan = dataclasses.replace(plan, cluster=dataclasses.replace(plan.cluster, accelerator="cuda"))
    wanted = PreflightPlan(
        enabled=True, max_seconds=180.0, host_seconds=30.0, collective=True, bandwidth_fraction=0.5,
        clock_seconds=2.0, cache_minutes=0.0, dcgm=True, ignore=(), gpu_memory_gib=80.0, intra_gb_per_s=300.0,
        nvlink=True, network_gb_per_s=25.0, infiniband=True, cpu_cores=128, checkpoint_bytes=100 * GIB,
        checkpoints=5, container=False, env={},
    )  # fmt: skip
    target = Target(plan, wanted, "ssh", NAMES, "/env/python", "/code/train.py", "/ckpt", 29500, 16.0)
    return dataclasses.replace(target, **changes)


def _run(out: str, status: int = 0) -> Said:
    return {"status": status, "out": out, "err": ""}


def _good() -> Said:
    """What the probe says of a host of two A100 that is in order."""
    rows = [f"{i}, GPU-{i}, NVIDIA A100-SXM4-80GB, 81920, 535.154.05, 0" for i in (0, 1)]
    links = "\n".join(f"GPU {i}: NVIDIA A100-SXM4-80GB\n\t Link 0: 25 GB/s\n\t Link 1: 25 GB/s" for i in (0, 1))
    return {
        "system": {
            "cores": 128, "load": 1.0, "uptime": 1e6,
            "memory_available": 900 * GIB, "huge_pages": "0 reserved", "limits": {"memlock": -1, "nofile": 65536},
            "shm": {"size": 500 * GIB, "free": 500 * GIB}, "addresses": {"lo": "127.0.0.1", "eth0": "10.0.0.1"},
        },
        "software": {
            "python": "3.11.2",
            "versions": {"torch": "2.6.0", "deepspeed": "0.19.8", "nccl": "2.21.5", "cuda": "12.4",
                         "numpy": "2.0"},
        },
        "gpus": {
            "devices": 2, "visible": "", "smi": _run("\n".join(rows)), "apps": _run(""), "nvlink": _run(links),
            "throttled": _run("0, 0x0000000000000001\n1, 0x0000000000000000"),
            "dcgmi": _run("| Denylist                  | Pass                                           |"),
        },
        "network": {
            "ibstat": _run("CA 'mlx5_0'\n\tPort 1:\n\t\tState: Active\n\t\tPhysical state: LinkUp\n\t\tRate: 200\n"
                           "\t\tLink layer: InfiniBand"),
            "ethtool": {"eth0": _run("\tSpeed: 25000Mb/s\n\tDuplex: Full\n\tLink detected: yes")},
        },
        "kernel": _run(""),
        "folders": {
            "checkpoints": {
                "path": "/ckpt", "found": "/ckpt", "fault": "", "size": 10**15, "free": 10**14,
                "mount": {"source": "server:/ckpt", "point": "/ckpt", "kind": "nfs4"},
            }
        },
        "code": {"digest": "abc", "files": 1, "named": {"train.py": "11"}, "mount": {}},
        "names": {"unknown": [], "none_known": False, "itself": {}, "own": ["10.0.0.9"], "master": ["10.0.0.1"]},
        "port": {"fault": "", "free": 41000},
        "locks": [],
    }  # fmt: skip


def _host(name: str, said: Said, skew: float = 0.0, **more: Any) -> Host:
    answer = {"schema": SCHEMA, "said": said, "failed": {}, "silent": [], "time": 1000.0 + skew, **more}
    return host_from(Answer(name, 0, f"Welcome!\n{MARK}{json.dumps(answer)}\n", "", 1.0, 1000.0))


def _set(*path: str | int, value: Any) -> Change:
    def change(said: Said) -> None:
        at: Any = said
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value

    return change


def _replace(*path: str, old: str, new: str) -> Change:
    def change(said: Said) -> None:
        at: Any = said
        for key in path:
            at = at[key]
        assert old in at["out"]
        at["out"] = at["out"].replace(old, new)

    return change


def _kernel(line: str) -> Change:
    return _set("kernel", value=_run(line))


_CHECKPOINTS = ("folders", "checkpoints")
CASES: dict[str, Change] = {
    "host.load": _set("system", "load", value=250.0),
    "host.cores": _set("system", "cores", value=64),
    "host.huge_pages": _set("system", "huge_pages", value="512 reserved"),
    "host.memory": _set("system", "memory_available", value=GIB),
    "host.shm": _set("system", "shm", "size", value=64 * 2**20),
    "host.nofile": _set("system", "limits", "nofile", value=1024),
    "host.memlock": _set("system", "limits", "memlock", value=65536),
    "host.out_of_memory": _kernel("[999900.0] Out of memory: Killed process 1 (python3) total-vm:1kB"),
    "host.disk_fault": _kernel("[999900.0] I/O error, dev nvme0n1, sector 1"),
    "host.package": lambda said: said["software"]["versions"].pop("deepspeed"),
    "host.profiler": _set("software", "programs", value={"nsys": None}),
    "gpu.missing": _replace("gpus", "smi", old="\n1, GPU-1, NVIDIA A100-SXM4-80GB, 81920, 535.154.05, 0", new=""),
    "gpu.lost": _set("gpus", "smi", value=_run("Unable to determine the device handle for GPU 0000:02:00.0", 15)),
    "gpu.type": _replace("gpus", "smi", old="A100-SXM4-80GB, 81920", new="A100-SXM4-40GB, 40960"),
    "gpu.ecc": _replace("gpus", "smi", old="05, 0\n", new="05, 3\n"),
    "gpu.xid": _kernel("[999900.0] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus."),
    "gpu.throttled": _replace("gpus", "throttled", old="0x0000000000000000", new="0x0000000000000040"),
    "gpu.nvlink": _replace("gpus", "nvlink", old="Link 1: 25 GB/s\nGPU 1", new="Link 1: <inactive>\nGPU 1"),
    "gpu.busy": _set("gpus", "apps", value=_run("42, GPU-1, 990, python old.py")),
    "gpu.diagnosis": _replace("gpus", "dcgmi", old="Pass", new="Fail"),
    "version.driver": _replace("gpus", "smi", old="535.154.05", new="550.54.15"),
    "version.cuda": _set("software", "versions", "cuda", value="12.6"),
    "version.nccl": _set("software", "versions", "nccl", value="2.20.5"),
    "version.python": _set("software", "python", value="3.10.4"),
    "version.torch": _set("software", "versions", "torch", value="2.5.0"),
    "version.deepspeed": _set("software", "versions", "deepspeed", value="0.16.9"),
    "version.package": _set("software", "versions", "numpy", value="1.26"),
    "code.missing": _set("code", value={"missing": "/code/train.py"}),
    "code.differs": _set("code", value={"digest": "x", "files": 1, "named": {"train.py": "22"}, "mount": {}}),
    "folder.writable": _set(*_CHECKPOINTS, "fault", value="Permission denied"),
    "folder.full": _set(*_CHECKPOINTS, "free", value=GIB),
    "folder.small": _set(*_CHECKPOINTS, "free", value=150 * GIB),
    "folder.local": _set(*_CHECKPOINTS, "mount", "kind", value="ext4"),
    "net.name": _set("names", "unknown", value=["n4"]),
    "net.loopback": _set("names", "own", value=["127.0.1.1"]),
    "net.port": _set("port", "fault", value="Address already in use"),
    "net.infiniband": _replace("network", "ibstat", old="Active", new="Initializing"),
    "net.ethernet": _replace("network", "ethtool", "eth0", old="25000", new="1000"),
    "torch.lock": _set("locks", value=[{"path": "/x/lock", "quiet_s": 7200.0}]),
}


@pytest.mark.parametrize("check", CASES)
def test_one_host_that_is_not_as_the_others(check: str) -> None:
    hosts = {name: _good() for name in NAMES}
    CASES[check](hosts["n2"])
    found = judge([_host(name, said) for name, said in hosts.items()], _target(profiled=(3,)))
    assert {(hit.check, hit.host) for hit in found if hit.check == check} == {(check, "n2")}
    beside = {"host.package": {"version.deepspeed"}, "gpu.lost": {"version.driver"}}
    assert {hit.check for hit in found} - {check} <= beside.get(check, set())


def test_hosts_in_order_have_no_finding() -> None:
    hosts = [_host(name, _good()) for name in NAMES]
    assert judge(hosts, _target()) == ()
    assert unseen(hosts, _target()) == ()


def test_gpus_that_ranks_do_not_see_are_not_judged() -> None:
    hosts = {name: _good() for name in NAMES}
    _set("gpus", "apps", value=_run("42, GPU-1, 990, python other.py"))(hosts["n2"])
    target = _target()
    cluster = dataclasses.replace(target.plan.cluster, gpus_per_node=1)
    one = dataclasses.replace(target, plan=dataclasses.replace(target.plan, cluster=cluster))
    assert judge([_host(name, said) for name, said in hosts.items()], one) == ()
    hosts["n2"]["gpus"]["visible"] = "1"
    (hit,) = judge([_host(name, said) for name, said in hosts.items()], one)
    assert (hit.check, hit.found) == ("gpu.busy", "GPU 1: python other.py (process 42, 990 MiB)")


def test_a_profiled_rank_is_sought_where_hosts_have_unequal_numbers_of_gpus() -> None:
    """Ranks 0 and 1 on n1, 2 and 3 on n2, 4 on n3, 5 on n4."""
    hosts = {name: _good() for name in NAMES}
    for said in hosts.values():
        said["software"]["programs"] = {"nsys": None}
    target = _target(profiled=(1, 5))
    cluster = dataclasses.replace(target.plan.cluster, nodes=6, gpus_per_node=1, slots=(2, 2, 1, 1))
    unequal = dataclasses.replace(target, plan=dataclasses.replace(target.plan, cluster=cluster))
    found = judge([_host(name, said) for name, said in hosts.items()], unequal)
    assert {hit.host for hit in found if hit.check == "host.profiler"} == {"n1", "n4"}


def test_names_that_ssh_alone_knows_are_no_finding() -> None:
    hosts = {name: _good() for name in NAMES}
    for said in hosts.values():
        said["names"]["none_known"] = True
    facts = [_host(name, said) for name, said in hosts.items()]
    assert judge(facts, _target()) == ()
    assert unseen(facts, _target()) == ("names: no host knows n1, n2, n3, n4",)
    hosts["n2"]["names"] = _good()["names"]
    found = judge([_host(name, said) for name, said in hosts.items()], _target())
    assert {(hit.check, hit.host, hit.found) for hit in found} == {
        ("net.name", "n1", "n3 and 1 more"),
        ("net.name", "n3", "n1 and 1 more"),
        ("net.name", "n4", "n1 and 1 more"),
    }


def test_what_a_host_does_not_say() -> None:
    hosts = [
        _host("n1", _good(), silent=["gpus"]),
        _host("n2", _good(), skew=-7.5),
        host_from(Answer("n3", 255, "", "ssh: connect to host n3 port 22: No route to host\n", 1.0, 0.0)),
        host_from(Answer("n4", 127, "", "sh: 1: exec: /env/python: not found\n", 1.0, 0.0)),
        host_from(Answer("n5", None, "", "", 30.0, 0.0)),
        host_from(Answer("n6", 1, "", "SyntaxError: invalid syntax\n", 1.0, 0.0)),
    ]
    found = {hit.host: (hit.check, hit.found) for hit in judge(hosts, _target())}
    assert found["n1"] == ("host.silent", "no answer about gpus")
    assert found["n2"] == ("host.clock", "7.5 s behind")
    assert found["n3"][0] == "host.unreachable"
    assert "No route to host" in found["n3"][1]
    assert found["n4"][0] == "host.python"
    assert found["n5"] == ("host.unreachable", "no answer within 30 s")
    assert found["n6"] == ("host.probe", "SyntaxError: invalid syntax")


def _said_of_ranks(across: float, pairs: list[list[float]] | None = None, right: bool = True) -> list[Said]:
    rank: Said = {
        "within": {"right": True, "bytes_per_s": 240e9},
        "across": {"right": right, "bytes_per_s": across},
    }
    return [{**rank, **({"pairs": pairs} if pairs else {})}, copy.deepcopy(rank)]


def test_a_collective_that_is_slow_wrong_or_fails() -> None:
    target = _target()
    good = {name: _said_of_ranks(45e9) for name in NAMES}
    measured = judge_collective(good, target)
    assert measured.hits == ()
    assert measured.sentences[1] == "all_reduce (NCCL) over all ranks: 45.00 GB/s, promised 50"

    wrong = judge_collective({**good, "n3": _said_of_ranks(45e9, right=False)}, target)
    assert [(hit.check, hit.host) for hit in wrong.hits] == [("collective.wrong", "n3")]

    slow = {
        name: _said_of_ranks(4e9, [[other, 1e9 if "n3" in (name, NAMES[other]) else 20e9]
                                   for other in range(4) if NAMES[other] != name])
        for name in NAMES
    }  # fmt: skip
    found = judge_collective(slow, target)
    assert [(hit.check, hit.host) for hit in found.hits] == [
        ("collective.slow", "all hosts"), ("collective.pair", "n3"),
    ]  # fmt: skip

    errors = {"n1": [{"error": "timed out"}], "n2": [{"error": "RuntimeError: CUDA error: out of memory"}]}
    failed = judge_collective({**good, **errors}, target)
    assert [(hit.check, hit.host) for hit in failed.hits] == [("collective.failed", "n2")]


def test_each_check_has_a_case() -> None:
    elsewhere = {
        "host.unreachable", "host.python", "host.probe", "host.silent", "host.clock", "collective.failed",
        "collective.wrong", "collective.slow", "collective.pair",
    }  # fmt: skip
    assert set(checks()) == set(CASES) | elsewhere
    for check in checks().values():
        assert check.severity in ("error", "warning")
        assert check.why
        assert check.fix


def test_the_table_groups_hosts_and_leaves_out_none_where_all_are_bad() -> None:
    hosts = [_host(name, _good()) for name in NAMES]
    for name in NAMES:
        said = _good()
        _set(*_CHECKPOINTS, "fault", value="Permission denied")(said)
        hosts[NAMES.index(name)] = _host(name, said)
    report = Report(NAMES, judge(hosts, _target()), (), ())
    assert table(report)[0].startswith("n1, n2, n3, n4  FAIL  folder.writable: /ckpt (nfs4 of server:/ckpt)")
    assert report.excluded == ()
    ignoring = dataclasses.replace(report, ignored=("folder.writable",))
    assert ignoring.blocking == ()
    assert "  warn  folder.writable" in table(ignoring)[0]


def test_the_documentation_lists_every_check() -> None:
    rows = re.findall(r"^\| `([a-z_.]+)` \| (stops|told) \| (.*) \|$", DOCUMENTATION.read_text(), re.MULTILINE)
    shown = {"error": "stops", "warning": "told"}
    assert rows == [(check.id, shown[check.severity], check.about) for check in checks().values()]


def test_explain_prints_a_check(dslaunch: CommandLine) -> None:
    ran = dslaunch("explain", "gpu.xid")
    assert ran.status == 0
    assert ran.out.startswith("gpu.xid: the driver reported a fault of the hardware in the last day\n")
    assert "What to do: Reset the GPU" in ran.out


def test_the_probe_and_the_collective_run_on_an_old_python() -> None:
    for name in ("probe.py", "collective.py"):
        ast.parse((PREFLIGHT / name).read_text(), feature_version=(3, 9))


def test_measured_bandwidths_become_a_cluster_that_plans_take(dslaunch: CommandLine, tmp_path: Path) -> None:
    cluster = configured(Request(("recipe=llama3_8b", "cluster=4x2xA100"), None, (), ())).cluster
    path = tmp_path / "conf" / "cluster" / "mine.yaml"
    path.parent.mkdir(parents=True)
    write_profile(path, "A100", cluster, Measured(within_bytes_per_s=150e9, across_bytes_per_s=15e9), _target())
    words = ("recipe=llama3_8b", "cluster=4x2xmine")
    measured = configured(Request(words, tmp_path, (), ())).cluster
    rates = SHIPPED.gpu(cluster.gpu)
    assert measured.intra.gb_per_s * rates.link == pytest.approx(150, rel=0.01)
    assert measured.network is not None
    assert measured.network.gb_per_s * 2 * rates.network == pytest.approx(15, rel=0.01)
    assert "preflight" in measured.network.source
