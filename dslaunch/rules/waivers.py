"""Findings that somebody took responsibility for: `RULE`, or `RULE:2027-01-31` up to and with that day."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date

from dslaunch.errors import ConfigError
from dslaunch.planfile import Finding
from dslaunch.rules.registry import rule_named


@dataclass(frozen=True)
class Waiver:
    """One rule that is waived."""

    rule: str
    until: date | None = None
    """The last day; None: for good."""

    def holds(self, today: date) -> bool:
        """Whether it still counts."""
        return self.until is None or today <= self.until

    def __str__(self) -> str:
        return f"{self.rule}:{self.until.isoformat()}" if self.until else self.rule


def waiver(text: str, where: str = "--accept") -> Waiver:
    """The waiver in `RULE[:YYYY-MM-DD]`.

    Raises:
        ConfigError: no such rule, or no day of the calendar.
    """
    name, colon, day = text.partition(":")
    rule = rule_named(name, f"{where}: ").id
    try:
        return Waiver(rule, date.fromisoformat(day) if colon else None)
    except ValueError as error:
        found = f"{where} {text}: '{day}' is no day"
        raise ConfigError(f"{found}. Write {rule}:YYYY-MM-DD, or {rule} alone for no expiry.") from error


def accepted_rules(waivers: Iterable[str], today: date | None = None) -> frozenset[str]:
    """The rules that are waived today, of waivers as text."""
    day = today or date.today()
    return frozenset(found.rule for found in map(waiver, waivers) if found.holds(day))


def require_current(waivers: Iterable[str], today: date | None = None) -> None:
    """Raises ConfigError where a waiver that was just typed has expired already."""
    for found in map(waiver, waivers):
        if not found.holds(today or date.today()):
            raise ConfigError(
                f"--accept {found}: that day is past. Give a later one, or mend what {found.rule} finds "
                f"(`dslaunch explain {found.rule}`)."
            )


def expired(waivers: Iterable[str], findings: Iterable[Finding], today: date | None = None) -> list[str]:
    """Those of yesterday and before whose findings stand again."""
    standing = {finding.rule for finding in findings}
    past = (found for found in map(waiver, waivers) if not found.holds(today or date.today()))
    return [str(found) for found in past if found.rule in standing]


def waive(
    findings: Iterable[Finding], accepted: Iterable[str]
) -> tuple[tuple[Finding, ...], tuple[Finding, ...]]:
    """Findings that stand, and those whose rule is waived today; an unknown rule id is a ConfigError."""
    names = accepted_rules(accepted)
    all_findings = tuple(findings)
    stand = tuple(finding for finding in all_findings if finding.rule not in names)
    return stand, tuple(finding for finding in all_findings if finding.rule in names)
