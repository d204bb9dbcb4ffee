"""From files to findings, sorted; waivers and thresholds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dslaunch.errors import ConfigError, listed
from dslaunch.files.fileset import FileSet, read_fileset, read_paths
from dslaunch.planfile import Finding, Plan, plan_from_json
from dslaunch.rules.inputs import incomplete
from dslaunch.rules.registry import SEVERITIES, Hit, Rule, rule_named, rules
from dslaunch.rules.settings import NEWEST_DEEPSPEED, Settings, of_plan


def check(plan: Plan | None, files: FileSet, settings: Settings) -> tuple[Finding, ...]:
    """Every finding, the gravest first, then by file and line."""
    return _sorted(hits(plan, files, settings))


def _sorted(found: Iterable[tuple[Rule, Hit]]) -> tuple[Finding, ...]:
    return tuple(_finding(rule, hit) for rule, hit in sorted(found, key=_order))


def hits(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[tuple[Rule, Hit]]:
    """What each rule that holds for the version says, unsorted."""
    for rule in rules().values():
        if rule.holds_for(settings.deepspeed_version):
            for hit in rule.check(plan, files, settings):
                yield rule, hit


def check_rendered(
    plan: Plan, files: Mapping[str, str], settings: Settings | None = None
) -> tuple[Finding, ...]:
    """The findings on our own rendered files, `{name: text}`; the settings are the plan's where None."""
    fileset = read_fileset(files)
    return check(plan, fileset, settings or _planned(plan, fileset))


def check_paths(paths: Sequence[Path], settings: Settings) -> tuple[Finding, ...]:
    """The findings on files written elsewhere, judged by the plan.json among them where there is one.

    Raises:
        ConfigError: a file that can't be read as text, two plans, or settings that contradict the plan.
    """
    files = read_paths(paths)
    plans = files.of("plan")
    if not plans:
        return check(None, files, settings)
    if len(plans) > 1:
        names = listed(file.name for file in plans)
        raise ConfigError(f"{names}: {len(plans)} plans, and one is needed. Check one run's files at a time.")
    plan = plan_from_json(plans[0].text, plans[0].name)
    return check(plan, files, _beside_plan(settings, _planned(plan, files), plans[0].name))


def check_folder(folder: Path) -> tuple[Finding, ...]:
    """The findings on a rendered folder, judged by its own plan.json."""
    files = read_paths(sorted(path for path in folder.iterdir() if path.is_file()))
    plan_file = folder / "plan.json"
    plan = plan_from_json(plan_file.read_text(encoding="utf-8"), str(plan_file))
    settings = _planned(plan, files)
    whole = ((rule_named("own.manifest"), hit) for hit in incomplete(files))
    return _sorted((*hits(plan, files, settings), *whole))


def _planned(plan: Plan, files: FileSet) -> Settings:
    """The plan's settings; Hugging Face reads the files where the Trainer's arguments are among them."""
    return replace(of_plan(plan), huggingface=bool(files.of("hf_arguments")))


def _beside_plan(given: Settings, planned: Settings, name: str) -> Settings:
    """The plan's settings, but for another DeepSpeed that is asked about, and what the plan does not say."""
    if given.world_size not in (None, planned.world_size):
        raise ConfigError(
            f"--world-size {given.world_size}, but {name} is for {planned.world_size} ranks. Leave the option or "
            "the plan out."
        )
    huggingface = planned.huggingface if given.huggingface is None else given.huggingface
    another = given.deepspeed_version != NEWEST_DEEPSPEED
    version = given.deepspeed_version if another else planned.deepspeed_version
    return replace(planned, deepspeed_version=version, huggingface=huggingface)


def waive(
    findings: Iterable[Finding], accepted: Iterable[str]
) -> tuple[tuple[Finding, ...], tuple[Finding, ...]]:
    """Findings that stand, and those whose rule the user accepted; an unknown rule id is a ConfigError."""
    names = {rule_named(name).id for name in accepted}
    all_findings = tuple(findings)
    stand = tuple(finding for finding in all_findings if finding.rule not in names)
    return stand, tuple(finding for finding in all_findings if finding.rule in names)


def fails(findings: Iterable[Finding], threshold: str) -> bool:
    """Whether the gravest finding is at or above `threshold` (`--fail-on`)."""
    if threshold not in SEVERITIES:
        raise ConfigError(f"--fail-on {threshold!r}: expected one of {listed(SEVERITIES)}.")
    return any(_rank(finding.severity) >= _rank(threshold) for finding in findings)


def _rank(severity: str) -> int:
    return SEVERITIES.index(severity)


def _order(found: tuple[Rule, Hit]) -> tuple[int, str, int, int, str, str]:
    rule, hit = found
    line, column = (hit.at.line, hit.at.column) if hit.at else (0, 0)
    return -_rank(hit.severity or rule.severity), hit.name, line, column, rule.id, hit.message


def _finding(rule: Rule, hit: Hit) -> Finding:
    return Finding(rule.id, hit.severity or rule.severity, hit.message, hit.where, hit.fix)
