"""A launch over ssh without pdsh: `python -m dslaunch.launch.remote`, one ssh process and one agent a host.

    connect to every host -> agree on the rendezvous -> start every rank -> hand on output -> end all together

The first rank that fails ends the others, and its exit status is this program's; so does a host that is lost. No
rank is started before every host has answered.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from pathlib import Path

from dslaunch.launch.link import Frame, Link, LinkError, connect, preamble
from dslaunch.launch.output import Lines
from dslaunch.launch.remote_job import HOSTS, RemoteJob
from dslaunch.launch.swept import sweep
from dslaunch.run.folder import write_file

_GRACE_S = 10.0
"""Between SIGTERM and SIGKILL: below the supervisor's, which ends this program after 15 s."""
_ANSWER_S = 3.0
"""How much longer a host may take to say that its ranks are ended."""
_LOST_STATUS = 255
_PR_SET_PDEATHSIG = 1


class Launch:
    """The running job: a link to each host, until nothing of it is left on any."""

    def __init__(self, job: RemoteJob, lines: Lines) -> None:
        self.status = 0
        """Of the rank that failed first, or 255 where a host was lost before one failed."""
        self._job = job
        self._lines = lines
        self._links: list[Link] = []
        self._copied: set[Link] = set()
        self._stopping = False

    async def run(self) -> int:
        """Start, watch and end the job; returns its exit status."""
        try:
            self._links = await self._connect()
            if not self._stopping and self._links:
                self._start()
                beats = asyncio.create_task(self._beat())
                await asyncio.gather(*map(self._watch, self._links))
                beats.cancel()
        finally:
            await asyncio.gather(*(link.close() for link in self._links))
        return self.status

    def stop(self, status: int, grace_s: float = _GRACE_S) -> None:
        """End every rank; a second call leaves them no time."""
        self.status = self.status or status
        for link in self._links:
            link.order({"stop": 0.0 if self._stopping else grace_s})
        if not self._stopping:
            asyncio.get_running_loop().call_later(grace_s + _ANSWER_S, self._give_up)
        self._stopping = True

    def _give_up(self) -> None:
        for link in self._links:
            link.cut()

    async def _connect(self) -> list[Link]:
        """Links to all hosts in rank order; none where one cannot be had, and each of those is named then."""
        hosts = list(self._job.hosts)
        start = preamble(self._job.variables, self._job.files["env.sh"])
        limit = asyncio.Semaphore(self._job.launcher.connections)

        async def one(host: str) -> Link | LinkError:
            async with limit:
                try:
                    return await connect(host, start, self._job.launcher.lost_after_s)
                except LinkError as error:
                    self._lines.say(f"{host}: {error}")
                    return error

        outcomes = await asyncio.gather(*map(one, hosts))
        links = [outcome for outcome in outcomes if isinstance(outcome, Link)]
        if len(links) == len(hosts):
            return links
        self._lines.say(
            f"{len(hosts) - len(links)} of {len(hosts)} hosts cannot be used; no rank was started"
        )
        self.status = _LOST_STATUS
        await asyncio.gather(*(link.close() for link in links))
        return []

    def _start(self) -> None:
        address, port = self._job.rendezvous(self._links[0].hello)
        self._lines.say(f"{len(self._links)} hosts answer; the ranks meet at {address} port {port}")
        for node, link in enumerate(self._links):
            link.order({
                "start": {
                    "run_dir": str(self._job.run_dir),
                    "files": dict(self._job.files),
                    "silence_s": self._job.launcher.lost_after_s,
                    "grace_s": _GRACE_S,
                    "commands": self._job.commands(node, address, port),
                }
            })  # fmt: skip

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._job.launcher.lost_after_s / 4)
            for link in self._links:
                link.order(None)

    async def _watch(self, link: Link) -> None:
        """Hand on what one host says, to its end."""
        try:
            while (frame := await link.answer()).kind != "done":
                self._take(link, frame)
        except LinkError as error:
            self._lines.say(f"{link.host}: lost: {error}")
            self.stop(_LOST_STATUS)
            await self._sweep(link.host)

    def _take(self, link: Link, frame: Frame) -> None:
        match frame.kind:
            case "started" if frame.fields["copied"]:
                self._copied.add(link)
                self._lines.say(
                    f"{link.host}: does not see this run folder; the files were copied to the same path"
                )
            case "output":
                self._output(link, frame.fields["tag"], frame.data)
            case "exit":
                self._exit(frame.fields["tag"], frame.fields["status"])
            case "file":
                (self._job.run_dir / "ranks").mkdir(exist_ok=True)
                (self._job.run_dir / "ranks" / Path(frame.fields["name"]).name).write_bytes(frame.data)

    def _output(self, link: Link, tag: str, data: bytes) -> None:
        self._lines.feed(tag, data)
        if link in self._copied and self._job.runner == "direct":
            with (self._job.logs / f"rank-{tag}.log").open("ab") as log:
                log.write(data)

    def _exit(self, tag: str, status: int) -> None:
        self._lines.finish(tag)
        if self._job.runner == "direct":
            record = self._job.run_dir / "ranks" / f"{tag}.exit"
            # A rank that was killed could not write its status; the agent saw it.
            if not record.exists() or record.read_text().strip() == "running":
                record.parent.mkdir(exist_ok=True)
                write_file(record, f"{status}\n")
        if status and not self._stopping:
            who = f"rank {tag}" if self._job.runner == "direct" else tag
            self._lines.say(f"{who} exits {status}; the others are ended")
            self.stop(status)

    async def _sweep(self, host: str) -> None:
        """End what runs on a host whose agent is gone."""
        try:
            self._lines.say(
                f"{host}: {await sweep(self._job, host, _GRACE_S) or 'nothing of this run is left there'}"
            )
        except LinkError:
            silence_s = self._job.launcher.lost_after_s
            self._lines.say(
                f"{host}: not reached; its agent ends the ranks after {silence_s:.0f} s of silence"
            )


async def run(job: RemoteJob) -> int:
    """The launch, stopped by SIGTERM, SIGINT or SIGHUP."""
    job.logs.mkdir(parents=True, exist_ok=True)
    write_file(job.run_dir / HOSTS, job.files[HOSTS])
    launch = Launch(job, Lines(sys.stdout.buffer))
    for sign in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(sign, launch.stop, 128 + sign)
    return await launch.run()


def main() -> int:
    """Returns the exit status of the rank that failed first."""
    # The ranks do not outlive the process that supervises them: prctl(2), PR_SET_PDEATHSIG.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    return asyncio.run(run(RemoteJob.read(os.environ)))


if __name__ == "__main__":
    sys.exit(main())
