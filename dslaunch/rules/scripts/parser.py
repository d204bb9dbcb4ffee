"""The arguments that a script's own parser takes, read from its syntax tree and judged by argparse itself.

A parser counts where the script shows all of it: one ArgumentParser, or an HfArgumentParser over classes that the
script writes out or that are transformers' own. Nothing of the script is run: what is a literal goes into a parser
of the same shape, and anything else takes every value.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn

from dslaunch.engines.trainer_catalogue import trainer_words
from dslaunch.files.flags import is_told
from dslaunch.rules.scripts.tree import Call, Script

_MADE = "argparse.ArgumentParser"
_OF_TRANSFORMERS = ("transformers.HfArgumentParser", "transformers.hf_argparser.HfArgumentParser")
_BRANCHES = (ast.If, ast.For, ast.While, ast.Try)
_GROUPS = ("add_argument_group", "add_mutually_exclusive_group")
_DEEPSPEED = "deepspeed.add_config_arguments"
_OF_DEEPSPEED: Mapping[str, Mapping[str, Any]] = {
    "--deepspeed": {"action": "store_true"}, "--deepspeed_config": {},
    "--deepscale": {"action": "store_true"}, "--deepscale_config": {},
}  # fmt: skip
"""What deepspeed.add_config_arguments adds: deepspeed/__init__.py _add_core_arguments, 0.16.9 to 0.19.8."""
_TYPES: Mapping[str, Callable[[str], Any]] = {"int": int, "float": float}
_ACTIONS = frozenset({
    "append", "append_const", "count", "extend", "help", "store", "store_const", "store_false", "store_true",
    "version",
})  # fmt: skip
_WITH_VALUE = frozenset({"append", "extend", "store"})
_OPTIONAL: Mapping[Any, str] = {None: "?", "+": "*"}
"""How many words a positional argument takes where it may take none."""
_SHAPE = frozenset({"allow_abbrev", "description", "epilog", "formatter_class", "prog", "usage", "add_help"})
"""Keywords of ArgumentParser beside which the arguments are still all that is seen."""
_TRAINERS = frozenset({
    "transformers.TrainingArguments", "transformers.Seq2SeqTrainingArguments",
    "transformers.training_args.TrainingArguments",
})  # fmt: skip


class _OpenError(Exception):
    """The parser isn't written out."""


class _RefusedError(Exception):
    """What argparse prints before it exits."""


@dataclass(frozen=True)
class Option:
    """One argument: its names, and the keywords of add_argument as far as they are literals."""

    names: tuple[str, ...]
    keywords: Mapping[str, Any]
    at: ast.expr | ast.stmt
    required: bool = False
    sometimes: bool = False
    """Added under a condition, or in a loop."""


