"""`dslaunch review`: what a change of a site's folder does to every plan in it, for a pull request.

SITE/renderings.yaml says which folders are committed renderings, and of what:

    rendered/vla70b: recipe=vla70b cluster=64xA100

A recipe of SITE/recipes that no line names is planned as it stands. What the change cannot touch is not planned.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from dslaunch.compose import compose
from dslaunch.conffiles import loaded
from dslaunch.errors import ConfigError, DslaunchError, listed
from dslaunch.output import bar
from dslaunch.planfile import Finding
from dslaunch.review import outputs
from dslaunch.review.diff_markdown import markdown, markdown_alone
from dslaunch.review.difference import Difference, compare
from dslaunch.review.revision import changed_since
from dslaunch.review.side import Side
from dslaunch.review.touched import is_touched
from dslaunch.rules.checking import fails
from dslaunch.rules.sarif import format_sarif
from dslaunch.sides import Named, named, side

MARKER = "<!-- dslaunch review -->"
"""First line of the comment: how the one that is there already is found again."""
RENDERINGS = "renderings.yaml"
_NO_DECISION = ("prediction.json", "manifest.json")
"""Files that a better model of time changes, which makes no rendering stale."""
_IN_FILE = re.compile(r":\d+:\d+$")
_SHORT = 12
"""Characters of a revision's name that say which it is."""
_LONGEST = 60_000
"""Characters; a comment on GitHub holds 65,536."""


@dataclass(frozen=True)
class Entry:
    """One plan of the site."""

    wanted: Named
    folder: Path | None
    """Where its rendering is committed."""

    @property
    def recipe(self) -> str:
        return next(w.removeprefix("recipe=") for w in self.wanted.overrides if w.startswith("recipe="))


@dataclass(frozen=True)
class Review:
    """What a change does to the plans of a site."""

    base: str
    total: int
    """Plans of the site."""
    reviewed: tuple[Reviewed, ...]
    """Those that were planned."""
    gone: tuple[str, ...] = ()
    """Recipes that the site had at the base and has no more."""

    @property
    def stops(self) -> bool:
        """Whether the change must not land."""
        return any(each.faults for each in self.reviewed)


@dataclass(frozen=True)
class Reviewed:
    """What became of one plan."""

    entry: Entry
    faults: tuple[str, ...]
    """Why the change must not land; empty: nothing speaks against it."""
    difference: Difference | None = None
    """None where the base or the change has no such plan."""
    alone: str = ""
    """Why there is no plan at the base to compare with."""
    after: Side | None = None
    """Where there is none, the plan itself."""
    findings: tuple[Finding, ...] = ()

    @property
    def touched(self) -> bool:
        """Whether the change does anything to it."""
        return bool(self.faults or self.difference is None or self.difference.kinds)


def review(base: str, site: Path, *, every: bool = False) -> Review:
    """The plans of the site that a change since the revision `base` can touch, now and then.

    Args:
        every: plan the others too: a newer dslaunch may render them differently.

    Raises:
        ConfigError: no site, no such revision, or a renderings.yaml that can't be read.
    """
    found = entries(site)
    changed = changed_since(base, site)
    wanted = [e for e in found if every or is_touched(e.wanted.overrides, e.folder, changed, site)]
    with bar(f"{len(wanted)} plans, now and at {base}", len(wanted)) as advance:
        reviewed = tuple(advance(_reviewed(entry, base, site)) for entry in wanted)
    return Review(base, len(found), reviewed, _gone(changed, site))


def _gone(changed: Sequence[PurePosixPath], site: Path) -> tuple[str, ...]:
    recipes = [path for path in changed if path.parent.name == "recipes" and path.suffix == ".yaml"]
    return tuple(sorted(path.stem for path in recipes if not (site / path).exists()))


def entries(site: Path) -> list[Entry]:
    """The plans of the site's renderings.yaml, then its other recipes."""
    if not site.is_dir():
        raise ConfigError(f"--config-dir {site}: no such folder.")
    found = [Entry(named(words), site / folder) for folder, words in _renderings(site)]
    rendered = {entry.recipe for entry in found}
    names = sorted(path.stem for path in (site / "recipes").glob("*.yaml"))
    return found + [Entry(named(f"recipe={name}"), None) for name in names if name not in rendered]


