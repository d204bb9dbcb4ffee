"""Every recipe that is shipped: named, described, planned and rendered as it stands, at each size it pins."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from dslaunch.compose import names
from dslaunch.paths import data_root
from tests.command import CommandLine

RECIPES = names("recipes")
TREES = {name: yaml.safe_load((data_root() / "recipes" / f"{name}.yaml").read_text()) for name in RECIPES}
SIZES = [(name, size) for name, tree in TREES.items() for size in tree.get("layouts", {})]
TOO_LARGE = {("vla70b", 16)}
"""Published layouts that do not fit by the ledger, which says so."""


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_is_named_after_its_file_and_described(recipe: str, dslaunch: CommandLine) -> None:
    assert TREES[recipe]["name"] == recipe
    (line,) = [line for line in dslaunch("recipes").out.splitlines() if line.split()[0] == recipe]
    assert len(line.split()) > 3


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_renders_on_its_own_cluster(recipe: str, dslaunch: CommandLine, tmp_path: Path) -> None:
    ran = dslaunch("render", f"recipe={recipe}", "-o", str(tmp_path / "out"))
    assert ran.status == 0, ran.err
    assert dslaunch("check", str(tmp_path / "out")).status == 0


@pytest.mark.parametrize(("recipe", "gpus"), SIZES)
def test_pinned_size_fits_or_is_known_not_to(recipe: str, gpus: int, dslaunch: CommandLine) -> None:
    ran = dslaunch("plan", f"recipe={recipe}", f"cluster.gpus={gpus}", "--json")
    errors = {finding["rule"] for finding in ran.json["findings"] if finding["severity"] == "error"}
    assert ran.json["world_size"] == gpus
    assert (ran.status, errors) == ((3, {"memory.gpu"}) if (recipe, gpus) in TOO_LARGE else (0, set()))
