"""What runs on each host of a launch over ssh: it starts the host's ranks, and ends them with all that is theirs.

dslaunch.launch.remote sends the text of this module and of dslaunch.run.processes over ssh and has the training
environment's interpreter (Python 3.9 or later) execute it, so a host needs no dslaunch. Orders come as JSON lines
on stdin; an empty line is a sign of life. Answers go to stdout: a JSON line with `kind`, `size` and more, then
`size` bytes.

The ranks are ended where stdin closes (the launching side is gone) or stays silent for `silence_s` seconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import select
import signal
import socket
import struct
import subprocess
import time
from pathlib import Path
from typing import Any

from dslaunch.run.processes import Process, Tree, adopting, identify, send

MAGIC = b"dslaunch-agent/1\n"
"""What stands before it on stdout is a login shell's talk."""
_POLL_S = 0.1
_SETTLE_S = 2.0
"""Helpers such as Python's resource tracker end by themselves a moment after the process they serve."""
_BEAT_S = 2.0
_ORDER_LIMIT_S = 600.0
_FLUSH_LIMIT_S = 60.0
_CHUNK = 1 << 16
_PORTS = range(10_000, 32_000)
"""Below those that Linux gives to connections (ip_local_port_range, ip(7))."""
_SIOCGIFADDR = 0x8915
"""netdevice(7)."""
_FULL = 1 << 20
"""Bytes of answers that wait for the network; the ranks' output is left in their pipes then."""


class Ladder:
    """Signals to a run's processes: SIGTERM to each at once, SIGKILL to what is left after `grace_s`."""

    def __init__(self, grace_s: float) -> None:
        self.kill_at = time.monotonic() + grace_s
        self._asked: set[Process] = set()

    def step(self, living: set[Process]) -> None:
        """Signal what is left; called again until nothing is."""
        killing = time.monotonic() >= self.kill_at
        for process in living if killing else living - self._asked:
            send(process, signal.SIGKILL if killing else signal.SIGTERM)
        self._asked |= living


class Channel:
    """Orders from the launching side, and answers to it; neither blocks, for the network may be gone."""

    def __init__(self) -> None:
        os.set_blocking(0, False)
        os.set_blocking(1, False)
        self.heard = time.monotonic()
        self.open = True
        """Nothing said that the launching side is gone."""
        self._orders = b""
        self._answers = MAGIC

    @property
    def full(self) -> bool:
        return len(self._answers) > _FULL

    def answer(self, kind: str, data: bytes = b"", **fields: Any) -> None:
        """Queue one frame."""
        if self.open:
            self._answers += json.dumps({"kind": kind, "size": len(data), **fields}).encode() + b"\n" + data

    def exchange(self, pipes: list[int], timeout_s: float) -> tuple[list[int], list[dict[str, Any]]]:
        """Wait for something to do; returns which of `pipes` can be read, and the orders that came."""
        reading = [*pipes, 0] if self.open else pipes
        readable, writable, _ = select.select(reading, [1] if self._answers else [], [], timeout_s)
        if writable:
            self._send()
        orders = self._take() if 0 in readable else []
        return [each for each in readable if each != 0], orders

    def flush(self) -> None:
        """Until the answers are sent, or the launching side is gone or takes none for a minute."""
        limit = time.monotonic() + _FLUSH_LIMIT_S
        while self._answers and time.monotonic() < limit:
            self.exchange([], _POLL_S)

    def _send(self) -> None:
        try:
            self._answers = self._answers[os.write(1, self._answers[:_CHUNK]) :]
        except OSError:
            self._hang_up()

    def _take(self) -> list[dict[str, Any]]:
        data = os.read(0, _CHUNK)
        self.heard = time.monotonic()
        if not data:
            self._hang_up()
        *lines, self._orders = (self._orders + data).split(b"\n")
        return [json.loads(line) for line in lines if line]

    def _hang_up(self) -> None:
        self.open, self._answers = False, b""


