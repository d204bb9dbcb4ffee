"""YAML with the position of each key. What is hostile in it, such as aliases of aliases, is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from dslaunch.files.position import Lines, Path, Position, Problem
from dslaunch.files.relaxed_json import MAX_DEPTH, MAX_VALUES, Document

_BREAKS = re.compile("\r(?!\n)|[\x85\u2028\u2029]")
"""What ends a line for YAML, and for no one else."""
_ANY_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")


class YamlError(Exception):
    """The text is no YAML, or more than one reads."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def parse(text: str) -> Document:
    """The document in `text`, or all of a file of Kubernetes objects, as a list; raises YamlError."""
    if not _BREAKS.search(text):
        return _parsed(text)
    starts, lines = [0, *(found.end() for found in _ANY_BREAK.finditer(text))], Lines(text)

    def counted(at: Position) -> Position:
        return lines.position(starts[at.line - 1] + at.column - 1)

    try:
        read = _parsed(text)
    except YamlError as error:
        raise YamlError(replace(error.problem, at=counted(error.problem.at))) from error
    problems = tuple(replace(problem, at=counted(problem.at)) for problem in read.problems)
    return Document(read.value, {path: counted(at) for path, at in read.positions.items()}, problems)


def _parsed(text: str) -> Document:
    """What `parse` returns, with lines counted as YAML counts them."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _measure(yaml.parse(text, Loader=loader))
        nodes = [node for node in yaml.compose_all(text, Loader=loader) if node is not None]
        if not nodes:
            return Document(None, {})
        positions: dict[Path, Position] = {}
        repeated: list[Problem] = []
        again: Path | None = None  # a repeated key: what stands in it repeats nothing
        for path, at in _of_all(nodes):
            within = again is not None and path[: len(again)] == again and path != again
            if path[-1:] == ("<<",):
                continue  # YAML's merge key: what each of them names is merged
            if path in positions and not within:
                repeated.append(_repeated(path, positions[path], at))
                again = path
            positions[path] = at
            if len(positions) + len(repeated) > MAX_VALUES:  # as many once its aliases are followed
                raise YamlError(Problem("file.unread", f"more than {MAX_VALUES:,} values", at))
        values = [value for value in yaml.load_all(text, Loader=loader) if value is not None]
        if len(values) > 1 and not any(is_manifest(value) for value in values):
            raise YamlError(Problem("file.syntax", "another document begins here", _at(nodes[1].start_mark)))
        return Document(values if len(values) > 1 else values[0], positions, tuple(repeated))
    except yaml.MarkedYAMLError as error:
        raise YamlError(Problem("file.syntax", f"no YAML: {error.problem}", _at(error.problem_mark))) from error
    except (yaml.YAMLError, ValueError) as error:
        message = f"no YAML: {str(error).splitlines()[0]}"
        raise YamlError(Problem("file.syntax", message, Position(1, 1))) from error


def is_manifest(value: Any) -> bool:
    """Whether a document describes an object of Kubernetes."""
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("apiVersion", "kind"))


def _of_all(nodes: Sequence[Any]) -> Iterator[tuple[Path, Position]]:
    """The places of one document, or of several behind their numbers."""
    if len(nodes) == 1:
        yield from _places(nodes[0], ())
    for index, node in enumerate(nodes) if len(nodes) > 1 else ():
        yield (index,), _at(node.start_mark)
        yield from _places(node, (index,))


def _measure(events: Iterator[Any]) -> None:
    """Raises YamlError where it is nested too deeply: whoever builds values of it would run out of stack."""
    depth = 0
    for event in events:
        kind = type(event).__name__
        depth += kind in ("MappingStartEvent", "SequenceStartEvent")
        depth -= kind in ("MappingEndEvent", "SequenceEndEvent")
        if depth > MAX_DEPTH:
            message = f"nested deeper than {MAX_DEPTH} levels"
            raise YamlError(Problem("file.syntax", message, _at(event.start_mark)))


def _places(node: Any, path: Path) -> Iterator[tuple[Path, Position]]:
    """Each key and each item with its place; an alias's are where its anchor has them."""
    if len(path) > MAX_DEPTH:
        raise YamlError(Problem("file.syntax", "an alias inside its own anchor", _at(node.start_mark)))
    children: list[tuple[str | int, Any, Any]] = []
    if node.id == "mapping":
        children = [(key.value, key, value) for key, value in node.value if key.id == "scalar"]
    elif node.id == "sequence":
        children = [(index, item, item) for index, item in enumerate(node.value)]
    for name, marked, value in children:
        yield (*path, name), _at(marked.start_mark)
        yield from _places(value, (*path, name))


def _repeated(path: Path, first: Position, at: Position) -> Problem:
    message = f"the key '{path[-1]}' stands here again; the first is at line {first.line}"
    return Problem("file.duplicate-key", message, at)


def _at(mark: Any) -> Position:
    return Position(mark.line + 1, mark.column + 1) if mark else Position(1, 1)
