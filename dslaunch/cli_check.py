"""The verbs `check` and `explain`: judge a recipe, a rendered folder or files of others, and say why."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dslaunch.arguments import VERBS, paths_and_overrides
from dslaunch.completing import complete
from dslaunch.errors import ConfigError
from dslaunch.flow import Request, configured, judged

if TYPE_CHECKING:
    from dslaunch.planfile import Finding
    from dslaunch.rules.checking import Job
    from dslaunch.rules.registry import Edits
    from dslaunch.rules.selection import Selection
    from dslaunch.rules.settings import Settings
    from dslaunch.rules.site import Site

Verb = Callable[..., int]
_SETTINGS = {"max_content_width": 100}
_PLAIN_RECIPE = "recipe=llama3_8b"
"""Any recipe whose cluster can be another: `cluster=` beside files is composed with it."""


@dataclass(frozen=True)
class _Judged:
    """Findings that stand, those that are waived, and the job behind them where files were given."""

    standing: tuple[Finding, ...]
    waived: tuple[Finding, ...]
    job: Job | None = None


def _topology(function: Verb) -> Verb:
    for name, meaning in (
        ("--pp", "Pipeline stages of the program."),
        ("--tp", "Tensor-parallel size of the program."),
        ("--ranks-per-node", "Ranks on each node."),
        ("--nodes", "Nodes of the job."),
        ("--world-size", "Ranks in all, for files written elsewhere."),
    ):
        function = click.option(name, type=click.IntRange(1), help=meaning)(function)
    for name, meaning in (("--megatron-version", "megatron-core"), ("--deepspeed-version", "DeepSpeed")):
        function = click.option(name, default="", help=f"Version of {meaning} that reads the files.")(
            function
        )
    return function


def _choice(function: Verb) -> Verb:
    function = click.option("--ignore", multiple=True, metavar="RULE|SUBJECT", help="Leave these rules out.")(
        function
    )
    return click.option(
        "--select", multiple=True, metavar="RULE|SUBJECT", help="Ask these rules only, such as `batch,zero`."
    )(function)


def _mending(function: Verb) -> Verb:
    function = click.option("-y", "--yes", is_flag=True, help="With --fix: write without asking.")(function)
    return click.option(
        "--fix", "fixing", is_flag=True, help="Mend what has one right fix, after showing it as a diff."
    )(function)


@click.command("check", help=VERBS["check"], context_settings=_SETTINGS)
@click.argument(
    "words",
    nargs=-1,
    metavar="[FILE ...] [cluster=NAME] | recipe=NAME [KEY=VALUE ...]",
    shell_complete=complete,
)
@click.option(
    "--config-dir", type=click.Path(path_type=Path),
    help="A site's folder with its own conf/, recipes/, templates/ and dslaunch.yaml.",
)  # fmt: skip
@click.option("--accept", multiple=True, metavar="RULE[:DATE]", help="Waive a finding, up to a day.")
@click.option(
    "--component", default="", metavar="NAME", help="This component of the model alone, such as llm."
)
@click.option("--format", "form", default="text", metavar="text|json|sarif|github", help="How to print it.")
@click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
@click.option("--fail-on", default="hang", show_default=True, help="Exit with 6 at this severity or above.")
@_topology
@_choice
@_mending
@click.pass_obj
def check_verb(
    obj: Any, /, words: tuple[str, ...], config_dir: Path | None, accept: tuple[str, ...], component: str,
    form: str, as_json: bool, fail_on: str, select: tuple[str, ...], ignore: tuple[str, ...],
    fixing: bool, yes: bool, **known: Any,
) -> int:  # fmt: skip
    from dslaunch.rules.checking import fails
    from dslaunch.rules.fixing import edits_of
    from dslaunch.rules.known import described
    from dslaunch.rules.megatron.run import stock_runs
    from dslaunch.rules.registry import NO_EDITS
    from dslaunch.rules.site import site
    from dslaunch.rules.waivers import expired, require_current

    if not words:
        raise ConfigError("check: name the files, or a recipe: `check FILE ...`, `check recipe=NAME`.")
    fails((), fail_on)
    formatted = _formatter("json" if as_json else form)
    require_current(accept)
    place = site(config_dir)
    selection = _selection(place, select, ignore)
    paths, clusters = paths_and_overrides(words)
    if paths:
        job = _job(
            [Path(path) for path in paths], _with_cluster(clusters, known, config_dir), place, selection
        )
        found = _judged_job(job, (*accept, *place.accept))
    else:
        if fixing:
            raise ConfigError("--fix mends files: name them. A recipe's findings are mended in the recipe.")
        if told := [name for name, value in known.items() if value]:
            raise ConfigError(
                f"--{told[0].replace('_', '-')}: belongs to files written elsewhere. A recipe's sizes are those "
                "of cluster= and strategy, and engine.version= is the version that it is rendered for."
            )
        request = Request(words, config_dir, accept, obj.script_arguments, component)
        found = _judged_recipe(request, selection)
    if fixing and found.job:
        found = _mended(found.job, found, (*accept, *place.accept), yes)
    for past in expired(place.accept, found.standing):
        click.echo(f"{config_dir}: the waiver {past} has expired.", err=True)
    edits = edits_of(found.job) if found.job else NO_EDITS
    click.echo(formatted(found.standing, found.waived, edits), nl=False)
    if found.job and not found.job.plan and form == "text" and not as_json:
        click.echo(described(found.job.settings))
        if not found.job.settings.megatron_version and next(
            stock_runs(found.job.files, found.job.settings), None
        ):
            click.echo("megatron-core: version not known; --megatron-version tells, such as 0.16")
    return 6 if fails(found.standing, fail_on) else 0


@click.command("explain", help=VERBS["explain"], context_settings=_SETTINGS)
@click.argument("words", nargs=-1, metavar="[RULE | CHECK ...]")
@click.option("--symptom", metavar="TEXT", help="The text of an error or of a log; - reads it.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def explain_verb(words: tuple[str, ...], symptom: str | None, as_json: bool) -> int:
    from dslaunch.cli_lists import echo_rows
    from dslaunch.rules import symptoms
    from dslaunch.rules.output import page
    from dslaunch.rules.registry import rules

    if words and symptom is not None:
        raise ConfigError(f"explain: {words[0]} or --symptom, not both. Ask for one after the other.")
    text = sys.stdin.read() if symptom == "-" else symptom or ""
    if symptom is not None and not text.strip():
        raise ConfigError("explain --symptom: the text is empty. Give some words of the error or of the log.")
    if as_json:
        _echo_explanation(words, text)
    elif symptom:
        click.echo(symptoms.explained(text), nl=False)
    elif words:
        from dslaunch.preflight import catalogue

        of_checks = catalogue.checks()
        pages = [catalogue.page(word) if word in of_checks else page(word) for word in words]
        click.echo("\n".join(pages), nl=False)
    else:
        echo_rows([(r.id, r.severity, r.summary) for r in rules().values()])
    return 0


def _echo_explanation(words: Sequence[str], text: str) -> None:
    """The same as JSON: what the text shows, the rules that are named with their pages, or all rules."""
    from dslaunch.planfile import to_json
    from dslaunch.review import outputs
    from dslaunch.rules.output import page, versions
    from dslaunch.rules.registry import rule_named, rules
    from dslaunch.rules.symptoms import matching

    if text:
        shown = tuple(
            outputs.SymptomSummary(s.id, s.title, s.causes, s.checks, s.rules, s.source)
            for s in matching(text)
        )
        click.echo(to_json(outputs.Symptoms(shown)), nl=False)
        return
    found = [rule_named(word) for word in words] or list(rules().values())
    summaries = tuple(
        outputs.RuleSummary(
            r.id,
            r.severity,
            r.summary,
            " ".join(versions(r).split()),
            r.evidence,
            page(r.id) if words else "",
        )
        for r in found
    )
    click.echo(to_json(outputs.Rules(summaries)), nl=False)


def _formatter(name: str) -> Callable[[Sequence[Finding], Sequence[Finding], Edits], str]:
    from dslaunch.errors import listed, nearest
    from dslaunch.rules.output import FORMATS

    if name not in FORMATS:
        raise ConfigError(f"--format {name}: expected one of {listed(FORMATS)}.{nearest(name, FORMATS)}")
    return FORMATS[name]


def _selection(place: Site, select: Sequence[str], ignore: Sequence[str]) -> Selection:
    from dslaunch.rules.selection import Selection, named

    ignored = named(ignore, "--ignore") | place.selection.ignore
    return Selection(named(select, "--select"), ignored, place.selection.severities)


def _with_cluster(words: Sequence[str], known: dict[str, Any], config_dir: Path | None) -> dict[str, Any]:
    """The options, with the size of the cluster that is named beside the files."""
    given = {key: value for key, value in known.items() if value}
    if not words:
        return given
    if others := [word for word in words if not word.startswith("cluster=")] or list(words[1:]):
        raise ConfigError(
            f"check takes files, or a recipe with overrides; found both. Beside files, cluster=NAME alone is "
            f"taken, not {others[0]}."
        )
    if both := [key for key in ("world_size", "nodes", "ranks_per_node") if key in given]:
        raise ConfigError(
            f"{words[0]} says how many ranks there are: leave out --{both[0].replace('_', '-')}."
        )
    cluster = configured(Request((_PLAIN_RECIPE, words[0]), config_dir, (), ())).cluster
    size = {"world_size": cluster.world_size, "nodes": cluster.node_count, "ranks_per_node": cluster.slots}
    return {**given, **size}


def _job(paths: Sequence[Path], given: dict[str, Any], place: Site, selection: Selection) -> Job:
    from dslaunch.engines.deepspeed_keys import table
    from dslaunch.engines.versions import named
    from dslaunch.files.fileset import is_rendered
    from dslaunch.rules.checking import job_of_folder, job_of_paths
    from dslaunch.rules.settings import NEWEST_DEEPSPEED, Settings

    if len(paths) == 1 and is_rendered(paths[0]):
        if given:
            raise ConfigError(f"check {paths[0]}: its plan.json says the topology; leave out the options.")
        return job_of_folder(paths[0], selection)
    defaults = {
        "deepspeed_version": place.deepspeed_version or NEWEST_DEEPSPEED,
        "megatron_version": place.megatron_version,
    }
    _require_whole(given)
    settings: dict[str, Any] = {**defaults, **given}
    settings["deepspeed_version"] = named(settings["deepspeed_version"], table().versions)
    job = job_of_paths(paths, Settings(**settings), selection)
    _require_groups(job.settings, given)
    return job


def _require_whole(given: dict[str, Any]) -> None:
    """Raises ConfigError where sizes on the command line contradict each other."""
    world, nodes, each = (given.get(name) for name in ("world_size", "nodes", "ranks_per_node"))
    if world and nodes and each and world != nodes * each:
        raise ConfigError(
            f"--world-size {world}: --nodes {nodes} * --ranks-per-node {each} make {nodes * each}."
        )
    if world and nodes and world < nodes:
        raise ConfigError(f"--nodes {nodes}: --world-size {world} leaves nodes without a rank.")
    if world and each and world % each:
        raise ConfigError(f"--ranks-per-node {each}: --world-size {world} is no multiple of it.")


def _require_groups(settings: Settings, given: dict[str, Any]) -> None:
    """Raises ConfigError where --tp and --pp don't divide the ranks, whoever told how many there are."""
    world, tp, pp = settings.world_size, given.get("tp", 1), given.get("pp", 1)
    if world and world % (tp * pp):
        whence = f"the {world} ranks, {settings.size_from}" if settings.size_from else f"{world} ranks"
        raise ConfigError(
            f"{whence}: no multiple of --tp {tp} * --pp {pp} = {tp * pp}. Give sizes that divide them."
        )


