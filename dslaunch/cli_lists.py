"""The verbs that say what there is: `recipes`, `models`, `clusters`, `schema`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import click

from dslaunch.arguments import VERBS
from dslaunch.output import step

Verb = Callable[..., int]


def _options(function: Verb) -> Verb:
    function = _json(function)
    return click.option(
        "--config-dir", type=click.Path(path_type=Path),
        help="A site's folder with its own conf/, recipes/ and templates/.",
    )(function)  # fmt: skip


def _json(function: Verb) -> Verb:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(function)


@click.command("recipes", help=VERBS["recipes"])
@_options
def recipes_verb(config_dir: Path | None, as_json: bool) -> int:
    from dslaunch.review import lists, outputs

    if as_json:
        return _echo_json(outputs.Recipes(tuple(lists.recipes(config_dir))))
    return echo_rows(lists.recipe_rows(config_dir), cut=True)


@click.command("models", help=VERBS["models"])
@_options
def models_verb(config_dir: Path | None, as_json: bool) -> int:
    from dslaunch.review import lists, outputs

    with step("read the models"):
        found = lists.models(config_dir)
    return _echo_json(outputs.Models(tuple(found))) if as_json else echo_rows(lists.model_rows(found), cut=True)


@click.command("clusters", help=VERBS["clusters"])
@_options
def clusters_verb(config_dir: Path | None, as_json: bool) -> int:
    from dslaunch.review import lists, outputs

    if as_json:
        return _echo_json(outputs.Clusters(tuple(lists.clusters(config_dir))))
    return echo_rows(lists.cluster_rows(config_dir), cut=True)


@click.command("schema", help=VERBS["schema"])
@click.argument("words", nargs=-1, metavar="[KEY | dslaunch.NAME/N ...]")
@_json
def schema_verb(words: tuple[str, ...], as_json: bool) -> int:
    """Keys as rows or JSON; of an output's name, such as dslaunch.plan/1, the JSON Schema."""
    from dslaunch.review import keys, outputs
    from dslaunch.review.json_schema import json_schema

    for word in words or ("",):
        if "/" in word:
            _echo_json(json_schema(word))
        elif as_json:
            found = tuple(key for _, section in keys.sections(word) for key in section)
            _echo_json(outputs.Keys(found))
        else:
            echo_rows(keys.schema_rows(word))
            for line in keys.more_lines(word):
                click.echo(line)
    return 0


def echo_rows(rows: Sequence[tuple[str, ...]], *, cut: bool = False) -> int:
    """A line for each row, folded or cut for a terminal."""
    from dslaunch.review.columns import lines, width

    for line in lines(rows, width(), cut=cut):
        click.echo(line)
    return 0


def _echo_json(value: object) -> int:
    from dslaunch.planfile import to_json

    click.echo(to_json(value), nl=False)
    return 0
