"""Functions of the user's, named as `package.module:name` in a model, or in data.path."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from dslaunch.errors import ConfigError, listed


def imported(target: str, key: str) -> Callable[..., Any]:
    """What `package.module:name` names; ConfigError where it is not there."""
    package, _, attribute = target.partition(":")
    try:
        module = importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{key}: found '{target}', but {error}. Install the package in the training environment, or put its "
            "folder on PYTHONPATH."
        ) from error
    if not callable(found := getattr(module, attribute, None)):
        there = sorted(name for name, value in vars(module).items() if callable(value) and name[0] != "_")
        raise ConfigError(f"{key}: {package} has no function '{attribute}'; there are {listed(there)}.")
    return found  # type: ignore[no-any-return]
