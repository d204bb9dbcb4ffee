"""The verb `triage`: repeat a failing run on one process, and say where its fault is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dslaunch.arguments import VERBS
from dslaunch.errors import ConfigError
from dslaunch.output import note, tell

if TYPE_CHECKING:
    from dslaunch.run.verdict import Triage

_TITLES = {
    "model_and_data": "the model or its data",
    "communication": "the communication between ranks",
    "environment": "the environment",
    "unclear": "unclear",
}
_UNCLEAR = 1
"""Exit status where no verdict was reached."""


@click.command("triage", help=VERBS["triage"], context_settings={"max_content_width": 100})
@click.argument("words", nargs=-1, metavar="RUN [run.root=DIR]")
@click.option("--step", type=click.IntRange(1), help="The step that fails; default: as its records tell.")
@click.option("--minutes", type=click.FloatRange(0.1), default=10.0, show_default=True, help="Its time limit.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def triage_verb(words: tuple[str, ...], step: int | None, minutes: float, as_json: bool) -> int:
    from dslaunch.launch.triage import triage
    from dslaunch.planfile import to_json

    found = triage(_run(words), step or 0, minutes, note if as_json else tell)
    if as_json:
        click.echo(to_json(found), nl=False)
    else:
        for line in _lines(found):
            click.echo(line)
    return _UNCLEAR if found.verdict == "unclear" else 0


def _run(words: tuple[str, ...]) -> Path:
    from dslaunch.run.find import find_run
    from dslaunch.schema.launch import Run

    roots = [word.removeprefix("run.root=") for word in words if word.startswith("run.root=")]
    runs = [word for word in words if not word.startswith("run.root=")]
    if len(runs) != 1 or len(roots) > 1:
        raise ConfigError(f"triage takes one run, and run.root=DIR; found {', '.join(words) or 'nothing'}.")
    return find_run(runs[0], Path(roots[0] if roots else Run().root))


def _lines(found: Triage) -> list[str]:
    rows = {
        "verdict": f"{_TITLES[found.verdict]}: {found.why}",
        "the run": f"failed at step {found.step}{f' ({found.cause})' if found.cause else ''}: "
        f"{found.error or 'no rank said why'}",
        "alone": f"{found.repeated_as}, from {found.repeated_from}, completed step {found.repeated_to}"
        f"{f', then {found.repeated_error}' if found.repeated_error else ''}",
        "its files": found.folder,
        "next": found.next.format(folder=found.folder),
    }
    hosts = [f"preflight      {each}" for each in found.preflight]
    return [*(f"{name:<14} {text}" for name, text in rows.items()), *hosts]