def comment(found: Review) -> str:
    """The text of the one comment, Markdown."""
    touched = [each for each in found.reviewed if each.touched]
    failing = [each for each in touched if each.faults]
    state = f"{len(failing)} must not land" if failing else "nothing speaks against it"
    lines = [
        MARKER,
        f"## dslaunch: {len(touched)} of {found.total} plans change, {state}\n",
        f"Base: `{found.base}`. The change can touch {len(found.reviewed)} of them; these were planned.\n",
    ]
    if found.gone:
        lines.append(f"Gone: {listed([f'`recipe={name}`' for name in found.gone])}.\n")
    text = "\n".join([*lines, *(block for each in touched for block in _blocks(each))])
    if len(text) <= _LONGEST:
        return text
    cut = text[:_LONGEST].rpartition("\n\n")[0]
    ended = "\n```\n\n</details>" * (cut.count("<details>") - cut.count("</details>"))
    return f"{cut}\n{ended}\n\nThe rest is too long for a comment; the job's output has all of it.\n"


def sarif(found: Review, site: Path) -> str:
    """All findings, each at a line of the repository: of the rendering, or of the key in the recipe or conf/."""
    return format_sarif([finding for each in found.reviewed for finding in _placed(each, site)])


def as_output(found: Review) -> outputs.Review:
    """What `dslaunch review --json` prints."""
    plans = tuple(
        outputs.ReviewedPlan(
            plan=each.entry.wanted.word,
            rendering=str(each.entry.folder) if each.entry.folder else None,
            faults=each.faults,
            difference=each.difference,
            alone=each.alone,
            findings=each.findings,
        )
        for each in found.reviewed
    )
    return outputs.Review(found.base, found.total, plans, found.gone)


def _renderings(site: Path) -> Iterator[tuple[str, str]]:
    path = site / RENDERINGS
    tree = loaded(path) if path.is_file() else {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: a line is FOLDER: recipe=NAME KEY=VALUE ...")
    for folder, words in tree.items():
        if not isinstance(words, str) or "recipe=" not in words:
            raise ConfigError(f"{path}: {folder} is {words!r}; say recipe=NAME and its overrides.")
        yield str(folder), words


def _reviewed(entry: Entry, base: str, site: Path) -> Reviewed:
    try:
        after = side(entry.wanted, site)
    except DslaunchError as error:
        return Reviewed(entry, (f"no plan: {error}",))
    faults = [*_stale(entry, after), *_wrong(after)]
    try:
        then = replace(entry.wanted, revision=base, word=f"{entry.wanted.word} at {base[:_SHORT]}")
        before = side(then, site)
    except DslaunchError as error:
        alone = str(error).partition(". There are ")[0]
        return Reviewed(entry, tuple(faults), alone=alone, after=after, findings=after.findings)
    return Reviewed(entry, tuple(faults), compare(before, after), findings=after.findings)


def _stale(entry: Entry, fresh: Side) -> Iterator[str]:
    if entry.folder is None:
        return
    wanted = {name: text for name, text in fresh.files.items() if name not in _NO_DECISION}
    there = {path.name for path in entry.folder.iterdir()} if entry.folder.is_dir() else set()
    stale = [name for name, text in wanted.items() if not _holds(entry.folder / name, text)]
    stale += sorted(there - set(fresh.files))
    if stale:
        words = shlex.join(entry.wanted.overrides)
        yield (
            f"{entry.folder} is stale ({', '.join(stale)}): run `dslaunch render {words} -o {entry.folder}` with "
            "the same --config-dir, and commit it."
        )


def _holds(path: Path, text: str) -> bool:
    return path.is_file() and path.read_bytes() == text.encode()


def _wrong(after: Side) -> Iterator[str]:
    for finding in after.findings:
        if fails([finding], "error"):
            yield f"{finding.rule}: {finding.said}"


def _blocks(each: Reviewed) -> Iterator[str]:
    for fault in each.faults:
        yield f"- **must not land**: {each.entry.wanted.word}: {' '.join(fault.split())}"
    yield ""
    if each.difference is not None:
        yield markdown(each.difference)
    elif each.after:
        yield markdown_alone(each.after, f"No plan at the base: {' '.join(each.alone.split())}.")


def _placed(each: Reviewed, site: Path) -> Iterator[Finding]:
    if not each.findings:
        return
    keys = [word for word in each.entry.wanted.overrides if not word.startswith("recipe=")]
    composed = compose(each.entry.recipe, keys, site)
    for finding in each.findings:
        if _IN_FILE.search(finding.where) and each.entry.folder is not None:
            yield replace(finding, where=f"{each.entry.folder.as_posix()}/{finding.where}")
        else:
            where = _written(composed.locate(finding.where.split(".")), each.entry.recipe, site)
            yield replace(finding, where=where, message=f"{finding.where}: {finding.message}")


def _written(place: str, recipe: str, site: Path) -> str:
    """FILE:LINE:COLUMN of a key, where a file of the site holds it; else the recipe's first line."""
    file, _, line = place.rpartition(":")
    own = file and Path(file).is_relative_to(site)
    return f"{Path(file).as_posix()}:{line}:1" if own else f"{(site / 'recipes' / recipe).as_posix()}.yaml:1:1"
