"""README.md is right: its files are written, its commands run in order, its tables compared with the program."""

from __future__ import annotations

import difflib
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dslaunch import cli, conffiles
from dslaunch.arguments import VERBS
from dslaunch.launch import LAUNCHERS
from tests.command import CommandLine
from tests.golden.cases import CASES, rendered

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

NOT_RUN = {
    "make demo": ".ci/run does",
    "make test": "this is it",
    "pip install .": "installs packages: .ci/run installs the wheel",
    "pip install '.[runtime]'": "installs packages: `make demo` installs them",
}
DRY_RUN = {
    "dslaunch recipe=vla_tiny cluster=local": "trains for a minute: tests/real/test_training.py does it",
    "dslaunch recipe=vla_tiny cluster=local launcher=torchrun": "the same",
    "dslaunch recipe=my_vla --config-dir site launcher=ssh": "needs two hosts",
    "dslaunch recipe=my_vla --config-dir site launcher=slurm": "needs SLURM: test_slurm_launch.py submits",
    "dslaunch launch mine launcher=slurm --wait": "the same",
}
"""How a launch begins that is run with --dry-run, and why."""


@dataclass(frozen=True)
class Command:
    """One line of a bash block."""

    line: str
    status: int
    shown: list[str] = field(default_factory=list)
    """Lines of the text block after it: its output has to hold them."""


def blocks(*languages: str) -> Iterator[tuple[str, str]]:
    """(language, text) of the fenced blocks in these languages, in order."""
    return ((match[1], match[2]) for match in BLOCK.finditer(README) if match[1] in languages)


def commands() -> list[Command]:
    found: list[Command] = []
    for language, text in blocks("bash", "text"):
        if language == "text":
            found[-1].shown.extend(line.rstrip() for line in text.splitlines() if line != "...")
            continue
        for line in text.splitlines():
            command, _, status = line.partition("  # exit status ")
            found.append(Command(command, int(status or 0)))
    return found


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a reader of the README stands: a folder with what a checkout has, and the README's own files."""
    shutil.copytree(ROOT / "templates", tmp_path / "templates")
    for _, text in blocks("yaml", "python"):
        first, _, rest = text.partition("\n")
        path = tmp_path / first.removeprefix("# ")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(rest, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    return tmp_path


def test_commands_run_in_order_and_print_what_is_shown(home: Path, dslaunch: CommandLine) -> None:
    for command in commands():
        if command.line in NOT_RUN:
            continue
        program, *words = shlex.split(command.line)
        if program != "dslaunch":
            subprocess.run(["bash", "-ec", command.line], cwd=home, check=True, timeout=60)
            continue
        ran = dslaunch(*words, *(["--dry-run"] if command.line.startswith(tuple(DRY_RUN)) else []))
        assert ran.status == command.status, f"{command.line}\n{ran.out}{ran.err}"
        printed = [line.rstrip() for line in ran.out.splitlines()]
        for line in command.shown:
            assert line in printed, (
                f"README.md shows of `{command.line}` a line that it does not print; the nearest are\n"
                + "\n".join(difflib.get_close_matches(line, printed))
            )


def test_what_is_not_run_stands_in_the_readme() -> None:
    lines = [command.line for command in commands()]
    assert set(NOT_RUN) <= set(lines)
    assert all(any(line.startswith(start) for line in lines) for start in DRY_RUN)


def table(heading: str) -> list[list[str]]:
    """The rows of the table whose first heading this is, as cells without backquotes."""
    lines = README.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    rows: list[list[str]] = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().replace("`", "") for cell in line.strip("|").split("|")])
    return rows


@pytest.mark.parametrize("key", [row[0] for row in table("key")])
def test_key_is_a_key_of_the_schema(key: str, dslaunch: CommandLine) -> None:
    ran = dslaunch("schema", key)
    assert ran.status == 0, ran.err


def test_strategies_are_those_of_conf() -> None:
    (row,) = [row for row in table("key") if row[0] == "strategy"]
    named = set(re.findall(r"[a-z]+[0-9]\w*|ddp|layouts|auto", row[1]))
    assert len(named) > 5
    assert named <= set(conffiles.names("strategy"))


def test_launchers_and_engines_are_those_of_the_program() -> None:
    assert {row[0] for row in table("launcher")} == set(LAUNCHERS)
    assert {row[0] for row in table("engine")} | {"auto"} == set(conffiles.names("engine"))


def test_files_are_those_rendered() -> None:
    found = " ".join(name for words in CASES.values() for name in rendered(*words))
    assert {row[0] for row in table("file")} == set(re.sub(r"(ds_config)\.\w+(?=\.)", r"\1", found).split())


def test_exit_statuses_are_those_of_the_command_line() -> None:
    documented = cli.run.__doc__ or ""
    for status, _ in table("status"):
        assert re.search(rf"(^|;)\s*{status} ", documented, re.MULTILINE), f"{status} is not one of run's"


def test_verbs_in_the_text_exist() -> None:
    assert set(re.findall(r"`dslaunch ([a-z]+)\b(?!=)", README)) <= set(VERBS)
