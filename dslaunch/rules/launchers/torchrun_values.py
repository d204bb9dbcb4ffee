"""Values of torchrun's options that it, or its agent, refuses."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from dslaunch.files.commands import Launcher
from dslaunch.files.fileset import FileSet
from dslaunch.files.flags import is_told
from dslaunch.planfile import Plan
from dslaunch.rules.launchers.torchrun import BACKENDS, option, torchruns
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.settings import Settings

_RAN = "pytorch/pytorch:torch/distributed/run.py get_args_parser, config_from_args 2.13, run"
_NUMBERS = ("node-rank", "master-port", "max-restarts")


@rule("torchrun.value", severity="error", raised_by="torchrun", evidence=_RAN)
def value(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A value that torchrun can't read or refuses, or no script to start."""
    for file, command, launcher in torchruns(files):
        if command.script is None and launcher.options.complete and launcher.options.flags and not file.inside:
            message = "torchrun is given no script: it prints its usage and exits."
            if not launcher.options.has("-h", "--help"):
                yield Hit(file.name, launcher.at, message, "Name the script behind the options.")
        nodes, processes = option(launcher, "nnodes"), option(launcher, "nproc-per-node")
        if nodes is not None and not re.fullmatch(r"\d+(:\d+)?", nodes):
            at = launcher.options.position("--nnodes")
            yield Hit(
                file.name,
                at,
                f"--nnodes {nodes!r}: torchrun takes N or LEAST:MOST.",
                "Write a number of nodes.",
            )
        if processes is not None and not re.fullmatch(r"\d+|cpu|gpu|auto|xpu|hpu|npu", processes):
            at = launcher.options.position("--nproc-per-node", "--nproc_per_node")
            message = f"--nproc-per-node {processes!r}: torchrun takes a number, cpu, gpu or auto."
            yield Hit(file.name, at, message, "Write a number of processes.")
        backend = option(launcher, "rdzv-backend")
        if backend is not None and backend not in BACKENDS:
            at = launcher.options.position("--rdzv-backend", "--rdzv_backend")
            message = f"--rdzv-backend {backend!r}: torchrun knows none of this name, and raises ValueError."
            yield Hit(file.name, at, message, f"Use {', '.join(BACKENDS)}.")
        for name in _NUMBERS:
            number = option(launcher, name)
            if number is not None and not re.fullmatch(r"-?\d+", number):
                at = launcher.options.position(f"--{name}", f"--{name.replace('-', '_')}")
                yield Hit(file.name, at, f"--{name} {number!r} is no whole number.", "Write a number.")
        for name, wrong, message, fix in _refused(launcher):
            at = launcher.options.position(*_spelled(name))
            yield Hit(file.name, at, f"--{name} {wrong}: {message}.", fix)


def _spelled(name: str) -> tuple[str, ...]:
    short = {"redirects": ("-r",), "tee": ("-t",), "module": ("-m",)}
    return (f"--{name}", f"--{name.replace('-', '_')}", *short.get(name, ()))


def _is_range(text: str) -> bool:
    """Whether `2:4` isn't upside down, and begins with 1 or more."""
    least, colon, most = text.partition(":")
    if not least.isdecimal() or (colon and not most.isdecimal()):
        return True  # said already
    return int(least) > 0 and (not colon or int(least) <= int(most))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _is_endpoint(text: str) -> bool:
    """HOST, HOST:PORT or [ADDRESS]:PORT; a port that is too large is env.port's."""
    return _ENDPOINT.fullmatch(text) is not None


_ENDPOINT = re.compile(r"(?:[\w.-]+|\[[0-9a-fA-F:.]+\])(?::\d{1,9})?")
_STD = re.compile(r"[0123]|(?:\d:[0123],)*\d:[0123]")
_CHECKS: Mapping[str, tuple[Callable[[str], bool], str, str]] = {
    "nnodes": (_is_range, "AssertionError, for the least has to be 1 or more, and not above the most",
               "Write N, or LEAST:MOST."),
    "nproc-per-node": (lambda text: text != "0", "AssertionError", "Write 1 or more."),
    "max-restarts": (lambda text: not text.startswith("-"), "AssertionError", "Write 0 or more."),
    "monitor-interval": (_is_number, "torchrun exits", "Write seconds."),
    "start-method": (lambda text: text in ("spawn", "fork", "forkserver"), "torchrun exits",
                     "Use spawn, fork or forkserver."),
    "numa-binding": (lambda text: text in ("node", "socket", "exclusive", "core-complex"), "torchrun exits",
                     "Use node, socket, exclusive or core-complex."),
    "redirects": (lambda text: _STD.fullmatch(text) is not None, "ValueError", "Write 0 to 3, or RANK:0 and on."),
    "tee": (lambda text: _STD.fullmatch(text) is not None, "ValueError", "Write 0 to 3, or RANK:0 and on."),
    "local-ranks-filter": (lambda text: re.fullmatch(r"\d+(?:,\d+)*", text) is not None, "ValueError",
                           "Write ranks with commas between them: 0,1."),
    "rdzv-conf": (lambda text: all("=" in part for part in text.split(",") if part), "ValueError",
                  "Write KEY=VALUE, with commas between several."),
}  # fmt: skip


def _refused(launcher: Launcher) -> Iterator[tuple[str, str, str, str]]:
    """Name, value, what torchrun does, and the fix."""
    for name, (takes, message, fix) in _CHECKS.items():
        value = launcher.options.value(*_spelled(name))
        if value is not None and is_told(value) and value and not takes(value):
            yield name, value, message, fix
    endpoint, backend = option(launcher, "rdzv-endpoint"), option(launcher, "rdzv-backend")
    if endpoint and backend not in (None, "static") and not _is_endpoint(endpoint):
        yield "rdzv-endpoint", endpoint, "no HOST:PORT, and torchrun raises ValueError", "Write HOST:PORT."
    for flag in launcher.options.flags:
        name = flag.name.removeprefix("--").replace("_", "-")
        if flag.values and name in ("standalone", "no-python", "run-path"):
            yield name, "with a value", "torchrun exits", "Write it without one."
    both = [launcher.options.has(*_spelled(name)) for name in ("no-python", "module")]
    if all(both):
        yield "no-python", "beside --module", "ValueError", "Keep one."
