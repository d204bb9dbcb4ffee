"""The YAML files of conf/ and recipes/ as users write them: what there is, and where a key stands."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from dslaunch.errors import ConfigError, listed, nearest
from dslaunch.paths import data_dirs, data_root

_Loader: type = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's, ten times as fast, where PyYAML was built with it."""
GROUPS = ("cluster", "engine", "goal", "launcher", "model", "profile", "strategy", "training")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
SIZED = re.compile(r"(?P<first>[0-9]+)x(?:(?P<second>[0-9]+)x)?(?P<type>[A-Za-z][A-Za-z0-9_.+-]*)")


def names(kind: str, site: Path | None = None) -> list[str]:
    """Names of the recipes, or of a group's choices."""
    folders = data_dirs("recipes", site) if kind == "recipes" else group_folders(kind, site)
    return sorted({file.stem for folder in folders for file in folder.glob("*.yaml")})


def recipe_folder(recipe: str, site: Path | None) -> Path:
    if not NAME.fullmatch(recipe):
        raise ConfigError(
            f"recipe={recipe}: a recipe is a name, not a path. Put your own in SITE/recipes/NAME.yaml and "
            "give --config-dir SITE."
        )
    for folder in data_dirs("recipes", site):
        if (folder / f"{recipe}.yaml").is_file():
            return folder
    known = names("recipes", site)
    raise ConfigError(f"recipe={recipe}: no such recipe. There are {listed(known)}.{nearest(recipe, known)}")


def parents(recipe: Path, site: Path | None) -> list[Path]:
    """The recipes that `recipe` builds on, nearest first: plain names in its defaults."""
    found: list[Path] = []
    queue = [recipe]
    while queue:
        tree = loaded(queue.pop(0))
        for entry in tree.get("defaults", []) if isinstance(tree, dict) else []:
            files = [folder / f"{entry}.yaml" for folder in data_dirs("recipes", site)]
            above = next((file for file in files if isinstance(entry, str) and file.is_file()), None)
            if above is not None and above not in found:
                found.append(above)
                queue.append(above)
    return found


def check_recipe(file: Path, site: Path | None) -> None:
    """What Hydra says too little about: the text itself, and its defaults.

    Raises:
        ConfigError: not UTF-8, not YAML, no mapping, no list of defaults, a group or choice that isn't there.
    """
    tree = loaded(file)
    defaults = tree.get("defaults") if isinstance(tree, dict) else None
    if not isinstance(defaults, list) or not any(isinstance(entry, str) for entry in defaults):
        raise ConfigError(
            f"{shown(file)}: defaults: a recipe begins with `defaults: [base, _self_]`, or with the name of a "
            "recipe that it builds on."
        )
    for entry in defaults:
        for key, choice in entry.items() if isinstance(entry, dict) else ():
            _check_default(file, str(key), choice, site)


def _check_default(file: Path, key: str, choice: object, site: Path | None) -> None:
    group = key.removeprefix("override ").strip().lstrip("/")
    where = f"{shown(file)}: defaults: {key}"
    if group not in GROUPS:
        raise ConfigError(f"{where}: no such group. There are {listed(GROUPS)}.{nearest(group, GROUPS)}")
    if not isinstance(choice, str):
        raise ConfigError(f"{where}: is {choice!r}; it takes a name. See `dslaunch {group}s`.")
    try:
        check_choice(group, choice, site)
    except ConfigError as error:
        raise ConfigError(f"{shown(file)}: defaults: {error}") from error


_MORE = {
    "cluster": "; sizes are written as 64xTYPE (GPUs) or 8x8xTYPE (nodes x GPUs)",
    "training": "; LoRA and fine-tuning are recipes of their own, such as recipe=llama3_8b_lora, which `dslaunch "
    "recipes` lists",
}


def check_choice(group: str, choice: str, site: Path | None) -> None:
    known = names(group, site)
    if choice in known:
        return
    sized = SIZED.fullmatch(choice)
    if group == "cluster" and sized and sized["type"] in known:
        return
    loose = SIZED.fullmatch(choice.replace("X", "x", 1)) if group == "cluster" else None
    sizes = choice[: loose.start("type")].lower() if loose else ""
    near = nearest(loose["type"] if loose else choice, known).replace("'", f"'{sizes}", 1)
    how = _MORE.get(group, "")
    raise ConfigError(f"{group}={choice}: no such {group}. There are {listed(known)}{how}.{near}")


def loaded(file: Path) -> Any:
    try:
        return yaml.load(file.read_text(encoding="utf-8"), Loader=_Loader)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{shown(file)}: not UTF-8 at byte {error.start}. Save it as UTF-8.") from error
    except yaml.MarkedYAMLError as error:
        at = f":{error.problem_mark.line + 1}:{error.problem_mark.column + 1}" if error.problem_mark else ""
        raise ConfigError(
            f"{shown(file)}{at}: not YAML: {error.problem}. Mend the line and try again."
        ) from error


def fabric_files(tree: Mapping[Any, Any], site: Path | None) -> dict[str, Path]:
    """The file of each fabric, the site's in place of the package's.

    Raises:
        ConfigError: the tree has fabrics of its own, which nothing would read.
    """
    if "fabrics" in tree:
        raise ConfigError(
            "fabrics: is read from conf/fabric/*.yaml alone. Set env.NAME=VALUE for one run, or put a file into "
            "SITE/conf/fabric and give --config-dir SITE"
        )
    folders = reversed(group_folders("fabric", site))
    return {file.stem: file for folder in folders for file in sorted(folder.glob("*.yaml"))}


def group_folders(group: str, site: Path | None) -> list[Path]:
    return [folder / group for folder in data_dirs("conf", site) if (folder / group).is_dir()]


def line_of(file: Path, keys: list[str]) -> int | None:
    node = yaml.compose(file.read_text(encoding="utf-8"), Loader=_Loader)
    line = None
    for key in keys:
        if not isinstance(node, yaml.MappingNode):
            return None
        pairs = {k.value: (k, v) for k, v in node.value}
        if key not in pairs:
            return None
        line, node = pairs[key][0].start_mark.line + 1, pairs[key][1]
    return line


def shown(file: Path) -> str:
    """The file as a reader would name it: from the package's root, or as it is."""
    return str(file.relative_to(data_root())) if file.is_relative_to(data_root()) else str(file)
