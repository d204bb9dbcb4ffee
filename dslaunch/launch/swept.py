"""A launcher that may leave processes on the hosts: `python -m dslaunch.launch.swept KIND COMMAND...`.

It runs the command to its end or to a stop signal, and then ends over ssh, on every host of DSLAUNCH_HOSTS, what
still has this run's folder in its environment.

KIND `shielded` keeps the stop signals from the command; `open` does not. DeepSpeed's multi-node runner answers
them with `pkill -f` for its launcher's name on every host (deepspeed/launcher/multinode_runner.py,
PDSHRunner.get_cmd, 0.19.8), which ends other runs too; so it is ended by SIGKILL, and the sweep does what its
pkill should do.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Sequence

from dslaunch.launch.link import LinkError, connect, preamble
from dslaunch.launch.output import Lines
from dslaunch.launch.remote_job import HOSTS, RemoteJob
from dslaunch.run.folder import write_file
from dslaunch.run.processes import Tree, adopting, end

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_GRACE_S = 5.0
"""For the command, and again for what it left on the hosts: both within the supervisor's 15 s."""
_POLL_S = 1.0
_PR_SET_PDEATHSIG = 1


async def sweep(job: RemoteJob, host: str, grace_s: float) -> str:
    """End what this run left on a host; returns what there is to say about it, in words.

    Raises:
        LinkError: the host cannot be reached.
    """
    link = await connect(host, preamble(job.variables, job.files["env.sh"]), job.launcher.lost_after_s)
    try:
        link.order({"sweep": str(job.run_dir), "grace_s": grace_s})
        ended = (await link.answer()).fields["ended"]
    finally:
        await link.close()
    return f"{ended} processes of this run were still there and are ended" if ended else ""


async def sweep_all(job: RemoteJob, lines: Lines) -> None:
    """The same on every host at once."""
    limit = asyncio.Semaphore(job.launcher.connections)

    async def one(host: str) -> None:
        async with limit:
            try:
                said = await sweep(job, host, _GRACE_S)
            except LinkError as error:
                said = f"not reached, so it is not known whether something of this run is left there: {error}"
        if said:
            lines.say(f"{host}: {said}")

    await asyncio.gather(*map(one, job.hosts))


async def run(job: RemoteJob, argv: Sequence[str], shielded: bool) -> int:
    """The command's exit status, 128 + N where signal N stopped it, or that of a rank whose end it ignored."""
    stopped: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    for sign in _STOP_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(sign, _note, stopped, 128 + sign)
    with adopting():
        tree = Tree()
        child = await asyncio.create_subprocess_exec(*argv, preexec_fn=_block if shielded else None)
        ended = asyncio.create_task(child.wait())
        watch = asyncio.create_task(_watch_ranks(job, stopped))
        await asyncio.wait({ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
        watch.cancel()
        if stopped.done():
            grace_s = 0.0 if shielded else _GRACE_S
            await asyncio.to_thread(end, lambda: tree.living(child.pid), grace_s, lambda: False)
        status = await ended
    await sweep_all(job, Lines(sys.stdout.buffer))
    return stopped.result() if stopped.done() else status if status >= 0 else 128 - status


async def _watch_ranks(job: RemoteJob, stopped: asyncio.Future[int]) -> None:
    """Stop the command where the ranks have ended and it goes on all the same.

    pdsh does so on the other hosts where a rank fails, and where a process that a rank left holds ssh's output.
    """
    while (status := _outcome(job)) is None:
        await asyncio.sleep(_POLL_S)
    await asyncio.sleep(_GRACE_S)
    _note(stopped, status)


def _outcome(job: RemoteJob) -> int | None:
    """Exit status of a rank that failed, 0 where all have ended well; None until then."""
    records = [path.read_text().strip() for path in (job.run_dir / "ranks").glob("*.exit")]
    ended = [int(text) for text in records if text.isdigit()]
    return max(ended) if any(ended) or len(ended) == job.plan.world_size else None


def _note(stopped: asyncio.Future[int], status: int) -> None:
    if not stopped.done():
        stopped.set_result(status)


def _block() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)


def main(argv: Sequence[str]) -> int:
    """Returns the exit status of the command."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    kind, *command = argv
    job = RemoteJob.read(os.environ)
    write_file(job.run_dir / HOSTS, job.files[HOSTS])
    return asyncio.run(run(job, command, shielded=kind == "shielded"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
