"""Findings as SARIF 2.1.0 (OASIS Standard, 2020): what code hosts and editors read."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote

from dslaunch import __version__
from dslaunch.planfile import Finding
from dslaunch.rules.registry import NO_EDITS, Edit, Edits, Rule, rules

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_LEVELS = {"error": "error", "hang": "error", "wrong": "error", "info": "note"}
"""The others are warnings (section 3.27.10)."""
_PLACE = re.compile(r"(?P<file>.+):(?P<line>\d+):(?P<column>\d+)")


def format_sarif(findings: Sequence[Finding], waived: Sequence[Finding] = (), edits: Edits = NO_EDITS) -> str:
    """One run with the rules that spoke; waived findings are results with a suppression.

    Args:
        edits: what --fix would change, which stands as the `fixes` of its result (section 3.55).
    """
    named = sorted({finding.rule for finding in (*findings, *waived)})
    results = [{**_result(finding, named), **_fixes(finding, edits)} for finding in findings]
    results += [{**_result(finding, named), "suppressions": [{"kind": "external"}]} for finding in waived]
    driver = {
        "name": "dslaunch",
        "version": __version__,
        "rules": [_descriptor(rules()[rule_id]) for rule_id in named],
    }
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2, sort_keys=True) + "\n"


def _descriptor(rule: Rule) -> dict[str, Any]:
    return {
        "id": rule.id,
        "shortDescription": {"text": rule.summary},
        "help": {"text": f"dslaunch explain {rule.id}"},
        "defaultConfiguration": {"level": _LEVELS.get(rule.severity, "warning")},
        "properties": {"severity": rule.severity, "evidence": rule.evidence, "raisedBy": rule.raised_by},
    }


def _result(finding: Finding, named: Sequence[str]) -> dict[str, Any]:
    return {
        "ruleId": finding.rule,
        "ruleIndex": named.index(finding.rule),
        "level": _LEVELS.get(finding.severity, "warning"),
        "message": {"text": finding.said},
        "locations": [_location(finding.where)],
        "properties": {"severity": finding.severity},
    }


def _fixes(finding: Finding, edits: Edits) -> dict[str, Any]:
    """The one right change of the file, where there is one."""
    edit, match = edits.get((finding.rule, finding.where)), _PLACE.fullmatch(finding.where)
    if edit is None or match is None:
        return {}
    replacement = {"deletedRegion": _region(edit), "insertedContent": {"text": edit.new}}
    changes = [{"artifactLocation": {"uri": _uri(match["file"])}, "replacements": [replacement]}]
    return {"fixes": [{"description": {"text": finding.fix}, "artifactChanges": changes}]}


def _region(edit: Edit) -> dict[str, int]:
    """What `old` covers, up to and without the end column (section 3.30.8)."""
    lines = edit.old.split("\n")
    first = edit.at.column if len(lines) == 1 else 1
    return {
        "startLine": edit.at.line,
        "startColumn": edit.at.column,
        "endLine": edit.at.line + len(lines) - 1,
        "endColumn": first + len(lines[-1]),
    }


def _location(where: str) -> dict[str, Any]:
    """A place in a file, or a key of the configuration."""
    match = _PLACE.fullmatch(where)
    if match is None:
        return {"logicalLocations": [{"fullyQualifiedName": where, "kind": "member"}]}
    region = {"startLine": int(match["line"]), "startColumn": int(match["column"])}
    return {"physicalLocation": {"artifactLocation": {"uri": _uri(match["file"])}, "region": region}}


def _uri(name: str) -> str:
    """A relative reference, or a file URI (RFC 3986, RFC 8089)."""
    path = PurePosixPath(name)
    return f"file://{quote(str(path))}" if path.is_absolute() else quote(str(path), safe="/")
