"""The verbs `import` and `init`: what others wrote becomes a model or recipe, tried before it is written."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dslaunch.arguments import VERBS, paths_and_overrides
from dslaunch.errors import ConfigError, DslaunchError, listed, nearest
from dslaunch.flow import Request, rendered
from dslaunch.output import note

if TYPE_CHECKING:
    from dslaunch.importing.compare import Row
    from dslaunch.importing.imported import Imported

KINDS = ("hf", "deepspeed", "megatron", "accelerate")


@click.command("import", help=VERBS["import"], context_settings={"max_content_width": 100})
@click.argument("words", nargs=-1, metavar=f"{'|'.join(KINDS)} SOURCE [KEY=VALUE ...]")
@click.option(
    "-o", "--output", "--config-dir", "site", type=click.Path(path_type=Path, file_okay=False),
    help="The site's folder to write into; without it the text is printed.",
)  # fmt: skip
@click.option("--name", default="", help="Name of the model or recipe.")
@click.option("--force", is_flag=True, help="Write over a file of that name.")
@click.option("--accept", multiple=True, metavar="RULE", help="Waive a finding on the imported recipe.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def import_verb(
    obj: Any, /, words: tuple[str, ...], site: Path | None, name: str, force: bool, accept: tuple[str, ...],
    as_json: bool,
) -> int:  # fmt: skip
    kind, source, overrides = _kind_and_source(words)
    made = _read(kind, source, overrides, obj.script_arguments, name)
    files = _tried(made, site, accept) if made.choices else {}
    return _finished(made, files, site, force, as_json)


@click.command("init", help=VERBS["init"], context_settings={"max_content_width": 100})
@click.argument("words", nargs=-1, metavar="SCRIPT [KEY=VALUE ...]")
@click.option(
    "-o", "--output", "--config-dir", "site", type=click.Path(path_type=Path, file_okay=False),
    help="The site's folder to write into; without it the text is printed.",
)  # fmt: skip
@click.option("--name", default="", help="Name of the recipe.")
@click.option(
    "--kind", default="", metavar="hf_trainer|accelerate|megatron|deepspeed|fsdp|ddp",
    help="What the script is, where reading it leaves a doubt.",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Write over a file of that name.")
@click.option("--accept", multiple=True, metavar="RULE", help="Waive a finding on the recipe.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def init_verb(
    obj: Any, /, words: tuple[str, ...], site: Path | None, name: str, kind: str, force: bool,
    accept: tuple[str, ...], as_json: bool,
) -> int:  # fmt: skip
    from dslaunch.importing.init import init

    scripts, overrides = paths_and_overrides(words)
    if len(scripts) != 1:
        raise ConfigError(
            f"init takes one script, found {listed(scripts) or 'none'}. Write: dslaunch init train.py"
        )
    overrides += _asked(overrides) if sys.stdin and sys.stdin.isatty() else []
    made = init(scripts[0], overrides, obj.script_arguments, name=name, kind=kind)
    return _finished(made, _tried(made, site, accept), site, force, as_json)


def _kind_and_source(words: Sequence[str]) -> tuple[str, str, list[str]]:
    bare, overrides = paths_and_overrides(words)
    if not bare or bare[0] not in KINDS:
        found = f"'{bare[0]}'" if bare else "nothing"
        raise ConfigError(
            f"import: found {found} where the kind belongs. Allowed: {listed(KINDS)}."
            f"{nearest(bare[0], KINDS) if bare else ''}"
        )
    if len(bare) != 2:
        raise ConfigError(f"import {bare[0]} takes one source, found {listed(bare[1:]) or 'none'}.")
    return bare[0], bare[1], overrides


def _read(kind: str, source: str, words: Sequence[str], arguments: Sequence[str], name: str) -> Imported:
    if kind == "hf":
        from dslaunch.importing.hf import import_hf

        if words:
            raise ConfigError(f"import hf makes a model file and takes no {words[0].partition('=')[0]}=.")
        return import_hf(source, name)
    if kind == "deepspeed":
        from dslaunch.importing.deepspeed import import_deepspeed

        return import_deepspeed(source, words, arguments, name)
    if kind == "megatron":
        from dslaunch.importing.megatron import import_megatron

        return import_megatron(source, words, name)
    from dslaunch.importing.accelerate import import_accelerate

    return import_accelerate(source, words, arguments, name)


def _tried(made: Imported, site: Path | None, accept: tuple[str, ...]) -> dict[str, str]:
    """The files rendered from the recipe in a copy of the site's folder; raises what stops it."""
    from dslaunch.importing.writing import staged

    with staged(site, made.files) as stage:
        try:
            return rendered(Request(made.planned_by, stage, accept, ()))[2]
        except DslaunchError as error:
            _note_losses(made)
            shown = str(error).replace(str(stage), str(site or "."))
            raise type(error)(f"{shown.rstrip()}\nThe recipe was not written.") from error


def _finished(made: Imported, files: dict[str, str], site: Path | None, force: bool, as_json: bool) -> int:
    """Writes the result where a site's folder is given, and says what came of it."""
    from dslaunch.importing.compare import compared, keys_of
    from dslaunch.importing.writing import refuse_existing, write_site

    keys = keys_of(files) if made.original else {}
    rows = compared(made.original, keys) if keys else ()
    if not as_json:
        _report(made, rows)
    written: list[Path] = []
    if site is not None:
        refuse_existing(site, list(made.files), force=force)
        written = write_site(site, made.files)
    if as_json:
        _echo_json(made, rows, site)
    elif site is None:
        for text in made.files.values():
            click.echo(text, nl=False)
    else:
        for path in written:
            click.echo(path)
        if made.choices:
            click.echo(f"Next: dslaunch plan recipe={made.name} --config-dir {shlex.quote(str(site))}")
    return 0


def _report(made: Imported, rows: Sequence[Row]) -> None:
    """What came back, and what did not."""
    if rows:
        other = [row for row in rows if not row.same]
        note(f"{len(rows) - len(other)} of {len(rows)} keys are rendered again as they stood")
        for row in other:
            shown = "is not rendered" if row.rendered is None else f"is rendered as {row.rendered}"
            note(f"  {row.key} = {row.original} {shown}")
    _note_losses(made)


def _note_losses(made: Imported) -> None:
    from dslaunch.importing.imported import gathered

    if made.notes:
        note("Not carried over as it stands:")
        for each in gathered(made.notes):
            note(f"  {each}")


def _echo_json(made: Imported, rows: Sequence[Row], site: Path | None) -> None:
    from dslaunch.planfile import to_json
    from dslaunch.review.outputs import Compared, NotCarried, Written

    found = Written(
        name=made.name,
        files=dict(made.files),
        folder=str(site) if site else None,
        notes=tuple(NotCarried(each.key, each.reason) for each in made.notes),
        keys=tuple(Compared(row.key, row.original, row.rendered, row.same) for row in rows),
        planned_by=made.planned_by,
    )
    click.echo(to_json(found), nl=False)


def _asked(given: Sequence[str]) -> list[str]:
    """Answers on a terminal for what every recipe needs; an empty answer leaves the key out."""
    from dslaunch.importing.init import QUESTIONS

    keys = {word.partition("=")[0] for word in given}
    asked = [(key, click.prompt(text, default="", show_default=False, err=True)) for key, text in QUESTIONS
             if key not in keys]  # fmt: skip
    return [f"{key}={answer}" for key, answer in asked if answer]
