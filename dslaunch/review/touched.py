"""Which plans of a site's folder a change can touch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from dslaunch.conffiles import SIZED
from dslaunch.paths import data_dirs

_WORD = re.compile(r"[A-Za-z0-9_.+-]+")
_COMMENT = re.compile(r"(^|\s)#.*")
_FOR_ALL = ("templates", "dslaunch.yaml", "efficiency.yaml", "renderings.yaml")
"""A change of these may change every plan or every judgement."""


def is_touched(
    overrides: Sequence[str], rendering: Path | None, changed: Sequence[PurePosixPath], site: Path
) -> bool:
    """Whether one of the changed files can have a say in the plan of `overrides`, or is its committed rendering.

    Args:
        rendering: the folder of the committed rendering; outside the site's folder nobody knows what changed.
        changed: paths inside the site's folder; they may be gone by now.
    """
    if rendering and not rendering.resolve().is_relative_to(site.resolve()):
        return True
    named = _names(overrides, site)
    return any(_has_a_say(path, named) or _inside(path, rendering, site) for path in changed)


def _has_a_say(path: PurePosixPath, named: set[str]) -> bool:
    if path.parts[0] in _FOR_ALL:
        return True
    return path.parts[0] in ("conf", "recipes") and path.suffix == ".yaml" and path.stem in named


def _inside(path: PurePosixPath, rendering: Path | None, site: Path) -> bool:
    return rendering is not None and (site / path).is_relative_to(rendering)


def _names(overrides: Sequence[str], site: Path) -> set[str]:
    """Every word of the overrides, and of the recipe and conf files that such words name, and so on.

    A word that names a file by chance makes a plan that is looked at in vain; none is missed.
    """
    named = {"base", *_words(" ".join(overrides))}
    folders = data_dirs("recipes", site) + data_dirs("conf", site)
    waiting = {file for folder in folders for file in folder.rglob("*.yaml")}
    while reached := {file for file in waiting if file.stem in named}:
        waiting -= reached
        named.update(*(_words(file.read_text(encoding="utf-8", errors="replace")) for file in reached))
    return named


def _words(text: str) -> set[str]:
    """The names in a text: of `64xH100` also H100."""
    found = {word for line in text.splitlines() for word in _WORD.findall(_COMMENT.sub("", line))}
    return found | {sized["type"] for word in found if (sized := SIZED.fullmatch(word))}
