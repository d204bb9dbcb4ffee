"""One host reached over ssh: an agent (dslaunch.run.agent) that is sent there, orders to it, answers from it.

Nothing but `exec bash -s` stands on ssh's command line, so no shell between reads a path, an argument or a secret:
they all go through stdin, quoted for bash.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dslaunch.run
from dslaunch.run.agent import MAGIC

_CONNECT_LIMIT_S = 20
_HELLO_LIMIT_S = 60.0
_KEPT_LINES = 5
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_BOOT = r"""
import json, os, sys, types
if sys.version_info < (3, 9):
    sys.exit("launcher.python: %s is Python %d.%d. Give 3.9 or later" % ((sys.executable,) + sys.version_info[:2]))
size = text = b""
while size[-1:] != b"\n":
    size += os.read(0, 1) or sys.exit("the connection was closed")
while len(text) < int(size):
    text += os.read(0, int(size) - len(text)) or sys.exit("the connection was closed")
for name, source in json.loads(text.decode()):
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
sys.modules["dslaunch.run.agent"].main()
"""
_NO_PYTHON = (
    'command -v -- "$DSLAUNCH_PYTHON" >/dev/null || { printf \'launcher.python: %s is not found on %s. Give the '
    'interpreter of the training environment there\\n\' "$DSLAUNCH_PYTHON" "$HOSTNAME" >&2; exit 2; }'
)


class LinkError(Exception):
    """A host that cannot be reached, or was lost; the message says why."""


@dataclass(frozen=True)
class Frame:
    """One answer of an agent."""

    kind: str
    fields: Mapping[str, Any]
    data: bytes


class Link:
    """A connection to one host."""

    def __init__(self, host: str, process: asyncio.subprocess.Process) -> None:
        self.host = host
        self.hello: Mapping[str, Any] = {}
        self._process = process
        self._said: deque[str] = deque(maxlen=_KEPT_LINES)
        self._errors = asyncio.create_task(self._keep_errors())

    @property
    def said(self) -> str:
        """What ssh and the remote shell said last on stderr."""
        return "; ".join(self._said)

    async def greet(self) -> None:
        """Wait for the agent's hello; raises LinkError where none comes."""
        try:
            async with asyncio.timeout(_HELLO_LIMIT_S):
                while (line := await self._line()) != MAGIC:
                    self._said.append(line.decode(errors="replace").strip())
                self.hello = (await self.answer()).fields
        except TimeoutError:
            raise LinkError(f"no answer within {_HELLO_LIMIT_S:.0f} s. {self.said}") from None

    async def answer(self) -> Frame:
        """The next answer; raises LinkError where the connection ends instead."""
        fields = json.loads(await self._line())
        try:
            data = await self._stdout.readexactly(fields["size"])
        except asyncio.IncompleteReadError:
            raise await self._lost() from None
        return Frame(fields["kind"], fields, data)

    def order(self, order: Mapping[str, Any] | None) -> None:
        """Send an order; None is a sign of life."""
        text = json.dumps(order) if order else ""
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():
            self._process.stdin.write(text.encode() + b"\n")

    def cut(self) -> None:
        """End the connection at once; an agent that still runs notices and ends its ranks."""
        if self._process.returncode is None:
            # Not process.kill(), which reaps an ssh that has just ended, and asyncio says that it lost a child.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)

    async def close(self) -> None:
        """End the connection and reap ssh."""
        self.cut()
        await self._process.wait()
        await self._errors

    @property
    def _stdout(self) -> asyncio.StreamReader:
        assert self._process.stdout is not None
        return self._process.stdout

    async def _line(self) -> bytes:
        line = await self._stdout.readline()
        if not line.endswith(b"\n"):
            raise await self._lost()
        return line

    async def _lost(self) -> LinkError:
        status = await self._process.wait()
        await self._errors
        return LinkError(f"ssh exits {status}: {self.said or 'no reason given'}")

    async def _keep_errors(self) -> None:
        assert self._process.stderr is not None
        async for line in self._process.stderr:
            self._said.append(line.decode(errors="replace").strip())


async def connect(host: str, preamble: bytes, silence_s: float) -> Link:
    """Send the agent to `host` and hear its hello.

    Args:
        preamble: see `preamble`.
        silence_s: how long ssh waits for a sign of life before it gives the host up.

    Raises:
        LinkError: the host cannot be reached, or the agent cannot run there.
    """
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": str(_CONNECT_LIMIT_S),
        "ServerAliveInterval": str(max(1, round(silence_s / 4))),
        "ServerAliveCountMax": "4",
        "ControlPath": "none",  # a shared connection would outlive this one
    }
    words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    pipe = asyncio.subprocess.PIPE
    with _stop_signals_blocked():
        process = await asyncio.create_subprocess_exec(
            *("ssh", "-T", "-x", "-a", *words, "--", host, "exec bash -s"),
            stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True,
        )  # fmt: skip
    link = Link(host, process)
    assert process.stdin is not None
    process.stdin.write(preamble)
    try:
        await link.greet()
    except BaseException:
        await link.close()
        raise
    return link


def preamble(variables: Mapping[str, str], env_sh: str) -> bytes:
    """What bash reads on the host: the environment, then the agent's start, and after it the agent's text.

    Args:
        variables: exported before env.sh is read; DSLAUNCH_PYTHON among them.
        env_sh: text of the rendered env.sh.
    """
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
    start = f'{_NO_PYTHON}\nexec "$DSLAUNCH_PYTHON" -I -c {shlex.quote(_BOOT)}\n'
    sources = json.dumps(_sources()).encode()
    return os.fsencode(f"{exports}{env_sh}\n{start}") + b"%d\n" % len(sources) + sources


def _sources() -> list[tuple[str, str]]:
    """Module names and texts, each before what imports it."""
    folder = Path(dslaunch.run.__path__[0])
    modules = [
        (f"dslaunch.run.{name}", (folder / f"{name}.py").read_text()) for name in ("processes", "agent")
    ]
    return [("dslaunch", ""), ("dslaunch.run", ""), *modules]


@contextlib.contextmanager
def _stop_signals_blocked() -> Iterator[None]:
    """ssh is started with these signals blocked and leaves them so: a stop reaches the ranks before it ends.

    The process is made before anything else runs, so connections that are made at the same time do not mix. A
    function between fork and exec (preexec_fn) would do, but has the whole address space copied for each host.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
