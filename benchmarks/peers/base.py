"""What every peer gives: an estimate for a run, or None where it does not cover such runs."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.errors import Error
from benchmarks.settings import Missing, Setting, setting


@dataclass(frozen=True)
class Estimate:
    """None: not estimated."""

    memory_gib: float | None = None
    """Allocated, on the fullest rank."""
    step_s: float | None = None


@dataclass(frozen=True)
class Peer:
    """Another tool."""

    name: str
    missing: str
    """Why it can't run here, and how it could; empty where it can."""
    estimate: Callable[[Setting], Estimate | None]

    def errors(self, ours: Sequence[Error]) -> list[Error]:
        """Its errors on the same figures, for the records that it supports."""
        found = []
        for error in ours:
            try:
                estimate = quietly(self.estimate, setting(error.record))
            except Missing:
                continue
            value = estimate and (estimate.memory_gib if error.kind == "memory" else estimate.step_s)
            if value:
                found.append(replace(error, predicted=value))
        return found


def quietly(estimate: Callable[[Setting], Estimate | None], run: Setting) -> Estimate | None:
    """The estimate without what the tool prints; None where the tool itself fails on such a run."""
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return estimate(run)
    except Exception:
        # A peer's refusals are asserts and errors of every type: whatever it raises, it has no estimate.
        return None
    finally:
        logging.disable(logging.NOTSET)


def not_installed(module: str, package: str) -> str:
    """How to get a package that is absent, or what it imports; empty where it can be imported."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        return f"pip install {package if error.name == module.split('.')[0] else error.name}"
    return ""


def no_checkout(name: str, url: str, module: str = "") -> str:
    """How to get a checkout that is absent, or what its `module` imports; empty where it can be used."""
    folder = os.environ.get("DSLAUNCH_PEERS", "")
    if not folder:
        return f"set DSLAUNCH_PEERS to a folder, and git clone {url} into it"
    if not (Path(folder) / name).is_dir():
        return f"git clone {url} {Path(folder) / name}"
    with importable(checkout(name)):
        return not_installed(module, module) if module else ""


def checkout(name: str) -> Path:
    """The folder of a peer that is read from a checkout."""
    return Path(os.environ["DSLAUNCH_PEERS"]) / name


@contextlib.contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Modules of `folder` can be imported meanwhile."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
