"""From the words of `dslaunch diff` and `dslaunch report` to what they name."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dslaunch.arguments import paths_and_overrides
from dslaunch.errors import ConfigError, DslaunchError, listed
from dslaunch.flow import Request, reviewed
from dslaunch.paths import data_root

if TYPE_CHECKING:
    from dslaunch.review.side import Side

_GIT = "git:"


@dataclass(frozen=True)
class Named:
    """One side as it was typed: a recipe with overrides, or a folder, now or at a revision."""

    word: str
    overrides: tuple[str, ...] = ()
    folder: Path | None = None
    """Where both are empty, it is what the other side is."""
    revision: str = ""
    """Empty: as it stands now."""


def named(word: str) -> Named:
    """What a word means.

    Raises:
        ConfigError: git: without a revision, or overrides without a recipe.
    """
    if word.startswith(_GIT):
        revision, colon, folder = word.removeprefix(_GIT).partition(":")
        if not revision or (colon and not folder):
            raise ConfigError(
                f"{word}: say git:REV or git:REV:FOLDER, such as git:main or git:HEAD~1:rendered."
            )
        return Named(word, folder=Path(folder) if colon else None, revision=revision)
    if paths_and_overrides([word])[0]:
        return Named(word, folder=Path(word))
    try:
        overrides = tuple(shlex.split(word))
    except ValueError as error:
        raise ConfigError(f"{word}: a quote does not end: {error}. Close it.") from error
    if not any(each.startswith("recipe=") for each in overrides):
        raise ConfigError(
            f"{word}: names no recipe. A recipe with its overrides is one word in quotes: "
            f'"recipe=NAME {word}".'
        )
    return Named(word, overrides)


def pair(words: Sequence[str]) -> tuple[Named, Named]:
    """The two sides of a comparison; git:REV alone is the other side at that revision.

    Raises:
        ConfigError: not two words, or none that says what is meant.
    """
    if len(words) != 2:
        raise ConfigError(
            f"diff takes two sides, found {len(words)}: {listed(words) or 'nothing'}. Each is a folder, git:REV, "
            'git:REV:FOLDER, or a recipe in quotes: dslaunch diff "recipe=NAME cluster=8xH100" '
            '"recipe=NAME cluster=16xH100"'
        )
    first, second = named(words[0]), named(words[1])
    return _like(first, second), _like(second, first)


def one(words: Sequence[str]) -> Named:
    """What is reported on: one folder, one revision's folder, or a recipe, its overrides quoted together or not.

    Raises:
        ConfigError: nothing, or several things.
    """
    if words and not any(word.startswith(_GIT) for word in words) and not paths_and_overrides(words)[0]:
        return named(words[0] if len(words) == 1 else shlex.join(words))
    if len(words) != 1:
        raise ConfigError(
            f"report takes one folder, or recipe=NAME with its overrides; found {listed(words) or 'nothing'}."
        )
    found = named(words[0])
    if found.revision and found.folder is None:
        raise ConfigError(f"{found.word}: say which folder of the revision: {found.word}:FOLDER.")
    return found


def side(wanted: Named, site: Path | None) -> Side:
    """The side, read or planned.

    Args:
        site: --config-dir; at a revision, the same folder as it was then.

    Raises:
        ConfigError, PlanError: what stops it, with the side's own words first.
    """
    try:
        if not wanted.revision:
            return _read(wanted, wanted.folder, site)
        return _at_revision(wanted, site)
    except DslaunchError as error:
        raise type(error)(f"{wanted.word}: {error}") from error


def _at_revision(wanted: Named, site: Path | None) -> Side:
    """Without a site, the recipes and conf of dslaunch's own checkout are taken as they were."""
    from dslaunch.review.revision import SITE_FOLDERS, checked_out

    if wanted.folder is not None:
        with checked_out(wanted.revision, wanted.folder) as then:
            return _read(wanted, then, site)
    with checked_out(wanted.revision, site or data_root(), SITE_FOLDERS) as then:
        try:
            return _read(wanted, None, then)
        except DslaunchError as error:
            raise type(error)(str(error).replace(str(then), str(site or "."))) from error


def _read(wanted: Named, folder: Path | None, site: Path | None) -> Side:
    from dslaunch.review.side import Side, side_of_folder
    from dslaunch.rules.site import site as site_of
    from dslaunch.rules.waivers import waive

    if folder is not None:
        return side_of_folder(folder, wanted.word, site_of(site).selection)
    _, plan, prediction, files, findings = reviewed(Request(wanted.overrides, site, (), ()))
    standing, _ = waive(findings, plan.accepted)
    return Side(wanted.word, plan, prediction, files, standing)


def _like(one: Named, other: Named) -> Named:
    """`one`, with what the other side is where it only names a revision."""
    if one.overrides or one.folder is not None:
        return one
    if not other.overrides and other.folder is None:
        raise ConfigError(
            f"{one.word} and {other.word} name revisions, but not of what. Say git:REV:FOLDER, or a recipe on one "
            "side."
        )
    title = f"{one.word} {other.word.rpartition(':')[2] if other.revision else other.word}"
    return replace(one, word=title, overrides=other.overrides, folder=other.folder)
