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
_FORM = "RUN|CHECKPOINT [run.root=DIR]"


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

    checkpoint = _checkpoint(verb, words)
    plans = sorted(path for form in ("plan.json", "step-*/plan.json") for path in checkpoint.glob(form))
    if not plans:
        raise ConfigError(
            f"{checkpoint}: no checkpoint of dslaunch.runtime stands there. Name a run, or a folder step-N that "
            "such a run has written."
        )
    python = read_plan(plans[-1]).launcher.python or sys.executable
    made = [python, "-m", "dslaunch.runtime.forms", verb, str(checkpoint), str(output), *["--json"] * as_json]
    try:
        return subprocess.run(made, check=False).returncode
    except OSError as error:
        raise ConfigError(
            f"launcher.python: {python}: {error.strerror}. Activate the training environment."
        ) from error


def _checkpoint(verb: str, words: tuple[str, ...]) -> Path:
    """The checkpoint that is meant, or the folder of checkpoints: by its path, or by its run's name."""
    from dslaunch.run.checkpoints import checkpoint_dir
    from dslaunch.run.find import STATE, find_run, run_and_root
    from dslaunch.run.state import read_state
    from dslaunch.run.status import run_plan

    word, root = run_and_root(verb, words)
    if not word:
        raise ConfigError(f"{verb} takes one run or checkpoint, found none.")
    path = Path(word)
    if path.is_dir() and not (path / STATE).is_file():
        return path / "checkpoints" if (path / "checkpoints").is_dir() else path
    run = find_run(word, root)
    return checkpoint_dir(run_plan(run), run, read_state(run).work_dir)
