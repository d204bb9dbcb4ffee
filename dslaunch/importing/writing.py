"""YAML as this project writes it, and files put into a site's folder: all of them or none."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from dslaunch.errors import ConfigError

_WIDTH = 110


def yaml_text(tree: Mapping[str, Any], head: Sequence[str] = ()) -> str:
    """`tree` with its keys in the order given, short sections on one line, after `head` as comments."""
    comments = [f"# {' '.join(line.splitlines())}".rstrip() for line in head]
    return "\n".join([*comments, *_block(tree, "")]) + "\n"


def _block(tree: Mapping[str, Any], indent: str) -> Iterator[str]:
    for key, value in tree.items():
        shown = f"{indent}{_scalar(key)}:"
        flow = _flow(value)
        if isinstance(value, Mapping) and value and (_deep(value) or len(shown) + len(flow) > 80):
            yield shown
            yield from _block(value, indent + "  ")
        elif isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value):
            yield shown
            yield from (f"{indent}  - {_flow(item)}" for item in value)
        elif isinstance(value, list) and len(shown) + len(flow) > _WIDTH:
            yield f"{shown} ["
            yield from _wrapped([f"{_flow(item)}," for item in value], indent + "  ")
            yield f"{indent}]"
        else:
            yield f"{shown} {flow}"


def _wrapped(items: Sequence[str], indent: str) -> Iterator[str]:
    line = indent + items[0]
    for item in items[1:]:
        if len(line) + 1 + len(item) > _WIDTH:
            yield line
            line = indent + item
        else:
            line += f" {item}"
    yield line


def _deep(value: Mapping[str, Any]) -> bool:
    return any(isinstance(item, Mapping) and item for item in value.values()) or len(value) > 6


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_scalar(k)}: {_flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_flow(item) for item in value) + "]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    """One scalar, quoted where YAML would read something else, and `${` kept from being an interpolation."""
    if isinstance(value, float):
        mantissa, power, exponent = repr(value).partition("e")
        return mantissa + (".0" if power and "." not in mantissa else "") + power + exponent
    if isinstance(value, str):
        value = value.replace("${", "\\${")
    written: str = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True).strip()
    return written.removesuffix("...").strip()


def refuse_existing(site: Path, names: Sequence[str], *, force: bool) -> None:
    """Raises ConfigError where one of the files is there already and `force` is not given."""
    there = [name for name in names if (site / name).exists()]
    if folders := [name for name in there if (site / name).is_dir()]:
        raise ConfigError(
            f"{site / folders[0]}: a folder stands where the file belongs. Give another --name."
        )
    if there and not force:
        raise ConfigError(
            f"{site / there[0]}: is there already. Give another --name, or --force to write over it."
        )


@contextmanager
def staged(site: Path | None, files: Mapping[str, str]) -> Iterator[Path]:
    """A copy of the site's folder with `files` in it, to be tried before anything is written."""
    with tempfile.TemporaryDirectory(prefix="dslaunch-") as folder:
        stage = Path(folder)
        for kind in ("conf", "recipes", "templates"):
            if site is not None and (site / kind).is_dir():
                shutil.copytree(site / kind, stage / kind)
        _put(stage, files)
        yield stage


def write_site(site: Path, files: Mapping[str, str]) -> list[Path]:
    """The paths written, each by a rename, so that no reader finds half a file."""
    return _put(site, files)


def _put(site: Path, files: Mapping[str, str]) -> list[Path]:
    written = []
    for name, text in files.items():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.chmod(temporary, 0o644)
        Path(temporary).replace(path)
        written.append(path)
    return written
