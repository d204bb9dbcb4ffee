"""The tree becomes a RunConfig, or one message for each mistake in it."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from dslaunch.errors import ConfigError, listed, nearest
from dslaunch.schema.base import PATTERNS
from dslaunch.schema.cluster import in_parts
from dslaunch.schema.config import RunConfig
from dslaunch.schema.strategy import ComponentStrategy, Strategy
from dslaunch.secrets import in_arguments, is_secret_name, may_be_secret, shaped

Path = tuple[str | int, ...]
_YAML_KINDS = {bool: "truth value", int: "number", float: "number"}


def validate(tree: Mapping[str, Any], locate: Callable[[Sequence[str | int]], str]) -> RunConfig:
    """The RunConfig in `tree`; `locate` tells where a key was written.

    Raises:
        ConfigError: one line for each mistake: where, which key, what was found, what is allowed.
    """
    prepared = {**tree, "strategy": _with_components(tree.get("strategy"))}
    if isinstance(tree.get("layouts"), dict):
        prepared["layouts"] = _by_size(tree["layouts"])
    try:
        config = RunConfig.model_validate(prepared)
    except ValidationError as error:
        lines = dict.fromkeys(_line(dict(mistake), locate, tree) for mistake in error.errors())
        raise ConfigError("\n".join(lines)) from error
    mistakes = [*_component_names(config, locate), *_unused_layouts(config, locate), *_secrets(config)]
    mistakes += [*_unequal_hosts(config, locate), *_staged(config, locate)]
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return config.model_copy(update={"cluster": in_parts(config.cluster)})


def _with_components(strategy: Any) -> Any:
    """`strategy.llm.tp` is typed, `strategy.components.llm.tp` is meant."""
    if not isinstance(strategy, dict):
        return strategy
    if not isinstance(strategy.get("components", {}), dict):
        return strategy
    own = {key: value for key, value in strategy.items() if key in Strategy.model_fields}
    rest = {key: value for key, value in strategy.items() if key not in Strategy.model_fields}
    return {**own, "components": {**own.get("components", {}), **rest}}


def _by_size(layouts: Mapping[Any, Any]) -> dict[Any, Any]:
    """`layouts.64.llm.tp=4` is text to Hydra, 64 is meant; it is laid over the recipe's own layout."""
    found: dict[Any, Any] = {}
    for size, layout in layouts.items():
        key = int(size) if isinstance(size, str) and size.isascii() and size.isdigit() else size
        below = found.get(key)
        if isinstance(below, dict) and isinstance(layout, dict):
            layout = {name: _over(below.get(name), part) for name, part in {**below, **layout}.items()}
        found[key] = layout
    return found


def _over(below: Any, above: Any) -> Any:
    return {**below, **above} if isinstance(below, dict) and isinstance(above, dict) else above


def _unequal_hosts(config: RunConfig, locate: Callable[[Sequence[str | int]], str]) -> list[str]:
    """What cannot be done with hosts that differ in their GPUs: put one in another's place, or leave some out."""
    if not config.cluster.mixed:
        return []
    wrong: list[Path] = []
    if config.goal.name in ("fewest_gpus", "deadline", "cost"):
        wrong.append(("goal", "name"))
    if config.restart.elastic:
        wrong.append(("restart", "elastic"))
    if config.restart.spares:
        wrong.append(("restart", "spares"))
    slurm, one_kind = config.launcher.slurm, ("spare_nodes", "segment", "at_once")
    wrong += [("launcher", "slurm", key) for key in one_kind if getattr(slurm, key)]
    if slurm.rank_order == "switches":
        wrong.append(("launcher", "slurm", "rank_order"))
    if not slurm.exclusive:  # two components may share a node then
        wrong.append(("launcher", "slurm", "exclusive"))
    return [
        f"{locate(path)}: {_dotted(path)}: goes with hosts that are alike, and cluster.mixed names several kinds. "
        "Take it out, or plan for as many GPUs on each host: cluster=NODESxGPUSxTYPE"
        for path in wrong
    ]


def _staged(config: RunConfig, locate: Callable[[Sequence[str | int]], str]) -> list[str]:
    path: Path = ("launcher", "stage")
    if not config.launcher.stage.to:
        return []
    if config.restart.elastic:
        why = "goes with a fixed set of hosts, and restart.elastic is true. Take one out"
    elif config.launcher.container.kind != "none":
        why = "the ranks of a container see the mounted folders alone. Take it out, or launcher.container"
    else:
        return []
    return [f"{locate(path)}: launcher.stage: {why}"]


