"""What a shell makes of a script's words: commands that end early, arrays, assignments, and jobs left behind."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from dslaunch.files.blocks import ends
from dslaunch.files.commands import CommandLine
from dslaunch.files.fileset import File, FileSet
from dslaunch.files.flags import Word
from dslaunch.files.lexer import tokens
from dslaunch.files.position import Position
from dslaunch.files.script import Command, ShellScript
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Edit, Hit, rule
from dslaunch.rules.settings import Settings

_BASH = "the manual page of bash 5.2, run"
_OPTION = re.compile(r"--[A-Za-z][\w-]*(?:=.*)?", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*")
_BLANK_END = re.compile(r"(?<!\\)\\[ \t]+$")
_BEFORE_COMMENT = re.compile(r"^(?![ \t]*#)[^#\n]*\S[ \t]+(?P<joins>\\[ \t]+#.*)$", re.MULTILINE)
_ARRAY = re.compile(r"\w+\+?=\(")
_PLAIN = re.compile(r"=|[\w.,:/-]+")
_VALUE = re.compile(r"[\d.,:/]*\d[\d.,:/]*|[A-Z][A-Z_]+")
"""A number or a word in capitals: a variable's value, and no command's name."""
_ZSH = re.compile(r"#!.*\bzsh\b")


def _launching(files: FileSet) -> Iterator[tuple[File, ShellScript]]:
    """Scripts that start programs on ranks."""
    return ((file, script) for file, script in files.scripts() if script.launches)


@rule("shell.cut-command", severity="wrong", raised_by="nobody", evidence=_BASH)
def cut(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """An option where a command begins: the one before it ended without a backslash, or at a comment."""
    for file, script in _launching(files):
        yield from _comments(file) if not script.problems and not file.inside else ()
        lines = file.lines
        for before, command in pairwise(script.commands):
            word = command.words[0]
            line = lines[command.at.line - 2] if command.at.line > 1 else ""
            if not _OPTION.fullmatch(word.text) or command.at.line <= before.at.line:
                continue
            if _BLANK_END.search(line):
                continue  # launcher.line-end says it
            name = word.text.partition("=")[0]
            why = "a comment ends a command" if "#" in line else "the line before ends without a backslash"
            message = f"{why}: {before.words[0].text} runs without {name}, which is then run by itself."
            fix = (
                "Take the comment out of the command."
                if "#" in line
                else "End the line before with a backslash."
            )
            yield Hit(file.name, command.at, message, fix)


def _comments(file: File) -> Iterator[Hit]:
    """Comments behind a backslash: it is no longer the last character, and makes the blank behind it a word."""
    arrays = [token for token in tokens(file.text) if _ARRAY.match(file.text, token.start, token.end)]
    read = [token for token in tokens(file.text) if token.kind in ("word", "heredoc") and token not in arrays]
    for each in arrays:
        read += tokens(file.text, file.text.index("(", each.start) + 1, each.end - 1)
    for found in _BEFORE_COMMENT.finditer(file.text):
        start = found.start("joins")
        if any(token.start < start < token.end for token in read):
            continue
        inside = next((token for token in arrays if token.start < start < token.end), None)
        what = "the command ends here" if inside is None else "the array is longer"
        message = f"a backslash in front of a comment joins no lines: {what}, with words that aren't meant."
        at = file.places.position(start)
        edit = Edit(at, found["joins"], "\\" if inside is None else found["joins"].lstrip("\\ \t"))
        yield Hit(file.name, at, message, "Take the comment out of the command.", edit=edit)


@rule("shell.quoted-comment", severity="wrong", raised_by="nobody", evidence=_BASH)
def quoted_comment(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A comment inside quotes, among a command's options: its words are handed on to the program."""
    for file, script in _launching(files):
        lines = file.places
        launched = {command.at for command in script.launches}
        words = (word for each in script.commands if each.at in launched for word in _handed_on(each))
        for word in words:
            if word.text.startswith("#") and file.text.startswith("#", lines.offset(word.at)):
                message = "inside quotes # begins no comment: it reaches the program, as the words behind it do."
                yield Hit(file.name, word.at, message, "Take the comment out of the quotes.")


def _handed_on(command: Command) -> tuple[Word, ...]:
    """The words of a command that no further shell reads, to which a # would begin a comment."""
    return () if any(word.text in ("eval", "bash", "sh") for word in command.words) else command.words


