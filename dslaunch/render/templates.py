"""Jinja templates: a site's first, then the package's. A template places values; the result is read again."""

from __future__ import annotations

import itertools
import json
import shlex
import traceback
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import yaml

from dslaunch.errors import ConfigError
from dslaunch.planfile import to_json


class Templates:
    """The templates found in a list of folders, the first folder first."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._environment = _environment(tuple(folders))

    def render(self, name: str, variables: Mapping[str, Any]) -> str:
        """The text of template `name`.

        Raises:
            ConfigError: no such template, or a mistake in it, with file and line.
        """
        try:
            return self._environment.get_template(name).render(variables)
        except jinja2.TemplateNotFound as error:
            raise ConfigError(
                f"{error.name}: no such template in {', '.join(map(str, self._folders))}. "
                "Put it into templates/ of the site folder, or reinstall dslaunch"
            ) from error
        except jinja2.TemplateSyntaxError as error:
            where = f"{error.filename or self.path(name)}:{error.lineno}"
            raise ConfigError(f"{where}: {error.message}. Correct the template") from error
        except Exception as error:  # a template is a program of the user's, and can raise anything
            raise ConfigError(f"{self._where(name, error)}: {error}. {_HINT}") from error

    def path(self, name: str) -> Path:
        """The file that template `name` is read from."""
        return next(path for folder in self._folders if (path := folder / name).is_file())

    def _where(self, name: str, error: Exception) -> str:
        """FILE:LINE of the innermost frame that stands in a template; Jinja writes such frames."""
        frames = traceback.extract_tb(error.__traceback__)
        folders = self._folders
        own = [f for f in frames if any(Path(f.filename).is_relative_to(folder) for folder in folders)]
        return f"{own[-1].filename}:{own[-1].lineno}" if own else str(self.path(name))


@lru_cache
def _environment(folders: tuple[Path, ...]) -> jinja2.Environment:
    """Kept for what it has compiled; Jinja reads a file again that has been written since."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([str(folder) for folder in folders]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        comment_start_string="{##",  # `{#` is in every shell script that counts an array: ${#list[@]}
        comment_end_string="##}",
        autoescape=False,
    )
    environment.filters["sh"] = lambda value: shlex.quote(str(value))
    environment.filters["yaml"] = _yaml
    environment.filters["json"] = lambda value: to_json(value).removesuffix("\n")
    return environment


_HINT = (
    "A template sees the fields of dslaunch.context/1 (dslaunch/render/context.py), and filters json, yaml and sh"
)


class _Blocks(yaml.SafeDumper):  # type: ignore[misc]
    """Texts of several lines as blocks, as one reads them, and what occurs twice written twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Blocks.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, "|" if "\n" in text else None
    ),
)


def _yaml(value: Any) -> str:
    text: str = yaml.dump(value, Dumper=_Blocks, sort_keys=False, allow_unicode=True, width=1000)
    return text.rstrip("\n")


def require_json(path: Path, text: str, expected: Any) -> None:
    """Raise ConfigError where `text` is not JSON, or not `expected`: the first key that differs is named."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"{path}: what it renders is not JSON: {error}. Write values with the filter json"
        ) from error
    if difference := first_difference(json.loads(json.dumps(expected)), found):
        raise ConfigError(
            f"{path}: {difference}. A template places what was planned; add or change keys with "
            "engine.extra.KEY=VALUE"
        )


def require_yaml(path: Path, text: str, expected: Any) -> None:
    """The same for YAML."""
    try:
        documents = list(yaml.safe_load_all(text))
    except yaml.YAMLError as error:
        raise ConfigError(
            f"{path}: what it renders is not YAML: {error}. Write values with the filter json"
        ) from error
    found = documents if isinstance(expected, list) else documents[0] if documents else None
    if difference := first_difference(expected, found):
        raise ConfigError(
            f"{path}: {difference}. A template places what was planned; change the plan instead"
        )


def require_lines(path: Path, text: str, expected: Sequence[str]) -> None:
    """Raise ConfigError where `text`, but for blank lines and comments, is not the lines `expected`."""
    found = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    for line, wanted in itertools.zip_longest(found, expected, fillvalue="nothing"):
        if line != wanted:
            raise ConfigError(
                f"{path}: it renders {line!r}, where {wanted!r} was planned. "
                "A template places what was planned; change the plan instead"
            )


def first_difference(expected: Any, found: Any, key: str = "") -> str:
    """The first key (sorted) at which `found` differs, in words; empty where nothing does."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for name in sorted(expected.keys() | found.keys()):
            inner = f"{key}.{name}" if key else name
            if name not in found or name not in expected:
                return f"key {inner} is {'missing' if name in expected else 'not planned'}"
            if difference := first_difference(expected[name], found[name], inner):
                return difference
        return ""
    if expected == found and type(expected) is type(found):
        return ""
    return f"key {key or '(the whole)'} is {json.dumps(found)}, planned is {json.dumps(expected)}"
