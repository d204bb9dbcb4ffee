"""What a rule is, and the list of all.

A rule is a function that yields hits, registered under an id that names it everywhere: in findings, on its
page in pages/ID.md, and on its cases in tests/cases/ID.yaml.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path as DiskPath
from typing import Literal

from dslaunch.engines.deepspeed_keys import release
from dslaunch.errors import ConfigError, listed, nearest
from dslaunch.files.fileset import File, FileSet
from dslaunch.files.position import Path, Position
from dslaunch.planfile import Plan
from dslaunch.rules.settings import Settings

Framework = Literal["deepspeed", "megatron"]
"""Whose versions `since` and `until` count."""

Severity = Literal["info", "deprecated", "slow", "memory", "wrong", "hang", "error"]
SEVERITIES: tuple[Severity, ...] = ("info", "deprecated", "slow", "memory", "wrong", "hang", "error")
"""From what can wait to what stops the job at start-up."""
MEANINGS: Mapping[Severity, str] = {
    "error": "stops at start-up, or later with an exception",
    "hang": "waits for ever",
    "wrong": "runs, and does something else than what is written",
    "memory": "takes memory that may be missing",
    "slow": "runs slower than it could",
    "deprecated": "still works, with a warning",
    "info": "worth knowing; nothing need change",
}
"""What each means for a job."""

RaisedBy = Literal[
    "DeepSpeedConfig", "deepspeed.initialize", "deepspeed launcher", "deepspeed", "transformers", "accelerate",
    "megatron", "sbatch", "srun", "torchrun", "torch", "python", "nobody",
]  # fmt: skip
"""What first says that something is wrong; `nobody`: it runs, or only dslaunch looks."""

@dataclass(frozen=True)
class Edit:
    """A change of a file that puts a finding right, where there is one right change."""

    at: Position
    old: str
    """What stands at `at`."""
    new: str


Edits = Mapping[tuple[str, str], Edit]
"""Edits by the rule and the place of the finding that they put right."""
NO_EDITS: Edits = {}


@dataclass(frozen=True)
class Hit:
    """One place where a rule holds."""

    name: str
    """The file, or the key of the configuration where the plan itself is at fault."""
    at: Position | None
    """None where `name` is a key."""
    message: str
    """What was found, and what the real program does with it."""
    fix: str
    severity: Severity | None = None
    """The rule's own where it is None."""
    raised_by: RaisedBy | None = None
    """The rule's own where it is None."""
    edit: Edit | None = None
    """What `--fix` does."""

    @property
    def where(self) -> str:
        """`file:line:column`, or the key."""
        return f"{self.name}:{self.at.line}:{self.at.column}" if self.at else self.name


Check = Callable[[Plan | None, FileSet, Settings], Iterator[Hit]]


@dataclass(frozen=True)
class Rule:
    """A registered rule."""

    id: str
    severity: Severity
    summary: str
    """One sentence: the first line of the function's docstring."""
    evidence: str
    """Where the fact was read or tried: repo:path and version."""
    since: str
    """The first version of the framework it is known to hold for; empty where it holds for each in the table."""
    until: str
    """The last one; empty where it still holds."""
    framework: Framework
    raised_by: RaisedBy
    check: Check

    def holds_for(self, settings: Settings) -> bool:
        """Whether the rule applies to the framework's version; where that isn't known, it does."""
        version = settings.deepspeed_version if self.framework == "deepspeed" else settings.megatron_version
        if not version:
            return True
        after = not self.since or release(self.since) <= release(version)
        return after and (not self.until or release(version) <= release(self.until))


_RULES: dict[str, Rule] = {}


def rule(
    rule_id: str,
    *,
    severity: Severity,
    evidence: str,
    raised_by: RaisedBy,
    since: str = "",
    until: str = "",
    framework: Framework = "deepspeed",
) -> Callable[[Check], Check]:
    """Register the decorated function."""

    def register(check: Check) -> Check:
        assert rule_id not in _RULES, f"two rules are called {rule_id}"
        assert check.__doc__, f"{rule_id} has no docstring"
        summary = check.__doc__.partition("\n")[0]
        _RULES[rule_id] = Rule(
            rule_id, severity, summary, evidence, since, until, framework, raised_by, check
        )
        return check

    return register


@cache
def rules() -> dict[str, Rule]:
    """Every rule by id, in order of the ids: those of all modules beside this one."""
    for module in pkgutil.walk_packages([str(DiskPath(__file__).parent)], f"{__package__}."):
        importlib.import_module(module.name)
    return dict(sorted(_RULES.items()))


def rule_named(rule_id: str, where: str = "") -> Rule:
    """The rule of this id; raises ConfigError with the nearest one where there is none.

    Args:
        where: what the message begins with, such as `site/dslaunch.yaml:3:5: `.
    """
    if rule_id not in rules():
        subjects = sorted({each.partition(".")[0] for each in rules()})
        subject = rule_id.partition(".")[0]
        of_it = [each for each in rules() if each.startswith(f"{subject}.")]
        known = f"{subject} has {listed(of_it)}" if of_it else f"There are rules on {listed(subjects, limit=80)}"
        found = f"{where}No rule is called '{rule_id}'.{nearest(rule_id, rules())}"
        raise ConfigError(f"{found} {known}; `dslaunch explain` lists all.")
    return rules()[rule_id]


def hit(
    file: File,
    path: Path,
    message: str,
    fix: str,
    *,
    severity: Severity | None = None,
    raised_by: RaisedBy | None = None,
    edit: Edit | None = None,
) -> Hit:
    """A hit at the key `path` of a JSON or YAML file."""
    return Hit(file.name, file.at(*path), message, fix, severity, raised_by, edit)
