"""The verb `calibrate`: the user's own runs correct the rates that later plans are predicted with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dslaunch.arguments import VERBS
from dslaunch.errors import ConfigError

if TYPE_CHECKING:
    from dslaunch.hardware.corrections import Correction, Lesson
    from dslaunch.planfile import Plan
    from dslaunch.review.lessons import Taught


@click.command("calibrate", help=VERBS["calibrate"], context_settings={"max_content_width": 100})
@click.argument("words", nargs=-1, metavar="RUN ...")
@click.option("--config-dir", type=click.Path(path_type=Path, file_okay=False),
              help="The site's folder, whose efficiency.yaml is written.")  # fmt: skip
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False),
              help="The file itself: SITE/efficiency.yaml.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def calibrate_verb(
    words: tuple[str, ...], config_dir: Path | None, output: Path | None, as_json: bool
) -> int:
    from dslaunch.hardware.corrections import text
    from dslaunch.hardware.efficiency import SHIPPED
    from dslaunch.review.lessons import taught
    from dslaunch.run.folder import write_file

    if not words:
        raise ConfigError("calibrate takes run folders, found none. `dslaunch runs` lists them.")
    path = _file(config_dir, output)
    lessons, refused = _lessons(words)
    for word, reason in refused:
        click.echo(f"{word}: teaches nothing: {reason}", err=True)
    if not lessons:
        raise ConfigError("no run teaches anything, so nothing is written.")
    known = _known(path)
    found = taught(lessons, known, SHIPPED)
    if path:
        write_file(path, text({**known, **{each.key: each.after for each in found}}, SHIPPED.sha256()))
    if as_json:
        _echo_json(found, refused, path)
    else:
        _show(found, path)
    return 0


def _echo_json(found: Sequence[Taught], refused: Sequence[tuple[str, str]], path: Path | None) -> None:
    from dslaunch.planfile import to_json
    from dslaunch.review.outputs_run import Calibrated, Unfit

    unfit = tuple(Unfit(run, why) for run, why in refused)
    click.echo(to_json(Calibrated(tuple(found), unfit, str(path) if path else None)), nl=False)


def _show(found: Sequence[Taught], path: Path | None) -> None:
    for each in found:
        for line in _lines(each):
            click.echo(line)
    if path:
        click.echo(f"{path}: written; plans with --config-dir {path.parent} use it")
    else:
        click.echo("nothing is written: name the site's folder, --config-dir SITE")


def _file(site: Path | None, output: Path | None) -> Path | None:
    """The file to write; None where nothing says which."""
    from dslaunch.hardware.corrections import FILE

    if site and output:
        raise ConfigError("--config-dir and -o are both given. Give one.")
    if output and output.name != FILE:
        raise ConfigError(f"-o {output}: plans read SITE/{FILE}. Name it {output.parent / FILE}.")
    folder = site or (output.parent if output else None)
    if folder is None:
        return None
    if not folder.is_dir():
        raise ConfigError(
            f"{'--config-dir' if site else '-o'} {site or output}: there is no folder {folder}."
        )
    return folder / FILE


def _lessons(words: Sequence[str]) -> tuple[list[tuple[Plan, Lesson]], list[tuple[str, str]]]:
    """(what runs teach, with their plans; the others with the reason)."""
    from dslaunch.hardware.efficiency import SHIPPED
    from dslaunch.review.lessons import lesson
    from dslaunch.review.runs import read_run

    lessons, refused = [], []
    for word in words:
        run = read_run(Path(word))
        found = lesson(run, SHIPPED)
        if isinstance(found, str):
            refused.append((word, found))
        else:
            lessons.append((run.plan, found))
    return lessons, refused


def _known(path: Path | None) -> dict[str, Correction]:
    """What the file holds so far; nothing where that corrects the rates of another version."""
    from dslaunch.hardware.corrections import read
    from dslaunch.hardware.efficiency import SHIPPED

    if path is None or not path.is_file():
        return {}
    rates, found = read(path)
    if rates != SHIPPED.sha256():
        click.echo(f"{path}: corrects another version's rates: what it holds is dropped", err=True)
        return {}
    return found


def _lines(found: Taught) -> Iterator[str]:
    """Such as `A100-SXM4-80GB/transformers: time x1 -> x1.24, memory x1 -> x0.981`, and its runs."""
    before, after = found.before, found.after
    yield (
        f"{found.key}: time x{before.time:.3g} -> x{after.time:.3g}, "
        f"memory x{before.memory:.3g} -> x{after.memory:.3g}"
    )
    runs, plans = len(after.runs), after.plans
    yield (
        f"  from {runs} {'run' if runs == 1 else 'runs'} of {plans} {'plan' if plans == 1 else 'plans'}, whose "
        f"median of time is believed to {found.weight:.0%}; runs of other plans make it more"
    )
    for run in after.runs:
        memory = (
            "allocated memory not measured"
            if run.memory_gib is None
            else f"allocated {run.memory_gib:.3g} GiB, shipped rates say {run.predicted_gib:.3g}: "
            f"x{run.memory_gib / run.predicted_gib:.3g}"
        )
        yield (
            f"  {run.run}: step {run.step_s:.3g} s, shipped rates say {run.predicted_step_s:.3g}: "
            f"x{run.step_s / run.predicted_step_s:.3g}; {memory}"
        )
