"""The verbs that look at plans and runs: `diff`, `report`, `runs`, `compare`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dslaunch.arguments import VERBS
from dslaunch.cli_lists import echo_rows
from dslaunch.completing import complete
from dslaunch.errors import ConfigError, listed, nearest
from dslaunch.output import step

if TYPE_CHECKING:
    from dslaunch.review.difference import Difference

Verb = Callable[..., int]
_SETTINGS = {"max_content_width": 100}
_FORMATS = ("text", "markdown", "json", "html")


def _site(function: Verb) -> Verb:
    return click.option(
        "--config-dir", type=click.Path(path_type=Path),
        help="A site's folder with its own conf/, recipes/ and templates/.",
    )(function)  # fmt: skip


def _json(function: Verb) -> Verb:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(function)


@click.command("diff", help=VERBS["diff"], context_settings=_SETTINGS)
@click.argument(
    "words",
    nargs=-1,
    metavar="DIR|RUN|git:REV[:DIR]|'recipe=NAME ...' (two of these)",
    shell_complete=complete,
)
@_site
@click.option("--format", "form", default="text", metavar="|".join(_FORMATS), help="How to print it.")
@click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
@click.option("--fail-on", default="", metavar="CLASS|SEVERITY[,...]",
              help="Exit with 6 where a change has this class, or a new finding this severity.")  # fmt: skip
def diff_verb(words: tuple[str, ...], config_dir: Path | None, form: str, as_json: bool, fail_on: str) -> int:
    from dslaunch.review.difference import compare, stops, thresholds
    from dslaunch.sides import pair, side

    form = _format("json" if as_json else form)
    stopping = thresholds(fail_on)
    before, after = pair(words)
    found = compare(side(before, config_dir), side(after, config_dir))
    _print(found, form)
    return 6 if stops(found, stopping) else 0


def _format(form: str) -> str:
    if form not in _FORMATS:
        raise ConfigError(f"--format {form}: expected one of {listed(_FORMATS)}.{nearest(form, _FORMATS)}")
    return form


def _print(found: Difference, form: str) -> None:
    if form == "text":
        from dslaunch.review.diff_text import show

        show(found)
    elif form == "markdown":
        from dslaunch.review.diff_markdown import markdown

        click.echo(markdown(found), nl=False)
    elif form == "json":
        _echo_json(found)
    else:
        from dslaunch.review.html import diff_html

        click.echo(diff_html(found), nl=False)


@click.command("report", help=VERBS["report"], context_settings=_SETTINGS)
@click.argument("words", nargs=-1, metavar="DIR|RUN|git:REV:DIR|recipe=NAME ...", shell_complete=complete)
@_site
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), required=True, help="The HTML file to write."
)
@_json
def report_verb(words: tuple[str, ...], config_dir: Path | None, output: Path, as_json: bool) -> int:
    from dslaunch.review import outputs
    from dslaunch.review.measured import measured
    from dslaunch.review.report import report_html
    from dslaunch.run.folder import write_file
    from dslaunch.sides import one, side

    wanted = one(words)
    found = side(wanted, config_dir)
    run = measured(wanted.folder) if wanted.folder and not wanted.revision else None
    if not output.absolute().parent.is_dir():
        raise ConfigError(f"-o {output}: there is no folder {output.parent}. Make it, or give another file.")
    with step("draw"):
        write_file(output, report_html(found, run))
    if as_json:
        _echo_json(outputs.Report(str(output), found.plan.name, output.stat().st_size))
    else:
        click.echo(f"{output}: {found.plan.name}, {output.stat().st_size // 1024} KiB")
    return 0


@click.command("runs", help=VERBS["runs"], context_settings=_SETTINGS)
@click.argument("words", nargs=-1, metavar="[run.root=DIR]")
@_json
def runs_verb(words: tuple[str, ...], as_json: bool) -> int:
    from dslaunch.review.runs import run_objects, run_rows, runs_in

    root = _root(words)
    found = runs_in(root)
    if as_json:
        _echo_json(run_objects(found))
    elif found:
        echo_rows(run_rows(found))
    else:
        click.echo(f"{root}: no runs. Another folder is named by run.root=DIR.", err=True)
    return 0


@click.command("compare", help=VERBS["compare"], context_settings=_SETTINGS)
@click.argument("words", nargs=-1, metavar="RUN RUN ...|SWEEP")
@_json
def compare_verb(words: tuple[str, ...], as_json: bool) -> int:
    from dslaunch.review.columns import side_by_side, width
    from dslaunch.review.runs import comparison_object, comparison_rows, read_run

    folders = [folder for word in words for folder in _runs_of(word)]
    if len(folders) < 2:
        raise ConfigError(
            f"compare takes two runs or more, found {len(folders)}, or a sweep. Name run folders; `dslaunch runs` "
            "lists them."
        )
    found = [read_run(folder) for folder in folders]
    if as_json:
        _echo_json(comparison_object(found))
    else:
        for line in side_by_side(comparison_rows(found), width()):
            click.echo(line)
    return 0


def _runs_of(word: str) -> list[Path]:
    """The run folder that a word names, by its path or its name; of a sweep those of its runs."""
    from dslaunch.run.sweeps import find_sweep, launched
    from dslaunch.schema.launch import Run

    root = Path(Run().root)
    if sweep := find_sweep(word, root):
        return [folder for _, folder in launched(sweep)]
    named = root / word
    return [named if not Path(word).exists() and named.is_dir() else Path(word)]


def _root(words: tuple[str, ...]) -> Path:
    """Where runs are: run.root as it was typed, or its default."""
    from dslaunch.schema.launch import Run

    other = [word for word in words if not word.startswith("run.root=")]
    if other or len(words) > 1:
        raise ConfigError(f"runs takes run.root=DIR alone, found {listed(words)}.")
    return Path(words[0].removeprefix("run.root=") if words else Run().root)


def _echo_json(value: object) -> None:
    from dslaunch.planfile import to_json

    click.echo(to_json(value), nl=False)


@click.command("review", help=VERBS["review"], context_settings=_SETTINGS)
@click.argument("words", nargs=-1, metavar="BASE")
@click.option("--config-dir", type=click.Path(path_type=Path), required=True,
              help="The site's folder, with renderings.yaml where renderings are committed.")  # fmt: skip
@click.option("--comment", type=click.Path(path_type=Path), help="Write the comment to this file too.")
@click.option("--sarif", type=click.Path(path_type=Path), help="Write all findings to this file, as SARIF.")
@click.option("--all", "every", is_flag=True, help="Plan what the change cannot touch too.")
@_json
def review_verb(
    words: tuple[str, ...], config_dir: Path, comment: Path | None, sarif: Path | None, every: bool,
    as_json: bool,
) -> int:  # fmt: skip
    from dslaunch import reviewing
    from dslaunch.run.folder import write_file

    if len(words) != 1:
        raise ConfigError(f"review takes one revision, such as origin/main; found {listed(words) or 'none'}.")
    found = reviewing.review(words[0], config_dir, every=every)
    text = reviewing.comment(found)
    if comment:
        write_file(comment, text)
    if sarif:
        write_file(sarif, reviewing.sarif(found, config_dir))
    if as_json:
        _echo_json(reviewing.as_output(found))
    else:
        click.echo(text, nl=False)
    return 6 if found.stops else 0
