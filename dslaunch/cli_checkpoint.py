"""The verbs `convert` and `export`: a checkpoint of dslaunch's runtime in other forms.

The training environment does the work, which need not be dslaunch's own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click

from dslaunch.arguments import VERBS
from dslaunch.errors import ConfigError

_OUTPUT = click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path, file_okay=False), help="A new folder."
)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_FORM = "RUN|CHECKPOINT"


@click.command("convert", help=VERBS["convert"], context_settings={"max_content_width": 100})
@click.argument("words", nargs=-1, metavar=_FORM)
@_OUTPUT
@_JSON
def convert_verb(words: tuple[str, ...], output: Path, as_json: bool) -> int:
    return _formed("convert", words, output, as_json)


@click.command("export", help=VERBS["export"], context_settings={"max_content_width": 100})
@click.argument("words", nargs=-1, metavar=_FORM)
@_OUTPUT
@_JSON
def export_verb(words: tuple[str, ...], output: Path, as_json: bool) -> int:
    return _formed("export", words, output, as_json)


def _formed(verb: str, words: tuple[str, ...], output: Path, as_json: bool) -> int:
    from dslaunch.runtime.checks import read_plan

    if len(words) != 1:
        raise ConfigError(f"{verb} takes one run folder or checkpoint, found {len(words)}.")
    path = Path(words[0])
    checkpoint = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    plans = sorted(checkpoint.glob("step-*/plan.json")) or [checkpoint / "plan.json"]
    python = read_plan(plans[-1]).launcher.python or sys.executable
    made = [python, "-m", "dslaunch.runtime.forms", verb, str(checkpoint), str(output), *["--json"] * as_json]
    try:
        return subprocess.run(made, check=False).returncode
    except OSError as error:
        raise ConfigError(
            f"launcher.python: {python}: {error.strerror}. Activate the training environment."
        ) from error
