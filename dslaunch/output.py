"""Standard output, and what happens where nobody reads it any more (`dslaunch models | head`)."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import click

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
