"""Training scripts whose ranks all read the same stream, because nothing shares it out."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.alone import JOINS
from dslaunch.rules.scripts.bindings import possible
from dslaunch.rules.scripts.objects import beside
from dslaunch.rules.scripts.tree import LOADER, Call, Script, scripts
from dslaunch.rules.settings import Settings

_STREAM = "torch.utils.data.IterableDataset"
_SHARES = re.compile(
    r"rank|world|replica|num_shards|\.shard\(|split_\w*node|process_index|random|\brandn?\b|randint|randperm"
    r"|dp_|data_parallel|shuffle", re.IGNORECASE,
)  # fmt: skip
"""What a stream is written with that is another one on each rank."""
_ELSEWHERE = re.compile(
    r"split_dataset_by_node|split_by_node|\.shard\(|islice\(|prepare\(|prepare_data_loader"
)


@rule("script.shared-stream", severity="wrong", raised_by="nobody", evidence="torch 2.13, run on two ranks")
def shared_stream(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A stream of data that every rank reads as a whole."""
    for script in scripts(files):
        if script.by_framework or not script.own_loop or _ELSEWHERE.search(script.python.text):
            continue
        for call in script.called(LOADER):
            given = call.argument("dataset", 0)
            made = _made(script, given, call) if given is not None else []
            if not made:
                continue
            text = " ".join(map(ast.unparse, (call.node, *made)))
            if _SHARES.search(text.replace(".shuffle(", "").replace("shuffle=", "")):
                continue  # shuffled or not, each rank reads all of it
            name = _stream(script, made)
            if name:
                message = (
                    f"each rank reads {name} from its beginning: all train on the same batches, and more GPUs do "
                    "the same work once more."
                )
                fix = "In __iter__, take every WORLD_SIZE-th sample from RANK on, by process and by worker."
                if name == "load_dataset":
                    fix = "Use datasets.distributed.split_dataset_by_node(dataset, rank, world_size)."
                yield script.hit(call, message, fix)


def _made(script: Script, given: ast.expr, call: Call) -> list[ast.expr]:
    """All that a data set may be made of, over names that are bound several times: `ds = ds.map(...)`."""
    found: list[ast.expr] = []
    waiting = [given]
    while waiting:
        node = waiting.pop()
        if any(node is each for each in found):
            continue
        if not isinstance(node, ast.Name):
            found.append(node)
        names = (each for each in ast.walk(node) if isinstance(each, ast.Name))
        waiting += [value for each in names for value in possible(script, each, call.around)]
    return found


def _stream(script: Script, made: list[ast.expr]) -> str:
    """The class, or load_dataset, that makes a stream in which no rank is told of; empty for anything else."""
    names = {script.name(each.func) for each in made if isinstance(each, ast.Call)}
    for node in script.nodes:
        if isinstance(node, ast.ClassDef) and node.name in names:
            own = [script.name(base) for base in node.bases] == [_STREAM]
            return node.name if own and not _SHARES.search(ast.unparse(node)) else ""
    nodes = [each for part in made for each in ast.walk(part)]
    calls = [Call(each, script.name(each.func), ()) for each in nodes if isinstance(each, ast.Call)]
    streams = any(
        each.name.endswith("load_dataset") and script.constant(each.keyword("streaming")) is True
        for each in calls
    )
    ordered = any("rank" in ast.unparse(each).lower() for each in nodes if _is_shuffle(each))
    return "load_dataset" if streams and not ordered else ""


def _is_shuffle(node: ast.AST) -> bool:
    """Whether it is `.shuffle(...)`: by a seed of its own each rank reads in another order."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "shuffle"


_BY_RANK = re.compile(
    r"(?:rank\b|get_rank\(\)|RANK)[^\n]*::|::[^\n]*(?:world|WORLD|num_replicas)|% *(?:self\.)?world"
)
"""How a share of files or samples is taken by rank."""
_ENDLESS = re.compile(r"while True|cycle\(|repeat\(|count\(")
_AGREES = re.compile(r"all_reduce|all_gather|broadcast|max_steps|total_steps|num_steps")


@rule("script.uneven-stream", severity="hang", raised_by="nobody", evidence="torch 2.13, run on two ranks")
def uneven_stream(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A pass over a stream that each rank has its own share of, to its end: shares of other lengths."""
    every = list(scripts(files))
    shared = {name: script for script in every for name in _by_rank(script)}
    for script in every:
        if script.by_framework or not script.own_loop or JOINS.search(script.python.text):
            continue
        for loop in (node for node in script.nodes if isinstance(node, ast.For)) if shared else ():
            name = _read(script, loop)
            last = name.rpartition(".")[2]
            of = [script, *beside(script, name, every)] if last in shared else []
            if any(shared[last] is each for each in of) and not _bounded(loop):
                message = (
                    f"{last} gives each rank a share of its own, and the loop runs to the share's end: where "
                    "these hold different numbers of batches, the ranks with more wait for ever in backward."
                )
                fix = "Run a number of steps that all know, or agree on the end by all_reduce; or use Join."
                yield Hit(script.path, script.python.at(loop), message, fix)


def _by_rank(script: Script) -> Iterator[str]:
    """The file's streams that end, and that give each rank samples or files of its own."""
    for node in script.nodes if "IterableDataset" in script.python.text else ():
        if isinstance(node, ast.ClassDef) and [script.name(base) for base in node.bases] == [_STREAM]:
            text = ast.unparse(node)
            if _BY_RANK.search(text) and not _ENDLESS.search(text):
                yield node.name


def _read(script: Script, loop: ast.For) -> str:
    """The class of the stream that a loop reads through a loader."""
    given: ast.expr | None = loop.iter
    if isinstance(given, ast.Call) and ast.unparse(given.func).rpartition(".")[2] in ("enumerate", "tqdm"):
        given = given.args[0] if given.args else None
    made = script.bound(given)
    data = script.bound(made.args[0]) if isinstance(made, ast.Call) and made.args else None
    loads = isinstance(made, ast.Call) and script.name(made.func) == LOADER
    return script.name(data.func) if loads and isinstance(data, ast.Call) else ""


def _bounded(loop: ast.For) -> bool:
    """Whether a loop trains nothing, may end before the stream does, or agrees with the other ranks."""
    nodes = [node for part in loop.body for node in ast.walk(part)]
    trains = any(isinstance(node, ast.Attribute) and node.attr == "backward" for node in nodes)
    ends = any(isinstance(node, ast.Break | ast.Return) for node in nodes)
    return not trains or ends or bool(_AGREES.search(ast.unparse(loop)))
