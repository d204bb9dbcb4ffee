"""Training scripts whose ranks read a file before the one that writes it has done so."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.guards import COLLECTIVES, SEES, function_of, guards, on_one_rank, one_rank_guard
from dslaunch.rules.scripts.tree import Call, Script, scripts
from dslaunch.rules.settings import Settings

_WRITERS = re.compile(
    r"torch\.save|numpy\.savez?|.*\.save_pretrained|.*\.save_to_disk|.*\.to_parquet|.*\.(?:dump|to_csv|to_json)"
    r"|(?:.*\.)?snapshot_download|(?:.*\.)?urlretrieve|shutil\.(?:copy\w*|move)"
)
_READERS = re.compile(
    r"torch\.load|numpy\.load|(?:.*\.)?load_from_disk|.*\.from_pretrained|pandas\.read_\w+|open|numpy\.memmap"
)
_MEETS = re.compile(
    r".*(?:barrier|wait|sync|broadcast|initialize|main_process_first|Join|Parallel|fully_shard|prepare).*"
)
"""What a call is named in which a rank may wait for the one that writes."""


@rule("script.read-early", severity="error", raised_by="python", evidence="torch 2.13, run on two ranks")
def read_early(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A file that the first rank makes and all read, with nothing in between in which they wait for it."""
    for script in scripts(files):
        writes = [call for call in script.every if one_rank_guard(call) is True]
        reads = [call for call in script.calls if _READERS.fullmatch(call.name)] if writes else []
        for call in reads:
            path = _path(call)
            made = next((each for each in writes if path and _makes(each, path, call)), None)
            if made is None or one_rank_guard(call) is not None or _waits(script, made, call):
                continue
            message = (
                f"only the first rank makes {path}, in line {made.node.lineno}, and the others read it without "
                "waiting: FileNotFoundError, or half a file."
            )
            found = script.hit(call, message, "Call torch.distributed.barrier() on all ranks before this line.")
            yield found if _is_run(script, call) else replace(found, severity="info")


def _is_run(script: Script, call: Call) -> bool:
    """Whether the file itself calls the function, or makes an object of the class: else its caller may wait."""
    outer = [node.name for node in call.around if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    return not outer or bool(script.called(outer[-1]))


def _path(call: Call) -> str:
    """The file that is read, where it is a name or a text, and not opened to write."""
    mode = call.argument("mode", 1) if call.name == "open" else None
    writes = isinstance(mode, ast.Constant) and "r" not in str(mode.value)
    given = call.node.args[0] if call.node.args and not writes else None
    return ast.unparse(given) if isinstance(given, ast.Name | ast.Constant | ast.Attribute) else ""


def _makes(call: Call, path: str, read: Call) -> bool:
    """Whether a call above makes the file: by its name, or because it is called where there is none."""
    if call.node.lineno >= read.node.lineno or function_of(call) is not function_of(read):
        return False
    given = {ast.unparse(each) for each in (*call.node.args, *(one.value for one in call.node.keywords))}
    if path not in given or _READERS.fullmatch(call.name):
        return False
    missing = any(SEES.search(text := ast.unparse(node.test)) and path in text for node, _ in guards(call))
    asks = SEES.search(f"{call.method}(") or call.method in ("print", "info", "mkdir", "makedirs", "dirname")
    return bool(_WRITERS.fullmatch(call.name)) or (missing and not asks)


def _waits(script: Script, made: Call, read: Call) -> bool:
    """Whether something between may make the others wait, or the reader is another program's or branch's."""
    between = range(made.node.lineno, read.node.lineno + 1)
    for call in script.calls:
        if call.node.lineno in between and call not in (made, read):
            ours = call.method in script.functions and function_of(call) is function_of(read)
            if call.method in COLLECTIVES or _MEETS.fullmatch(call.name) or ours:
                return True
    if any(isinstance(node, ast.With) and _MEETS.match(ast.unparse(node.items[0])) for node in made.around):
        return True
    others = [
        node for node, _ in guards(made) if not _of_first(node) and not SEES.search(ast.unparse(node.test))
    ]
    return [node for node, _ in guards(read)] != others


def _of_first(node: ast.If) -> bool:
    """Whether one part of a condition is about the rank."""
    parts = node.test.values if isinstance(node.test, ast.BoolOp) else [node.test]
    return any(on_one_rank(part) is not None for part in parts)
