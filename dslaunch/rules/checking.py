"""From files to findings, sorted; thresholds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from dslaunch.errors import ConfigError, listed
from dslaunch.files.fileset import FileSet, joined, read_fileset, read_folder, read_paths
from dslaunch.planfile import Finding, Plan, plan_from_json
from dslaunch.rules.inputs import incomplete
from dslaunch.rules.known import told
from dslaunch.rules.registry import SEVERITIES, Hit, Rule, rule_named, rules
from dslaunch.rules.scripts.dicts import hits_in_scripts
from dslaunch.rules.selection import EVERY_RULE, Selection, is_silenced, silenced
from dslaunch.rules.settings import NEWEST_DEEPSPEED, Settings, of_plan
from dslaunch.rules.shell.branches import hits_in_branches

MAX_HITS = 200
"""Of one rule on one job: what nobody reads to the end need not be looked for."""


@dataclass(frozen=True)
class Job:
    """What is judged: files, the plan behind them, and what is known beside them."""

    plan: Plan | None
    files: FileSet
    settings: Settings
    selection: Selection = EVERY_RULE
    whole_folder: bool = False
    """The files are all of a rendered folder's, which must be those of its manifest."""

    def with_texts(self, texts: Mapping[str, str]) -> Job:
        """The job with other texts for some of its files."""
        old = {file.name: file.text for file in self.files.files}
        return replace(self, files=read_fileset({**old, **texts}))


def check(
    plan: Plan | None, files: FileSet, settings: Settings, selection: Selection = EVERY_RULE
) -> tuple[Finding, ...]:
    """Every finding, the gravest first, then by file and line."""
    return findings_of(Job(plan, files, settings, selection))


def findings_of(job: Job) -> tuple[Finding, ...]:
    """The findings on a job, as `check` sorts them."""
    return tuple(finding_of(rule, hit) for rule, hit in sorted_hits(job))


def sorted_hits(job: Job) -> list[tuple[Rule, Hit]]:
    """What each rule says that the selection lets speak, the gravest first, then by file and line."""
    comments = silenced(job.files)
    found = [
        (rule, _raised(rule, hit, job.selection))
        for rule, hit in (*hits(job.plan, job.files, job.settings, job.selection), *_of_folder(job))
        if not is_silenced(rule, hit, comments)
    ]
    return sorted(found, key=_order)


def hits(
    plan: Plan | None, files: FileSet, settings: Settings, selection: Selection = EVERY_RULE
) -> Iterator[tuple[Rule, Hit]]:
    """What each rule that holds for the version says, unsorted, and no more than `MAX_HITS` of each."""
    asked = [rule for rule in rules().values() if rule.holds_for(settings) and selection.takes(rule)]
    said: set[tuple[str, Hit]] = set()
    for rule in asked:
        found = iter(rule.check(plan, files, settings))
        for hit in map(_placed, islice(found, MAX_HITS)):
            if (rule.id, hit) not in said:  # one option may belong to several commands
                said.add((rule.id, hit))
                yield rule, hit
        if more := next(found, None):
            message = f"this is one of more than {MAX_HITS} such places; the rest isn't listed."
            yield rule, replace(more, message=message, edit=None)
    if plan is None:
        yield from hits_in_scripts(files, settings, asked, said)
        yield from hits_in_branches(files, settings, asked, said)


def _placed(hit: Hit) -> Hit:
    """The hit in the file where it stands: an option of sbatch's is in the script that calls it."""
    return replace(hit, name=hit.at.file) if hit.at is not None and hit.at.file else hit


def _of_folder(job: Job) -> Iterator[tuple[Rule, Hit]]:
    rule = rule_named("own.manifest")
    if job.whole_folder and job.selection.takes(rule):
        yield from ((rule, hit) for hit in incomplete(job.files))


def _raised(rule: Rule, hit: Hit, selection: Selection) -> Hit:
    """The hit with the severity that a site raised it to."""
    severity = selection.severities.get(rule.id)
    own = hit.severity or rule.severity
    return replace(hit, severity=severity) if severity and _rank(severity) > _rank(own) else hit


