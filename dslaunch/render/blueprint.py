"""blueprint.json: what a plan was made from, so that a run can be planned anew, for other nodes or one rank alone.

The whole configuration stands in it, as validated, and not the words that were typed: a recipe or a cluster file
that is edited, or upgraded, while the run trains changes nothing of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from dslaunch.errors import ConfigError
from dslaunch.planfile import to_json
from dslaunch.render.manifest import MANIFEST, manifest
from dslaunch.schema.config import RunConfig

BLUEPRINT = "blueprint.json"
SCHEMA = "dslaunch.blueprint/1"


@dataclass(frozen=True)
class Blueprint:
    """What a plan is made from."""

    config: RunConfig
    """Before anything was searched or settled; its cluster is the one that was asked for."""
    site: Path | None
    """The site's folder as it was typed, with its templates, rates and rules."""
    accepted: tuple[str, ...]
    """Findings that the user waived."""


def with_blueprint(
    files: Mapping[str, str], config: RunConfig, site: Path | None, accepted: Sequence[str]
) -> dict[str, str]:
    """`files` of a rendering, with blueprint.json among them and in their manifest."""
    written = {
        "schema": SCHEMA,
        "site": str(site or ""),
        "accepted": list(accepted),
        "config": config.model_dump(mode="json", exclude_unset=True),
    }
    found = {**files, BLUEPRINT: to_json(written)}
    return dict(sorted({**found, MANIFEST: manifest(found)}.items()))


def read_blueprint(text: str, where: str) -> Blueprint:
    """The blueprint in `text`.

    Raises:
        ConfigError: not one, or one of another version of dslaunch.
    """
    try:
        data = json.loads(text)
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema is {data['schema']!r}, read is {SCHEMA}")
        config = RunConfig.model_validate_json(json.dumps(data["config"]))
        return Blueprint(config, Path(data["site"]) if data["site"] else None, tuple(data["accepted"]))
    except (ValueError, KeyError, TypeError, ValidationError) as error:
        raise ConfigError(
            f"{where}: not what this version of dslaunch plans anew from: {error}. Go on with the version that "
            "launched the run, or launch anew"
        ) from error
