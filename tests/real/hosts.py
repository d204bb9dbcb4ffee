"""Hosts reached by ssh, on this machine: a network, mount, process and host-name space each, and an sshd in it.

Every host has its own address, name, /proc, /dev/shm, /run and /etc/hosts; the file system is shared, but for the
folders that are asked to be `private`. They stand on a bridge of their own, whose addresses nothing else here has.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.real.parts import need

_START_LIMIT_S = 90.0
_INIT = """
set -e
hostname {name}
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir -p /run/sshd
mount --bind {folder}/etc_hosts /etc/hosts
{private}
exec /usr/sbin/sshd -D -e -f /dev/null -h {folder}/host_key -o ListenAddress={address} -o PidFile=none \
  -o AuthorizedKeysFile={folder}/key.pub -o StrictModes=no -o PermitRootLogin=yes -o UsePAM=no -o MaxStartups=200
"""


@dataclass(frozen=True)
class Host:
    """One host."""

    name: str
    address: str
    namespace: str
    """Of its network, as `ip netns` knows it."""
    link: str
    """The bridge's end of its cable."""
    init: int
    """Its first process (sshd), as this machine numbers it."""

    def processes(self) -> dict[int, str]:
        """What runs on it beside sshd: this machine's process ids, and command lines."""
        space = os.readlink(f"/proc/{self.init}/ns/pid")
        found = {}
        for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{pid}/ns/pid") == space:
                    words = (
                        Path(f"/proc/{pid}/cmdline")
                        .read_bytes()
                        .replace(b"\0", b" ")
                        .decode(errors="replace")
                    )
                    found[pid] = words.strip()
        return {
            pid: words
            for pid, words in found.items()
            if words and not words.startswith(("sshd", "/usr/sbin/sshd"))
        }

    def cut(self) -> None:
        """Pull its network cable."""
        _run("ip", "link", "set", self.link, "down")

    def restore(self) -> None:
        """Put the cable back."""
        _run("ip", "link", "set", self.link, "up")


@dataclass(frozen=True)
class Hosts:
    """A network of hosts. `environ` is what a user's shell beside them has: `ssh NAME` works in it."""

    folder: Path
    hosts: tuple[Host, ...]
    environ: dict[str, str]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(host.name for host in self.hosts)

    def quiet(self, limit_s: float = 60.0) -> bool:
        """Whether nothing but sshd is left on any host, at the latest after `limit_s`."""
        limit = time.monotonic() + limit_s
        while any(host.processes() for host in self.hosts):
            if time.monotonic() > limit:
                return False
            time.sleep(0.1)
        return True


@contextlib.contextmanager
def ssh_hosts(count: int = 2, private: tuple[Path, ...] = ()) -> Iterator[Hosts]:
    """Start `count` hosts named n1, n2, ...; stop them, with all that runs on them, by the recorded process ids.

    Args:
        private: existing folders that each host sees empty, and of its own.
    """
    folder = Path(tempfile.mkdtemp(prefix="dslaunch-hosts-", dir="/tmp"))
    bridge, network = _new_bridge()
    addresses = {f"n{number}": f"{network}.{number}" for number in range(1, count + 1)}
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        stack.callback(_run, "ip", "link", "del", bridge)
        _write_files(folder, addresses)
        _run("ip", "addr", "add", f"{network}.254/24", "dev", bridge)
        _run("ip", "link", "set", bridge, "up")
        hosts = tuple(
            stack.enter_context(_host(name, address, bridge, folder, private))
            for name, address in addresses.items()
        )
        environ = {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}"}
        found = Hosts(folder, hosts, environ)
        _wait_for_ssh(found)
        yield found


@pytest.fixture(scope="session")
def two_hosts() -> Iterator[Hosts]:
    """n1 and n2 for the whole session."""
    need("sshd")
    if os.geteuid() != 0:
        pytest.skip("hosts on one machine are started as root")
    with ssh_hosts() as hosts:
        yield hosts


