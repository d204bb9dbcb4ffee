"""`python -m dslaunch.runtime --plan PATH/plan.json`: the training program, started once per rank.

A launcher (deepspeed, torchrun, srun) sets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
DSLAUNCH_RUN_DIR is where metrics, TensorBoard files and checkpoints go; without it, the plan's folder.

Exit status: 0 done; 1 a rank failed; 2 the plan, or what it names, can't be executed; 143 SIGTERM asked for an
end, and a checkpoint is saved.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from dslaunch import progress
from dslaunch.errors import DslaunchError

_SAYS = "dslaunch.runtime: "
TRAINING = "training step "
"""How phases of training begin."""


def main(argv: list[str]) -> int:
    """Run this rank; the exit status."""
    parser = argparse.ArgumentParser("python -m dslaunch.runtime", description="Trains what a plan says.")
    parser.add_argument("--plan", type=Path, required=True, help="the plan.json that `dslaunch render` wrote")
    parser.add_argument("--local_rank", type=int, help="given by the deepspeed launcher; LOCAL_RANK counts")
    parser.add_argument(
        "--show", action="store_true", help="print who sends which samples to whom; train nothing"
    )
    options = parser.parse_args(argv)
    phase = ["starting"]

    def enter(name: str) -> None:
        phase[0] = name
        progress.phase(name)

    try:
        if options.show:
            return _show(options.plan)
        return _trained(options.plan, enter)
    except DslaunchError as error:
        # Often the same on every rank; but the first one that ends has the others ended, and must have said it.
        print(f"{_SAYS}{error}", file=sys.stderr)
        return error.status
    except ModuleNotFoundError as error:
        print(f"{_SAYS}{error} in {sys.executable}. Install dslaunch[runtime] there.", file=sys.stderr)
        return 2
    except Exception as error:
        traceback.print_exc()
        where = f"rank {os.environ.get('RANK', '?')} on {socket.gethostname()}"
        print(f"{_SAYS}{where} failed while {phase[0]}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


def _trained(plan: Path, enter: Callable[[str], None]) -> int:
    from dslaunch.runtime.program import run
    from dslaunch.runtime.proof import NotDistributedError
    from dslaunch.runtime.stopping import STATUS, Stopped

    try:
        run(plan, os.environ, enter)
    except Stopped as stopped:
        if os.environ["RANK"] == "0":
            print(f"{_SAYS}{stopped}", file=sys.stderr)
        return STATUS
    except NotDistributedError as error:
        print(f"{_SAYS}not as planned: {error}", file=sys.stderr)
        return 1
    return 0


def _show(path: Path) -> int:
    """Print the redistribution; where nobody reads the output any more, the status that a shell gives for it."""
    try:
        print(_shown(path), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left is written when it ends
        return 128 + signal.SIGPIPE
    return 0


def _shown(path: Path) -> str:
    """The redistribution of the plan in `path`; needs neither torch nor other ranks."""
    from dslaunch.runtime.checks import check_executable, read_plan
    from dslaunch.runtime.drawing import describe, mermaid
    from dslaunch.runtime.messages import step_of

    plan = read_plan(path)
    check_executable(plan)
    step = step_of(plan)
    return f"{describe(step)}\n\n```mermaid\n{mermaid(step)}\n```"


def leave(status: int) -> None:
    """End at once: after a failure, taking the process group down would wait for ranks that do not answer."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
