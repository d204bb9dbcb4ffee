"""A small all_reduce on all ranks of a launch. This file is sent to a Python on every host, on standard input.

It stands alone: the training's own Python and torch. Each rank is a child process of it. First the ranks of a host
reduce among themselves, then all ranks; where that is slower than it should be, hosts exchange data two by two in
rounds, so that a slow one is found. It prints one line of JSON, which `measuring.py` reads.

Bandwidth is the bus bandwidth: 2 (n - 1) / n * bytes / seconds for n ranks, what the busiest link carries
(NVIDIA/nccl-tests doc/PERFORMANCE.md).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import socket
import sys
import time
from typing import Any

MARK = "dslaunch-collective "
_REPEATS = 5
_EXCHANGES = 3
_VALUES = 61
"""Ranks add 1 to 61: sums of 2**18 such terms are exact in fp32."""
Request = dict[str, Any]


def main(request: Request, host: str) -> None:
    """Start this host's ranks, wait for them until the deadline, and print what they say.

    Args:
        host: this host's name, one of `request["hosts"]`.
    """
    end = time.monotonic() + request["deadline_s"]
    node = request["hosts"].index(host)
    request["within_port"] = _free_port()
    children = [_start(request, node, local, end) for local in range(request["ranks"])]
    said = [_hear(pid, pipe, end) for pid, pipe in children]
    sys.stdout.write("\n" + MARK + json.dumps({"ranks": said}) + "\n")
    sys.stdout.flush()


def _free_port() -> int:
    """Of those that Linux gives to no connection (ip_local_port_range, ip(7)) before the ranks use it."""
    for port in random.sample(range(10_000, 32_000), 100):
        with socket.socket() as trial, contextlib.suppress(OSError):
            trial.bind(("127.0.0.1", port))
            return port
    raise OSError("no TCP port is free")


def _start(request: Request, node: int, local: int, end: float) -> tuple[int, int]:
    """A child for one rank: its process id, and the pipe that it answers on."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    os.close(reading)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    try:
        answer = _rank(request, node, local, end)
    except Exception as error:  # said to the launching machine, which names the host
        answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:500]}
    os.write(writing, json.dumps(answer).encode())
    os._exit(0)


def _hear(pid: int, pipe: int, end: float) -> dict[str, Any]:
    """A rank's answer; at the deadline the rank is ended."""
    data = b""
    while True:
        ready, _, _ = select.select([pipe], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return {"error": "timed out"}
        part = os.read(pipe, 65536)
        if not part:
            break
        data += part
    _, status = os.waitpid(pid, 0)
    if data:
        answer: dict[str, Any] = json.loads(data)
        return answer
    return {"error": f"ended by signal {os.WTERMSIG(status)}"}


def _rank(request: Request, node: int, local: int, end: float) -> dict[str, Any]:
    os.environ.update({**request["env_defaults"], **os.environ, **request["env"]})
    ranks, hosts = request["ranks"], len(request["hosts"])
    if hosts > 1:
        _use_interface(request["address"])
    within = _Ranks(request, "127.0.0.1", request["within_port"], local, ranks, local, end)
    answer: dict[str, Any] = {"within": within.reduce()} if ranks > 1 else {}
    within.leave()
    if hosts == 1:
        return answer
    across = _Ranks(request, request["address"], request["port"], node * ranks + local, ranks * hosts, local, end)
    answer["across"] = across.reduce()
    slow = across.agree(answer["across"]["bytes_per_s"] < request["slow_below"])
    if slow and local == 0 and hosts > 2:
        answer["pairs"] = across.pairs(node, hosts, ranks, request["rounds"])
    across.leave()
    return answer


def _use_interface(address: str) -> None:
    """The interface towards the master, unless the environment names one."""
    import fcntl
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as trial:
        trial.connect((address, 9))
        own = trial.getsockname()[0]
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(trial, 0x8915, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            if socket.inet_ntoa(reply[20:24]) == own:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
                os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
                return


class _Ranks:
    """A process group, and what is measured in it."""

    def __init__(
        self, request: Request, address: str, port: int, rank: int, world: int, local: int, end: float
    ) -> None:
        from datetime import timedelta

        import torch
        import torch.distributed as dist

        self._torch, self._dist, self._rank, self._world = torch, dist, rank, world
        self._device = torch.device("cpu")
        if request["backend"] == "nccl":
            self._device = torch.device("cuda", local)
            torch.cuda.set_device(self._device)
        self._count = request["bytes"] // 4
        dist.init_process_group(
            request["backend"], init_method=f"tcp://{address}:{port}", rank=rank, world_size=world,
            timeout=timedelta(seconds=max(1.0, end - time.monotonic())),
        )  # fmt: skip

    def leave(self) -> None:
        self._dist.destroy_process_group()

    def reduce(self) -> dict[str, Any]:
        """Whether the sum was right each time, and the bus bandwidth of the median."""
        torch, mine = self._torch, _value(self._rank)
        wanted = sum(_value(rank) for rank in range(self._world))
        seconds, right = [], True
        for _ in range(_REPEATS + 1):
            data = torch.full((self._count,), mine, dtype=torch.float32, device=self._device)
            self._dist.barrier()
            self._wait()
            start = time.perf_counter()
            self._dist.all_reduce(data)
            self._wait()
            seconds.append(time.perf_counter() - start)
            right = right and bool((data == wanted).all())
        # The first one opens the connections.
        median = sorted(seconds[1:])[_REPEATS // 2]
        moved = 2 * (self._world - 1) / self._world * self._count * 4
        return {"right": right, "bytes_per_s": moved / median}

    def agree(self, mine: bool) -> bool:
        """Whether it is so for any rank."""
        flag = self._torch.tensor([int(mine)], device=self._device)
        self._dist.all_reduce(flag)
        return bool(flag.item())

    def pairs(self, node: int, hosts: int, ranks: int, rounds: int) -> list[tuple[int, float]]:
        """The first rank of every host: bytes/s with another host in each round, both ways at once, at best."""
        found = []
        for turn in range(min(rounds, hosts - 1 + hosts % 2)):
            other = _partner(node, turn, hosts)
            if other is None:
                continue
            # The first one opens the connection, and waits for a partner who is late.
            self._exchange(other * ranks, 1)
            best = min(self._exchange(other * ranks, self._count) for _ in range(_EXCHANGES))
            found.append((other, self._count * 4 / best))
        return found

    def _exchange(self, other: int, count: int) -> float:
        """Seconds of sending and getting `count` numbers."""
        sent = self._torch.zeros(count, dtype=self._torch.float32, device=self._device)
        got = self._torch.empty_like(sent)
        start = time.perf_counter()
        ops = [self._dist.P2POp(self._dist.isend, sent, other), self._dist.P2POp(self._dist.irecv, got, other)]
        for work in self._dist.batch_isend_irecv(ops):
            work.wait()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self._device.type == "cuda":
            self._torch.cuda.synchronize(self._device)


def _value(rank: int) -> int:
    return rank % _VALUES + 1


def _partner(node: int, turn: int, hosts: int) -> int | None:
    """Whom `node` meets in a round of a round-robin tournament (the circle method); None: nobody."""
    seats = hosts + hosts % 2
    last = seats - 1
    if node == last:
        other = turn * (seats // 2) % last
    else:
        other = (turn - node) % last
        if other == node:
            other = last
    return other if other < hosts else None
