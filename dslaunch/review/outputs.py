"""What verbs print under --json. Each object names its schema, whose number grows when a reader has to change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dslaunch.planfile import Finding
from dslaunch.review.difference import Difference
from dslaunch.review.keys import Key
from dslaunch.review.lists import ClusterSummary, ModelSummary, Recipe
from dslaunch.rules.output import FINDINGS_SCHEMA


@dataclass(frozen=True)
class Recipes:
    """`dslaunch recipes --json`"""

    recipes: tuple[Recipe, ...]
    schema: str = "dslaunch.recipes/1"


@dataclass(frozen=True)
class Models:
    """`dslaunch models --json`"""

    models: tuple[ModelSummary, ...]
    schema: str = "dslaunch.models/1"


@dataclass(frozen=True)
class Clusters:
    """`dslaunch clusters --json`"""

    clusters: tuple[ClusterSummary, ...]
    schema: str = "dslaunch.clusters/1"


@dataclass(frozen=True)
class Keys:
    """`dslaunch schema --json`"""

    keys: tuple[Key, ...]
    """Of a component, those of every architecture."""
    schema: str = "dslaunch.keys/1"


@dataclass(frozen=True)
class Rendered:
    """`dslaunch render --json`"""

    folder: str
    name: str
    engine: str
    files: tuple[str, ...]
    findings: tuple[Finding, ...]
    """Those that stand: none of them stopped the rendering."""
    schema: str = "dslaunch.rendered/1"


@dataclass(frozen=True)
class DryRun:
    """`dslaunch launch --dry-run --json`"""

    files: dict[str, str]
    """Name -> text; none of a reviewed folder, which holds them."""
    steps: tuple[str, ...]
    """What a launch would do, a sentence or command each."""
    schema: str = "dslaunch.dry-run/1"


@dataclass(frozen=True)
class Report:
    """`dslaunch report --json`"""

    file: str
    name: str
    bytes: int
    schema: str = "dslaunch.report/1"


@dataclass(frozen=True)
class NotCarried:
    """Something of the source that has not become part of the result as it stands."""

    key: str
    reason: str


@dataclass(frozen=True)
class Compared:
    """A key of the source, and what a rendering of the imported recipe holds in its place."""

    key: str
    original: Any
    rendered: Any
    """null where the rendering has not got it."""
    same: bool


@dataclass(frozen=True)
class Written:
    """`dslaunch import --json` and `dslaunch init --json`"""

    name: str
    files: dict[str, str]
    """Path in the site's folder -> text."""
    folder: str | None
    """The site's folder that they were written into; null: they were not written."""
    notes: tuple[NotCarried, ...]
    keys: tuple[Compared, ...]
    planned_by: tuple[str, ...]
    """Words that plan the recipe; none where it is a model alone."""
    schema: str = "dslaunch.imported/1"


@dataclass(frozen=True)
class RuleSummary:
    """A rule of the catalogue."""

    id: str
    severity: str
    summary: str
    versions: str
    evidence: str
    page: str
    """Markdown; empty in the list of all rules."""


@dataclass(frozen=True)
class Rules:
    """`dslaunch explain --json`"""

    rules: tuple[RuleSummary, ...]
    schema: str = "dslaunch.rules/1"


@dataclass(frozen=True)
class SymptomSummary:
    """What a text may come from."""

    id: str
    title: str
    causes: tuple[str, ...]
    checks: tuple[str, ...]
    """How to find out."""
    rules: tuple[str, ...]
    """Ids of the rules that see a cause before the launch."""
    source: str


@dataclass(frozen=True)
class Symptoms:
    """`dslaunch explain --symptom TEXT --json`"""

    symptoms: tuple[SymptomSummary, ...]
    """The surest first."""
    schema: str = "dslaunch.symptoms/1"


@dataclass(frozen=True)
class JudgedFinding:
    """A finding, and where its rule holds."""

    rule: str
    severity: str
    message: str
    where: str
    """FILE:LINE:COLUMN, or what of the plan."""
    fix: str
    versions: str
    """Of the framework, for which the rule is known to hold."""
    source: str


@dataclass(frozen=True)
class Findings:
    """`dslaunch check --json`"""

    findings: tuple[JudgedFinding, ...]
    waived: tuple[JudgedFinding, ...]
    schema: str = FINDINGS_SCHEMA


@dataclass(frozen=True)
class ReviewedPlan:
    """One plan that a change can touch."""

    plan: str
    """The words that plan it."""
    rendering: str | None
    """The folder of its committed rendering."""
    faults: tuple[str, ...]
    """Why the change must not land; empty: nothing speaks against it."""
    difference: Difference | None
    """null where the base or the change has no such plan."""
    alone: str
    """Why there is no plan at the base to compare with."""
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Review:
    """`dslaunch review --json`"""

    base: str
    """The revision."""
    total: int
    """Plans of the site."""
    plans: tuple[ReviewedPlan, ...]
    """Those that the change can touch, which were planned."""
    gone: tuple[str, ...]
    """Recipes that the site had at the revision and has no more."""
    schema: str = "dslaunch.review/1"
