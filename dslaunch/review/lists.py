"""What there is: recipes, models, clusters, and the keys of the schema. One line each."""

from __future__ import annotations

import types
import typing
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from dslaunch.conffiles import loaded, names
from dslaunch.errors import ConfigError, listed, nearest
from dslaunch.model.params import params
from dslaunch.paths import data_dirs
from dslaunch.schema.cluster import Gpu, Node
from dslaunch.schema.model import Model
from dslaunch.schema.strategy import Strategy
from dslaunch.schema.validate import keys_of, models_at


def recipe_rows(site: Path | None) -> list[tuple[str, ...]]:
    """(name, what it is)."""
    return [(name, _about(name, site)) for name in names("recipes", site)]


def _about(name: str, site: Path | None) -> str:
    try:
        return str(_load(data_dirs("recipes", site), name).get("about", ""))
    except ConfigError as error:
        return f"not valid: {error}"


def model_rows(site: Path | None) -> list[tuple[str, ...]]:
    """(name, parameters, components and source)."""
    rows: list[tuple[str, ...]] = []
    for name in names("model", site):
        model = Model.model_validate(_load(_folders("model", site), name))
        total = sum(params(component) for component in model.components.values())
        rows.append((name, f"{total / 1e9:.3g}B", f"{', '.join(model.components)} ({_first(model.source)})"))
    return rows


def cluster_rows(site: Path | None) -> list[tuple[str, ...]]:
    """(name, GPU, memory, GPUs a node, network); sizes go before the name: 64xA100."""
    return [(name, *_cluster(name, site)) for name in names("cluster", site)]


def _cluster(name: str, site: Path | None) -> tuple[str, str, str, str]:
    own = _load(_folders("cluster", site), name)
    if set(own) == {"defaults"}:
        return f"= {next(d for d in own['defaults'] if d != '_self_')}", "", "", ""
    tree = _joined(own, site)
    try:
        gpu, node = Gpu.model_validate(tree["gpu"]), Node.model_validate(tree["node"])
    except (KeyError, ValidationError):
        return "not valid: `dslaunch plan` says why", "", "", ""
    network = str((tree.get("network") or {}).get("kind", "one node"))
    return gpu.name, f"{gpu.memory_gib:g} GiB", f"{node.gpus} a node", network


def _joined(tree: dict[str, Any], site: Path | None) -> dict[str, Any]:
    """A cluster file laid over the one it names in its defaults, section by section."""
    bases = [str(base) for base in tree.get("defaults", []) if base != "_self_"]
    below = _joined(_load(_folders("cluster", site), bases[0]), site) if bases else {}
    return {
        key: {**below.get(key, {}), **value} if isinstance(value, dict) else value
        for key, value in {**below, **tree}.items()
    }


def schema_rows(dotted: str) -> list[tuple[str, ...]]:
    """(key, type, default, meaning) of each key of the section `dotted`, or of the one key."""
    typed = tuple(dotted.split(".")) if dotted else ()
    path = _real_path(typed)
    sections = models_at(path)
    if sections:
        rows: list[tuple[str, ...]] = []
        for section in sections:
            if len(sections) > 1:
                rows.append((f"# {_first(section.__doc__ or '')}", "", "", ""))
            rows += [_row(".".join([*typed, key]), field) for key, field in keys_of(section).items()]
        return rows
    owners = models_at(path[:-1])
    if not owners and len(typed) > 1:  # a name inside a mapping, such as env.NAME
        return schema_rows(".".join(typed[:-1]))
    found = [_row(dotted, keys_of(owner)[path[-1]]) for owner in owners if path[-1] in keys_of(owner)]
    if not found:
        known = [".".join([*typed[:-1], key]) for owner in owners for key in keys_of(owner)]
        raise ConfigError(f"schema: no key '{dotted}'. There are {listed(known)}.{nearest(dotted, known)}")
    return found


def _real_path(typed: tuple[str, ...]) -> tuple[str, ...]:
    """`strategy.llm` is typed, `strategy.components.llm` is meant."""
    if len(typed) > 1 and typed[0] == "strategy" and typed[1] not in Strategy.model_fields:
        return (typed[0], "components", *typed[1:])
    return typed


def _row(key: str, field: FieldInfo) -> tuple[str, ...]:
    meaning = (field.description or "").replace("\n", " ")
    return (key, _kind(field.annotation), _default(field), meaning)


def _kind(annotation: Any) -> str:
    """An annotation as a user would say it: `int`, `a | b`, `NAME: section`."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _kind(args[0])
    if origin is typing.Literal:
        return " | ".join(str(arg) for arg in args)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(_kind(arg) for arg in args if arg is not type(None))
    if origin is dict:
        return f"{{NAME: {_kind(args[1])}}}"
    if origin is tuple:
        return f"[{', '.join(dict.fromkeys(_kind(arg) for arg in args if arg is not Ellipsis))}]"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return {"str": "text", "bool": "true | false"}.get(annotation.__name__, str(annotation.__name__))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if value is None or value is PydanticUndefined or isinstance(value, BaseModel | dict) or value == ():
        return ""
    return (
        str(list(value))
        if isinstance(value, tuple)
        else str(value).lower()
        if isinstance(value, bool)
        else str(value)
    )


def _load(folders: list[Path], name: str) -> dict[str, Any]:
    file = next((f for folder in folders if (f := folder / f"{name}.yaml").is_file()), None)
    if file is None:
        return {}
    tree = loaded(file)
    return tree if isinstance(tree, dict) else {}


def _folders(group: str, site: Path | None) -> list[Path]:
    return [folder / group for folder in data_dirs("conf", site)]


def _first(text: str, most: int = 80) -> str:
    """The first source of several, cut where it is long."""
    first = text.strip().partition("\n")[0].partition(";")[0]
    return first if len(first) <= most else first[: most - 3] + "..."
