"""The verb `launch`: a description, a reviewed folder, or a sweep of descriptions."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dslaunch.arguments import VERBS, paths_and_overrides
from dslaunch.completing import complete
from dslaunch.errors import ConfigError
from dslaunch.flow import Request, rendered
from dslaunch.output import note, tell

if TYPE_CHECKING:
    from dslaunch.launch import How

_SETTINGS = {"max_content_width": 100}


@click.command("launch", help=VERBS["launch"], context_settings=_SETTINGS)
@click.argument("words", nargs=-1, shell_complete=complete)
@click.option(
    "--config-dir", type=click.Path(path_type=Path),
    help="A site's folder with its own conf/, recipes/ and templates/.",
)  # fmt: skip
@click.option(
    "--accept", multiple=True, metavar="RULE[:DATE]",
    help="Waive a finding, up to a day; recorded in the plan.",
)  # fmt: skip
@click.option(
    "--component", default="", metavar="NAME", help="This component of the model alone, such as llm."
)
@click.option("--dry-run", is_flag=True, help="Print the steps and the files; write and launch nothing.")
@click.option("--wait", is_flag=True, help="Follow a submitted job to its end.")
@click.option("--detach", is_flag=True, help="Return at once; the run goes on without this shell.")
@click.option("--multirun", is_flag=True, help="A run for each combination of the values in KEY=A,B.")
@click.option("--skip-refused", is_flag=True, help="With --multirun: launch the runs whose plans fit.")
@click.option("--test-only", is_flag=True, help="Have SLURM say whether and when it would start the job.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask before a large launch.")
@click.option("--skip-preflight", is_flag=True, help="Do not ask the hosts how they are before the launch.")
@click.option("--json", "as_json", is_flag=True, help="With --dry-run: print JSON.")
@click.pass_obj
def launch_verb(
    obj: Any, /, words: tuple[str, ...], config_dir: Path | None, accept: tuple[str, ...], component: str,
    dry_run: bool, wait: bool, detach: bool, multirun: bool, skip_refused: bool, test_only: bool, yes: bool,
    skip_preflight: bool, as_json: bool,
) -> int:  # fmt: skip
    from dslaunch.launch import How, launch

    if as_json and (multirun or not dry_run):
        raise ConfigError(
            "launch --json: belongs to --dry-run of one run. What became of a launch: `dslaunch status --json`."
        )
    ask = None if yes or not (sys.stdin and sys.stdin.isatty()) else click.confirm
    said: list[str] = []
    how = How(said.append if as_json else tell, ask, wait, dry_run, detach, skip_preflight, test_only)
    request = Request(words, config_dir, accept, obj.script_arguments, component)
    if folders := paths_and_overrides(words)[0]:
        status = _launch_folder(request, folders, multirun, how)
        return _echo_json(status, {}, said) if as_json else status
    if multirun:
        return _sweep(request, how, skip_refused=skip_refused)
    if skip_refused:
        raise ConfigError("--skip-refused: belongs to --multirun, which may have runs that are refused.")
    config, the_plan, files, findings = rendered(request)
    if findings:
        from dslaunch.rules.output import format_text

        note(format_text(findings).rstrip("\n"))
    if as_json:
        return _echo_json(launch(the_plan, files, Path(config.run.root), how), files, said)
    if dry_run:
        _show_files(files)
    return launch(the_plan, files, Path(config.run.root), how)


def _echo_json(status: int, files: Mapping[str, str], steps: Sequence[str]) -> int:
    from dslaunch.planfile import to_json
    from dslaunch.review.outputs import DryRun

    click.echo(to_json(DryRun(dict(files), tuple(steps))), nl=False)
    return status


def _launch_folder(request: Request, folders: Sequence[str], multirun: bool, how: How) -> int:
    from dslaunch.launch import launch_folder

    if request.accepted or request.component or request.site or request.script_arguments or multirun:
        raise ConfigError(
            f"launch {folders[0]}: a reviewed folder is launched as it is; --accept, --component, "
            "--config-dir, --multirun and arguments after -- belong to `dslaunch render`, or to a launch of a "
            "recipe."
        )
    given = _folder_overrides(request.overrides, folders)
    root = Path(given.get("run.root", "runs"))
    return launch_folder(Path(folders[0]), root, how, launcher=given.get("launcher", ""))


def _folder_overrides(words: Sequence[str], folders: Sequence[str]) -> dict[str, str]:
    """What may still be said when a reviewed folder is launched: who starts it, and where runs are kept."""
    from dslaunch.launch import LAUNCHERS

    if len(folders) > 1:
        raise ConfigError(f"launch takes one folder, found {', '.join(folders)}.")
    given = dict(word.split("=", 1) for word in paths_and_overrides(words)[1])
    for key in given:
        if key not in ("launcher", "run.root"):
            raise ConfigError(
                f"{key}: a reviewed folder is launched as it is; only launcher= and run.root= can be given. "
                "To change the plan, render again."
            )
    if given.get("launcher", "auto") not in LAUNCHERS:
        raise ConfigError(f"launcher={given['launcher']}. Allowed: {', '.join(LAUNCHERS)}.")
    return given


def _sweep(request: Request, how: How, *, skip_refused: bool) -> int:
    from dslaunch.launch.sweep import launch_sweep
    from dslaunch.review.columns import lines, width
    from dslaunch.sweeping import launchable, members, recorded, rows

    sweep = members(request)
    for line in lines(rows(sweep), width()):
        click.echo(line)
    chosen = launchable(sweep, skip_refused=skip_refused)
    planned = [each.planned for each in chosen]
    return launch_sweep(planned, recorded(sweep), chosen[0].run_root, chosen[0].at_once, how)


def _show_files(files: dict[str, str]) -> None:
    for name, text in sorted(files.items()):
        click.echo(f"==> {name}\n{text}", nl=not text.endswith("\n"))