def _new_bridge() -> tuple[str, str]:
    """A bridge, and the first three parts of its hosts' addresses; whoever makes the bridge has both."""
    for number in (each % 250 for each in range(os.getpid(), os.getpid() + 250)):
        used = _run("ip", "-o", "addr") + _run("ip", "-o", "link")
        taken = (f"10.213.{number}.", f"dl{number}:", f"dl{number}n")  # a link outlives its namespace for a moment
        made = ["ip", "link", "add", f"dl{number}", "type", "bridge"]
        if not any(name in used for name in taken) and not subprocess.run(made, capture_output=True).returncode:
            return f"dl{number}", f"10.213.{number}"
    raise AssertionError("no bridge can be made: " + _run("ip", "-o", "link"))


def _write_files(folder: Path, addresses: dict[str, str]) -> None:
    for name in ("host_key", "key"):
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
    rows = [f"{address} {name}" for name, address in addresses.items()]
    (folder / "etc_hosts").write_text("\n".join(["127.0.0.1 localhost", *rows]) + "\n")
    aliases = [f"Host {name}\n  HostName {address}\n" for name, address in addresses.items()]
    (folder / "config").write_text(
        "".join(aliases) + f"Host *\n  User root\n  IdentityFile {folder}/key\n  IdentitiesOnly yes\n"
        f"  StrictHostKeyChecking accept-new\n  UserKnownHostsFile {folder}/known_hosts\n  LogLevel ERROR\n"
    )
    wrapper = folder / "bin" / "ssh"
    wrapper.parent.mkdir()
    wrapper.write_text(
        f'#!/bin/sh\nexec {shutil.which("ssh")} -F {shlex.quote(str(folder / "config"))} "$@"\n'
    )
    wrapper.chmod(0o755)


@contextlib.contextmanager
def _host(name: str, address: str, bridge: str, folder: Path, private: tuple[Path, ...]) -> Iterator[Host]:
    space, link = f"{bridge}{name}", f"{bridge}{name}"
    with contextlib.ExitStack() as stack:
        _run("ip", "netns", "add", space)
        stack.callback(_run, "ip", "netns", "del", space)
        _run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
        stack.callback(_end_link, link)
        _run("ip", "link", "set", link, "master", bridge, "up")
        for words in (("addr", "add", f"{address}/24", "dev", "eth0"), ("link", "set", "eth0", "up"),
                      ("link", "set", "lo", "up")):  # fmt: skip
            _run("ip", "-n", space, *words)
        init = _INIT.format(
            name=name,
            folder=folder,
            address=address,
            private="\n".join(f"mount -t tmpfs tmpfs {shlex.quote(str(path))}" for path in private),
        )
        log = stack.enter_context((folder / f"{name}.log").open("wb"))
        spaces = ("unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
        process = subprocess.Popen(
            ["ip", "netns", "exec", space, *spaces, "sh", "-c", init],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
        stack.callback(process.wait)
        stack.callback(process.kill)
        yield Host(name, address, space, link, _child_of(process.pid))


def _end_link(link: str) -> None:
    """End a host's link now: with its namespace it would go some time later."""
    subprocess.run(["ip", "link", "del", link], capture_output=True, check=False)


def _child_of(pid: int) -> int:
    limit = time.monotonic() + _START_LIMIT_S
    while not (children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        assert time.monotonic() < limit
        time.sleep(0.02)
    return int(children[0])


def _wait_for_ssh(hosts: Hosts) -> None:
    limit = time.monotonic() + _START_LIMIT_S
    for host in hosts.hosts:
        words = ["ssh", "-n", host.name, "hostname"]
        while (done := subprocess.run(words, env=hosts.environ, capture_output=True, text=True)).returncode:
            log = (hosts.folder / f"{host.name}.log").read_text()
            assert time.monotonic() < limit, f"{host.name}: {done.stderr}{log}"
            time.sleep(0.1)
        assert done.stdout.strip() == host.name


def _run(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{shlex.join(argv)} exits {done.returncode}: {done.stderr}"
    return done.stdout
