"""Runs the command line in this process, and a site's folder for tests."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from dslaunch.cli import run


@dataclass(frozen=True)
class Ran:
    """What a command line left."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class CommandLine:
    """`dslaunch(...)` with the words as one string or as a list."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: str) -> Ran:
        argv = words[0].split() if len(words) == 1 else list(words)
        self._capsys.readouterr()
        status = run(argv)
        out, err = self._capsys.readouterr()
        return Ran(status, out, err)


def planned(dslaunch: CommandLine, words: str) -> Any:
    """What `--json` prints for a plan, whether or not it fits."""
    ran = dslaunch(f"{words} --json")
    assert ran.out, ran.err
    return ran.json


def refused(dslaunch: CommandLine, words: str) -> str:
    """What is said of a plan that there is not."""
    ran = dslaunch(words)
    assert (ran.status, ran.out) == (3, ""), ran.out
    return ran.err


def valid(value: Any, name: str, dslaunch: CommandLine) -> None:
    """The JSON that a verb printed is what `dslaunch schema NAME` says."""
    schema = dslaunch("schema", name).json
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(value, schema)


def make_site(folder: Path, recipe: str = "", **clusters: str) -> Path:
    """A site's folder with a recipe `mine` and clusters by name."""
    (folder / "recipes").mkdir(parents=True)
    (folder / "conf" / "cluster").mkdir(parents=True)
    if recipe:
        (folder / "recipes" / "mine.yaml").write_text(recipe, encoding="utf-8")
    for name, text in clusters.items():
        (folder / "conf" / "cluster" / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder


RECIPE = """\
defaults:
  - base
  - override model: llama3_8b
  - override cluster: 8xH100
  - override strategy: zero3
  - _self_
name: mine
training:
  global_batch: 64
  seq_len: 4096
"""
