"""What objects of classes that the files show make of a value: an EarlyStopping that is given a loss."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath

from dslaunch.rules.scripts.tree import Script

_ROUNDS = 3
"""Attributes of an object that depend on one another are followed so far."""
_LIBRARY = ast.parse("""
class EarlyStopping:
    def __call__(self, loss, model):
        if loss > self.best:
            self.early_stop = True
""").body[0]
_OF_LIBRARIES: Mapping[str, ast.stmt] = {
    "early_stopping_pytorch.EarlyStopping": _LIBRARY, "pytorchtools.EarlyStopping": _LIBRARY,
}  # fmt: skip
"""What these do with a loss: early-stopping-pytorch 1.0.10, and the file that it was made of."""


def class_of(script: Script, node: ast.expr, files: Iterable[Script]) -> ast.ClassDef | None:
    """The class of which an object is made in all places: the script's, of a file beside it, or a library's."""
    text = ast.unparse(node)
    made = [moved(each) for each in assigned(script, text) if not _is_none(each) and not _wraps(each, text)]
    names = {script.name(each.func) if isinstance(each, ast.Call) else "" for each in made}
    name = names.pop() if len(names) == 1 else ""
    if not name:
        return None
    known = _OF_LIBRARIES.get(name)
    if isinstance(known, ast.ClassDef) and not _classes(script, name):
        return known
    found = _classes(script, name)
    if not found:
        last = name.rpartition(".")[2]
        found = [each for other in beside(script, name, files) for each in _classes(other, last)]
    return found[0] if len(found) == 1 else None


def beside(script: Script, name: str, files: Iterable[Script]) -> Iterator[Script]:
    """The other files that a name may be imported from: `stopping.EarlyStopping` from stopping.py, anywhere."""
    module = name.rpartition(".")[0].rpartition(".")[2]
    for other in files if module or name in _relative(script) else ():
        path = PurePath(other.path)
        stem = path.parent.name if path.stem == "__init__" else path.stem
        if other is not script and (stem == module or not module):
            yield other


def assigned(script: Script, text: str) -> list[ast.expr]:
    """All that a file binds a name or an attribute to, as it is written: `val_loader`, `self.stopper`.

    Of `a, b = make()` it is what the function of the file returns at that place.
    """
    kept: dict[str, list[ast.expr]] | None = vars(script).get("assigned_to")
    if kept is None:
        kept = vars(script).setdefault("assigned_to", {})
        for target, value in _pairs(script):
            kept.setdefault(ast.unparse(target), []).append(value)
    return kept.get(text, [])


def _pairs(script: Script) -> Iterator[tuple[ast.expr, ast.expr]]:
    for node in script.nodes:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if not isinstance(target, ast.Tuple):
            yield target, node.value
            continue
        values = _returned(script, node.value)
        for at, each in enumerate(target.elts):
            yield each, values[at] if len(values) == len(target.elts) else ast.Constant(...)


def _returned(script: Script, value: ast.expr) -> list[ast.expr]:
    """The parts of a tuple, or of the one that a function of the file returns."""
    function = script.functions.get(script.name(value.func)) if isinstance(value, ast.Call) else None
    if function is not None:
        ends = [each.value for each in ast.walk(function) if isinstance(each, ast.Return)]
        value = ends[0] if len(ends) == 1 and ends[0] is not None else value
    return value.elts if isinstance(value, ast.Tuple) else []


def moved(node: ast.expr) -> ast.expr:
    """`Net()` of `Net().to(device)`."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _MOVES:
        node = node.func.value
    return node


def _wraps(node: ast.expr, text: str) -> bool:
    """Whether an object is made of what the name held before: `model = DDP(model)`, `model = model.to(device)`."""
    if not isinstance(node, ast.Call):
        return False
    owner = moved(node)
    inner = [*node.args, *(owner.args if isinstance(owner, ast.Call) else ())]
    return ast.unparse(owner) == text or any(ast.unparse(each) == text for each in inner)


_MOVES = frozenset({"to", "cuda", "cpu", "train", "eval", "float", "half", "bfloat16"})


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _classes(script: Script, name: str) -> list[ast.ClassDef]:
    return [node for node in script.nodes if isinstance(node, ast.ClassDef) and node.name == name]


def _relative(script: Script) -> set[str]:
    """Names that come from a module beside the file: `from .stopping import EarlyStopping`."""
    kept: set[str] | None = vars(script).get("relative")
    if kept is None:
        imports = (node for node in script.nodes if isinstance(node, ast.ImportFrom) and node.level)
        names = {alias.asname or alias.name for node in imports for alias in node.names}
        kept = vars(script).setdefault("relative", names)
    return kept


@dataclass(frozen=True)
class Depends:
    """What of an object depends on a value that one of its methods is given."""

    made: ast.ClassDef
    method: str
    given: frozenset[str]
    """The method's arguments that hold the value."""
    attributes: set[str] = field(default_factory=set)
    methods: set[str] = field(default_factory=set)
    """Methods and properties that return something else with another value."""

    def __post_init__(self) -> None:
        functions = [each for each in self.made.body if isinstance(each, ast.FunctionDef)]
        for _ in range(_ROUNDS):
            for function in functions:
                names = set(self.given) if function.name == self.method else set()
                if self._flows(function.body, names, under=False):
                    self.methods.add(function.name)

    def _flows(self, body: list[ast.stmt], names: set[str], *, under: bool) -> bool:
        """Whether what these statements return depends on it; `under` a condition that does all of them do."""
        returns = False
        for node in body:
            if isinstance(node, ast.Return):
                returns |= node.value is not None and (under or self._mentions(node.value, names))
            elif isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
                if node.value is not None and (under or self._mentions(node.value, names)):
                    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                        self._binds(target, names)
            else:
                test = node.test if isinstance(node, ast.If | ast.While) else None
                within = under or (test is not None and self._mentions(test, names))
                for inner in (getattr(node, "body", []), getattr(node, "orelse", [])):
                    returns |= self._flows(inner, names, under=within)
        return returns

    def _mentions(self, node: ast.expr, names: set[str]) -> bool:
        return any(
            (isinstance(each, ast.Name) and each.id in names)
            or (_own(each) in self.attributes | self.methods)
            for each in ast.walk(node)
        )

    def _binds(self, target: ast.expr, names: set[str]) -> None:
        for each in target.elts if isinstance(target, ast.Tuple) else [target]:
            if isinstance(each, ast.Name):
                names.add(each.id)
            elif own := _own(each):
                self.attributes.add(own)


def _own(node: ast.AST) -> str:
    """`best` of `self.best`; empty for anything else."""
    own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return node.attr if isinstance(node, ast.Attribute) and own else ""


def parameters(made: ast.ClassDef, method: str, call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    """The arguments of a method by name, and what a call gives them."""
    function = next((f for f in made.body if isinstance(f, ast.FunctionDef) and f.name == method), None)
    names = [each.arg for each in function.args.args][1:] if function is not None else []
    yield from zip(names, call.args, strict=False)
    yield from ((each.arg, each.value) for each in call.keywords if each.arg)
