"""A real SLURM cluster on this host: munged, slurmctld and one slurmd per node, in a folder of their own.

The nodes claim CPUs and GPUs that the host lacks (`SlurmdParameters=config_overrides`, character devices made
with mknod), so a job of 8 nodes x 8 GPUs is scheduled, started and accounted for as on a real cluster.
"""

from __future__ import annotations

import contextlib
import os
import random
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.real.parts import need

_START_LIMIT_S = 120.0
_CPUS = 128
_SBIN = os.environ["PATH"] + ":/usr/sbin:/sbin"


@dataclass(frozen=True)
class SlurmCluster:
    """A running cluster. `environ` is what a user's shell on its login node would have."""

    folder: Path
    nodes: tuple[str, ...]
    gpus_per_node: int
    environ: dict[str, str]
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)
    private: tuple[Path, ...] = ()
    """Folders that each node sees empty, and of its own."""

    def run(self, *argv: str, limit_s: float = 120.0, check: bool = True) -> str:
        """Standard output of a SLURM command."""
        done = subprocess.run(
            argv, env=self.environ, capture_output=True, text=True, timeout=limit_s, check=False
        )
        if check and done.returncode:
            raise AssertionError(f"{argv} exits {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    def job(self, job_id: str) -> dict[str, str]:
        """The fields of `scontrol show job`."""
        line = self.run("scontrol", "show", "job", "--oneliner", job_id)
        return dict(word.split("=", 1) for word in line.split() if "=" in word)

    def queue(self) -> list[str]:
        """Ids of the jobs that are waiting or running."""
        return self.run("squeue", "--noheader", "--format", "%A").split()

    def kill_node(self, name: str) -> None:
        """What a node's power cut does: its slurmd and all that it started are gone at once."""
        slurmd = int((self.folder / "run" / f"slurmd-{name}.pid").read_text())
        for pid in [slurmd, *_steps_of(self, name)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def start_node(self, name: str) -> None:
        """Start the slurmd of a node that was killed."""
        _daemon(self, self.daemons, "slurmd", "-D", "-N", name)

    def wait_for_idle(self, limit_s: float = 300.0) -> None:
        """Until no job is left and every node takes work again."""
        _until(lambda: not self.queue() and _all_idle(self), limit_s, lambda: self.run("squeue", "--long"))


@contextlib.contextmanager
def slurm_cluster(
    nodes: int = 9,
    gpus_per_node: int = 8,
    settings: Sequence[str] = (),
    files: Mapping[str, str] | None = None,
    private: tuple[Path, ...] = (),
) -> Iterator[SlurmCluster]:
    """Start a cluster, and stop it by the recorded process ids; its folder is removed.

    Args:
        settings: further lines of slurm.conf.
        files: texts of further files beside it, by name.
        private: existing folders that each node sees empty, and of its own.
    """
    folder = Path(tempfile.mkdtemp(prefix="dslaunch-slurm-", dir="/tmp"))
    folder.chmod(0o755)
    names = tuple(f"n{i}" for i in range(1, nodes + 1))
    environ = {**_clean_environ(), "SLURM_CONF": str(folder / "slurm.conf")}
    cluster = SlurmCluster(folder, names, gpus_per_node, environ, private=private)
    daemons = cluster.daemons
    try:
        _write_config(cluster, settings)
        for name, text in (files or {}).items():
            (folder / name).write_text(text)
        _start(cluster, daemons)
        yield cluster
    finally:
        _stop(cluster, daemons)
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmCluster]:
    """9 nodes x 8 GPUs for the whole session: 8 for a job, and one to exclude."""
    need("slurm")
    if os.geteuid() != 0:
        pytest.skip("a SLURM cluster on one host is started as root")
    with slurm_cluster() as cluster:
        yield cluster


def _clean_environ() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
    return {**kept, "PATH": _SBIN}


def _free_ports(count: int) -> list[int]:
    """Ports below those that the kernel hands out, which another connection may take before a daemon does."""
    free: list[int] = []
    for port in random.sample(range(10_000, 32_000), 1_000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            free.append(port)
        if len(free) == count:
            return free
    raise AssertionError(f"{count} free ports are not to be had")


def _write_config(cluster: SlurmCluster, settings: Sequence[str]) -> None:
    folder, host = cluster.folder, socket.gethostname().split(".")[0]
    for name in ("munge", "state", "spool", "log", "run"):
        (folder / name).mkdir()
    for index in range(cluster.gpus_per_node):
        os.mknod(folder / f"gpu{index}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    control_port, *node_ports = _free_ports(1 + len(cluster.nodes))
    lines = [
        "ClusterName=dslaunch",
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmctldPort={control_port}",
        "SlurmUser=root",
        "SlurmdUser=root",
        "AuthType=auth/munge",
        f"AuthInfo=socket={folder}/munge/socket,cred_expire=5",  # and so long waits a requeued job
        "CryptoType=crypto/munge",
        f"StateSaveLocation={folder}/state",
        f"SlurmdSpoolDir={folder}/spool/%n",
        f"SlurmctldPidFile={folder}/run/slurmctld.pid",
        f"SlurmdPidFile={folder}/run/slurmd-%n.pid",
        f"SlurmctldLogFile={folder}/log/slurmctld.log",
        f"SlurmdLogFile={folder}/log/slurmd-%n.log",
        "SlurmdParameters=config_overrides",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        "SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0",
        "JobCompType=jobcomp/none",
        "MpiDefault=none",
        "ReturnToService=2",
        "KillWait=3",
        "GresTypes=gpu",
        *(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={_CPUS} "
            f"Gres=gpu:{cluster.gpus_per_node} Feature={'spare' if name == cluster.nodes[-1] else 'main'}"
            for name, port in zip(cluster.nodes, node_ports, strict=True)
        ),
        f"PartitionName=train Nodes={','.join(cluster.nodes)} Default=YES MaxTime=1:00:00 State=UP",
        *settings,
    ]
    (folder / "etc_hosts").write_text(f"127.0.0.1 localhost {host} {' '.join(cluster.nodes)}\n")
    (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
    gpus = f"{folder}/gpu[0-{cluster.gpus_per_node - 1}]"
    (folder / "gres.conf").write_text(
        f"NodeName={','.join(cluster.nodes)} Name=gpu Count={cluster.gpus_per_node} File={gpus}\n"
    )


def _start(cluster: SlurmCluster, daemons: list[subprocess.Popen[bytes]]) -> None:
    _start_munged(cluster, daemons)
    _daemon(cluster, daemons, "slurmctld", "-D", "-i")
    ping = ("scontrol", "ping")
    _until(lambda: "is UP" in cluster.run(*ping, check=False), _START_LIMIT_S, lambda: _logs(cluster))
    for name in cluster.nodes:
        _daemon(cluster, daemons, "slurmd", "-D", "-N", name)
    _until(lambda: _all_idle(cluster), _START_LIMIT_S, lambda: _logs(cluster))


def _start_munged(cluster: SlurmCluster, daemons: list[subprocess.Popen[bytes]]) -> None:
    folder = cluster.folder / "munge"
    key = folder / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    for path in (folder, key):
        shutil.chown(path, "munge", "munge")
    options = [f"--{kind}-file={folder}/{kind}" for kind in ("key", "log", "pid", "seed")]
    daemons.append(
        subprocess.Popen(
            ["munged", "--foreground", f"--socket={folder}/socket", *options],
            env=cluster.environ,
            user="munge",
            group="munge",
            extra_groups=[],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=(cluster.folder / "log" / "munged.err").open("wb"),
        )
    )
    _until((folder / "socket").exists, _START_LIMIT_S, lambda: _logs(cluster))


def _daemon(cluster: SlurmCluster, daemons: list[subprocess.Popen[bytes]], *argv: str) -> None:
    errors = cluster.folder / "log" / f"{argv[0]}-{argv[-1].strip('-')}.err"
    if argv[0] == "slurmd":  # its jobs know the nodes by name, as they would on a cluster
        own = "".join(f"mount -t tmpfs tmpfs {shlex.quote(str(path))} && " for path in cluster.private)
        mount = f'mount --bind "$0" /etc/hosts && {own}exec "$@"'
        argv = ("unshare", "--mount", "sh", "-c", mount, str(cluster.folder / "etc_hosts"), *argv)
    with errors.open("wb") as stream:
        daemons.append(
            subprocess.Popen(
                argv, env=cluster.environ, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, cwd="/"
            )
        )


def _all_idle(cluster: SlurmCluster) -> bool:
    """Whether each node is idle; a node that registered too early is told to resume."""
    rows = [row.split() for row in cluster.run("sinfo", "-hN", "-o", "%N %t", check=False).splitlines()]
    states = {row[0]: row[1] for row in rows if len(row) == 2}
    for name, state in states.items():
        if state in {"inval", "drain", "down", "down*"}:
            cluster.run("scontrol", "update", f"nodename={name}", "state=resume", check=False)
    return set(states) == set(cluster.nodes) and set(states.values()) == {"idle"}


def _stop(cluster: SlurmCluster, daemons: list[subprocess.Popen[bytes]]) -> None:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired, AssertionError):
        for job_id in cluster.queue():
            cluster.run("scancel", "--full", job_id)
        _until(lambda: not cluster.queue(), 20.0, lambda: "")
    for daemon in reversed(daemons):
        daemon.terminate()
    for daemon in reversed(daemons):
        try:
            daemon.wait(20.0)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
    _kill_steps(cluster)


def _kill_steps(cluster: SlurmCluster) -> None:
    """End what a job left: processes that run under this cluster's own configuration."""
    mark = f"SLURM_CONF={cluster.folder}/slurm.conf".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)


def _steps_of(cluster: SlurmCluster, node: str) -> list[int]:
    """The processes of the steps on a node, and the slurmstepd of each."""
    marks = {f"SLURM_CONF={cluster.folder}/slurm.conf".encode(), f"SLURMD_NODENAME={node}".encode()}
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and marks <= set((entry / "environ").read_bytes().split(b"\0")):
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                keeper = Path(f"/proc/{parent}/comm").read_text().startswith("slurmstepd")
                found += [int(parent), int(entry.name)] if keeper else [int(entry.name)]
    return found


def _logs(cluster: SlurmCluster) -> str:
    """The end of every daemon's log."""
    files = [*sorted((cluster.folder / "log").iterdir()), cluster.folder / "munge" / "log"]
    ends = [(file, file.read_text(errors="replace")[-1500:]) for file in files if file.is_file()]
    return "\n".join(f"--- {file.name}\n{text}" for file, text in ends if text)


def _until(condition: Callable[[], bool], limit_s: float, explain: Callable[[], str]) -> None:
    """Wait for `condition`; after the limit, fail with what `explain` says."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not reached within {limit_s:.0f} s:\n{explain()}")
        time.sleep(0.2)
