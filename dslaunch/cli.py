"""The command line: one short function a verb. What is heavy is imported inside it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dslaunch import __version__
from dslaunch.arguments import VERBS, ordered
from dslaunch.cli_calibrate import calibrate_verb
from dslaunch.cli_check import check_verb, explain_verb
from dslaunch.cli_checkpoint import convert_verb, export_verb
from dslaunch.cli_import import import_verb, init_verb
from dslaunch.cli_launch import launch_verb
from dslaunch.cli_lists import clusters_verb, models_verb, recipes_verb, schema_verb
from dslaunch.cli_preflight import preflight_verb
from dslaunch.cli_review import compare_verb, diff_verb, report_verb, review_verb, runs_verb
from dslaunch.cli_run import logs_verb, resume_verb, status_verb, stop_verb, watch_verb
from dslaunch.cli_triage import triage_verb
from dslaunch.completing import complete
from dslaunch.errors import ConfigError, DslaunchError
from dslaunch.flow import Request, explanation, judged, refusing, rendered
from dslaunch.output import CLOSED, OutputClosedError, Verbs, discard_output, note

if TYPE_CHECKING:
    from dslaunch.planfile import Finding

Verb = Callable[..., int]
_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def run(argv: Sequence[str]) -> int:
    """Run one command line; returns the exit status.

    0 done; 1 the launched job failed; 2 a mistake in configuration or command line; 3 no legal plan fits;
    4 preflight failed; 5 nothing was launched; 6 findings at or above --fail-on; 141 nobody reads the output any
    more (`| head`).
    """
    try:
        return _status(argv)
    except (BrokenPipeError, OutputClosedError):
        discard_output()
        return CLOSED


def _status(argv: Sequence[str]) -> int:
    """`run`, but for a closed output."""
    try:
        status = _main(argv)
        if sys.stdout:
            sys.stdout.flush()
        return status
    except click.UsageError as error:
        _complain(error.format_message() + " See `dslaunch --help`.")
        return 2
    except DslaunchError as error:
        _complain(str(error))
        return error.status
    except BrokenPipeError:
        raise
    except ModuleNotFoundError as error:
        _complain(
            f"the Python package {error.name} is missing here: install dslaunch with `pip install dslaunch`."
        )
        return 2
    except OSError as error:
        _complain(f"{error.filename or 'output'}: {error.strerror}.")
        return 2
    except (KeyboardInterrupt, click.Abort):
        _complain("stopped")
        return 130


def _main(argv: Sequence[str]) -> int:
    if "_DSLAUNCH_COMPLETE" in os.environ:
        return int(main.main(prog_name="dslaunch", standalone_mode=False) or 0)
    if not argv or argv[0] in ("-h", "--help", "--version"):
        return int(main.main(list(argv) or ["--help"], prog_name="dslaunch", standalone_mode=False) or 0)
    words = ordered(argv)
    arguments = [words.verb, *words.arguments]
    return int(main.main(arguments, prog_name="dslaunch", standalone_mode=False, obj=words) or 0)


def _complain(message: str) -> None:
    for line in message.splitlines():
        click.echo(line if line.startswith(" ") else f"dslaunch: {line}", err=True)


class _Verbs(Verbs):
    """The verbs in the order of the flow, and overrides completed in place of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Examples"):
            formatter.write_dl(
                [
                    ("dslaunch plan recipe=vla70b cluster=64xA100", "what fits, and how fast"),
                    ("dslaunch render recipe=vla70b cluster=64xA100 -o out", "the files, for review"),
                    ("dslaunch launch out", "exactly what was reviewed"),
                    ("dslaunch recipe=vla_tiny cluster=local", "all of it, on this machine"),
                ]
            )


@click.group(cls=_Verbs, context_settings=_SETTINGS)
@click.version_option(__version__, prog_name="dslaunch")
def main() -> None:
    """Plan, check, render and launch DeepSpeed and Megatron training.

    dslaunch [VERB] recipe=NAME cluster=64xA100 [KEY=VALUE ...] [OPTIONS] [-- SCRIPT ARGUMENTS]

    Without a verb, `launch` is meant. Options and overrides stand in any order. Every verb takes -q (the result
    and mistakes alone, without notes and progress) and -v (each step with its seconds, on standard error).
    """