def _component_names(config: RunConfig, locate: Callable[[Sequence[str | int]], str]) -> list[str]:
    known = list(config.model.components)
    named: list[tuple[Path, str]] = [(("strategy", name), name) for name in config.strategy.components]
    for size, layout in config.layouts.items():
        named += [(("layouts", str(size), name), name) for name in layout]
    allowed = [*known, *(f for f in Strategy.model_fields if f != "components")]
    return [
        f"{locate(path)}: {_dotted(path)}: model {config.model.name} has no component '{name}'. "
        f"Allowed: {listed(allowed if path[0] == 'strategy' else known)}.{nearest(name, allowed)}"
        for path, name in named
        if name not in known
    ]


def _unused_layouts(config: RunConfig, locate: Callable[[Sequence[str | int]], str]) -> list[str]:
    """Layouts typed for another number of GPUs than the cluster has, or beside a strategy that takes none."""
    typed = [size for size in config.layouts if locate(("layouts", str(size))) == "command line"]
    if config.strategy.name != "layouts":
        return [
            f"command line: layouts.{size}: strategy is {config.strategy.name}, which reads no layouts. Set "
            "strategy.COMPONENT.KEY instead, or strategy=layouts."
            for size in typed
        ]
    world = config.cluster.world_size
    return [
        f"command line: layouts.{size}: the cluster has {world} GPUs, and layouts.{world} would be read. Set "
        f"strategy.COMPONENT.KEY, or layouts.{world}.COMPONENT.KEY."
        for size in typed
        if size != world
    ]


def _secrets(config: RunConfig) -> list[str]:
    named = [
        f"env.{name}: looks like a secret, and its value would be written into files. Remove it, export {name} "
        f"in the launching shell, and hand it over by name: launcher.pass_env=[{name}]."
        for name, value in config.env.items()
        if is_secret_name(name) and may_be_secret(value)
    ]
    named += [
        f"script_args: {option}: its value looks like a secret, and would be written into files and shown in the "
        "list of processes. Have the script read it from an environment variable, and hand that over by name: "
        "launcher.pass_env=[NAME]."
        for option in in_arguments(config.script_args)
    ]
    return named + [
        f"{key}: holds a text with the shape of an access token or a password, and would be written into files. "
        "Take it out, revoke it where it was shared, and hand it over as an environment variable, by name: "
        "launcher.pass_env=[NAME]."
        for key in dict.fromkeys(shaped(config.model_dump()))
        if not any(line.startswith(f"{key}:") for line in named)
    ]


def _line(
    mistake: dict[str, Any], locate: Callable[[Sequence[str | int]], str], tree: Mapping[str, Any]
) -> str:
    path = _real_path(mistake["loc"])
    typed = tuple(key for i, key in enumerate(path) if (path[0], i, key) != ("strategy", 1, "components"))
    absent = mistake["type"] == "union_tag_not_found"
    words = _no_component(str(path[-1]), tree["model"]["components"]) if absent else _words(mistake, path)
    return f"{locate(typed)}: {_dotted(typed)}: {words}"


def _no_component(name: str, components: Mapping[str, Any]) -> str:
    """What to say of a component without an architecture: most of the time the name is mistaken."""
    known = [other for other, part in components.items() if isinstance(part, Mapping) and "arch" in part]
    return (
        f"the model has no component '{name}', and a new one takes its arch. "
        f"Allowed: {listed(known)}.{nearest(name, known)}"
    )


def _words(mistake: dict[str, Any], path: Path) -> str:
    found, kind = mistake.get("input"), mistake["type"]
    if kind == "extra_forbidden":
        if (
            path[0] == "strategy"
            and len(path) == 3
            and path[1] == "components"
            and not isinstance(found, dict)
        ):
            return _unknown(str(path[-1]), list(ComponentStrategy.model_fields))
        return _unknown(str(path[-1]), _fields(path[:-1]))
    if kind == "missing":
        return f"is missing.{_doc(path)}"
    if kind == "string_type" and isinstance(found, bool | int | float):
        return f"is {found!r}, a {_YAML_KINDS[type(found)]} to YAML, where text belongs. Put it in quotes."
    if kind == "string_type" and isinstance(found, dict | list):
        return f"holds {'keys' if isinstance(found, dict) else 'a list'}, where text belongs.{_doc(path)}"
    if kind == "string_pattern_mismatch":
        shown = "an address, which may let whoever reads it in" if "://" in str(found) else repr(found)
        return f"is {shown}; it takes {PATTERNS[mistake['ctx']['pattern']]}.{_doc(path)}"
    if kind in ("tuple_type", "list_type"):
        return f"is {found!r}; it takes a list, such as {path[-1]}=[A,B].{_doc(path)}"
    if kind == "model_type" or kind == "model_attributes_type":
        meant = elsewhere(str(path[-1])) if path[:2] == ("strategy", "components") else ""
        return f"is {found!r}; it takes keys: {listed(_fields(path))}.{meant}{_doc(path)}"
    allowed = str(mistake.get("ctx", {}).get("expected", "")).replace(" or ", ", ")
    if kind == "literal_error":
        words = [word.strip("' ") for word in allowed.split(",")]
        return f"is {found!r}. Allowed: {listed(words)}.{nearest(str(found), words)}{_doc(path)}"
    if kind == "union_tag_invalid":
        allowed = str(mistake["ctx"]["expected_tags"])
        return f"arch is {mistake['ctx']['tag']!r}. Allowed: {allowed}."
    message = mistake["msg"].removeprefix("Value error, ").removeprefix("Input ")
    told = isinstance(found, str | int | float | bool | None) and f"is {found!r}." not in message
    shown = f" (found {found!r})" if told else ""
    return f"{message}{shown}.{_doc(path)}"