@dataclass(frozen=True)
class Parser:
    """All arguments of a script."""

    options: tuple[Option, ...]
    spare: bool
    """Arguments it doesn't know are left to others (parse_known_args)."""
    abbreviates: bool
    raises: str
    """What ends the program where an argument is unknown."""
    helps: bool
    """-h and --help are its own."""

    @property
    def names(self) -> list[str]:
        """The names of all options."""
        return [name for option in self.options for name in option.names if name.startswith("-")]

    def twice(self) -> Iterator[tuple[str, Option]]:
        """Names that are added a second time, with the argument that adds them: ArgumentError."""
        seen: set[str] = {"-h", "--help"} if self.helps else set()
        for option in (each for each in self.options if not each.sometimes):
            for name in option.names:
                if name in seen and name.startswith("-"):
                    yield name, option
                seen.add(name)

    @property
    def is_one(self) -> bool:
        """Whether argparse takes every argument that the script adds."""
        try:
            self._argparse(required=True, typed=True)
        except (TypeError, ValueError, argparse.ArgumentError):
            return False
        return True

    def unknown(self, words: Sequence[str]) -> list[str]:
        """The words that no argument takes; raises ValueError with argparse's text where it stops before."""
        _, rest = self._read(words, required=False, typed=False)
        return [] if self.spare else rest

    def missing(self, words: Sequence[str]) -> str:
        """argparse's text about arguments that have to be given; empty where all are."""
        return self._fault(words, required=True, typed=False)

    def misfit(self, words: Sequence[str]) -> str:
        """argparse's text about the first value of the wrong type, or of none of the choices."""
        return self._fault(words, required=False, typed=True)

    def _fault(self, words: Sequence[str], *, required: bool, typed: bool) -> str:
        try:
            self._read(words, required=required, typed=typed)
        except ValueError as error:
            return str(error)
        return ""

    def _read(self, words: Sequence[str], *, required: bool, typed: bool) -> tuple[argparse.Namespace, list[str]]:
        try:
            return self._argparse(required=required, typed=typed).parse_known_args(list(words))
        except _RefusedError as error:
            raise ValueError(str(error)) from None

    def _argparse(self, *, required: bool, typed: bool) -> argparse.ArgumentParser:
        reader = _Reader(
            add_help=False, allow_abbrev=self.abbreviates, conflict_handler="resolve", argument_default=None
        )
        if self.helps:
            reader.add_argument("-h", "--help", action="store_true")
        for option in self.options:
            keywords = dict(option.keywords)
            kind, choices = keywords.pop("type", None), keywords.pop("choices", None)
            if typed and kind in _TYPES:
                keywords["type"] = _told_only(_TYPES[kind])
            if typed and choices:
                keywords["choices"] = _Choices(choices)
            if option.names[0].startswith("-"):
                keywords["required"] = required and option.required
            elif not required and "action" not in keywords:
                keywords["nargs"] = _OPTIONAL.get(keywords.get("nargs"), keywords.get("nargs"))
            reader.add_argument(*option.names, **keywords)
        return reader


@lru_cache(maxsize=1024)
def parser_of(script: Script) -> Parser | None:
    """The parser that reads a script's command line; None where it isn't all there."""
    try:
        found = _argument_parser(script) or _of_classes(script)
    except _OpenError:
        return None
    return found if found is not None and found.is_one else None