def _judged_job(job: Job, accepted: Sequence[str]) -> _Judged:
    """The findings on files; a plan among them has recorded what its maker waived."""
    from dslaunch.rules.checking import findings_of
    from dslaunch.rules.waivers import waive

    recorded = job.plan.accepted if job.plan else ()
    return _Judged(*waive(findings_of(job), (*accepted, *recorded)), job)


def _judged_recipe(request: Request, selection: Selection) -> _Judged:
    """The findings on a recipe's plan and on the files that it is rendered to."""
    from dslaunch.rules.registry import rules
    from dslaunch.rules.waivers import waive

    _, plan, _, findings = judged(request)
    spoken = [finding for finding in findings if selection.takes(rules()[finding.rule])]
    return _Judged(*waive(spoken, plan.accepted))


def _mended(job: Job, found: _Judged, accepted: Sequence[str], yes: bool) -> _Judged:
    """Shows what --fix changes, writes it where that is wanted, and judges again."""
    from dslaunch.rules.fixing import mended_texts, write_texts

    standing = {(finding.rule, finding.where) for finding in found.standing}
    changed, shown = mended_texts(job, standing)
    if not changed:
        click.echo("nothing has one right fix", err=True)
        return found
    click.echo(shown, nl=False, err=True)
    question = f"Write {len(changed)} file{'s' if len(changed) > 1 else ''}?"
    asked = bool(sys.stdin and sys.stdin.isatty())
    if not yes and not (asked and click.confirm(question, err=True)):
        click.echo("nothing was written; --yes writes it", err=True)
        return found
    write_texts(changed)
    return _judged_job(job.with_texts(changed), accepted)
