"""Hydra, and nothing but Hydra: a recipe, its groups and the overrides become one plain tree.

A recipe is the primary config; the site's and the package's conf/ are Hydra's search path; `64xA100` is a
config that a small source of ours makes up. Overrides of single keys are read by Hydra's grammar and forced in, as
it does with `++`, so that the schema judges them, not Hydra. Nothing is instantiated.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dslaunch.conffiles import (
    GROUPS,
    SIZED,
    check_choice,
    check_recipe,
    fabric_files,
    group_folders,
    line_of,
    loaded,
    parents,
    recipe_folder,
    shown,
)
from dslaunch.errors import ConfigError
from dslaunch.paths import data_dirs, data_root
from dslaunch.schema.text import is_text

_UNUSED = tuple(
    f"~hydra/{group}"
    for group in ("output", "launcher", "sweeper", "help", "hydra_help", "hydra_logging", "job_logging", "env")
)
"""What @hydra.main alone uses: a sixth of the time to compose."""
_GLOBAL = re.compile(r"^#\s*@package\s+_global_\s*$", re.MULTILINE)
_KEY = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*")


@dataclass(frozen=True)
class Composed:
    """The tree, and where each of its keys was written."""

    recipe: str
    tree: dict[str, Any]
    overrides: tuple[str, ...]
    files: tuple[tuple[tuple[str, ...], Path], ...]
    """The YAML files read, each with the path in the tree at which its content stands; the recipe first."""

    def locate(self, path: Sequence[str | int]) -> str:
        """`command line` or `file:line` of the key at `path`, or of the nearest parent that was written."""
        keys = [str(key) for key in path]
        for length in range(len(keys), 0, -1):
            dotted = ".".join(keys[:length])
            if any(_covers(override, dotted) for override in self.overrides):
                return "command line"
            for package, file in self.files:
                rest = keys[len(package) : length]
                if tuple(keys[: len(package)]) == package and (line := line_of(file, rest)):
                    return f"{shown(file)}:{line}"
        return shown(self.files[0][1])


def compose(recipe: str, overrides: Sequence[str], site: Path | None = None) -> Composed:
    """Joins `recipes/RECIPE.yaml`, the groups in conf/ and the overrides.

    Args:
        recipe: name of a recipe of the site or of the package.
        overrides: `group=choice` or `dotted.key=value`, as typed.
        site: a folder with its own conf/, recipes/ and templates/, searched first.

    Raises:
        ConfigError: no such recipe, group or choice; a YAML mistake; an override that can't be read.
    """
    folder = recipe_folder(recipe, site)
    check_recipe(folder / f"{recipe}.yaml", site)
    groups, keys = _read(overrides, site)
    try:
        joined, choices = _joined(recipe, groups, folder.resolve(), site and site.resolve(), _stamps(site))
        tree = _with_keys(joined, keys)
    except yaml.YAMLError as error:
        raise ConfigError(_yaml_mistake(error)) from error
    except RecursionError as error:
        raise ConfigError(
            f"recipe={recipe}: its defaults, or a cluster's, lead back to themselves."
        ) from error
    except (HydraException, OmegaConfBaseException, UnicodeDecodeError, ValueError, TypeError) as error:
        raise ConfigError(_hydra_mistake(error, folder / f"{recipe}.yaml")) from error
    _check_strategy_name(tree, choices)
    fabrics = fabric_files(tree, site)
    own = folder / f"{recipe}.yaml"
    files = [*(((), file) for file in (own, *parents(own, site))), *_group_files(choices, site)]
    files += [(("fabrics", name), file) for name, file in fabrics.items()]
    whole = {**{str(k): v for k, v in tree.items()}, "recipe": recipe}
    whole["fabrics"] = {name: loaded(file) for name, file in fabrics.items()}
    return Composed(recipe, whole, tuple(overrides), tuple(files))


def _stamps(site: Path | None) -> tuple[tuple[str, int, int], ...]:
    """What tells whether a file of the site was written since: (path, time, bytes)."""
    folders = (site / "conf", site / "recipes") if site else ()
    files = [(path, path.stat()) for folder in folders for path in sorted(folder.rglob("*.yaml"))]
    return tuple((str(path), stat.st_mtime_ns, stat.st_size) for path, stat in files)


@lru_cache(maxsize=256)
def _joined(
    recipe: str,
    groups: tuple[str, ...],
    folder: Path,
    site: Path | None,
    stamps: tuple[tuple[str, int, int], ...],
) -> tuple[bytes, dict[str, Any]]:
    """The recipe with its groups (pickled), and the choice of each; kept, since a comparison, a sweep or a review
    composes the same groups with other keys.

    Args:
        folder: the recipe's; absolute, as `site` is.
        stamps: of the site's files, which are read again where one was written.
    """
    folders = [*data_dirs("conf", site), *data_dirs("recipes", site)]  # a recipe may start from another
    searchpath = ",".join(_quoted(f"file://{path}") for path in folders)
    Plugins.instance().register(SizedCluster)
    with initialize_config_dir(config_dir=str(folder), version_base="1.3"):
        config = hydra_compose(
            recipe,
            [f"hydra.searchpath=[{searchpath},'{SizedCluster.scheme()}://any']", *_UNUSED, *groups],
            return_hydra_config=True,
        )
    kept = [key for key in config if key != "hydra"]
    return pickle.dumps(OmegaConf.masked_copy(config, kept)), dict(config.hydra.runtime.choices)


def _with_keys(pickled: bytes, keys: Sequence[Override]) -> dict[Any, Any]:
    """The tree with single keys set, as Hydra sets those of `++`."""
    changed: DictConfig = pickle.loads(pickled)  # a copy, in a sixth of the time of copy.deepcopy
    for each in keys:
        OmegaConf.update(changed, each.key_or_group, each.value(), merge=True, force_add=True)
    tree = OmegaConf.to_container(changed, resolve=True)
    assert isinstance(tree, dict)
    return tree


def swept(text: str) -> list[str]:
    """KEY=VALUE words, one for each value that Hydra's basic sweeper reads in `text`.

    A,B and choice(A,B), range(START,STOP,STEP) and sort(...) of either; a comma in brackets or quotes separates
    nothing. A key that is text takes choice(A,B) alone: a comma is a part of its value.

    Raises:
        ConfigError: a sweep without a list of values, such as interval(0,1).
    """
    key, _, value = text.partition("=")
    chosen = value[len("choice(") : -1] if value.startswith("choice(") and value.endswith(")") else ""
    if is_text(tuple(key.split("."))):
        return [f"{key}={_unquoted(part.strip())}" for part in _parts(chosen)] if chosen else [text]
    try:
        found = OverridesParser.create().parse_override(text)
    except HydraException:
        return [text]  # composition says what is wrong with it
    if not found.is_sweep_override():
        return [text]
    sweep = found.value()
    if not found.is_discrete_sweep() or isinstance(sweep, Glob) or getattr(sweep, "shuffle", False):
        raise ConfigError(
            f"{text}: names no list of values in a fixed order. Write A,B, choice(A,B) or range(START,STOP,STEP)"
        )
    typed = _parts(chosen or value)
    if isinstance(sweep, ChoiceSweep) and len(typed) == len(sweep.list):
        return [f"{key}={part.strip()}" for part in typed]  # 1e-4 stays 1e-4, and becomes no 0.0001
    return [f"{key}={each}" for each in found.sweep_string_iterator()]


def _parts(text: str) -> list[str]:
    """What commas outside of brackets and quotes separate."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        else:
            depth += (letter in "[{(") - (letter in "]})")
        if letter == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


