"""Findings as text and as JSON, and a rule's page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from importlib import resources

from dslaunch.planfile import Finding, to_json
from dslaunch.rules.registry import SEVERITIES, Rule, rule_named
from dslaunch.rules.settings import NEWEST_DEEPSPEED

FINDINGS_SCHEMA = "dslaunch.findings/1"


def format_text(findings: Sequence[Finding]) -> str:
    """One block a finding, and a last line that counts them."""
    return "".join(_block(finding) for finding in findings) + _count(findings) + "\n"


def format_json(findings: Sequence[Finding]) -> str:
    """`{"schema": "dslaunch.findings/1", "findings": [...]}`."""
    return to_json({"schema": FINDINGS_SCHEMA, "findings": list(findings)})


def page(rule_id: str) -> str:
    """The page of a rule as Markdown; raises ConfigError with the nearest id where there is none."""
    rule = rule_named(rule_id)
    text = (resources.files("dslaunch.rules") / "pages" / f"{rule.id}.md").read_text(encoding="utf-8")
    facts = f"Severity: {rule.severity}.{_versions(rule)} Evidence: {rule.evidence}."
    title, _, body = text.partition("\n")
    return f"{title}\n\n{rule.summary}\n\n{facts}\n{body}"


def _versions(rule: Rule) -> str:
    if "DeepSpeed:" not in rule.evidence:
        return ""
    if not rule.since:
        return f" Verified on DeepSpeed {NEWEST_DEEPSPEED} only."
    return f" Holds since DeepSpeed {rule.since}{f', until {rule.until}' if rule.until else ''}."


def _block(finding: Finding) -> str:
    lines = [f"{finding.where}: {finding.severity}: {finding.message} [{finding.rule}]"]
    return "\n".join([*lines, f"    fix: {finding.fix}"] if finding.fix else lines) + "\n"


def _count(findings: Sequence[Finding]) -> str:
    counts = Counter(finding.severity for finding in findings)
    parts = [f"{counts[severity]} {severity}" for severity in reversed(SEVERITIES) if counts[severity]]
    return f"findings: {', '.join(parts)}" if parts else "no findings"
