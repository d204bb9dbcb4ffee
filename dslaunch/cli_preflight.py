"""The verb `preflight`: ask the hosts of a launch how they are, without launching."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dslaunch.arguments import VERBS, paths_and_overrides
from dslaunch.completing import complete
from dslaunch.errors import ConfigError, LaunchError
from dslaunch.flow import Request, configured, rendered

if TYPE_CHECKING:
    from dslaunch.planfile import Plan
    from dslaunch.preflight import Target

_SETTINGS = {"max_content_width": 100}


@click.command("preflight", help=VERBS["preflight"], context_settings=_SETTINGS)
@click.argument("words", nargs=-1, metavar="[DIR] | recipe=NAME [KEY=VALUE ...]", shell_complete=complete)
@click.option(
    "--config-dir", type=click.Path(path_type=Path),
    help="A site's folder with its own conf/, recipes/ and templates/.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Write a cluster's file with what was measured."
)
@click.pass_obj
def preflight_verb(
    obj: Any, /, words: tuple[str, ...], config_dir: Path | None, as_json: bool, output: Path | None
) -> int:
    from dslaunch.launch.before import failure
    from dslaunch.planfile import to_json
    from dslaunch.preflight import preflight
    from dslaunch.preflight.cache import passed_lately, remember
    from dslaunch.preflight.report import as_data, table

    request = Request(tuple(words), config_dir, (), obj.script_arguments)
    base = _cluster_name(words) if output else ""
    target, root = _target(request)
    if age := passed_lately(root, target):
        click.echo(f"preflight passed {age / 60:.1f} min ago on these {len(target.hosts)} nodes")
        return 0
    report, measured = preflight(target, collective=target.preflight.collective)
    if target.way == "srun" and not report.blocking:
        remember(root, target)
    if as_json:
        click.echo(to_json(as_data(report)), nl=False)
    else:
        click.echo(failure(report, target) if report.blocking else "\n".join(table(report)))
        outcome = "failed" if report.blocking else "passed"
        count = f"{len(target.hosts)} host{'s' if target.several else ''}"
        click.echo(f"preflight {outcome}: {count}, {report.seconds:.1f} s")
    if output:
        from dslaunch.preflight.profile import write_profile

        write_profile(output, base, configured(request).cluster, measured, target)
        click.echo(f"{output}: cluster={output.stem} plans with the measured bandwidths", err=True)
    return 4 if report.blocking else 0


def _cluster_name(words: Sequence[str]) -> str:
    """The cluster's name in cluster=64xNAME, which a profile builds on."""
    from dslaunch.conffiles import SIZED

    given = [word.removeprefix("cluster=") for word in words if word.startswith("cluster=")]
    if len(given) != 1:
        raise ConfigError("--output: a profile builds on a cluster's file. Name it: recipe=NAME cluster=NAME")
    sized = SIZED.fullmatch(given[0])
    return sized["type"] if sized else given[0]


def _target(request: Request) -> tuple[Target, Path]:
    """What is to be asked, and run.root.

    Raises:
        ConfigError: an unknown launcher, an interpreter that is not here, or hosts that do not fit the plan.
        LaunchError: there is nothing that this machine could ask (status 5).
    """
    from dslaunch.launch.before import can_ask, target_of
    from dslaunch.launch.checks import check_python
    from dslaunch.launch.choose import choose
    from dslaunch.launch.request import LaunchRequest
    from dslaunch.run.folder import planned

    folders, _ = paths_and_overrides(request.overrides)
    plan, files, root = _folder(request, folders) if folders else _recipe(request)
    launcher = choose(plan, os.environ)
    if not can_ask(launcher, os.environ):
        raise LaunchError(
            "preflight: no hosts to ask. It asks this machine (launcher=local), hosts over ssh "
            "(launcher.hostfile=FILE or cluster.hosts=[...]), or the nodes of a SLURM allocation that it is "
            "started in; a SLURM job does it as its first step",
            status=5,
        )
    # Both are set in a job, which asks about its own run.
    run_dir = Path(os.environ.get("DSLAUNCH_RUN_DIR") or planned(root, plan.name))
    work_dir = Path(os.environ.get("DSLAUNCH_WORK_DIR") or Path.cwd())
    asked = LaunchRequest(plan, files, run_dir, work_dir, os.environ, wait=False)
    target = target_of(asked, launcher)
    if target.way == "here":
        check_python(asked)
    return target, run_dir.parent


def _recipe(request: Request) -> tuple[Plan, Mapping[str, str], Path]:
    config, plan, files, _ = rendered(request)
    return plan, files, Path(config.run.root)


def _folder(request: Request, folders: Sequence[str]) -> tuple[Plan, Mapping[str, str], Path]:
    """The plan and the files of a rendered folder, with launcher= in place of its own."""
    from dslaunch.launch import folder_plan

    given = dict(word.split("=", 1) for word in paths_and_overrides(request.overrides)[1])
    other = [key for key in given if key != "launcher"]
    if len(folders) > 1 or other:
        raise ConfigError(
            f"preflight {folders[0]}: a rendered folder is taken as it is; beside it only launcher= can be given, "
            f"found {', '.join([*folders[1:], *other])}"
        )
    plan, files = folder_plan(Path(folders[0]), given.get("launcher", ""))
    return plan, files, Path(folders[0]).absolute().parent
