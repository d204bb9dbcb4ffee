"""Methods of the Hugging Face Trainer that a script replaces: whether they take what the Trainer hands them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.tree import Script, scripts
from dslaunch.rules.settings import Settings

_TRAINERS = frozenset({
    "transformers.Trainer", "transformers.Seq2SeqTrainer", "transformers.trainer.Trainer",
    "transformers.trainer_seq2seq.Seq2SeqTrainer", "trl.SFTTrainer",
})  # fmt: skip


@dataclass(frozen=True)
class _Handed:
    """What the Trainer calls a method with."""

    names: tuple[str, ...]
    """By place, as its own class calls them."""
    keywords: tuple[str, ...] = ()
    since: str = ""
    """The first version of transformers that hands over so many."""
    unless: str = ""
    """The method that calls it: a class that replaces that one too calls as it likes."""


_CALLS: Mapping[str, _Handed] = {
    "compute_loss": _Handed(("model", "inputs"), ("num_items_in_batch",), "4.46", "training_step"),
    "training_step": _Handed(("model", "inputs", "num_items_in_batch"), (), "4.46", "_inner_training_loop"),
    "log": _Handed(("logs", "start_time"), (), "4.47", "_maybe_log_save_evaluate"),
    "_get_train_sampler": _Handed(("train_dataset",), (), "4.52", "get_train_dataloader"),
}
"""huggingface/transformers:src/transformers/trainer.py 5.24.0."""
_OLD = (
    "evaluation_strategy", "transformers.deepspeed", "no_cuda", "overwrite_output_dir", "is_torch_tpu_available",
)  # fmt: skip
"""What a script for an older transformers has."""


@rule(
    "script.trainer-method", severity="error", raised_by="python",
    evidence="huggingface/transformers:src/transformers/trainer.py 5.24.0, run; 4.46 to 4.52 release notes",
)  # fmt: skip
def methods(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A method of the Trainer replaced by one that takes fewer arguments than the Trainer hands over."""
    for script in scripts(files):
        for node in _classes(script):
            own = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
            for name, handed in _CALLS.items():
                method = own.get(name)
                if method is None or method.decorator_list or _calls_itself(own.get(handed.unless), handed.unless):
                    continue
                if missing := _untaken(method, handed):
                    message = (
                        f"{node.name}.{name} doesn't take {missing}, which the Trainer hands over since "
                        f"transformers {handed.since}: TypeError."
                    )
                    fix = f"Add {missing}=None, or **kwargs."
                    found = Hit(script.path, script.python.at(method), message, fix)
                    yield replace(found, severity="info") if _is_old(script) else found


def _is_old(script: Script) -> bool:
    return any(each in script.python.text for each in _OLD)


def _classes(script: Script) -> Iterator[ast.ClassDef]:
    """The file's classes that are derived from the Trainer, over one another too."""
    own: set[str] = set()
    for node in script.python.tree.body:
        if isinstance(node, ast.ClassDef):
            bases = {script.name(each) for each in node.bases}
            if bases & (_TRAINERS | own):
                own.add(node.name)
                yield node


def _calls_itself(caller: ast.FunctionDef | None, name: str) -> bool:
    """Whether a class replaces the method that calls, and doesn't hand on to the Trainer's own."""
    return caller is not None and f"super().{name}" not in ast.unparse(caller)


def _untaken(method: ast.FunctionDef, handed: _Handed) -> str:
    """The first argument that has no place; empty where all have."""
    arguments = method.args
    places = [each.arg for each in (*arguments.posonlyargs, *arguments.args)][1:]
    if arguments.vararg is None and len(places) < len(handed.names):
        return handed.names[len(places)]
    named = {*places[len(handed.names) :], *(each.arg for each in arguments.kwonlyargs)}
    return next((each for each in handed.keywords if each not in named and arguments.kwarg is None), "")
