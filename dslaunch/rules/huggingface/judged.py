"""Evaluations of the Trainer in a script: the metric of the best model, and samples to evaluate on."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import replace

from dslaunch.errors import listed
from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.huggingface.collators import Training, trainings
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.tree import Script, is_none
from dslaunch.rules.settings import Settings

_CODE = "huggingface/transformers:src/transformers"
_OWN = frozenset({
    "loss", "runtime", "samples_per_second", "steps_per_second", "model_preparation_time", "jit_compilation_time",
    "epoch",
})  # fmt: skip
"""What the Trainer tells of each evaluation."""
_OF_EVALUATE: Mapping[str, frozenset[str]] = {
    **{name: frozenset({name}) for name in ("accuracy", "f1", "precision", "recall", "exact_match")},
    "rouge": frozenset({"rouge1", "rouge2", "rougeL", "rougeLsum"}),
    "seqeval": frozenset({"overall_precision", "overall_recall", "overall_f1", "overall_accuracy"}),
}
"""The keys of what `evaluate.load(NAME).compute` returns; seqeval has one more for each kind of entity."""
_PLATEAU = ("reduce_lr_on_plateau", "greedy")


@rule(
    "huggingface.best-metric", severity="error", raised_by="transformers",
    evidence=f"{_CODE}/trainer.py _determine_best_metric, trainer_callback.py EarlyStoppingCallback 5.24.0, run",
)  # fmt: skip
def best_metric(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """metric_for_best_model names what no evaluation gives, or early stopping has no metric at all."""
    for run in trainings(files):
        judge = run.said("eval_strategy") or run.said("evaluation_strategy")
        if isinstance(judge, str) and judge != "no":
            yield from _not_computed(run)
        yield from _stops_without(run)


def _not_computed(run: Training) -> Iterator[Hit]:
    named, metric = run.given("metric_for_best_model"), run.said("metric_for_best_model")
    computed = _computed(run)
    if named is None or not isinstance(metric, str) or computed is None or _adds_own(run):
        return
    known = {key.removeprefix("eval_") for key in computed} | _OWN
    wanted = metric.removeprefix("eval_")
    of_one_set = any(wanted.endswith(f"_{key}") for key in known)  # `eval_NAME_loss` of several data sets
    if wanted not in known and not of_one_set:
        has = f"compute_metrics gives {listed(sorted(computed))}" if computed else "there is no compute_metrics"
        message = f"metric_for_best_model is {metric!r}, and {has}: KeyError at the first evaluation."
        at = run.script.python.at(named)
        yield Hit(run.script.path, at, message, "Name a metric that is computed, or loss.")


def _computed(run: Training) -> set[str] | None:
    """The keys that compute_metrics returns; None where they aren't told."""
    given = run.trainer.argument("compute_metrics", 8)
    if given is None:
        return None if run.own is not None else set()
    if isinstance(given, ast.Lambda):
        return _keys(run.script, given.body, given)
    function = run.script.functions.get(ast.unparse(given))
    if function is None or _is_twice(run.script, function.name):
        return None
    found: set[str] = set()
    ends = [each for each in ast.walk(function) if isinstance(each, ast.Return)]
    for end in ends:
        keys = _keys(run.script, end.value, function) if end.value is not None else None
        if keys is None:
            return None
        found |= keys
    return found if ends else None


def _is_twice(script: Script, name: str) -> bool:
    return sum(isinstance(node, ast.FunctionDef) and node.name == name for node in script.nodes) > 1


def _keys(script: Script, value: ast.expr, function: ast.AST) -> set[str] | None:
    """The keys of a dictionary that is written out, also under a name, or of a metric of evaluate's."""
    if isinstance(value, ast.Name):
        made = [
            node.value for node in ast.walk(function)
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == value.id
        ]  # fmt: skip
        uses = [node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == value.id]
        added = [
            node.slice for node in ast.walk(function)
            if isinstance(node, ast.Subscript) and ast.unparse(node.value) == value.id
        ]  # fmt: skip
        found = _keys(script, made[0], function) if len(made) == 1 and len(uses) == 2 + len(added) else None
        more = {str(each.value) for each in added if isinstance(each, ast.Constant)}
        return found | more if found is not None and len(more) == len({ast.dump(each) for each in added}) else None
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "dict" and not value.args:
        return {each.arg for each in value.keywords if each.arg} if all(k.arg for k in value.keywords) else None
    if isinstance(value, ast.Dict):
        keys = [each.value if isinstance(each, ast.Constant) else None for each in value.keys]
        return {str(each) for each in keys} if None not in keys else None
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "compute":
        loaded = script.bound(value.func.value)
        by_name = isinstance(loaded, ast.Call) and script.name(loaded.func) == "evaluate.load" and loaded.args
        name = script.constant(loaded.args[0]) if isinstance(loaded, ast.Call) and by_name else None
        keys_of = _OF_EVALUATE.get(str(name))
        return set(keys_of) if keys_of is not None and name != "seqeval" else None
    return None