@rule("shell.array", severity="wrong", raised_by="nobody", evidence=_BASH)
def array(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """An array without [@]: only its first word reaches the command."""
    for file, script in _launching(files):
        for name, at in () if _ZSH.match(file.text) else script.first_words:
            message = f"${{{name}}} is the first word of the array alone; the others aren't handed on."
            yield Hit(file.name, at, message, f'Write "${{{name}[@]}}".')


@rule("shell.assignment", severity="wrong", raised_by="nobody", evidence=_BASH)
def assignment(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A blank beside the = of an assignment, or within its value: the variable is empty or cut off."""
    for file, script in files.scripts():
        for words in script.declared:
            for before, word in pairwise(words):
                yield from _parted(file, before, word)
        lines = file.lines
        for command in script.commands if script.launches else ():
            words = command.words
            counts = "((" in lines[command.at.line - 1][: command.at.column]  # for (( i = 0; ...
            named = len(words) > 1 and words[1].text == "=" and _NAME.fullmatch(words[0].text)
            if named and not counts and words[0].text not in _COMMANDS and _is_bare(lines, words[1]):
                name = words[0].text
                message = f"`{name} =` runs a command named {name}: the variable isn't set."
                yield Hit(file.name, command.at, message, f"Write {name}=VALUE without blanks.")
            if command.environment and _VALUE.fullmatch(words[0].text):
                last = command.environment[-1]
                if last.value.endswith(",") or (not last.value and len(words) == 1):
                    message = f"{last.name} is {last.value!r}, and {words[0].text} is run as a command."
                    yield Hit(file.name, last.at, message, _without_blanks(last.name))


_COMMANDS = frozenset(
    {"echo", "printf", "print", "test", "expr", "let", "read", "grep", "awk", "sed", "cut", "tr"}
)
"""Programs and builtins that may be given a word `=`."""


def _is_bare(lines: Sequence[str], word: Word) -> bool:
    """Whether an `=` stands there without quotes."""
    return lines[word.at.line - 1][word.at.column - 1 :].startswith("=")


def _parted(file: File, before: Word, word: Word) -> Iterator[Hit]:
    """What `export` makes of a value, or of an `=`, that a blank parts from its name."""
    name, equals, value = before.text.partition("=")
    if not _NAME.fullmatch(name) or not _PLAIN.fullmatch(word.text):
        return
    if word.text == "=":
        message = f"`{name} =` sets nothing: bash says that '=' is not a valid identifier."
    elif equals and (value.endswith(",") or (not value and _VALUE.fullmatch(word.text))):
        names = "exported as a name" if _NAME.fullmatch(word.text) else "refused: not a valid identifier"
        message = f"{name} is {value!r}, and {word.text} behind the blank is {names}."
    else:
        return
    yield Hit(file.name, before.at, message, _without_blanks(name))


def _without_blanks(name: str) -> str:
    return f"Write {name}=VALUE without blanks, or with quotes around the value."


@rule("slurm.no-wait", severity="wrong", raised_by="nobody", evidence="SLURM 22.05, run")
def no_wait(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A launch in the background and no wait behind it: the job ends with the script, and its steps are killed."""
    for file, script in files.scripts():
        if not script.directives or file.inside:
            continue
        launched, lines = {each.at for each in script.launches}, file.places
        held = [(lines.position(start), lines.position(end)) for start, end in ends(file.text).items()]
        for command in script.commands:
            if not command.background or (command.words[0].text != "srun" and command.at not in launched):
                continue
            around = [end for start, end in held if start < command.at < end]
            behind = [each for each in script.commands if each.at > command.at]
            serves = any(word.text.rpartition("/")[2] in _SERVERS for word in command.words)
            if serves and any(not each.background for each in behind):
                continue  # it is to end with the job
            left = max(around, default=command.at)
            if not any(_lasts(each, left) for each in behind):
                program = command.words[0].text
                message = f"{program} runs in the background, and nothing waits: it is killed as the job ends."
                yield Hit(file.name, command.at, message, "Add `wait` as the last line.")


def _lasts(command: Command, left: Position) -> bool:
    """Whether a command may last as long as a step: `wait`, another launch in front, or what a loop does behind.

    Args:
        left: where the block ends in which the step is started.
    """
    name = command.words[0].text
    if "wait" in name or name == "fg":
        return True
    if name == "tail" and not any(word.text.startswith(_FOLLOWS) for word in command.words):
        return False
    if command.at < left:
        moment = name == "sleep" and len(command.words) == 2 and _MOMENT.fullmatch(command.words[1].text)
        return name in _LASTING and not command.background and not moment
    return command.conditional or (name in _LASTING and not command.background)


_SERVERS = frozenset({"dcgmi", "mlflow", "nvidia-smi", "prometheus", "ray", "redis-server", "rocm-smi", "vllm"})
"""Programs that serve or watch another one."""
_FOLLOWS = ("-f", "-F", "--follow", "--pid")
_MOMENT = re.compile(r"[\d.]{1,3}s?")
"""Up to some minutes, between one start and the next."""
_LASTING = frozenset(
    {"srun", "torchrun", "deepspeed", "python", "python3", "bash", "sh", "sleep", "tail", "mpirun"}
)


@rule(
    "launcher.shared-port",
    severity="error",
    raised_by="torch",
    evidence="deepspeed 0.19.8 and torch 2.13, run",
)
def shared_port(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """Two launches at a time on one node with one port."""
    for file, script in files.scripts():
        ports: dict[str, int] = {}
        backgrounds = {
            command.at: command.background for command in script.commands if not command.conditional
        }
        for at, name, port in _events(script):
            if name == "wait":
                ports.clear()
            elif port in ports:
                message = (
                    f"line {ports[port]} already runs with port {port} on this node: address already in use."
                )
                yield Hit(file.name, at, message, "Give each its own --master_port.")
            elif backgrounds.get(at):
                ports[port] = at.line


def _events(script: ShellScript) -> Iterator[tuple[Position, str, str]]:
    """(place, program, port) of what starts ranks on this node alone, and of each `wait`, in order."""
    found = [(each.at, "wait", "") for each in script.commands if each.words[0].text == "wait"]
    for command in script.launches:
        if not command.conditional and (port := _port(command)):
            found.append((command.at, command.launchers[0].program, port))
    return iter(sorted(found))


def _port(command: CommandLine) -> str:
    """Where the ranks of this node meet; empty where another node, or nobody, tells it."""
    launcher = command.launchers[0]
    options = launcher.options
    if launcher.program not in ("deepspeed", "torchrun") or not options.complete:
        return ""
    if command.at != launcher.at:
        return ""  # on another host, or in a container of its own
    if options.has("--hostfile", "-H", "--standalone", "--rdzv-backend", "--rdzv_backend"):
        return ""
    if options.value("--nnodes") not in (None, "1"):
        return ""
    given = options.value("--master-port", "--master_port")
    return given or (_DEEPSPEED_PORT if launcher.program == "deepspeed" else "")


_DEEPSPEED_PORT = "29500"
"""deepspeed/constants.py TORCH_DISTRIBUTED_DEFAULT_PORT; torchrun takes a free port on one node."""
