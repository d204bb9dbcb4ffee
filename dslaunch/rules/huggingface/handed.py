"""What a script hands to the Trainer: functions and callbacks that it calls, and data sets."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from dslaunch.errors import listed
from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, Severity, rule
from dslaunch.rules.scripts.objects import assigned
from dslaunch.rules.scripts.tree import Call, Script, scripts
from dslaunch.rules.settings import Settings

_CODE = "huggingface/transformers:src/transformers"
_TRAINERS = ("transformers.Trainer", "transformers.Seq2SeqTrainer", "trl.SFTTrainer")
_CALLS: dict[str, tuple[int, str]] = {
    "preprocess_logits_for_metrics": (2, "logits and labels"),
    "compute_metrics": (1, "one EvalPrediction"),
    "data_collator": (1, "the list of samples"),
}
"""How many arguments each is called with, by their places, and what they are."""
_Function = ast.FunctionDef | ast.Lambda


@rule(
    "huggingface.callable", severity="error", raised_by="python",
    evidence=f"{_CODE}/trainer.py evaluation_loop, get_eval_dataloader 4.30.0 to 5.24.0; 5.24.0 run",
)  # fmt: skip
def handed(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A function that the Trainer calls with another number of arguments than it takes."""
    for script in scripts(files):
        for call in _made(script):
            for name, (count, what) in _CALLS.items():
                given = call.keyword(name)
                function = script.functions.get(given.id) if isinstance(given, ast.Name) else given
                if not isinstance(function, _Function) or "batch_eval_metrics" in script.python.text:
                    continue
                decorated = isinstance(function, ast.FunctionDef) and function.decorator_list
                if not decorated and not _takes(function.args, count):
                    message = f"the Trainer calls {name} with {what}, which this function can't take: TypeError."
                    fix = f"Give it {count} argument{'s' if count > 1 else ''}."
                    yield Hit(script.path, script.python.at(function), message, fix)


def _made(script: Script) -> list[Call]:
    """The calls that make a Trainer, or one of the file's own class of it."""
    own = (
        node.name for node in script.nodes
        if isinstance(node, ast.ClassDef) and any(script.name(base) in _TRAINERS for base in node.bases)
    )  # fmt: skip
    return script.called(*_TRAINERS, *own)


def _takes(arguments: ast.arguments, count: int) -> bool:
    """Whether a call with `count` arguments by their places is one that Python accepts."""
    by_place = [*arguments.posonlyargs, *arguments.args]
    needed = len(by_place) - len(arguments.defaults)
    by_name_alone = any(default is None for default in arguments.kw_defaults)
    return needed <= count and (arguments.vararg is not None or count <= len(by_place)) and not by_name_alone


_EVENTS = frozenset({
    "on_init_end", "on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end", "on_step_begin",
    "on_pre_optimizer_step", "on_optimizer_step", "on_substep_end", "on_step_end", "on_evaluate", "on_predict",
    "on_save", "on_log", "on_prediction_step",
})  # fmt: skip
_CALLBACK = "transformers.TrainerCallback"
_GIVEN = ("model", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader")
"""What CallbackHandler.call_event hands to each event by its name, among others."""


@rule(
    "huggingface.callback", severity="error", raised_by="python",
    evidence=f"{_CODE}/trainer_callback.py CallbackHandler.call_event 4.30.0 to 5.24.0; 5.24.0 run",
)  # fmt: skip
def callback(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A method of a callback that doesn't take what the Trainer hands it by name."""
    for script in scripts(files):
        for node in script.nodes:
            if not isinstance(node, ast.ClassDef) or _CALLBACK not in map(script.name, node.bases):
                continue
            used = any(isinstance(each, ast.Name) and each.id == node.name for each in script.nodes)
            severity: Severity | None = None if used else "info"
            for method in node.body:
                if not isinstance(method, ast.FunctionDef) or method.name not in _EVENTS or method.decorator_list:
                    continue
                taken = {each.arg for each in (*method.args.args, *method.args.kwonlyargs)}
                lacks = [name for name in _GIVEN if name not in taken]
                if method.args.kwarg is None and lacks:
                    message = (
                        f"the Trainer hands {method.name} {listed(lacks)} and more by name, and it has no "
                        "**kwargs: TypeError when that comes."
                    )
                    at = script.python.at(method)
                    yield Hit(script.path, at, message, "Add **kwargs to its arguments.", severity)


_KEPT = frozenset({
    "map", "filter", "shuffle", "cast", "cast_column", "remove_columns", "rename_column", "rename_columns",
    "select_columns", "with_format", "flatten", "sort",
})  # fmt: skip
"""Methods of a DatasetDict that return one."""
_SPLIT_PLACE = 4
"""Of `split` among load_dataset's arguments."""


@rule(
    "huggingface.dataset-dict", severity="error", raised_by="python",
    evidence="huggingface/datasets:src/datasets/dataset_dict.py __getitem__; transformers 5.24.0, run",
)  # fmt: skip
def dataset_dict(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """Every split of a data set handed to the Trainer where one belongs."""
    for script in scripts(files):
        for call in _made(script):
            given = call.keyword("train_dataset")
            if given is not None and _is_all_splits(script, given, frozenset()):
                message = (
                    "load_dataset without split= returns a DatasetDict of all splits, and the Trainer asks it for "
                    "sample 0: KeyError in the first step."
                )
                fix = 'Take one: ["train"], or load_dataset(..., split="train").'
                yield Hit(script.path, script.python.at(given), message, fix)


def _is_all_splits(script: Script, node: ast.expr, seen: frozenset[str]) -> bool:
    """Whether an expression is a DatasetDict wherever its names are bound."""
    if isinstance(node, ast.Name):
        if node.id in seen or node.id in script.parameters:
            return False
        values = assigned(script, node.id)
        own = [value for value in values if not _is_of(value, node.id)]
        kept = all(_keeps(value) for value in values if _is_of(value, node.id))
        return kept and bool(own) and all(_is_all_splits(script, value, seen | {node.id}) for value in own)
    if not isinstance(node, ast.Call):
        return False
    if script.name(node.func) in ("datasets.load_dataset", "datasets.load.load_dataset"):
        told = any(each.arg in ("split", None) for each in node.keywords)
        starred = any(isinstance(each, ast.Starred) for each in node.args)
        return not told and not starred and len(node.args) <= _SPLIT_PLACE
    return _keeps(node) and isinstance(node.func, ast.Attribute) and _is_all_splits(script, node.func.value, seen)


def _keeps(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _KEPT


def _is_of(node: ast.expr, name: str) -> bool:
    """Whether a value is a method's of what the name held before: `data = data.map(...)`."""
    inner = node.func.value if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None
    return isinstance(inner, ast.Name) and inner.id == name