def _adds_own(run: Training) -> bool:
    """Whether a class of the file may put metrics of its own beside those of compute_metrics."""
    functions = {node.name for node in run.script.nodes if isinstance(node, ast.FunctionDef)}
    return bool(functions & {"on_evaluate", "evaluate", "evaluation_loop", "prediction_step", "_evaluate"})


def _stops_without(run: Training) -> Iterator[Hit]:
    """EarlyStoppingCallback asserts that there is a metric, and an evaluation."""
    callbacks = run.script.bound(run.trainer.argument("callbacks", 9))
    for each in callbacks.elts if isinstance(callbacks, ast.List) else ():
        made = run.script.bound(each)
        if not isinstance(made, ast.Call) or run.script.name(made.func) != "transformers.EarlyStoppingCallback":
            continue
        best, schedule = run.given("load_best_model_at_end"), run.said("lr_scheduler_type")
        lacks = [
            name for name, told in (
                ("metric_for_best_model", run.given("metric_for_best_model") or best or schedule in _PLATEAU),
                ("eval_strategy", run.given("eval_strategy") or run.given("evaluation_strategy")),
            ) if not told
        ]  # fmt: skip
        if lacks:
            message = f"EarlyStoppingCallback without {' and '.join(lacks)}: AssertionError when training begins."
            fix = 'Give load_best_model_at_end=True, metric_for_best_model="loss" and eval_strategy.'
            yield run.script.hit(run.arguments, message, fix)


@rule(
    "huggingface.no-eval-dataset", severity="error", raised_by="transformers",
    evidence=f"{_CODE}/trainer.py __init__ 4.46.0 to 5.24.0, run",
)  # fmt: skip
def no_eval_dataset(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """An eval_strategy, and a Trainer that gets no eval_dataset."""
    for run in trainings(files):
        judge = run.said("eval_strategy") or run.said("evaluation_strategy")
        given = run.trainer.argument("eval_dataset", 4)
        missing = given is None or is_none(given)
        if judge not in ("steps", "epoch") or not missing or _is_set_later(run.script) or _brings(run.own):
            continue
        message = f"eval_strategy is {judge}, and the Trainer gets no eval_dataset: ValueError as it is made."
        fix = 'Give eval_dataset, or eval_strategy="no".'
        if loads := _has_method(run.own, "get_eval_dataloader", "evaluate"):
            message = (
                f"eval_strategy is {judge}, and the Trainer gets no eval_dataset: transformers 4.46.0 and newer "
                f"raise ValueError as it is made, whatever its own {loads} brings; 4.45.2 doesn't."
            )
            yield replace(run.script.hit(run.trainer, message, "Give eval_dataset too."), severity="info")
        else:
            yield run.script.hit(run.trainer, message, fix)


def _brings(own: ast.ClassDef | None) -> bool:
    """Whether a Trainer of the file's own may hand a data set on itself: in its __init__, or by another class."""
    return own is not None and (len(own.bases) > 1 or bool(_has_method(own, "__init__")))


def _has_method(own: ast.ClassDef | None, *names: str) -> str:
    """The first of these methods that a class has; empty where it has none."""
    methods = {each.name for each in own.body if isinstance(each, ast.FunctionDef)} if own is not None else set()
    return next((name for name in names if name in methods), "")


def _is_set_later(script: Script) -> bool:
    """Whether the file sets the strategy in what it has made: `arguments.eval_strategy = "no"`."""
    return any(
        isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        and node.attr in ("eval_strategy", "evaluation_strategy")
        for node in script.nodes
    )  # fmt: skip
