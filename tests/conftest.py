"""Options of the whole test suite."""

from __future__ import annotations

import gc
import os
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.command import CommandLine
from tests.memo import remember

_OBJECTS = 50_000
"""Made between two collections of garbage: what is remembered would be looked through again and again."""
_OF_A_LAUNCH = re.compile(
    r"DSLAUNCH_(RUN_DIR|WORK_DIR|PLAN|DS_CONFIG|ATTEMPT|RESUME|RUNNER|PYTHON|HOSTS|HOSTFILE|NODE_RANK|MASTER_\w+)"
    r"|(NODE_|LOCAL_|GROUP_)?RANK|(LOCAL_)?WORLD_SIZE|CUDA_VISIBLE_DEVICES"
    r"|(MASTER|SLURM|SBATCH|OMPI|TORCHELASTIC)_\w+"
)
"""Variables of a launch or of a job that the tests may be started in, and are no part of."""
_COMPARED = re.compile(r"(\d+) .*\b0 disagreements")
_REAL = {
    "test_rules_against_deepspeed": "DeepSpeed's parser",
    "test_rules_against_engine": "DeepSpeed's engine",
    "test_rules_against_megatron": "Megatron",
}
"""By the file of the test, what the rules are compared with."""


def pytest_configure() -> None:
    gc.set_threshold(_OBJECTS)
    os.environ.pop("COLUMNS", None)  # pytest-xdist sets it; a test that means a width says so
    for name in filter(_OF_A_LAUNCH.fullmatch, list(os.environ)):
        del os.environ[name]
    remember()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write tests/golden anew instead of comparing with it"
    )
    parser.addoption(
        "--update-docs", action="store_true", help="write the outputs shown in README.md and docs anew"
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was compared with a real program, and how often the two disagreed: a count that passed says so too."""
    compared: Counter[str] = Counter()
    for report in terminalreporter.stats.get("passed", ()):
        for line in report.capstdout.splitlines():
            if match := _COMPARED.fullmatch(line):
                terminalreporter.write_line(f"{report.nodeid}: {line}")
                compared[_REAL.get(Path(report.fspath).stem, "others")] += int(match[1])
    if compared:
        parts = ", ".join(f"{number:,} by {name}" for name, number in compared.items())
        terminalreporter.write_line(f"{compared.total():,} configurations compared, {parts}: 0 disagreements")


@pytest.fixture
def dslaunch(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    """The command line, run in this process."""
    return CommandLine(capsys)


@pytest.fixture(scope="session")
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are written anew."""
    return bool(request.config.getoption("--update-golden"))


@pytest.fixture(scope="session")
def update_docs(request: pytest.FixtureRequest) -> bool:
    """Whether the outputs that pages show are written anew."""
    return bool(request.config.getoption("--update-docs"))
