"""Findings as text, as JSON and as annotations of GitHub; a rule's page."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any

from dslaunch.planfile import Finding, to_json
from dslaunch.rules.registry import MEANINGS, NO_EDITS, SEVERITIES, Edits, Rule, rule_named, rules
from dslaunch.rules.sarif import format_sarif
from dslaunch.rules.settings import NEWEST_DEEPSPEED

FINDINGS_SCHEMA = "dslaunch.findings/1"
_GITHUB_LEVELS = {"error": "error", "hang": "error", "wrong": "error", "info": "notice"}
"""The others are warnings."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_PLACE = re.compile(r"(?P<file>.+):(?P<line>\d+):(?P<column>\d+)")


def format_text(findings: Sequence[Finding], waived: Sequence[Finding] = (), _edits: Edits = NO_EDITS) -> str:
    """One block a finding, and a last line that counts them."""
    blocks = "".join(_block(finding) for finding in findings)
    tail = f"; {len(waived)} waived ({', '.join(sorted({f.rule for f in waived}))})" if waived else ""
    return f"{blocks}{_count(findings)}{tail}\n"


def format_json(findings: Sequence[Finding], waived: Sequence[Finding] = (), edits: Edits = NO_EDITS) -> str:
    """`{"schema": "dslaunch.findings/1", "findings": [...], "waived": [...]}`.

    What --fix would change stands as a finding's `edit`: line, column, old and new text.
    """
    return to_json({
        "schema": FINDINGS_SCHEMA,
        "findings": [{**_row(finding), **_edit(finding, edits)} for finding in findings],
        "waived": [_row(finding) for finding in waived],
    })  # fmt: skip


def format_github(
    findings: Sequence[Finding], waived: Sequence[Finding] = (), _edits: Edits = NO_EDITS
) -> str:
    """Workflow commands, which GitHub shows at the lines of a pull request."""
    return "".join(_annotation(finding) for finding in findings)


FORMATS: dict[str, Callable[[Sequence[Finding], Sequence[Finding], Edits], str]] = {
    "text": format_text,
    "json": format_json,
    "sarif": format_sarif,
    "github": format_github,
}


def page(rule_id: str) -> str:
    """The page of a rule as Markdown; raises ConfigError with the nearest id where there is none."""
    rule = rule_named(rule_id)
    text = _page(rule.id)
    severity = f"Severity: {rule.severity} ({MEANINGS[rule.severity]})."
    facts = f"{severity} {_said(rule)} {versions(rule)} Evidence: {rule.evidence}."
    title, _, body = text.partition("\n")
    return f"{title}\n\n{rule.summary}\n\n{' '.join(facts.split())}\n{body}"


def introduction(rule_id: str) -> str:
    """The first paragraph of a rule's page: why it is so."""
    paragraphs = _page(rule_id).split("\n\n")
    return next(each for each in paragraphs[1:] if not each.startswith("#"))


def _page(rule_id: str) -> str:
    return (resources.files("dslaunch.rules") / "pages" / f"{rule_id}.md").read_text(encoding="utf-8")


def _said(rule: Rule) -> str:
    """Who tells the user at run time, as far as anybody does."""
    if rule.raised_by != "nobody":
        return f"Raised by {_PROGRAMS.get(rule.raised_by, rule.raised_by)}."
    return "No program says so." if rule.severity in ("wrong", "slow", "memory") else ""


_PROGRAMS = {
    "DeepSpeedConfig": "DeepSpeed when it reads the file", "deepspeed.initialize": "DeepSpeed's engine",
    "deepspeed launcher": "DeepSpeed's launcher", "deepspeed": "DeepSpeed", "megatron": "Megatron",
}  # fmt: skip


def versions(rule: Rule) -> str:
    """For which versions of its framework the rule is known to hold; empty where it is dslaunch's own."""
    name = {"deepspeed": "DeepSpeed", "megatron": "megatron-core"}[rule.framework]
    if not rule.since and not rule.until:
        of_deepspeed = rule.framework == "deepspeed" and "DeepSpeed:" in rule.evidence
        return f"Verified on DeepSpeed {NEWEST_DEEPSPEED} only." if of_deepspeed else ""
    since = f" since {rule.since}" if rule.since else ""
    until = f" until {rule.until}" if rule.until else ""
    return f"Holds for {name}{since}{',' if since and until else ''}{until}."


def _block(finding: Finding) -> str:
    rule = rules()[finding.rule]
    lines = [f"{finding.where}: {finding.severity}: {finding.message} [{finding.rule}]"]
    lines += [f"    fix: {finding.fix}"] if finding.fix else []
    if not rule.evidence.startswith("dslaunch's own"):
        lines.append(f"    why: {versions(rule)} Source: {rule.evidence}.".replace("  Source", " Source"))
    return "".join(_CONTROL.sub(_escaped, line) + "\n" for line in lines)


def _escaped(found: re.Match[str]) -> str:
    """A character that would break the line, or that a terminal would obey, as Python writes it."""
    return found[0].encode("unicode_escape").decode()


def _row(finding: Finding) -> dict[str, str]:
    rule = rules()[finding.rule]
    return {**dataclasses.asdict(finding), "versions": versions(rule), "source": rule.evidence}


def _edit(finding: Finding, edits: Edits) -> dict[str, Any]:
    edit = edits.get((finding.rule, finding.where))
    return {"edit": {**vars(edit.at), "old": edit.old, "new": edit.new}} if edit else {}


def _annotation(finding: Finding) -> str:
    level = _GITHUB_LEVELS.get(finding.severity, "warning")
    match = _PLACE.fullmatch(finding.where)
    places = {"file": match["file"], "line": match["line"], "col": match["column"]} if match else {}
    properties = ",".join(
        f"{key}={_property(value)}" for key, value in {**places, "title": finding.rule}.items()
    )
    where = "" if match else f"{finding.where}: "
    return f"::{level} {properties}::{_data(f'{where}{finding.said}')}\n"


def _data(text: str) -> str:
    """Escaped as the toolkit of GitHub's actions does: packages/core/src/command.ts escapeData."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _count(findings: Sequence[Finding]) -> str:
    counts = Counter(finding.severity for finding in findings)
    parts = [f"{counts[severity]} {severity}" for severity in reversed(SEVERITIES) if counts[severity]]
    return f"findings: {', '.join(parts)}" if parts else "no findings"
