"""Commands that start programs on ranks: `srun torchrun ... train.py ...`, read from the outside in."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from dslaunch.files.flags import Arguments, Word, launcher_options, script_arguments
from dslaunch.files.position import Position
from dslaunch.files.shell import Assignment
from dslaunch.files.switches import CONTAINERS, RUNS, SWITCHES, WRAPPERS

_PYTHON = re.compile(r"(?:py)?python[\d.]*")
_PROGRAMS = {
    "deepspeed": "deepspeed",
    "ds": "deepspeed",
    "mpiexec": "mpirun",
    "mpirun": "mpirun",
    "orterun": "mpirun",
    "srun": "srun",
    "torchrun": "torchrun",
}
_MODULES = {
    "accelerate.commands.launch": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
    "torch.distributed.launch": "torchrun",
    "torch.distributed.run": "torchrun",
}
_MODULE_OPTIONS = ("-m", "--module")
_OPERATORS = frozenset({"&", "&&", "&>", ";", "<", ">", ">>", "2>", "2>&1", "|", "|&", "||"})
"""Where a command ends that eval or `bash -c` reads: `eval "python train.py --lr 1 | tee log"`."""
_BARE_OPTIONS = ("--no_python", "--no-python")


@dataclass(frozen=True)
class Launcher:
    """One program that starts others."""

    program: str
    """deepspeed | torchrun | srun | accelerate | mpirun | python"""
    spelled: str
    """As typed: `torchrun`, `torch.distributed.launch`, `python3`."""
    options: Arguments
    at: Position


@dataclass(frozen=True)
class CommandLine:
    """A command that starts a program on ranks."""

    at: Position
    launchers: tuple[Launcher, ...]
    """From the outside in."""
    script: Word | None
    """The program: a Python file, a module's name, or a command; None where the command names none."""
    module: bool
    """`script` is a module's name."""
    arguments: Arguments
    """What follows it."""
    environment: tuple[Assignment, ...]
    conditional: bool
    """It stands in an if, a loop, a case or a function."""
    components: bool = False
    """An srun over components of a heterogeneous job (`:` or --het-group): others than the one read here too."""

    def launcher(self, program: str) -> Launcher | None:
        """The launcher of this name, or None."""
        return next((launcher for launcher in self.launchers if launcher.program == program), None)

    @property
    def complete(self) -> bool:
        """Whether every word is told."""
        return self.arguments.complete and all(launcher.options.complete for launcher in self.launchers)


def command_line(
    words: Sequence[Word], at: Position, environment: tuple[Assignment, ...], *, conditional: bool
) -> CommandLine | None:
    """The command that these words make, or None where it starts nothing on ranks."""
    launchers: list[Launcher] = []
    module = bare = False
    rest = _from_launcher(words, first=True)
    while rest and (program := _program(rest)):
        launcher, rest = _launcher(program, rest)
        launchers.append(launcher)
        module = launcher.options.has(*_MODULE_OPTIONS) and program != "srun"
        bare = launcher.options.has(*_BARE_OPTIONS) or program in ("srun", "mpirun")
        if program == "python" and launcher.options.has("-c"):
            return None
        if not bare:
            break
        rest = _from_launcher(rest, first=False)
    if not launchers or (launchers[-1].program == "python" and not rest):
        return None
    script = rest[0] if rest else None
    own = list(takewhile(lambda word: word.text not in _OPERATORS, rest[1:]))
    arguments = _settled(script_arguments(own), script)
    components = launchers[0].program == "srun" and _over_components(launchers[0].options, words)
    return CommandLine(at, tuple(launchers), script, module, arguments, environment, conditional, components)


def _over_components(srun: Arguments, words: Sequence[Word]) -> bool:
    return srun.has("--het-group", "--pack-group") or any(word.text == ":" for word in words)


def _settled(arguments: Arguments, script: Word | None) -> Arguments:
    """Where the script itself isn't told, its arguments may not be all; of `$ROOT/train.py` they are."""
    if script is None or script.known or script.text.endswith(".py"):
        return arguments
    return Arguments(arguments.flags, arguments.words, complete=False)


def _from_launcher(words: Sequence[Word], *, first: bool) -> Sequence[Word]:
    """The words from the launcher on, past what wraps it: `exec`, `env A=1`, `nsys profile ...`, a container."""
    if words and _program(words):
        return words
    if first and words and _name(words[0]) == "kubectl":
        return _in_pod(words)
    if first and words and _name(words[0]) in CONTAINERS and not _runs_command(words):
        return ()
    if words and (not first or _name(words[0]) in WRAPPERS):
        for at in range(1, len(words)):
            if _program(words[at:]):
                return words[at:]
            if words[at].text.endswith((".py", ".sh")):
                break
    return () if first else words


def _in_pod(words: Sequence[Word]) -> Sequence[Word]:
    """What `kubectl exec POD -- COMMAND` runs."""
    texts = [word.text for word in words]
    at = texts.index("--") + 1 if "exec" in texts and "--" in texts else len(words)
    return _from_launcher(words[at:], first=True) if "exec" in texts[:at] else ()


def _runs_command(words: Sequence[Word]) -> bool:
    """Whether the container's command follows: not of `docker build -t deepspeed`, nor behind --entrypoint."""
    entry = any(word.text.partition("=")[0] == "--entrypoint" for word in words)
    return not entry and any(word.text in RUNS for word in words[1:4])


def _name(word: Word) -> str:
    return word.text.rpartition("/")[2]


def _program(words: Sequence[Word]) -> str:
    """The launcher that the first words name; empty where they name none."""
    name = _name(words[0])
    if name == "accelerate":
        return "accelerate" if len(words) > 1 and words[1].text == "launch" else ""
    if _PYTHON.fullmatch(name):
        return "python"
    return _PROGRAMS.get(name, "")


def _launcher(program: str, words: Sequence[Word]) -> tuple[Launcher, Sequence[Word]]:
    """The launcher at the front, and the words behind its options."""
    head = words[0]
    if program == "python":
        options, rest = launcher_options(words[1:], SWITCHES["python"])
        inner = _MODULES.get(rest[0].text, "") if options.has("-m") and rest else ""
        if not inner:
            return Launcher("python", _name(head), options, head.at), rest
        module = rest[0]
        options, rest = _options(inner, rest[1:])
        return Launcher(inner, module.text, options, module.at), rest
    start = 2 if program == "accelerate" else 1
    options, rest = _options(program, words[start:])
    return Launcher(program, _name(head), options, head.at), rest


def _options(program: str, words: Sequence[Word]) -> tuple[Arguments, Sequence[Word]]:
    """The launcher's options; a variable among them that isn't told may hold more."""
    options, rest = launcher_options(words, SWITCHES[program], joined=program == "srun")
    while rest and not rest[0].known and any(word.text.endswith(".py") for word in rest[1:]):
        more, rest = launcher_options(rest[1:], SWITCHES[program], joined=program == "srun")
        options = Arguments((*options.flags, *more.flags), complete=False)
    return options, rest
