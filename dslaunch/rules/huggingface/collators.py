"""What a collator of the Trainer's gets: columns that are dropped before, and labels."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dslaunch.errors import listed
from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.bindings import possible
from dslaunch.rules.scripts.objects import assigned
from dslaunch.rules.scripts.tree import Call, Script, scripts
from dslaunch.rules.settings import Settings

_CODE = "huggingface/transformers:src/transformers"
_ARGUMENTS = ("transformers.TrainingArguments", "transformers.Seq2SeqTrainingArguments")
_TRAINERS = ("transformers.Trainer", "transformers.Seq2SeqTrainer")
_Function = ast.FunctionDef | ast.Lambda


@dataclass(frozen=True)
class Training:
    """A Trainer that a script makes, with the one call that makes its arguments."""

    script: Script
    trainer: Call
    arguments: Call
    own: ast.ClassDef | None
    """The file's own class of the Trainer."""

    def given(self, name: str) -> ast.expr | None:
        """What an argument of TrainingArguments is written as."""
        return self.arguments.keyword(name)

    def said(self, name: str) -> object:
        """The literal that an argument of TrainingArguments is, or is bound to."""
        return self.script.constant(self.given(name))


def trainings(files: FileSet) -> Iterator[Training]:
    """The Trainers of scripts whose arguments are written out in one place."""
    for script in scripts(files):
        made = script.called(*_ARGUMENTS)
        if len(made) != 1 or made[0].unpacks:
            continue
        own = {
            node.name: node for node in script.nodes
            if isinstance(node, ast.ClassDef) and any(script.name(base) in _TRAINERS for base in node.bases)
        }  # fmt: skip
        for call in script.called(*_TRAINERS, *own):
            if not call.unpacks and _may_get(script, call, made[0]):
                yield Training(script, call, made[0], own.get(call.name))


def _may_get(script: Script, trainer: Call, arguments: Call) -> bool:
    """Whether a Trainer's arguments may be these: not where its `args` are seen to be made by something else."""
    given = trainer.argument("args", 1)
    if not isinstance(given, ast.Name):
        return True
    found: list[ast.AST] = [*(possible(script, given, trainer.around) or assigned(script, given.id))]
    names = (script.name(each.func) for value in found for each in ast.walk(value) if isinstance(each, ast.Call))
    found += [script.functions[name] for name in names if name in script.functions]
    return not found or any(each is arguments.node for value in found for each in ast.walk(value))


@rule(
    "huggingface.unused-columns", severity="error", raised_by="transformers",
    evidence=f"{_CODE}/trainer.py _remove_unused_columns, _get_collator_with_removed_columns 5.24.0, run",
)  # fmt: skip
def unused_columns(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A collator that reads columns which the Trainer drops, as the model's forward doesn't take them."""
    for run in trainings(files):
        script = run.script
        if _KEEPS.search(script.python.text) or (run.own is not None and _has_hooks(run.own)):
            continue
        taken = _signature(script, run.trainer.argument("model", 0), run.trainer.around)
        for reader, rows in _readers(script, run.trainer) if taken is not None else ():
            assert taken is not None
            dropped = [key for key in _read(reader, rows) if _is_dropped(key, taken)]
            if dropped:
                message = (
                    f"{listed(dropped)}: columns that the model's forward doesn't take are dropped before the "
                    "collator or transform reads them, ValueError or KeyError."
                )
                yield script.hit(run.arguments, message, "Give remove_unused_columns=False.")
                break


_KEEPS = re.compile(r"remove_unused_columns|_signature_columns|can_return_loss|trust_remote_code")
"""What may keep columns, or bring a forward that takes others."""
_HOOKS = {"get_train_dataloader", "_remove_unused_columns", "_set_signature_columns_if_needed", "_get_dataloader"}
_LABELS = {"label", "label_ids", "labels"}
_RAW = frozenset({
    "text", "prompt", "completion", "messages", "conversations", "question", "answer", "query", "positive",
    "negative", "sentence", "sentence1", "sentence2", "chosen", "rejected", "caption", "document", "summary",
    "instruction", "response", "image", "image_path", "img", "audio", "video", "path", "passage", "tokens",
})  # fmt: skip
"""Names of columns that no model of transformers takes."""


def _has_hooks(own: ast.ClassDef) -> bool:
    return any(isinstance(each, ast.FunctionDef) and each.name in _HOOKS for each in own.body)


def _is_dropped(key: str, taken: frozenset[str] | str) -> bool:
    if key in _LABELS or "label" in key:
        return False
    return key in _RAW if isinstance(taken, str) else key not in taken


def _signature(script: Script, model: ast.expr | None, around: Sequence[ast.AST]) -> frozenset[str] | str | None:
    """The arguments of a model's forward, the name of a class of transformers', or None where it isn't told."""
    found = possible(script, model, around) if model is not None else []
    made = found[0] if len(found) == 1 else None
    if not isinstance(made, ast.Call):
        return None
    name = script.name(made.func)
    if name.endswith("get_peft_model") and made.args:
        return _signature(script, made.args[0], around)
    if name.startswith("transformers.") and name.endswith((".from_pretrained", ".from_config")):
        return name
    own = next((each for each in script.nodes if isinstance(each, ast.ClassDef) and each.name == name), None)
    functions = (each for each in own.body if isinstance(each, ast.FunctionDef)) if own is not None else ()
    forward = next((each for each in functions if each.name == "forward"), None)
    if forward is None:
        return None
    given = forward.args
    return frozenset(each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs))


