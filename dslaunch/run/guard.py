"""Ends a supervised command where its supervisor is gone: `python -m dslaunch.run.guard FD COMMAND ...`.

The guard stands between the two, as the parent of the command and of every orphan among its descendants. FD is the
reading end of a pipe whose other end the supervisor alone holds: it closes when the supervisor ends, by whatever
signal. The guard's exit status is the command's, 128 + N where signal N ended it.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from dslaunch.run.processes import Tree, adopting, end

_GRACE_S = 15.0
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(alive: int, argv: list[str]) -> int:
    """Run `argv` to its end, or to the supervisor's."""
    for sign in _STOP_SIGNALS:
        # A handler, for what is ignored here would be ignored by the command too.
        signal.signal(sign, lambda *_: None)
    with adopting():
        tree = Tree()
        child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, start_new_session=True)
        ended, poll = os.pidfd_open(child.pid), select.poll()
        poll.register(ended, select.POLLIN)
        poll.register(alive, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll()}
        if ended not in ready:
            end(tree.living, _GRACE_S, hurry=lambda: False)
            if "DSLAUNCH_RUN_DIR" in os.environ:
                _tell(Path(os.environ["DSLAUNCH_RUN_DIR"]))
        status = child.wait()
    return status if status >= 0 else 128 - status


def _tell(folder: Path) -> None:
    """The supervisor can no longer say how the run ended."""
    from dslaunch.run.disk import give_back
    from dslaunch.run.state import append_event, update_state

    give_back(folder)
    why = "the supervisor was killed, so the job was ended; `dslaunch resume` goes on from its newest checkpoint"
    append_event(folder, "failed", cause="supervisor_lost", why=why)
    update_state(folder, status="failed", exit_status=128 + signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
