"""Fixtures of the unit tests."""

from __future__ import annotations

import pytest

from tests.command import CommandLine


@pytest.fixture
def dslaunch(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    """The command line, run in this process."""
    return CommandLine(capsys)
