"""The arguments of a command against the parser of the script that it starts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from dslaunch.engines.trainer_catalogue import trainer_words
from dslaunch.errors import nearest
from dslaunch.files import loops
from dslaunch.files.commands import CommandLine
from dslaunch.files.fileset import File, FileSet
from dslaunch.files.flags import Flag, is_told
from dslaunch.files.position import Position
from dslaunch.files.script import ShellScript
from dslaunch.planfile import Plan
from dslaunch.rules.huggingface.arguments import slip
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.launched import launched
from dslaunch.rules.scripts.parser import Parser, parser_of
from dslaunch.rules.scripts.tree import scripts
from dslaunch.rules.settings import Settings

_ARGPARSE = "python/cpython:Lib/argparse.py 3.11 to 3.13, run"
_NAMED = re.compile(r"argument ([^:]+): (.*)", re.DOTALL)
_MISSING = re.compile(r"the following arguments are required: (.*)", re.DOTALL)
_SHOWN = 50


@rule(
    "script.argument", severity="error", raised_by="python",
    evidence=f"{_ARGPARSE}; huggingface/transformers:src/transformers/hf_argparser.py 5.24.0, run",
)  # fmt: skip
def argument(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """An argument of the command that the script's parser refuses, or one that it needs and doesn't get."""
    for file, command, script in launched(files):
        parser = parser_of(script)
        if parser is not None and not _is_a_file(command) and not _goes_on(command):
            yield from islice(_faults(file, command, parser, script.path.rpartition("/")[2]), _SHOWN)


@rule("script.argument-twice", severity="error", raised_by="python", evidence=_ARGPARSE)
def twice(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A parser that gets one option twice: ArgumentError as soon as the script starts."""
    for script in scripts(files):
        parser = parser_of(script)
        for name, option in parser.twice() if parser and parser.raises == "SystemExit" else ():
            message = f"{name} is added a second time: argparse raises ArgumentError."
            yield Hit(script.path, script.python.at(option.at), message, "Keep one, or name the other otherwise.")


def _is_a_file(command: CommandLine) -> bool:
    """Whether the only argument is a file of arguments, which a script may read instead."""
    words = command.arguments.words
    return not command.arguments.flags and len(words) == 1 and words[0].text.endswith((".json", ".yaml", ".yml"))


def _goes_on(command: CommandLine) -> bool:
    """Whether it stands in a quoted program whose next commands follow, their line ends lost: `bash -c '...'`."""
    given = command.arguments
    words = [word.text for word in given.words] + [value for flag in given.flags for value in flag.values]
    return not _KEYWORDS.isdisjoint(word for text in words for word in text.split())


_KEYWORDS = frozenset({"if", "then", "fi", "do", "done", "[[", "esac", "elif", "echo"})
"""Words of a shell that no program is given."""


def _faults(file: File, command: CommandLine, parser: Parser, path: str) -> Iterator[Hit]:
    words = _words(command)
    if any("~" in flag.name for flag in command.arguments.flags):
        return  # --lr~'loguniform(...)': orion reads it, and starts the script with a value
    try:
        unknown = parser.unknown(words)
    except ValueError as error:
        if not _is_gap(file, command, str(error)):
            yield _told(file, command, str(error), path)
        return
    rest = {*unknown, *(each.partition("=")[0] for each in unknown)}
    found = [*_strange(file, command, parser, rest, path), *_loose(file, command, parser, rest, path)]
    yield from found
    told = [each for each in unknown if is_told(each) and each.strip()]  # a blank one is launcher.line-end's
    if told and not found and parser.raises == "SystemExit":
        message = f"{path} doesn't take {' '.join(told)}: {_ends(parser)}, unrecognized arguments."
        yield Hit(file.name, _start(command), message, f"Take it out, or add it to the parser of {path}.")
    if command.arguments.complete:
        missing = _MISSING.fullmatch(parser.missing(words))
        if missing:
            message = f"{path} needs {missing[1]}, and this command doesn't give it: {_ends(parser)}."
            yield Hit(file.name, _start(command), message, "Give it.")
    if misfit := parser.misfit(words):
        yield _told(file, command, misfit, path)
    else:
        yield from _in_a_pass(file, command, parser, path)


_CHOOSES = re.compile(r"\b(?:if|case|continue)\b|&&|\|\|")