def _unknown(key: str, allowed: Sequence[str]) -> str:
    return f"unknown key.{nearest(key, allowed) or elsewhere(key)} Allowed: {listed(allowed)}."


def elsewhere(key: str) -> str:
    """` Did you mean 'training.optimizer.lr'?` where sections have a key of that name; else empty."""
    known = [dotted for dotted in _every_key() if dotted.rpartition(".")[2] == key][:3]
    return f" Did you mean {' or '.join(map(repr, known))}?" if known else ""


@cache
def _every_key() -> tuple[str, ...]:
    """Every key as it is typed, those that stand highest first; `layouts`, which repeats `strategy`, left out."""
    found = {dotted: None for dotted in _below(RunConfig, ()) if not dotted.startswith("layouts.")}
    return tuple(sorted(found, key=lambda dotted: (dotted.count("."), dotted)))


def _below(kind: Any, path: tuple[str, ...]) -> Iterator[str]:
    for inner in _bare(kind):
        origin, args = typing.get_origin(inner), typing.get_args(inner)
        if origin is dict:
            typed = ("strategy", "COMPONENT") if path == ("strategy", "components") else (*path, "NAME")
            yield from _below(args[1], typed)
        elif isinstance(inner, type) and issubclass(inner, BaseModel):
            for key, field in keys_of(inner).items():
                if (*path, key) != ("strategy", "components"):
                    yield ".".join([*path, key])
                yield from _below(field.annotation, (*path, key))


def _dotted(path: Sequence[str | int]) -> str:
    return ".".join(str(key) for key in path) or "the recipe"


def _real_path(loc: Path) -> Path:
    """Pydantic's location without the tags of a union and the marks of a dict's key."""
    of_component = loc[:2] == ("model", "components")
    return tuple(key for i, key in enumerate(loc) if key != "[key]" and not (of_component and i == 3))


def _doc(path: Path) -> str:
    """What the field at `path` means, as the schema documents it."""
    owner = _model_at(path[:-1])
    field = owner.model_fields.get(str(path[-1])) if owner and path else None
    return f" {field.description.splitlines()[0]}" if field and field.description else ""


def fields_at(path: Path) -> dict[str, FieldInfo]:
    """The keys that are allowed at `path`, as they are typed; empty where no section stands there."""
    found: dict[str, FieldInfo] = {}
    for model in models_at(path):
        found.update(keys_of(model))
    return found


def keys_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """A section's fields by the key that is typed."""
    return {f.alias or name: f for name, f in model.model_fields.items()}


def _fields(path: Path) -> list[str]:
    return list(fields_at(path))


def _model_at(path: Path) -> type[BaseModel] | None:
    models = models_at(path)
    return models[0] if models else None


def models_at(path: Path) -> list[type[BaseModel]]:
    """The sections that may stand at `path`: several where components differ by architecture."""
    kinds: list[Any] = [RunConfig]
    for key in path:
        kinds = [inner for kind in kinds for inner in _step(kind, key)]
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]


def _step(kind: Any, key: str | int) -> list[Any]:
    """The annotations that may stand under `key` of a value annotated `kind`."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        field = next((f for name, f in kind.model_fields.items() if str(key) in (name, f.alias)), None)
        return _bare(field.annotation) if field else []
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    return _bare(args[1]) if origin is dict else _bare(args[0]) if origin in (tuple, list) else []


def _bare(annotation: Any) -> list[Any]:
    """The alternatives of an annotation, without Annotated and None."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _bare(args[0])
    if origin in (typing.Union, types.UnionType):
        return [inner for arg in args for inner in _bare(arg) if arg is not type(None)]
    return [annotation]
