"""What torchrun makes of a range of nodes, and what torch.distributed.launch hands to a script."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.launchers.torchrun import given, option, torchruns
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.launched import started
from dslaunch.rules.scripts.parser import parser_of
from dslaunch.rules.scripts.tree import Script
from dslaunch.rules.settings import Settings

_HANDED = "--local-rank=0"


@rule(
    "torchrun.static-range", severity="hang", raised_by="nobody",
    evidence="pytorch/pytorch:torch/distributed/elastic/rendezvous/static_tcp_rendezvous.py "
    "create_rdzv_handler 2.13, run",
)  # fmt: skip
def static_range(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """--nnodes LEAST:MOST with the static rendezvous, which waits for the larger number."""
    for file, _, launcher in torchruns(files):
        least, colon, most = (option(launcher, "nnodes") or "").partition(":")
        if not colon or not least.isdecimal() or not most.isdecimal() or int(least) >= int(most):
            continue
        backend = option(launcher, "rdzv-backend")
        static = backend == "static" or not given(launcher, "rdzv-backend")
        if static and not launcher.options.has("--standalone"):
            message = f"--nnodes {least}:{most} without --rdzv-backend: it waits until all {most} nodes are there."
            fix = "Add --rdzv-backend c10d --rdzv-endpoint FIRST_HOST:PORT, or write the number that starts."
            yield Hit(file.name, launcher.options.position("--nnodes"), message, fix)


@rule(
    "torchrun.launch-local-rank", severity="error", raised_by="python",
    evidence="pytorch/pytorch:torch/distributed/launch.py, run.py determine_local_world_size 1.13, 2.0 and 2.13; "
    "2.13, run",
)  # fmt: skip
def launch_local_rank(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """torch.distributed.launch hands over --local-rank, and the script's parser doesn't know it."""
    for file, command, launcher in torchruns(files):
        if launcher.spelled != "torch.distributed.launch" or given(launcher, "use-env"):
            continue
        script = started(files, command)
        if script is None or not _refuses(script):
            continue
        knows = _knows(script)
        has = "knows --local_rank, as it was called before torch 2.0" if knows else "has no such argument"
        message = f"torch.distributed.launch adds --local-rank=N, and the parser of {script.path} {has}: it exits."
        fix = f"Use torchrun, and read LOCAL_RANK in {script.path}; or add --use-env."
        yield Hit(file.name, launcher.at, message, fix)


def _refuses(script: Script) -> bool:
    """Whether argparse refuses the argument; where the parser isn't all there, by the names that it is given."""
    parser = parser_of(script)
    if parser is None:
        return _knows(script) and not script.methods("parse_known_args") and "local-rank" not in script.python.text
    try:
        return _HANDED in parser.unknown([_HANDED])
    except ValueError:
        return True


def _knows(script: Script) -> bool:
    """Whether --local_rank is added by that name."""
    names = (each for call in script.methods("add_argument") for each in call.node.args)
    return any(isinstance(each, ast.Constant) and each.value == "--local_rank" for each in names)