def _words(function: Verb) -> Verb:
    return click.argument("words", nargs=-1, shell_complete=complete)(function)


def _site(function: Verb) -> Verb:
    return click.option(
        "--config-dir", type=click.Path(path_type=Path),
        help="A site's folder with its own conf/, recipes/ and templates/.",
    )(function)  # fmt: skip


def _accept(function: Verb) -> Verb:
    return click.option(
        "--accept", multiple=True, metavar="RULE[:DATE]",
        help="Waive a finding, up to a day; recorded in the plan.",
    )(function)  # fmt: skip


def _component(function: Verb) -> Verb:
    return click.option(
        "--component", default="", metavar="NAME", help="This component of the model alone, such as llm."
    )(function)


def _json(function: Verb) -> Verb:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(function)


@main.command(help=VERBS["plan"])
@_words
@_site
@_accept
@_component
@_json
@click.option("--explain", "explained", is_flag=True, help="Say why, what would change it, and what would do.")
@click.pass_obj
def plan(
    obj: Any, /, words: tuple[str, ...], config_dir: Path | None, accept: tuple[str, ...], component: str,
    as_json: bool, explained: bool,
) -> int:  # fmt: skip
    request = Request(words, config_dir, accept, obj.script_arguments, component)
    config, the_plan, prediction, findings = judged(request)
    prediction = replace(prediction, findings=findings)
    sentences = explanation(request, prediction) if explained else []
    if as_json:
        from dslaunch.planfile import joined, to_json

        said = {"explanation": sentences} if explained else {}
        click.echo(to_json({**joined(the_plan, prediction), **said}), nl=False)
    else:
        from dslaunch.review.page import show

        show(config, the_plan, prediction, sentences)
    return 3 if refusing(prediction.findings, the_plan.accepted) else 0


@main.command(help=VERBS["render"])
@_words
@_site
@_accept
@_component
@_json
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The folder to write.")
@click.pass_obj
def render(
    obj: Any, /, words: tuple[str, ...], config_dir: Path | None, accept: tuple[str, ...], component: str,
    as_json: bool, output: Path,
) -> int:  # fmt: skip
    request = Request(words, config_dir, accept, obj.script_arguments, component)
    _, the_plan, files, findings = rendered(request)
    from dslaunch.run.rendering import write_rendering

    write_rendering(output, files)
    if as_json:
        from dslaunch.planfile import to_json
        from dslaunch.review.outputs import Rendered

        engine = the_plan.engine.name
        made = Rendered(str(output), the_plan.name, engine, tuple(sorted(files)), tuple(findings))
        click.echo(to_json(made), nl=False)
        return 0
    click.echo(f"{output}: {len(files)} files for {the_plan.name}, engine {the_plan.engine.name}")
    for name in sorted(files):
        click.echo(f"  {name}")
    _note(findings)
    return 0


main.add_command(launch_verb)
main.add_command(check_verb)
main.add_command(explain_verb)
main.add_command(preflight_verb)
main.add_command(diff_verb)
main.add_command(report_verb)
main.add_command(runs_verb)
main.add_command(compare_verb)
main.add_command(calibrate_verb)
main.add_command(convert_verb)
main.add_command(export_verb)
main.add_command(review_verb)
for _verb in (status_verb, logs_verb, watch_verb, stop_verb, resume_verb):
    main.add_command(_verb)
main.add_command(triage_verb)
main.add_command(import_verb)
main.add_command(init_verb)
main.add_command(recipes_verb)
main.add_command(models_verb)
main.add_command(clusters_verb)
main.add_command(schema_verb)


@main.command(help=VERBS["completion"])
@click.argument("words", nargs=-1, metavar="bash|zsh|fish")
def completion(words: tuple[str, ...]) -> int:
    from click.shell_completion import get_completion_class

    shell = words[0] if words else ""
    kind = get_completion_class(shell)
    if kind is None:
        raise ConfigError(f"completion: shell is '{shell}'. Allowed: bash, zsh, fish.")
    click.echo(kind(main, {}, "dslaunch", "_DSLAUNCH_COMPLETE").source())
    return 0


def _note(findings: Sequence[Finding]) -> None:
    """Findings that stand, where nobody asked for them: on standard error."""
    from dslaunch.rules.output import format_text

    if findings:
        note(format_text(findings).rstrip("\n"))
