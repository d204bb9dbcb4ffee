"""JSON Schemas of what dslaunch writes and prints, made from the dataclasses that hold it."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import typing
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from pydantic import TypeAdapter

from dslaunch.errors import ConfigError, listed, nearest
from dslaunch.planfile import JOINED_SCHEMA, Plan, Prediction
from dslaunch.review import outputs, outputs_run, runs
from dslaunch.review.difference import Difference
from dslaunch.run.verdict import Triage

_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_KINDS: tuple[type, ...] = (
    Plan, Prediction, Difference, runs.Runs, runs.Comparison,
    outputs.Recipes, outputs.Models, outputs.Clusters, outputs.Keys, outputs.Rendered, outputs.DryRun,
    outputs.Report, outputs.Written, outputs.Rules, outputs.Symptoms, outputs.Findings, outputs.Review,
    outputs_run.RunStatus, outputs_run.RunLog, outputs_run.Stopped, outputs_run.PreflightReport,
    outputs_run.Frame, outputs_run.Calibrated, outputs_run.Forms, outputs_run.SweepStatus,
    Triage,
)  # fmt: skip


def json_schema(name: str) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of an output, by the name that stands under its `schema`.

    Raises:
        ConfigError: no output has this name.
    """
    found = _made()
    if name not in found:
        raise ConfigError(f"schema: no output '{name}'. There are {listed(found)}.{nearest(name, found)}")
    return {"$schema": _DRAFT, "$id": name, **found[name]()}


def names() -> list[str]:
    """The outputs that have a schema."""
    return list(_made())


def _made() -> dict[str, Callable[[], dict[str, Any]]]:
    by_name = {str(_name_of(kind)): partial(_schema_of, kind) for kind in _KINDS}
    return {**by_name, JOINED_SCHEMA: _joined}


def _name_of(kind: type) -> Any:
    return next(field.default for field in dataclasses.fields(kind) if field.name == "schema")


def _schema_of(kind: type) -> dict[str, Any]:
    made = TypeAdapter(kind).json_schema(mode="serialization")
    classes = {each.__name__: each for each in _classes(kind)}
    _describe(made, kind)
    for name, part in made.get("$defs", {}).items():
        _describe(part, classes[name])
    made["properties"]["schema"] = {"const": _name_of(kind)}
    return made


def _joined() -> dict[str, Any]:
    """The prediction's keys, the plan's over them, and a stage that holds both."""
    plan, prediction = _schema_of(Plan), _schema_of(Prediction)
    parts = {**prediction["$defs"], **plan["$defs"]}
    stage, predicted = parts["StagePlan"], parts.pop("StagePrediction")
    parts["StagePlan"] = {**stage, **_both(predicted, stage)}
    said = {"explanation": {"type": "array", "items": {"type": "string"}, "description": "With --explain."}}
    both = _both(prediction, plan)
    both["properties"] |= {**said, "schema": {"const": JOINED_SCHEMA}}
    about = {"title": "plan --json", "description": "`dslaunch plan --json`"}
    return {**plan, **both, **about, "$defs": parts}


def _both(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    required = dict.fromkeys([*below.get("required", []), *above.get("required", [])])
    return {"properties": {**below["properties"], **above["properties"]}, "required": list(required)}


def _describe(part: dict[str, Any], kind: type) -> None:
    """Writes what the class says of itself and of its fields into its schema; no other keys are allowed."""
    part["description"] = inspect.cleandoc(kind.__doc__ or "")
    part["additionalProperties"] = False
    for name, text in field_docs(kind).items():
        part["properties"][name]["description"] = text


def field_docs(kind: type) -> dict[str, str]:
    """The string under each field of a class."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, after in zip(body.body, body.body[1:], strict=False):
        named = isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        said = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if named and said:
            found[field.target.id] = inspect.cleandoc(str(after.value.value))  # type: ignore[attr-defined]
    return found


def _classes(kind: Any) -> Iterator[type]:
    """The dataclasses that an annotation holds, itself among them."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        yield kind
        for hint in typing.get_type_hints(kind).values():
            yield from _classes(hint)
    for inner in typing.get_args(kind):
        yield from _classes(inner)
