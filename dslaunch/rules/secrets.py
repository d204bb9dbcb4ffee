"""Secrets in files that are kept, copied and shown."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from dslaunch.files.fileset import File, FileSet
from dslaunch.files.shell import Assignment
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, hit, rule
from dslaunch.rules.settings import Settings
from dslaunch.secrets import SHAPES, is_secret_name, may_be_secret

_KEPT = "whoever gets the file has it"
_FIX = "Read it from the environment where you launch, and revoke what was written down."
_OWN_FIX = "Name the variable in launcher.pass_env, export it where you launch, and revoke what was written down."
_SHORTEST = 6
"""Characters; a shorter value of a variable is a word."""
_DRAWN = re.compile(r"(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z0-9]{12,}")
"""What issuers draw, for a variable of a script's own: token_key="tokens" is none."""
_BY_NAME = re.compile(r"--[\w-]*secret[\w-]*(?:=|\s+)['\"]?$")
"""An option that takes NAME=SECRET, where SECRET is what a store calls it."""
_EXAMPLE = re.compile(
    r"://(?:(?:my)?(?:user(?:name)?|acct|account)|admin|foo|me|x+):(?:my)?(?:pass(?:word|wd)?|pw|secret|bar|x+)@",
    re.IGNORECASE,
)
"""The user and password of examples."""


@rule(
    "env.secret",
    severity="error",
    raised_by="nobody",
    evidence="huggingface/diffusers#6916; shapes of tokens as their issuers document them",
)
def secret(plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A secret's value stands in a file."""
    for file in files.files:
        places = set()
        for found in (*_assigned(file), *_in_json(file), *_shaped(file)):
            if found.at not in places:
                places.add(found.at)
                yield replace(found, fix=_OWN_FIX) if plan and found.fix == _FIX else found


def _assigned(file: File) -> Iterator[Hit]:
    lines = file.lines
    for assignment in file.assignments:
        if assignment.literal and is_secret_name(assignment.name) and _is_value(assignment):
            before = lines[assignment.at.line - 1][: assignment.at.column - 1]
            if _BY_NAME.search(before):
                continue
            message = f"{assignment.name} is set to a literal value; {_KEPT}."
            yield Hit(file.name, assignment.at, message, _FIX)


def _is_value(assignment: Assignment) -> bool:
    """Whether it is one: what is set for programs, or drawn by an issuer."""
    name, value = assignment.name, assignment.value
    if not may_be_secret(value) or len(value) < _SHORTEST or value.upper() == name.upper():
        return False
    return name.isupper() or "passw" in name.lower() or _DRAWN.search(value) is not None


def _in_json(file: File) -> Iterator[Hit]:
    if file.kind == "deepspeed_json" and file.get("comet", "api_key"):
        message = f"comet.api_key holds the key itself; {_KEPT}."
        yield hit(file, ("comet", "api_key"), message, "Delete it, and pass COMET_API_KEY by name.")


def _shaped(file: File) -> Iterator[Hit]:
    lines = file.places
    for match in SHAPES.finditer(file.text):
        if _EXAMPLE.search(match[0]):
            continue
        assigned = file.text[file.text.rfind("\n", 0, match.start()) + 1 : match.start()]
        name = re.search(r"([A-Za-z_]\w*)=[\"']?$", assigned)
        at = lines.position(match.start() - len(name[0]) if name else match.start())
        yield Hit(file.name, at, "this has the shape of an access token or of a password in a URL.", _FIX)