class SizedCluster(ConfigSource):  # type: ignore[misc]
    """The configs `cluster/64xA100` (GPUs in all) and `cluster/8x8xA100` (nodes x GPUs of each)."""

    @staticmethod
    def scheme() -> str:
        return "sized"

    def available(self) -> bool:
        return True

    def load_config(self, config_path: str) -> ConfigResult:
        match = _sized(config_path)
        assert match, config_path
        first, second = int(match["first"]), match["second"]
        size: dict[str, int | None] = {"gpus": None, "nodes": None, "gpus_per_node": None}
        size |= {"nodes": first, "gpus_per_node": int(second)} if second else {"gpus": first}
        config = OmegaConf.create({"defaults": [match["type"], "_self_"], **size})
        return ConfigResult(
            provider=self.provider,
            path=f"{self.scheme()}://{config_path}",
            config=config,
            header={"package": None},
        )

    def is_group(self, config_path: str) -> bool:
        return config_path in ("", "cluster")

    def is_config(self, config_path: str) -> bool:
        return _sized(config_path) is not None

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return []


def _covers(override: str, dotted: str) -> bool:
    """Whether an override sets the key, or one below it."""
    key = override.split("=", 1)[0]
    return key == dotted or key.startswith(f"{dotted}.")


def _sized(config_path: str) -> re.Match[str] | None:
    group, _, name = config_path.removesuffix(".yaml").partition("/")
    return SIZED.fullmatch(name) if group == "cluster" else None


