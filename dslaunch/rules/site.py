"""A site's settings: `dslaunch.yaml` in the folder that --config-dir names.

rules:
  ignore: [pipeline.bubble]         # never asked
  severity: {key.unknown: error}    # raised; lowering one is what a waiver is for
  accept: [memory.gpu:2027-01-31]   # waived, with an expiry
versions: {deepspeed: "0.18.4", megatron: "0.16.1"}     # who reads files, and what plans are made for
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dslaunch.errors import ConfigError, listed, nearest
from dslaunch.files.fileset import File, read_paths
from dslaunch.rules.registry import SEVERITIES, rule_named
from dslaunch.rules.selection import EVERY_RULE, Selection, named
from dslaunch.rules.settings import NEWEST_DEEPSPEED
from dslaunch.rules.waivers import waiver

SITE_FILE = "dslaunch.yaml"
_VERSION = re.compile(r"\d+(\.\d+)*")
_KEYS = {"rules": ("ignore", "severity", "accept"), "versions": ("deepspeed", "megatron")}

_FRAMEWORKS = {
    "deepspeed": "deepspeed", "megatron_deepspeed": "deepspeed", "native": "deepspeed", "megatron": "megatron",
    "megatron_mimo": "megatron",
}  # fmt: skip
"""Whose version an engine's files are for."""


@dataclass(frozen=True)
class Site:
    """What a site's file says; nothing where there is none."""

    selection: Selection = EVERY_RULE
    accept: tuple[str, ...] = ()
    deepspeed_version: str = ""
    megatron_version: str = ""

    def version_for(self, engine: str) -> str:
        """The version that files of an engine are read by here; empty where the site doesn't say, or for auto."""
        versions = {"deepspeed": self.deepspeed_version, "megatron": self.megatron_version}
        return versions.get(_FRAMEWORKS.get(engine, ""), "")


def site(folder: Path | None) -> Site:
    """The settings in `folder`.

    Raises:
        ConfigError: no such folder, no YAML, an unknown key or rule, a severity below the rule's own.
    """
    if folder is None:
        return Site()
    if not folder.is_dir():
        raise ConfigError(f"--config-dir {folder}: no such folder.")
    path = folder / SITE_FILE
    if not path.is_file():
        return Site()
    (file,) = read_paths([path]).files
    return _read(file)


def _read(file: File) -> Site:
    if file.problems:
        problem = file.problems[0]
        raise ConfigError(f"{file.name}:{problem.at.line}:{problem.at.column}: {problem.message}.")
    _require_keys(file, (), file.value, tuple(_KEYS))
    for section, keys in _KEYS.items():
        _require_keys(file, (section,), file.get(section), keys)
    ignored = named(_texts(file, "rules", "ignore"), f"{_where(file, 'rules', 'ignore')}: rules.ignore")
    accept = _texts(file, "rules", "accept")
    for text in accept:
        waiver(text, _where(file, "rules", "accept"))
    versions = [_version(file, name) for name in _KEYS["versions"]]
    return Site(Selection(ignore=ignored, severities=_severities(file)), accept, *versions)


def _severities(file: File) -> Mapping[str, Any]:
    """By rule, each at least as grave as the rule's own."""
    found = {} if (said := file.get("rules", "severity")) is None else said
    if not isinstance(found, dict):
        raise _wrong(file, ("rules", "severity"), found, "RULE: SEVERITY pairs")
    for name, severity in found.items():
        path = ("rules", "severity", str(name))
        if severity not in SEVERITIES:
            raise _wrong(file, path, severity, f"one of {listed(SEVERITIES)}")
        own = rule_named(str(name), f"{_where(file, *path)}: ").severity
        if SEVERITIES.index(severity) < SEVERITIES.index(own):
            allowed = listed(SEVERITIES[SEVERITIES.index(own) :])
            raise _wrong(file, path, severity, f"{allowed}; to waive the rule, name it in rules.accept")
    return found


def _texts(file: File, *path: str) -> tuple[str, ...]:
    found = [] if (said := file.get(*path)) is None else said
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise _wrong(file, path, found, "a list of rules, such as [pipeline.bubble]")
    return tuple(found)


def _version(file: File, name: str) -> str:
    found = file.get("versions", name)
    if found is not None and not (isinstance(found, str) and _VERSION.fullmatch(found)):
        example = {"deepspeed": NEWEST_DEEPSPEED, "megatron": "0.16.1"}[name]
        raise _wrong(file, ("versions", name), found, f"a version in quotes, such as '{example}'")
    return found or ""


def _require_keys(file: File, path: tuple[str, ...], value: Any, allowed: tuple[str, ...]) -> None:
    if value is not None and not isinstance(value, dict):
        raise _wrong(file, path, value, f"keys {listed(allowed)}")
    for key in value or {}:
        if key not in allowed:
            where = _where(file, *path, key)
            near = nearest(str(key), allowed)
            raise ConfigError(f"{where}: unknown key '{key}'.{near} Allowed: {listed(allowed)}.")


def _wrong(file: File, path: tuple[str, ...], found: object, wanted: str) -> ConfigError:
    return ConfigError(
        f"{_where(file, *path)}: {'.'.join(path) or 'the file'} is {found!r}; expected {wanted}."
    )


def _where(file: File, *path: str) -> str:
    at = file.at(*path)
    return f"{file.name}:{at.line}:{at.column}"
