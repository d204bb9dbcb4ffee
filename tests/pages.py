"""Pages of documentation that are run: what they show is what comes out, or the page is written anew.

A page is read from top to bottom, in a folder of its own:

- a block with a title (```yaml title="site/recipes/mine.yaml"`), or whose first line is a comment that is a path
  (`# site/recipes/mine.yaml`), is a file, which is written;
- `bash`: commands, one a line (`\\` goes on). `# exit status N` behind one says that it does not end with 0;
- `python`: is run; what it prints is its output;
- `text` behind one of these: lines of the last output, in their order. `...` stands for what is left out;
- `<!-- figures: COLUMN ... -->` to `<!-- end -->`: a table of the `dslaunch plan` commands of the block before.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.command import CommandLine, Ran
from tests.figures import table

_PART = re.compile(
    r'^```(?P<language>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$'
    r"|^<!-- figures: (?P<columns>.*?) -->\n(?P<rows>.*?)^<!-- end -->$",
    re.MULTILINE | re.DOTALL,
)
_PATH = re.compile(r"# ([\w./-]+\.(?:yaml|py|sh))\n")
_STATUS = re.compile(r"\s+# exit status (\d+)$")
_FIGURES = re.compile(r"[\d.,]+")
_SPACE = re.compile(r"\s+|[─━-]{2,}")
LIMIT_S = 300.0


@dataclass
class Folder:
    """Where a page is run, and what it has done so far."""

    path: Path
    dslaunch: CommandLine
    not_run: Mapping[str, str]
    """How a command begins that is not run -> why not."""
    dry: Mapping[str, str]
    """How a launch begins that is run with --dry-run -> why."""
    output: str = ""
    """What the last block printed."""
    tabled: bool = False
    """Whether a table follows the part: its commands are plans, and are asked for --json."""
    plans: list[tuple[str, Ran]] = field(default_factory=list)
    """What they printed, by command."""
    names: dict[str, object] = field(default_factory=dict)
    """What the page's Python has defined."""


def refreshed(text: str, folder: Folder) -> str:
    """The page with every output as it really is.

    Raises:
        AssertionError: a command ends otherwise than the page says, or prints no line like one that is shown.
    """
    parts = list(_PART.finditer(text))
    fresh, done = "", 0
    for part, after in zip(parts, [*parts[1:], None], strict=True):
        folder.tabled = after is not None and after["columns"] is not None
        fresh += text[done : part.start()] + _part(part, folder)
        done = part.end()
    return fresh + text[done:]


def commands(text: str) -> Iterator[tuple[str, int]]:
    """(command, the status it ends with) of a bash block."""
    for line in text.replace("\\\n", " ").splitlines():
        status = _STATUS.search(line)
        command = _STATUS.sub("", line).strip()
        if command and not command.startswith("#"):
            yield command, int(status[1]) if status else 0


def bash_blocks(text: str) -> Iterator[str]:
    """The commands' blocks of a page."""
    return (m["text"] for m in _PART.finditer(text) if m["language"] == "bash" and not m["title"])


def _part(found: re.Match[str], folder: Folder) -> str:
    if found["columns"] is not None:
        return f"<!-- figures: {found['columns']} -->\n{table(folder.plans, found['columns'].split())}<!-- end -->"
    named = _PATH.match(found["text"])
    if found["title"] or named:
        path = folder.path / (found["title"] or str(named and named[1]))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(found["text"], encoding="utf-8")
    elif found["language"] == "text":
        start, end = (found.start("text") - found.start(), found.end("text") - found.start())
        return found[0][:start] + _shown(found["text"], folder.output) + found[0][end:]
    elif found["language"] == "bash" and folder.tabled:
        return f"```bash\n{_planned(found['text'], folder)}```"
    elif found["language"] in _RUN:
        _RUN[found["language"]](found["text"], folder)
    return found[0]


def _planned(text: str, folder: Folder) -> str:
    """Runs the plans of a table; whether one fits is the table's business, and is said behind its command."""
    folder.plans, lines = [], []
    for command, _ in commands(text):
        ran = folder.dslaunch(*shlex.split(command)[1:], "--json")
        assert ran.out, f"{command} ends with {ran.status} and without a plan\n{ran.err}"
        folder.plans.append((command, ran))
        lines.append(f"{command} # exit status {ran.status}\n" if ran.status else f"{command}\n")
    return "".join(lines)


def _run_bash(text: str, folder: Folder) -> None:
    for command, status in commands(text):
        if any(command.startswith(start) for start in folder.not_run):
            continue
        program, *words = shlex.split(command)
        if program != "dslaunch" or "|" in words or ">" in words:
            folder.output = _shell(command, folder.path, status)
            continue
        words += ["--dry-run"] if any(command.startswith(start) for start in folder.dry) else []
        ran = folder.dslaunch(*words)
        assert ran.status == status, f"{command} ends with {ran.status}, not {status}\n{ran.out}{ran.err}"
        folder.output = ran.out + ran.err


def _shell(command: str, where: Path, status: int) -> str:
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-ec", command], cwd=where, capture_output=True, text=True, timeout=LIMIT_S,
        check=False,
    )  # fmt: skip
    assert done.returncode == status, f"{command} ends with {done.returncode}, not {status}\n{done.stderr}"
    return done.stdout + done.stderr


def _run_python(text: str, folder: Folder) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(text, "<page>", "exec"), folder.names)
    folder.output = printed.getvalue()


_RUN: dict[str, Callable[[str, Folder], None]] = {"bash": _run_bash, "python": _run_python}


def _shown(text: str, output: str) -> str:
    """The lines of a text block, each as the output really has it: the same line, or the next one of its shape."""
    real = [line.rstrip() for line in output.splitlines()]
    after = 0
    lines = []
    for line in text.splitlines():
        if line == "...":
            lines.append(line)
            continue
        place = _find(line.rstrip(), real, after)
        assert place is not None, f"no line like this is printed:\n{line}\nprinted was:\n{output}"
        lines.append(real[place])
        after = place + 1
    return "".join(f"{line}\n" for line in lines)


def _find(line: str, real: list[str], after: int) -> int | None:
    for same in (lambda text: text, _shape):
        places = [n for n in range(after, len(real)) if same(real[n]) == same(line)]
        if places:
            return places[0]
    return None


def _shape(line: str) -> str:
    """A line without its figures, and with one space for many."""
    return _SPACE.sub(" ", _FIGURES.sub("#", line)).strip()
