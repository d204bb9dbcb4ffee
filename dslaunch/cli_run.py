"""The verbs for a run that was launched, from any shell: `status`, `logs`, `watch`, `stop`, `resume`."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from dslaunch.arguments import VERBS
from dslaunch.errors import ConfigError
from dslaunch.output import tell

Verb = Callable[..., int]
_SETTINGS = {"max_content_width": 100}
_RUN = "[RUN] [run.root=DIR]"


def _run_word(function: Verb) -> Verb:
    return click.argument("words", nargs=-1, metavar=_RUN)(function)


def _json(function: Verb) -> Verb:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(function)


@click.command("status", help=VERBS["status"], context_settings=_SETTINGS)
@_run_word
@_json
def status_verb(words: tuple[str, ...], as_json: bool) -> int:
    from dslaunch.review.columns import lines, width
    from dslaunch.run.status import plan_words, read_status, status_lines, status_object

    if sweep := _sweep("status", words):
        return _sweep_status(sweep, as_json)
    found = read_status(_folder("status", words))
    if as_json:
        _echo_json(status_object(found))
        return 0
    click.echo(f"{found.folder.name}: {plan_words(found.plan)}")
    for line in lines(status_lines(found), width()):
        click.echo(line)
    return 0


@click.command("logs", help=VERBS["logs"], context_settings=_SETTINGS)
@_run_word
@click.option("--rank", type=click.IntRange(0), help="What this rank said.")
@click.option("--first-error", is_flag=True, help="What the rank said that failed first.")
@click.option("--follow", is_flag=True, help="Go on until the run ends; Ctrl-C leaves the run alone.")
@click.option("--lines", type=click.IntRange(0), default=50, show_default=True, help="Last lines; 0 is all.")
@click.option("--attempt", type=click.IntRange(1), help="Which attempt, counted from 1; default: the newest.")
@_json
def logs_verb(
    words: tuple[str, ...], rank: int | None, first_error: bool, follow: bool, lines: int, attempt: int | None,
    as_json: bool,
) -> int:  # fmt: skip
    from dslaunch.run.logs import find_log, follow_log, kubernetes_logs, log_object, of_kubernetes, show
    from dslaunch.run.status import failure_words

    if rank is not None and first_error:
        raise ConfigError("--rank and --first-error are both given. Give one: each names a rank's log.")
    if follow and as_json:
        raise ConfigError("--follow and --json are both given. Give one: JSON is printed once.")
    if sweep := _sweep("logs", words):
        if follow or as_json:
            raise ConfigError(
                f"--follow and --json show one run, and {sweep.name} is a sweep. Name one: {sweep.name}.1"
            )
        return _sweep_logs(sweep, attempt, rank, first_error, lines)
    folder = _folder("logs", words)
    if of_kubernetes(folder):
        command = kubernetes_logs(folder, attempt, rank, lines, first_error=first_error, follow=follow)
        return _show_command(folder, command, as_json)
    log = find_log(folder, attempt, rank, first_error, follow=follow)
    if as_json:
        _echo_json(log_object(folder, log, lines))
        return 0
    if log.failures:
        click.echo(f"{failure_words(log.failures)}; {log.path}:", err=True)
    sys.stdout.flush()
    shown = show(log, lines, sys.stdout.buffer)
    if follow:
        follow_log(folder, log, shown, sys.stdout.buffer)
    return 0


def _show_command(folder: Path, command: Sequence[str], as_json: bool) -> int:
    """What a command prints, as its log."""
    from dslaunch.run.logs import command_object

    if as_json:
        _echo_json(command_object(folder, command))
        return 0
    sys.stdout.flush()
    with contextlib.suppress(KeyboardInterrupt):
        return subprocess.run(command, check=False).returncode
    return 0


@click.command("watch", help=VERBS["watch"], context_settings=_SETTINGS)
@_run_word
@click.option("--once", is_flag=True, help="Print one frame, and end.")
@click.option("--every", default=2.0, show_default=True, type=click.FloatRange(0.2), help="Seconds a frame.")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON a frame.")
def watch_verb(words: tuple[str, ...], once: bool, every: float, as_json: bool) -> int:
    from dslaunch.review.watch import show_once, watch, watch_json

    folder = _folder("watch", words)
    if as_json:
        watch_json(folder, every, once=once)
    elif once:
        show_once(folder)
    else:
        watch(folder, every)
    return 0


@click.command("stop", help=VERBS["stop"], context_settings=_SETTINGS)
@_run_word
@_json
def stop_verb(words: tuple[str, ...], as_json: bool) -> int:
    from dslaunch.run.stop import stop

    sweep = _sweep("stop", words)
    folder = sweep or _folder("stop", words, needed=True)
    said: list[str] = []
    for run in _launched(sweep) if sweep else [folder]:
        stop(run, said.append if as_json else tell)
    if as_json:
        _echo_json({"schema": "dslaunch.stop/1", "run": str(folder), "said": said})
    return 0


@click.command("resume", help=VERBS["resume"], context_settings=_SETTINGS)
@_run_word
@click.option("--from-scratch", is_flag=True, help="Start at step 0 where there is no checkpoint.")
@click.option("--dry-run", is_flag=True, help="Print the steps; launch nothing.")
@click.option("--wait", is_flag=True, help="Follow a submitted job to its end.")
@click.option("--detach", is_flag=True, help="Return at once; the run goes on without this shell.")
@click.option("--skip-preflight", is_flag=True, help="Start without asking the hosts how they are.")
@click.option("--nodes", type=click.IntRange(1), help="Plan an elastic run anew for so many nodes.")
@click.option("--json", "as_json", is_flag=True, help="With --dry-run: print JSON.")
def resume_verb(
    words: tuple[str, ...], from_scratch: bool, dry_run: bool, wait: bool, detach: bool, skip_preflight: bool,
    nodes: int | None, as_json: bool,
) -> int:  # fmt: skip
    from dslaunch.launch.resume import resume
    from dslaunch.review.outputs import DryRun

    if as_json and not dry_run:
        raise ConfigError(
            "resume --json: belongs to --dry-run. What became of a resumed run: `dslaunch status --json`."
        )
    sweep = _sweep("resume", words)
    folders = _unfinished(sweep) if sweep else [_folder("resume", words, needed=True)]
    said: list[str] = []
    status = 0
    for folder in folders:
        try:
            status |= resume(
                folder, from_scratch=from_scratch, wait=wait, dry_run=dry_run, detach=detach,
                skip_preflight=skip_preflight, echo=said.append if as_json else tell, nodes=nodes or 0,
            )  # fmt: skip
        except ConfigError as error:
            if not sweep:
                raise
            click.echo(f"{folder.name}: {error}", err=True)  # the others of the sweep go on
            status |= error.status
    if as_json:
        _echo_json(DryRun({}, tuple(said)))
    return status


def _folder(verb: str, words: tuple[str, ...], *, needed: bool = False) -> Path:
    """The folder of the run that is meant.

    Args:
        needed: nothing is not taken for the newest run, since the verb changes it.
    """
    from dslaunch.run.find import find_run, run_and_root
    from dslaunch.run.sweeps import find_sweep

    run, root = run_and_root(verb, words)
    if sweep := find_sweep(run, root):
        raise ConfigError(f"{verb} takes one run, and {sweep.name} is a sweep. Name one: {sweep.name}.1")
    if needed and not run:
        newest = find_run("", root)
        raise ConfigError(f"{verb} takes a run. The newest is {newest.name}: dslaunch {verb} {newest.name}")
    return find_run(run, root)


def _sweep(verb: str, words: tuple[str, ...]) -> Path | None:
    """The folder of the sweep that is meant; None where a run is."""
    from dslaunch.run.find import run_and_root
    from dslaunch.run.sweeps import find_sweep

    return find_sweep(*run_and_root(verb, words))


def _launched(sweep: Path) -> list[Path]:
    """The run folders of a sweep."""
    from dslaunch.run.sweeps import launched

    return [folder for _, folder in launched(sweep)]


def _unfinished(sweep: Path) -> list[Path]:
    """The runs that a resume has something to do for; the others are told."""
    from dslaunch.run.now import look

    standing = {folder: look(folder).standing for folder in _launched(sweep)}
    kept = ("finished", "running", "queued")
    for folder, state in standing.items():
        if state in kept:
            tell(f"{folder.name}: is {state}, and left as it is")
    return [folder for folder, state in standing.items() if state not in kept]


def _sweep_status(sweep: Path, as_json: bool) -> int:
    from dslaunch.review.columns import lines, width
    from dslaunch.review.sweeps import status_of_sweep, sweep_rows

    if as_json:
        _echo_json(status_of_sweep(sweep))
        return 0
    for line in lines(sweep_rows(sweep), width()):
        click.echo(line)
    return 0


def _sweep_logs(
    sweep: Path, attempt: int | None, rank: int | None, first_error: bool, lines: int
) -> int:
    """The end of each run's log; a run that has none says so."""
    from dslaunch.run.logs import find_log, show

    for folder in _launched(sweep):
        click.echo(f"==> {folder.name}")
        try:
            log = find_log(folder, attempt, rank, first_error, follow=False)
        except ConfigError as error:
            click.echo(str(error))
            continue
        sys.stdout.flush()
        show(log, lines, sys.stdout.buffer)
    return 0


def _echo_json(value: object) -> None:
    from dslaunch.planfile import to_json

    click.echo(to_json(value), nl=False)