def _readers(script: Script, trainer: Call) -> Iterator[tuple[_Function, bool]]:
    """The collator, which gets rows, and the transforms of data sets, which get a batch."""
    given = trainer.argument("data_collator", 2)
    found = script.bound(given) or given
    if isinstance(found, ast.Call) and script.name(found.func) == "functools.partial" and found.args:
        found = found.args[0]
    if (reader := _function(script, found)) is not None:
        yield reader, True
    for call in script.methods("set_transform", "with_transform"):
        given = call.node.args[0] if call.node.args else None
        if (reader := _function(script, given)) is not None and trainer.argument("train_dataset", 3) is not None:
            yield reader, False


def _function(script: Script, node: ast.expr | None) -> _Function | None:
    """A function of the file, or the `__call__` of an object of the file's."""
    if isinstance(node, ast.Lambda):
        return node
    if isinstance(node, ast.Name):
        return script.functions.get(node.id)
    name = script.name(node.func) if isinstance(node, ast.Call) else ""
    own = next((each for each in script.nodes if isinstance(each, ast.ClassDef) and each.name == name), None)
    functions = (each for each in own.body if isinstance(each, ast.FunctionDef)) if own is not None else ()
    return next((each for each in functions if each.name in ("__call__", "torch_call")), None)


def _read(reader: _Function, rows: bool) -> list[str]:
    """The keys that a function reads of each row, or of its batch, without asking whether they are there."""
    names = [each.arg for each in reader.args.args if each.arg != "self"]
    if not names:
        return []
    nodes = list(ast.walk(reader))
    held = {names[0]} if not rows else {
        each.id for node in nodes if isinstance(node, ast.For | ast.comprehension)
        and isinstance(node.iter, ast.Name) and node.iter.id == names[0]
        for each in ast.walk(node.target) if isinstance(each, ast.Name)
    }  # fmt: skip
    keys = [
        key for node in nodes if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load)
        and (
            (isinstance(node.value, ast.Name) and node.value.id in held)
            or (rows and isinstance(node.value, ast.Subscript) and ast.unparse(node.value.value) == names[0])
        )
        for key in _keys(nodes, node.slice)
    ]  # fmt: skip
    asked = {
        each.value for node in nodes if isinstance(node, ast.Compare | ast.Call)
        for each in (
            [node.left] if isinstance(node, ast.Compare)
            else node.args if ast.unparse(node.func).endswith((".get", ".pop")) else []
        )
        if isinstance(each, ast.Constant)
    }  # fmt: skip
    set_here = {
        each.value for node in nodes if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
        for each in [node.slice] if isinstance(each, ast.Constant)
    }  # fmt: skip
    return [key for key in dict.fromkeys(keys) if key not in asked | set_here]


def _keys(nodes: list[ast.AST], key: ast.expr) -> list[str]:
    """A key that is written, or all that an inner function is called with: `def enc(key): ... row[key]`."""
    if isinstance(key, ast.Constant):
        return [key.value] if isinstance(key.value, str) else []
    if not isinstance(key, ast.Name):
        return []
    found = []
    for function in nodes:
        places = [each.arg for each in function.args.args] if isinstance(function, ast.FunctionDef) else []
        if isinstance(function, ast.FunctionDef) and key.id in places:
            place = places.index(key.id)
            found += [
                each.args[place] for each in nodes if isinstance(each, ast.Call) and len(each.args) > place
                and isinstance(each.func, ast.Name) and each.func.id == function.name
            ]  # fmt: skip
    return [each.value for each in found if isinstance(each, ast.Constant) and isinstance(each.value, str)]


@rule(
    "huggingface.no-labels", severity="error", raised_by="transformers",
    evidence=f"{_CODE}/trainer.py compute_loss, data/data_collator.py 5.24.0, run",
)  # fmt: skip
def no_labels(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A language model trained on samples that get no labels: it returns no loss."""
    for run in trainings(files):
        script, trainer = run.script, run.trainer
        text = script.python.text.lower()
        own = run.own is not None or "trust_remote_code" in text
        if own or trainer.keyword("compute_loss_func") is not None or "label" in text:
            continue
        model, collator = script.bound(trainer.argument("model", 0)), trainer.argument("data_collator", 2)
        name = script.name(model.func) if isinstance(model, ast.Call) else ""
        made = script.bound(collator)
        plain = collator is None or script.name(made.func if isinstance(made, ast.Call) else collator) in _PLAIN
        if _CAUSAL.fullmatch(name) and plain and _is_tokenized(script):
            message = (
                "nothing makes labels: the collator pads, no more, and the model returns no loss, ValueError in "
                "the first step."
            )
            fix = "Give DataCollatorForLanguageModeling(tokenizer, mlm=False), or make labels in map."
            yield script.hit(trainer, message, fix)


_CAUSAL = re.compile(r"transformers\.(?:\w+ForCausalLM|\w+LMHeadModel)\.(?:from_pretrained|from_config)")
_PLAIN = tuple(f"transformers.{name}" for name in (
    "default_data_collator", "DefaultDataCollator", "DataCollatorWithPadding", "DataCollatorForSeq2Seq",
    "DataCollatorForTokenClassification",
))  # fmt: skip
"""Collators that add no labels."""


def _is_tokenized(script: Script) -> bool:
    """Whether the samples are made here: of text that is loaded, by a tokenizer within map."""
    tokenizers = script.assigned("transformers.AutoTokenizer.from_pretrained")
    loads = script.called("datasets.load_dataset")
    for call in script.methods("map") if loads and tokenizers else ():
        given = call.argument("function", 0)
        reader = given if isinstance(given, ast.Lambda) else script.functions.get(ast.unparse(given or call.node))
        inside = (each for each in ast.walk(reader) if isinstance(each, ast.Call)) if reader is not None else ()
        tokenizes = any(ast.unparse(each.func) in tokenizers for each in inside)
        if tokenizes and call.keyword("remove_columns") is not None:
            return True
    return False
