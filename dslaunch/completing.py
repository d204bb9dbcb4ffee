"""What a shell offers while a command line is typed."""

from __future__ import annotations

import click

from dslaunch.paths import data_dirs

_NO_GROUP = "fabric"
"""A folder of conf/ whose files the cluster chooses."""


def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """recipe=, cluster=, and the other groups' choices, from file names alone."""
    key, separator, start = incomplete.partition("=")
    if not separator:
        return [f"{k}=" for k in ("recipe", *_groups()) if k.startswith(incomplete)]
    folders = data_dirs("recipes") if key == "recipe" else [d / key for d in data_dirs("conf")]
    names = sorted({file.stem for folder in folders for file in folder.glob("*.yaml")})
    return [f"{key}={name}" for name in names if name.startswith(start)]


def _groups() -> list[str]:
    folders = {child.name for folder in data_dirs("conf") for child in folder.iterdir() if child.is_dir()}
    return sorted(folders - {_NO_GROUP})
