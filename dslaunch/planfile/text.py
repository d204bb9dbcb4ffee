"""Plans and predictions as JSON, and back: sorted keys, the same bytes everywhere."""

from __future__ import annotations

import dataclasses
import json
import re
import types
import typing
from typing import Any

from dslaunch.errors import ConfigError
from dslaunch.planfile.plan import PLAN_SCHEMA, Plan
from dslaunch.planfile.prediction import PREDICTION_SCHEMA, Prediction
from dslaunch.planfile.preflight import PREFLIGHT_SCHEMA, PreflightPlan

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
"""Of a run, and so of its folder."""
_READABLE = {PLAN_SCHEMA, PREDICTION_SCHEMA, PREFLIGHT_SCHEMA}
JOINED_SCHEMA = "dslaunch.plan-json/1"
"""Of `dslaunch plan --json`, which is plan.json with prediction.json laid over it."""


def to_json(value: Any) -> str:
    """Sorted keys, two spaces, lists of scalars on one line, a newline at the end."""
    return _write(_plain(value), "") + "\n"


def plan_from_json(text: str, where: str = "plan.json") -> Plan:
    """The Plan in `text`.

    Raises:
        ConfigError: not JSON, another schema, a missing or unknown key, or a value that no plan has.
    """
    plan = _read(Plan, text, where)
    assert isinstance(plan, Plan)
    if not _NAME.fullmatch(plan.name):
        raise _wrong(f"{where}.name", plan.name, "a run's name (letters, digits and _.+-)")
    if not plan.components:
        raise _wrong(f"{where}.components", plan.components, "an object of one component or more")
    counts = {
        "world_size": plan.world_size,
        "global_batch": plan.global_batch,
        "cluster.nodes": plan.cluster.nodes,
        "cluster.gpus_per_node": plan.cluster.gpus_per_node,
    }
    for key, count in counts.items():
        if count < 1:
            raise _wrong(f"{where}.{key}", count, "a number from 1 on")
    return plan


def prediction_from_json(text: str, where: str = "prediction.json") -> Prediction:
    """The Prediction in `text`; raises ConfigError like plan_from_json."""
    prediction = _read(Prediction, text, where)
    assert isinstance(prediction, Prediction)
    return prediction


def preflight_from_json(text: str, where: str = "preflight.json") -> PreflightPlan:
    """The PreflightPlan in `text`; raises ConfigError like plan_from_json."""
    preflight = _read(PreflightPlan, text, where)
    assert isinstance(preflight, PreflightPlan)
    return preflight


def joined(plan: Plan, prediction: Prediction) -> dict[str, Any]:
    """The one object of `dslaunch plan --json`: the prediction laid over the plan, stage by stage."""
    result: dict[str, Any] = {**_plain(prediction), **_plain(plan), "schema": JOINED_SCHEMA}
    for name, stages in prediction.components.items():
        for decided, predicted in zip(result["components"][name]["stages"], stages, strict=True):
            decided.update(_plain(predicted))
    return result


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _write(value: Any, indent: str) -> str:
    inner = indent + "  "
    if isinstance(value, dict) and value:
        rows = [f"{inner}{json.dumps(key)}: {_write(value[key], inner)}" for key in sorted(value)]
        return "{\n" + ",\n".join(rows) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        return "[\n" + ",\n".join(inner + _write(item, inner) for item in value) + f"\n{indent}]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _read(kind: Any, text: str, where: str) -> Any:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}. Render it again with `dslaunch render`.") from error
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema not in _READABLE:
        raise ConfigError(
            f"{where}: schema is {schema!r}; this dslaunch reads {', '.join(sorted(_READABLE))}. "
            "Render it again with `dslaunch render`."
        )
    return _build(kind, data, where)


def _build(kind: Any, data: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _build_dataclass(kind, data, where)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is dict:
        if not isinstance(data, dict):
            raise _wrong(where, data, "an object")
        return {key: _build(args[1], item, f"{where}.{key}") for key, item in data.items()}
    if origin is tuple:
        if not isinstance(data, list) or (args[-1] is not Ellipsis and len(data) != len(args)):
            raise _wrong(where, data, "a list" if args[-1] is Ellipsis else f"a list of {len(args)}")
        kinds = args[:1] * len(data) if args[-1] is Ellipsis else args
        return tuple(
            _build(k, item, f"{where}[{i}]") for i, (k, item) in enumerate(zip(kinds, data, strict=True))
        )
    if kind is Any:
        return data
    if origin is types.UnionType:
        parts = [part for part in args if dataclasses.is_dataclass(part)]
        return _build(parts[0], data, where) if parts and data is not None else data
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if not isinstance(data, kind) or (kind is int and isinstance(data, bool)):
        raise _wrong(where, data, kind.__name__)
    return data


def _wrong(where: str, data: Any, wanted: str) -> ConfigError:
    return ConfigError(f"{where}: {data!r} is not {wanted}. Render it again with `dslaunch render`.")


def _build_dataclass(kind: Any, data: Any, where: str) -> Any:
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    if not isinstance(data, dict):
        raise _wrong(where, data, "an object")
    required = {n for n, f in fields.items() if f.default is dataclasses.MISSING}
    wrong = sorted(set(data) - set(fields)) + sorted(required - set(data))
    if wrong:
        raise ConfigError(
            f"{where}: unknown or missing key {wrong[0]!r}. Render it again with `dslaunch render`."
        )
    return kind(**{name: _build(hints[name], item, f"{where}.{name}") for name, item in data.items()})
