"""What is printed beside a result: notes, steps and progress on standard error; and an output that nobody reads.

-q leaves the result and mistakes; -v adds each step with its seconds. Progress shows on a terminal only, after a
second.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dslaunch.arguments import Words

if TYPE_CHECKING:
    from rich.progress import Progress

T = TypeVar("T")
_PATIENCE_S = 1.0
"""What is done by then shows no progress."""

_open: list[str] = []
"""Names of what is shown: the outermost of what is going on. Two lines of progress would overwrite each other."""

CLOSED = 128 + signal.SIGPIPE
"""Exit status of a program whose output was closed, as a shell reports it."""


class OutputClosedError(Exception):
    """A BrokenPipeError on its way through click, which would end the program with status 1."""


class Verbs(click.Group):
    """A group of verbs that says where its output was closed."""

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        """Where --help and --version are printed."""
        try:
            return super().make_context(*args, **extra)
        except BrokenPipeError as error:
            raise OutputClosedError from error

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise OutputClosedError from error


def discard_output() -> None:
    """What is still written goes nowhere, also when the interpreter ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def tell(message: str) -> None:
    """A line about a job, which goes on where nobody reads it."""
    try:
        click.echo(message)
    except BrokenPipeError:
        discard_output()


def note(message: str) -> None:
    """A line on standard error that -q leaves out."""
    if not _asked("quiet"):
        click.echo(message, err=True)


@contextmanager
def step(name: str) -> Iterator[None]:
    """A step of the flow: shown while it lasts on a terminal, and said with its seconds under -v."""
    began = time.perf_counter()
    with _shown(name, None):
        yield
    if _asked("verbose"):
        click.echo(f"dslaunch: {name}: {time.perf_counter() - began:.2f} s", err=True)


@contextmanager
def bar(name: str, total: int) -> Iterator[Callable[[T], T]]:
    """Progress over `total` things: what is yielded takes a finished one, and gives it back."""
    with _shown(name, total) as progress:

        def advance(done: T) -> T:
            if progress:
                progress.advance(progress.task_ids[0])
            return done

        yield advance


@contextmanager
def _shown(name: str, total: int | None) -> Iterator[Progress | None]:
    """A line of progress from the second second on; None where nobody would see it."""
    if _open or _asked("quiet") or not sys.stderr or not sys.stderr.isatty():
        yield None
        return
    from rich import progress as rich
    from rich.console import Console

    counted = () if total is None else (rich.BarColumn(), rich.MofNCompleteColumn())
    columns = (rich.SpinnerColumn(), rich.TextColumn("{task.description}"), *counted, rich.TimeElapsedColumn())
    progress = rich.Progress(*columns, console=Console(stderr=True), transient=True)
    progress.add_task(name, total=total)
    later = Timer(_PATIENCE_S, progress.start)
    later.start()
    _open.append(name)
    try:
        yield progress
    finally:
        _open.remove(name)
        later.cancel()
        later.join()
        progress.stop()


def _asked(how: str) -> bool:
    """Whether the command line that is being run asks for `quiet` or `verbose`."""
    context = click.get_current_context(silent=True)
    words = context.find_object(Words) if context else None
    return bool(words and getattr(words, how))