def _in_a_pass(file: File, command: CommandLine, parser: Parser, path: str) -> Iterator[Hit]:
    """The first value that a loop's variable gives an option, and that the parser refuses."""
    script = file.value
    for flag in command.arguments.flags if isinstance(script, ShellScript) and script.passes else ():
        for value in (each for each in flag.values if not is_told(each)):
            at = file.places.offset(flag.at)
            held = loops.filled(value, script.passes, at)
            if held is not None and _CHOOSES.search(file.text, held.start, at):
                continue  # not each pass gets here
            for one in held.values[:_SHOWN] if held is not None else ():
                given = replace(flag, values=tuple(one if each == value else each for each in flag.values))
                refused = parser.misfit(_typed(given)) if is_told(one) else ""
                named = _NAMED.fullmatch(refused)
                if held is not None and named and _is_named(flag, named[1].split("/")):
                    message = f"where {held.name} is {one}, the parser of {path} stops: {refused}."
                    yield Hit(file.name, flag.at, message, "Give what the parser takes in each pass.")
                    break


def _is_gap(file: File, command: CommandLine, text: str) -> bool:
    """Whether an option lacks its value because a variable is empty here, which something else may fill."""
    named = _NAMED.fullmatch(text)
    flag = command.arguments.flag(*named[1].split("/")) if named and "expected" in text else None
    if flag is None:
        return False
    behind = file.text[file.places.offset(flag.at) + len(flag.name) :].lstrip(" \t\n\\=\"'")
    return behind.startswith("$")


def _start(command: CommandLine) -> Position:
    return command.script.at if command.script else command.at


def _strange(file: File, command: CommandLine, parser: Parser, rest: set[str], path: str) -> Iterator[Hit]:
    """Options that the parser doesn't have."""
    of_trainer = trainer_words("arguments") if parser.raises == "ValueError" else {}
    for flag in command.arguments.flags:
        name = flag.name
        if name not in rest or not is_told(name) or (of_trainer and slip(name.removeprefix("--"), of_trainer)):
            continue
        message = f"{path} has no argument {name}: {_ends(parser)}.{nearest(name, parser.names)}"
        yield Hit(file.name, flag.at, message, f"Correct it, or add it to the parser of {path}.")


def _loose(file: File, command: CommandLine, parser: Parser, rest: set[str], path: str) -> Iterator[Hit]:
    """Words that no argument takes: before all options, or behind one that takes fewer, or none."""
    for word in command.arguments.words:
        if word.text in rest and word.known and is_told(word.text):
            message = f"{path} has no place for {word.text}: {_ends(parser)}, unrecognized arguments."
            yield Hit(file.name, word.at, message, f"Take it out, or put the option before it that {path} has.")
    for flag in command.arguments.flags:
        left = [value for value in _left(parser, flag) if value in rest and is_told(value)]
        if left and flag.name not in rest:
            shown = " ".join(left)
            message = f"{flag.name} of {path} doesn't take {shown}: {_ends(parser)}, unrecognized arguments."
            yield Hit(file.name, flag.at, message, f"Take {shown} out, or change the argument in {path}.")


def _left(parser: Parser, flag: Flag) -> list[str]:
    """What an option leaves of its values, by itself."""
    try:
        return parser.unknown(_typed(flag)) if flag.values else []
    except ValueError:
        return []


def _told(file: File, command: CommandLine, text: str, path: str) -> Hit:
    """What argparse says, at the option it names."""
    named = _NAMED.fullmatch(text)
    names = named[1].split("/") if named else []
    flag = next((each for each in command.arguments.flags if _is_named(each, names)), None)
    at = flag.at if flag else _start(command)
    return Hit(file.name, at, f"the parser of {path} stops: {text}.", "Give what the parser takes.")


def _is_named(flag: Flag, names: list[str]) -> bool:
    return any(name == flag.name or (len(flag.name) > 2 and name.startswith(flag.name)) for name in names)


def _ends(parser: Parser) -> str:
    if parser.raises == "ValueError":
        return "HfArgumentParser raises ValueError"
    return "argparse prints its usage and exits with status 2"


def _words(command: CommandLine) -> list[str]:
    """The arguments as they were typed."""
    loose = [word.text for word in command.arguments.words]
    return [*loose, *(word for flag in command.arguments.flags for word in _typed(flag))]


def _typed(flag: Flag) -> list[str]:
    if flag.joined:
        return [f"{flag.name}={flag.values[0]}", *flag.values[1:]]
    return [flag.name, *flag.values]
