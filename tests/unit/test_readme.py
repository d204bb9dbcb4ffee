"""README.md is right: its files are written, its commands run in order, its tables compared with the program."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dslaunch.arguments import VERBS
from dslaunch.compose import names
from dslaunch.engines import ENGINES
from dslaunch.launch import LAUNCHERS
from tests.command import CommandLine
from tests.golden.cases import CASES, rendered

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

TRAINS = "trains for a minute: tests/real/test_training.py and test_local_launch.py do it"
INSTALLS = "installs packages: .ci/run does it"
NOT_RUN = {
    "pip install .": INSTALLS,
    "pip install '.[runtime]'": INSTALLS,
    "dslaunch recipe=vla_tiny cluster=local": TRAINS,
    "dslaunch recipe=vla_tiny cluster=local launcher=torchrun": TRAINS,
    "dslaunch recipe=my_vla --config-dir site launcher=ssh 'cluster.hosts=[node-a,node-b]'": "needs hosts",
    "dslaunch recipe=my_vla --config-dir site launcher=slurm launcher.slurm.partition=gpu launcher.slurm.time=12:00:00": (
        "needs SLURM: tests/real/test_slurm_launch.py submits"
    ),
    "dslaunch launch mine launcher=slurm --wait": "needs SLURM: tests/real/test_slurm_launch.py submits",
}
"""Command -> why only its dry run is tried (installations: not even that)."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a reader of the README stands: a folder with what a checkout has, and the README's own files."""
    folder = tmp_path_factory.mktemp("home")
    shutil.copytree(ROOT / "templates", folder / "templates")
    for _, text in blocks("yaml", "python"):
        first, _, rest = text.partition("\n")
        path = folder / first.removeprefix("# ")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(rest, encoding="utf-8")
    return folder


def blocks(*languages: str) -> Iterator[tuple[str, str]]:
    """(language, text) of the fenced blocks in these languages, in order."""
    return ((m[1], m[2]) for m in BLOCK.finditer(README) if m[1] in languages)


def commands() -> list[tuple[str, int, list[str]]]:
    """(command, exit status, lines that its output has to hold) of every line in a bash block."""
    found: list[tuple[str, int, list[str]]] = []
    for language, text in blocks("bash", "text"):
        if language == "text":
            found[-1][2].extend(line for line in text.splitlines() if line != "...")
            continue
        for line in text.splitlines():
            command, _, status = line.partition("  # exit status ")
            found.append((command, int(status or 0), []))
    return found


def run(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    """A command line in bash; `dslaunch` is this interpreter's."""
    shim = f'dslaunch() {{ "{sys.executable}" -m dslaunch "$@"; }}; '
    return subprocess.run(
        ["bash", "-c", shim + command], cwd=folder, env={**os.environ, "COLUMNS": "120"},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_commands_run_and_print_what_is_shown(home: Path) -> None:
    for command, status, shown in commands():
        if command in NOT_RUN:
            continue
        done = run(home, command)
        assert done.returncode == status, f"{command}\n{done.stdout}{done.stderr}"
        printed = {line.rstrip() for line in done.stdout.splitlines()}
        missing = [line for line in shown if line.rstrip() not in printed]
        assert not missing, f"README.md shows of `{command}` what it does not print: {missing}"


def test_launches_that_are_not_run_have_steps(home: Path) -> None:
    run(home, "dslaunch render recipe=my_vla --config-dir site -o mine")
    for command in NOT_RUN:
        if command.startswith("dslaunch"):
            done = run(home, f"{command} launcher.python={sys.executable} --dry-run" if "launch mine" not in command else f"{command} --dry-run")
            assert done.returncode == 0, f"{command}\n{done.stderr}"


def test_what_is_not_run_still_stands_in_the_readme() -> None:
    assert set(NOT_RUN) <= {command for command, _, _ in commands()}


def table(heading: str) -> list[list[str]]:
    """The rows of the table whose first heading this is, as cells without backquotes."""
    lines = README.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            return rows
        rows.append([cell.strip().replace("`", "") for cell in line.strip("|").split("|")])
    raise AssertionError("README.md ends in a table")


def test_keys_are_keys_of_the_schema(dslaunch: CommandLine) -> None:
    keys = [row[0] for row in table("key")]
    assert len(keys) > 30
    for key in keys:
        ran = dslaunch("schema", key)
        assert ran.status == 0, ran.err


def test_named_strategies_are_those_of_conf() -> None:
    (row,) = [row for row in table("key") if row[0] == "strategy"]
    assert all(name in row[1] for name in names("strategy"))


def test_launchers_and_engines_are_those_of_the_program() -> None:
    assert {row[0] for row in table("launcher")} == set(LAUNCHERS)
    listed = {row[0]: row for row in table("engine")}
    assert set(listed) | {"megatron_deepspeed"} == set(ENGINES)
    for name, row in listed.items():
        assert ".".join(ENGINES[name].versions[0].split(".")[:2]) in row[3]


def test_files_are_those_rendered() -> None:
    listed = {row[0] for row in table("file")}
    found = {re.sub(r"ds_config\.\w+\.json", "ds_config.json", name) for words in CASES.values() for name in rendered(*words)}
    assert listed == found


def test_exit_statuses_are_those_of_the_command_line() -> None:
    from dslaunch.cli import run as command_line

    documented = command_line.__doc__ or ""
    for status, *_ in table("status"):
        assert re.search(rf"(^|;)\s*{status} ", documented, re.MULTILINE), f"{status} is not one of run's"


def test_verbs_named_in_the_text_exist() -> None:
    used = set(re.findall(r"`dslaunch ([a-z]+)\b(?!=)", README))
    assert used <= set(VERBS)