def check_rendered(
    plan: Plan,
    files: Mapping[str, str],
    settings: Settings | None = None,
    selection: Selection = EVERY_RULE,
) -> tuple[Finding, ...]:
    """The findings on our own rendered files, `{name: text}`; the settings are the plan's where None."""
    fileset = read_fileset(files)
    return check(plan, fileset, settings or _planned(plan, fileset), selection)


def check_paths(
    paths: Sequence[Path], settings: Settings, selection: Selection = EVERY_RULE
) -> tuple[Finding, ...]:
    """The findings on files written elsewhere; raises ConfigError as `job_of_paths` does."""
    return findings_of(job_of_paths(paths, settings, selection))


def job_of_paths(paths: Sequence[Path], settings: Settings, selection: Selection) -> Job:
    """Files written elsewhere, or all of a folder's, judged by the plan.json among them where there is one.

    Raises:
        ConfigError: a named file that can't be read as text, folders without a file, two plans, or settings that
            contradict the plan.
    """
    named = [path for path in paths if not path.is_dir()]
    files = joined([read_paths(named), *(read_folder(path) for path in paths if path.is_dir())])
    if not files.files:
        raise _nothing_in(paths)
    plans = files.of("plan")
    if not plans:
        return Job(None, files, told(files, settings), selection)
    if len(plans) > 1:
        names = listed(file.name for file in plans)
        raise ConfigError(f"{names}: {len(plans)} plans, and one is needed. Check one run's files at a time.")
    plan = plan_from_json(plans[0].text, plans[0].name)
    return Job(plan, files, _beside_plan(settings, _planned(plan, files), plans[0].name), selection)


def _nothing_in(folders: Sequence[Path]) -> ConfigError:
    """What to say of folders in which there is nothing to judge: silence would pass for a sound job."""
    inside = sorted(path for folder in folders for path in folder.iterdir())
    fix = f"Each folder in it is a job of its own: name one, such as {inside[0]}" if inside else "Name another"
    return ConfigError(f"{listed(folders)}: holds no file. {fix}.")


def job_of_folder(folder: Path, selection: Selection) -> Job:
    """A rendered folder as a whole; raises ConfigError where a file of it can't be read."""
    files = read_paths(sorted(path for path in folder.iterdir() if path.is_file()))
    plan_file = folder / "plan.json"
    plan = plan_from_json(plan_file.read_text(encoding="utf-8"), str(plan_file))
    return Job(plan, files, _planned(plan, files), selection, whole_folder=True)


def _planned(plan: Plan, files: FileSet) -> Settings:
    """The plan's settings; Hugging Face reads the files where the Trainer's arguments are among them."""
    return replace(of_plan(plan), huggingface=bool(files.of("hf_arguments")))


def _beside_plan(given: Settings, planned: Settings, name: str) -> Settings:
    """The plan's settings, but for another version that is asked about, and what the plan does not say."""
    if given.world_size not in (None, planned.world_size):
        raise ConfigError(
            f"--world-size {given.world_size}, but {name} is for {planned.world_size} ranks. Leave the option or "
            "the plan out."
        )
    huggingface = planned.huggingface if given.huggingface is None else given.huggingface
    another = given.deepspeed_version != NEWEST_DEEPSPEED
    version = given.deepspeed_version if another else planned.deepspeed_version
    megatron = given.megatron_version or planned.megatron_version
    return replace(planned, deepspeed_version=version, megatron_version=megatron, huggingface=huggingface)


def fails(findings: Iterable[Finding], threshold: str) -> bool:
    """Whether the gravest finding is at or above `threshold` (`--fail-on`)."""
    if threshold not in SEVERITIES:
        raise ConfigError(f"--fail-on {threshold!r}: expected one of {listed(SEVERITIES)}.")
    return any(_rank(finding.severity) >= _rank(threshold) for finding in findings)


def finding_of(rule: Rule, hit: Hit) -> Finding:
    """The hit as it is reported and kept."""
    return Finding(rule.id, hit.severity or rule.severity, hit.message, hit.where, hit.fix)


def _rank(severity: str) -> int:
    return SEVERITIES.index(severity)


def _order(found: tuple[Rule, Hit]) -> tuple[int, str, int, int, str, str]:
    rule, hit = found
    line, column = (hit.at.line, hit.at.column) if hit.at else (0, 0)
    return -_rank(hit.severity or rule.severity), hit.name, line, column, rule.id, hit.message