class Ranks:
    """The commands of one host, from their start to the end of all that descends from them."""

    def __init__(self, channel: Channel, order: dict[str, Any]) -> None:
        self._channel = channel
        self._silence_s: float = order["silence_s"]
        self._grace_s: float = order["grace_s"]
        self._run_dir = Path(order["run_dir"])
        self._copied = _put_files(self._run_dir, order["files"])
        self._mirrored: dict[str, int] = {}
        self._ladder: Ladder | None = None
        self._beat_at = 0.0
        self._tree = Tree()
        self._children = {each["tag"]: self._begin(each) for each in order["commands"]}
        self._pipes = {_output(child): tag for tag, child in self._children.items()}
        self._statuses: dict[str, int] = {}

    def run(self) -> None:
        """Answer with what happens, until nothing of the run is left on this host."""
        self._channel.answer("started", copied=self._copied)
        while len(self._statuses) < len(self._children):
            self._turn()
            if self._ladder is not None:
                self._ladder.step(self._living())
        settled_at = time.monotonic() + _SETTLE_S
        while left := self._living():
            self._turn()
            if time.monotonic() > settled_at:
                self._stop(self._grace_s)
            if self._ladder is not None:
                self._ladder.step(left)
        while self._pipes and self._turn():
            pass
        self._mirror()
        self._channel.answer("done")

    def _living(self) -> set[Process]:
        return self._tree.living(*(child.pid for child in self._children.values()))

    def _begin(self, command: dict[str, Any]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command["argv"],
            cwd=self._run_dir,
            env={**os.environ, **command["env"]},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _turn(self) -> bool:
        """Hand on output, take orders, notice ends and silence; whether there was output."""
        pipes = [] if self._channel.full else list(self._pipes)
        readable, orders = self._channel.exchange(pipes, _POLL_S)
        for pipe in readable:
            data = os.read(pipe, _CHUNK)
            if data:
                self._channel.answer("output", data, tag=self._pipes[pipe])
            else:
                del self._pipes[pipe]
        for order in orders:
            self._stop(order["stop"])
        if not self._channel.open or self._silent():
            self._stop(self._grace_s)
        self._note_ends()
        if time.monotonic() > self._beat_at:
            self._beat_at = time.monotonic() + _BEAT_S
            self._mirror()
            self._channel.answer("beat")
        return bool(readable)

    def _note_ends(self) -> None:
        for tag, child in self._children.items():
            status = child.poll() if tag not in self._statuses else None
            if status is not None:
                self._statuses[tag] = status if status >= 0 else 128 - status
                self._channel.answer("exit", tag=tag, status=self._statuses[tag])

    def _silent(self) -> bool:
        return time.monotonic() - self._channel.heard > self._silence_s

    def _stop(self, grace_s: float) -> None:
        if self._ladder is None:
            self._ladder = Ladder(grace_s)
        self._ladder.kill_at = min(self._ladder.kill_at, time.monotonic() + grace_s)

    def _mirror(self) -> None:
        """Hand on what the ranks recorded, where the launching side does not see this run folder."""
        for path in (self._run_dir / "ranks").glob("*") if self._copied else ():
            changed = path.stat().st_mtime_ns
            if self._mirrored.get(path.name) != changed:
                self._mirrored[path.name] = changed
                self._channel.answer("file", path.read_bytes(), name=path.name)


def main() -> None:
    """Say hello, then do what the first order says: start the ranks, or sweep up what another launcher left."""
    for sign in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        # A handler that does nothing: what is ignored would be ignored by the ranks as well.
        signal.signal(sign, lambda _number, _frame: None)
    channel = Channel()
    channel.answer("hello", address=_reached_at(), addresses=_addresses(), port=free_port())
    orders: list[dict[str, Any]] = []
    while channel.open and not orders and time.monotonic() - channel.heard < _ORDER_LIMIT_S:
        _, orders = channel.exchange([], timeout_s=1.0)
    with adopting():
        for order in orders[:1]:
            if "sweep" in order:
                channel.answer("done", ended=_sweep(order["sweep"], order["grace_s"]))
            else:
                Ranks(channel, order["start"]).run()
    channel.flush()


def _sweep(run_dir: str, grace_s: float) -> int:
    """End every process that has this run folder in its environment; returns how many there were."""
    ladder = Ladder(grace_s)
    seen: set[Process] = set()
    while left := _carrying(f"DSLAUNCH_RUN_DIR={run_dir}".encode()):
        seen |= left
        ladder.step(left)
        time.sleep(_POLL_S)
    return len(seen)


def _carrying(assignment: bytes) -> set[Process]:
    """The running processes that were started with NAME=VALUE in their environment, but for this one."""
    found = set()
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            process = identify(pid)
            carries = assignment in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if process and carries and pid != os.getpid():
                found.add(process)
    return found


def _put_files(folder: Path, files: dict[str, str]) -> bool:
    """Write the rendered files where the launching side's run folder is not seen; whether that was so."""
    with contextlib.suppress(OSError):
        if (folder / "manifest.json").read_text(encoding="utf-8") == files["manifest.json"]:
            return False
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return True


def _output(child: subprocess.Popen[bytes]) -> int:
    assert child.stdout is not None
    return child.stdout.fileno()


def _reached_at() -> str:
    """The address of this host that the launching side connected to; empty where sshd does not say."""
    parts = os.environ.get("SSH_CONNECTION", "").split()
    return parts[2] if len(parts) == 4 else ""


def _addresses() -> list[str]:
    """The IPv4 addresses of this host's interfaces, one each."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                found.append(socket.inet_ntoa(answer[20:24]))
    return found


def free_port() -> int:
    """A TCP port that no process of this machine has, and that no connection is given before it is used."""
    for port in [*random.SystemRandom().sample(_PORTS, 100), 0]:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            chosen: int = probe.getsockname()[1]
            return chosen
    raise OSError("no TCP port is free")
