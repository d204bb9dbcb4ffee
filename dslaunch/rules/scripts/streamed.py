"""Scripts that hand the Hugging Face Trainer a stream of samples, of which nobody knows how many there are."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.bindings import possible
from dslaunch.rules.scripts.tree import Call, Script, scripts
from dslaunch.rules.settings import Settings

_TRAINERS = ("transformers.Trainer", "transformers.Seq2SeqTrainer", "trl.SFTTrainer")
_ARGUMENTS = ("transformers.TrainingArguments", "transformers.Seq2SeqTrainingArguments", "trl.SFTConfig")
_CHAINED = frozenset({
    "map", "filter", "shuffle", "take", "skip", "batch", "with_format", "remove_columns", "rename_column",
    "rename_columns", "select_columns", "cast", "cast_column", "repeat", "shard",
})  # fmt: skip
"""Methods of a stream that give a stream."""
_MAKERS = ("datasets.IterableDataset.from_generator", "datasets.IterableDataset.from_file")
_STREAMS = frozenset({"torch.utils.data.IterableDataset", "torch.utils.data.dataset.IterableDataset"})
_DEEP = 8


@rule(
    "script.stream-steps", severity="error", raised_by="transformers",
    evidence="huggingface/transformers:src/transformers/trainer.py __init__ 5.24.0, run",
)  # fmt: skip
def steps(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A Trainer that gets a stream of samples, and no max_steps."""
    for script in scripts(files):
        for call in script.called(*_TRAINERS):
            data, args = call.argument("train_dataset", 3), call.argument("args", 1)
            made = _made(script, args, call)
            if data is None or made is None or not _endless(made, script) or call.unpacks:
                continue
            if _is_stream(script, data, call.around, _DEEP):
                message = (
                    "the samples are a stream without a length, and max_steps isn't given: the Trainer raises "
                    "ValueError."
                )
                yield script.hit(call, message, "Give max_steps: samples / those of a step on all ranks.")


def _made(script: Script, args: ast.expr | None, call: Call) -> ast.Call | None:
    """The one call that makes the Trainer's arguments, where nothing changes them."""
    found = possible(script, args, call.around) if args is not None else []
    made = found[0] if len(found) == 1 else None
    known = isinstance(made, ast.Call) and script.name(made.func) in _ARGUMENTS
    changed = "max_steps =" in script.python.text
    return made if known and not changed and isinstance(made, ast.Call) else None


def _endless(made: ast.Call, script: Script) -> bool:
    """Whether a call is seen to leave max_steps at -1."""
    if any(each.arg is None for each in made.keywords):
        return False
    given = next((each.value for each in made.keywords if each.arg == "max_steps"), None)
    return given is None or ast.unparse(given) == "-1" or script.constant(given) == 0


def _is_stream(script: Script, node: ast.expr, around: tuple[ast.AST, ...], deep: int) -> bool:
    """Whether all that an expression may be is a stream."""
    found = possible(script, node, around)
    return deep > 0 and bool(found) and all(_streams(script, each, around, deep - 1) for each in found)


def _streams(script: Script, node: ast.expr, around: tuple[ast.AST, ...], deep: int) -> bool:
    if isinstance(node, ast.Subscript):
        return _is_stream(script, node.value, around, deep)
    if not isinstance(node, ast.Call):
        return False
    name = script.name(node.func)
    if name == "datasets.load_dataset":
        streaming = next((each.value for each in node.keywords if each.arg == "streaming"), None)
        return streaming is not None and script.constant(streaming) is True
    if name in _MAKERS or _is_own_class(script, name):
        return True
    if name in ("datasets.interleave_datasets", "datasets.concatenate_datasets") and node.args:
        parts = node.args[0].elts if isinstance(node.args[0], ast.List | ast.Tuple) else []
        return bool(parts) and all(_is_stream(script, each, around, deep) for each in parts)
    if isinstance(node.func, ast.Attribute) and node.func.attr in _CHAINED:
        return _is_stream(script, node.func.value, around, deep)
    function = script.functions.get(name)
    if function is None:
        return False
    given = [each.value for each in ast.walk(function) if isinstance(each, ast.Return)]
    return bool(given) and all(
        each is not None and _is_stream(script, each, (function, script.python.tree), deep) for each in given
    )


def _is_own_class(script: Script, name: str) -> bool:
    """A class of the file that is an IterableDataset of torch's, and has no length."""
    return any(
        isinstance(node, ast.ClassDef) and node.name == name
        and bool(node.bases) and {script.name(each) for each in node.bases} <= _STREAMS
        and not any(isinstance(each, ast.FunctionDef) and each.name == "__len__" for each in node.body)
        for node in script.python.tree.body
    )  # fmt: skip