class _Reader(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _RefusedError(message)


class _Choices(tuple[Any, ...]):
    """Choices, one of which any value may be that the shell fills in."""

    def __contains__(self, value: object) -> bool:
        return (isinstance(value, str) and not is_told(value)) or super().__contains__(value)


def _told_only(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        return kind(text) if is_told(text) else text

    read.__name__ = kind.__name__
    return read


def _argument_parser(script: Script) -> Parser | None:
    made = script.called(_MADE)
    if len(made) != 1 or "sys.argv" in script.python.text.replace("sys.argv[1:]", "").replace("sys.argv[0]", ""):
        return None
    call = made[0]
    own = _names(script)
    parses = list(_parses(script, own))
    if call.unpacks or call.node.args or not {each.arg for each in call.node.keywords} <= _SHAPE or not parses:
        return None
    if any(not _from_command_line(node) for _, node in parses) or _leaves(script, own):
        return None
    abbreviates, helps = (_switch(script, call, name) for name in ("allow_abbrev", "add_help"))
    options = tuple(_options(script, own | _groups(script, own)))
    spare = any(method == "parse_known_args" for method, _ in parses)
    return Parser(options, spare, abbreviates, "SystemExit", helps)


def _names(script: Script) -> set[str]:
    """The names of a parser: where it is made, in functions that are handed it, and where they return it."""
    own = {each for each in script.assigned(_MADE) if each.isidentifier()}
    while True:
        found = own | _handed(script, own)
        for function in _makers(script, found):
            found |= {each for each in script.assigned(function) if each.isidentifier()}
        if found == own:
            return own
        own = found


def _handed(script: Script, own: set[str]) -> set[str]:
    """Parameters of the script's own functions, which are called with a parser and under no condition."""
    found: set[str] = set()
    for call in script.calls:
        function = script.functions.get(call.name)
        if function is None or any(isinstance(node, _BRANCHES) for node in call.around):
            continue
        parameters = [each.arg for each in function.args.args]
        found |= {
            name for name, value in zip(parameters, call.node.args, strict=False)
            if isinstance(value, ast.Name) and value.id in own
        }  # fmt: skip
    return found


def _makers(script: Script, own: set[str]) -> list[str]:
    """The script's functions that return a parser."""
    return [
        name for name, function in script.functions.items()
        if any(
            isinstance(node, ast.Return) and isinstance(node.value, ast.Name) and node.value.id in own
            for node in ast.walk(function)
        )
    ]  # fmt: skip


def _parses(script: Script, own: set[str]) -> Iterator[tuple[str, ast.Call]]:
    """Where a parser reads its words: `parser.parse_args()`, or `get_parser().parse_args()`."""
    makers = _makers(script, own)
    for node in script.nodes:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr in ("parse_args", "parse_known_args"):
            owner = node.func.value
            maker = script.name(owner.func) if isinstance(owner, ast.Call) else ""
            if ast.unparse(owner) in own or maker in makers:
                yield node.func.attr, node


def _switch(script: Script, call: Call, name: str) -> bool:
    node = call.keyword(name)
    value = script.constant(node)
    if node is not None and not isinstance(value, bool):
        raise _OpenError
    return value is not False


def _from_command_line(node: ast.Call) -> bool:
    """Whether the words are those of the command: `parse_args()`, or with sys.argv[1:]."""
    given = [*node.args, *(each.value for each in node.keywords)]
    return all(ast.unparse(each) == "sys.argv[1:]" for each in given)


def _leaves(script: Script, own: set[str]) -> bool:
    """Whether something else gets hold of a parser, and may add to it."""
    for call in script.calls:
        handed = (*call.node.args, *(each.value for each in call.node.keywords))
        names = {each.id for part in handed for each in ast.walk(part) if isinstance(each, ast.Name)}
        if names & own and call.name != _DEEPSPEED and not _hands_over(script, call, own):
            return True
        if call.owner in own and call.method in ("add_subparsers", "register"):
            return True
    return False


def _hands_over(script: Script, call: Call, own: set[str]) -> bool:
    """Whether a call hands a parser, as it is, to a function of the script."""
    function = script.functions.get(call.name)
    if function is None or call.node.keywords or any(isinstance(node, _BRANCHES) for node in call.around):
        return False
    for parameter, value in zip(function.args.args, call.node.args, strict=False):
        names = {each.id for each in ast.walk(value) if isinstance(each, ast.Name)}
        if names & own and not (isinstance(value, ast.Name) and parameter.arg in own):
            return False
    return len(call.node.args) <= len(function.args.args)


def _groups(script: Script, own: set[str]) -> set[str]:
    found: set[str] = set()
    for node in script.nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            owner, _, method = script.name(node.value.func).rpartition(".")
            if method in _GROUPS and owner in own | found:
                found |= {ast.unparse(each) for each in node.targets}
    return found


def _options(script: Script, owners: set[str]) -> Iterator[Option]:
    for call in script.methods("add_argument", "add_config_arguments"):
        if call.name == _DEEPSPEED:
            for name, keywords in _OF_DEEPSPEED.items():
                yield Option((name,), keywords, call.node)
        elif call.owner not in owners:
            raise _OpenError
        elif call.method == "add_argument":
            yield _option(script, call)


def _option(script: Script, call: Call) -> Option:
    names = tuple(script.constant(each) for each in call.node.args)
    if call.unpacks or not names or any(not isinstance(name, str) or not name for name in names):
        raise _OpenError
    sometimes = any(isinstance(node, _BRANCHES) for node in call.around)
    action, keywords = _action(script, call)
    if action in _WITH_VALUE:
        nargs = call.keyword("nargs")
        if nargs is not None:
            keywords["nargs"] = _nargs(script, nargs)
        kind = call.keyword("type")
        keywords["type"] = kind.id if isinstance(kind, ast.Name) else ""
        choices = script.bound(call.keyword("choices"))
        if isinstance(choices, ast.List | ast.Tuple | ast.Set) and all(
            isinstance(each, ast.Constant) for each in choices.elts
        ):
            keywords["choices"] = ast.literal_eval(choices)
    required = script.constant(call.keyword("required")) is True and not sometimes
    if sometimes and not names[0].startswith("-"):
        raise _OpenError
    return Option(names, keywords, call.node, required, sometimes)


def _action(script: Script, call: Call) -> tuple[str, dict[str, Any]]:
    node = call.keyword("action")
    if node is None:
        return "store", {}
    if script.name(node).rpartition(".")[2] == "BooleanOptionalAction":
        return "", {"action": argparse.BooleanOptionalAction}
    action = script.constant(node)
    if action not in _ACTIONS:
        raise _OpenError
    if action in ("help", "version"):
        return action, {"action": "store_true"}
    return action, {"action": action, **({"const": 1} if action.endswith("_const") else {})}


def _nargs(script: Script, node: ast.expr) -> Any:
    if script.name(node) in ("argparse.REMAINDER", "argparse.PARSER"):
        return "..."
    value = script.constant(node)
    if value not in ("?", "*", "+", "...") and not (type(value) is int and value > 0):
        raise _OpenError
    return value


def _of_classes(script: Script) -> Parser | None:
    """An HfArgumentParser over dataclasses: one option for each field."""
    made = script.called(*_OF_TRANSFORMERS)
    own = {name for each in _OF_TRANSFORMERS for name in script.assigned(each)}
    parses = [each for each in script.methods("parse_args_into_dataclasses") if each.owner in own]
    if len(made) != 1 or len(parses) != 1 or "sys.argv" in script.python.text or _leaves(script, own):
        return None
    if parses[0].node.args or parses[0].node.keywords or script.methods("add_argument"):
        return None
    types = made[0].argument("dataclass_types", 0)
    given = types.elts if isinstance(types, ast.Tuple | ast.List) else [types] if types else []
    return Parser(
        tuple(option for each in given for option in _fields(script, each)), spare=False, abbreviates=True,
        raises="ValueError", helps=True,
    )  # fmt: skip


def _fields(script: Script, node: ast.expr) -> Iterator[Option]:
    """The options of one class, and of those that it is derived from."""
    classes = {each.name: each for each in script.python.tree.body if isinstance(each, ast.ClassDef)}
    full = script.name(node)
    if full in _TRAINERS:
        for name in trainer_words("arguments"):
            yield Option(_spellings(name), {"nargs": "*"}, node)
        return
    if full not in classes:
        raise _OpenError
    for base in classes[full].bases:
        yield from _fields(script, base)
    for line in classes[full].body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            required = _is_required(script, line)
            yield Option(_spellings(line.target.id), {"nargs": "*"}, line, required)


def _spellings(name: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(f"--{each}" for each in (name, name.replace("_", "-"), f"no_{name}",
                                                        f"no-{name.replace('_', '-')}")))  # fmt: skip


def _is_required(script: Script, line: ast.AnnAssign) -> bool:
    """A field without a default, unless it is a bool: hf_argparser.py _parse_dataclass_field, 5.24.0."""
    if "bool" in ast.unparse(line.annotation):
        return False
    if line.value is None:
        return True
    made = line.value
    is_field = isinstance(made, ast.Call) and script.name(made.func).rpartition(".")[2] == "field"
    words = {each.arg for each in made.keywords} if isinstance(made, ast.Call) else set()
    return is_field and not words & {"default", "default_factory", None, "init"}