def _read(overrides: Sequence[str], site: Path | None) -> tuple[tuple[str, ...], list[Override]]:
    """(choices of groups, for Hydra; single keys)."""
    groups, keys = [], []
    for text in overrides:
        key, value = _key_and_value(text)
        if key in GROUPS:
            check_choice(key, value, site)
            groups.append(f"{key}={_quoted(value)}")
        elif is_text(tuple(key.split("."))):
            keys.append(_parsed(text, f"++{key}={_quoted(value)}"))
        elif value:
            keys.append(_parsed(text, f"++{key}={value}"))
        else:
            raise ConfigError(f"{key}: the value after '=' is missing.")
    return tuple(groups), keys


def _key_and_value(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator or not _KEY.fullmatch(key):
        raise ConfigError(f"'{text}' is not KEY=VALUE. Overrides look like training.global_batch=512.")
    if key.split(".")[0] == "hydra":
        raise ConfigError(f"{key}: unknown key; Hydra's own settings are not taken.")
    if key == "strategy.name":
        raise ConfigError(f"strategy.name: a name alone changes nothing; write strategy={value or 'NAME'}.")
    if "${" in value:
        raise ConfigError(f"{key}: '${{' is not taken on the command line; write the value itself.")
    return key, value


def _parsed(typed: str, override: str) -> Override:
    """`override`, which Hydra can read as one value."""
    try:
        found = OverridesParser.create().parse_override(override)
    except HydraException as error:
        reason = str(error).splitlines()[0].replace("++", "")
        raise ConfigError(
            f"{typed}: can't be read: {reason}. Lists are written [1,2], texts 'a b'."
        ) from error
    if found.is_sweep_override():
        raise ConfigError(f"{typed}: several values; one is taken. A list is written [a,b].")
    return found


def _check_strategy_name(tree: dict[Any, Any], choices: dict[str, Any]) -> None:
    strategy = tree.get("strategy")
    name = strategy.get("name") if isinstance(strategy, dict) else None
    if isinstance(name, str) and name != choices.get("strategy"):
        raise ConfigError(
            f"strategy.name is {name}, but the strategy is {choices.get('strategy')}: a name alone changes "
            f"nothing. Write `override strategy: {name}` in the recipe's defaults; a site's own file "
            f"{name}.yaml says `name: {name}`."
        )


def _group_files(choices: dict[str, Any], site: Path | None) -> list[tuple[tuple[str, ...], Path]]:
    """The files behind Hydra's choices; for a sized cluster, and for an alias, the file it names."""
    found = []
    for group in GROUPS:
        choice = str(choices.get(group))
        sized = SIZED.fullmatch(choice) if group == "cluster" else None
        name = sized["type"] if sized else choice
        for folder in group_folders(group, site):
            if (file := folder / f"{name}.yaml").is_file():
                found.append((() if _stands_at_the_root(file) else (group,), file))
                break
    base = data_root() / "conf" / "base.yaml"
    return [*found, ((), base)]


def _stands_at_the_root(file: Path) -> bool:
    """Whether a group's file names keys from the root of the tree on: `# @package _global_`."""
    return bool(_GLOBAL.search(file.read_text(encoding="utf-8", errors="replace")))


def _quoted(value: str) -> str:
    """`value` as a quoted string of Hydra's override grammar."""
    escaped = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value)
    return f"'{escaped}'"


def _yaml_mistake(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"{shown(Path(mark.name))}:{mark.line + 1}:{mark.column + 1}" if mark else "a YAML file"
    return f"{where}: not YAML: {getattr(error, 'problem', None) or error}. Mend the line and try again."


def _hydra_mistake(error: Exception, recipe_file: Path) -> str:
    first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return f"{shown(recipe_file)}: {first.strip()}"
