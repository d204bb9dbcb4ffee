"""Secrets in files that are kept, copied and shown."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dslaunch.files.fileset import File, FileSet
from dslaunch.files.position import Lines
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, hit, rule
from dslaunch.rules.settings import Settings
from dslaunch.secrets import SHAPES, is_secret_name, may_be_secret

_KEPT = "the file is kept with the run and shown in reviews"
_FIX = "Name the variable in launcher.pass_env, export it where you launch, and revoke what was written down."


@rule(
    "env.secret",
    severity="error",
    raised_by="nobody",
    evidence="huggingface/diffusers#6916; shapes of tokens as their issuers document them",
)
def secret(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A secret's value stands in a file."""
    for file in files.files:
        places = set()
        for found in (*_assigned(file), *_in_json(file), *_shaped(file)):
            if found.at not in places:
                places.add(found.at)
                yield found


def _assigned(file: File) -> Iterator[Hit]:
    for assignment in file.assignments:
        if assignment.literal and is_secret_name(assignment.name) and may_be_secret(assignment.value):
            message = f"{assignment.name} is set to a literal value; {_KEPT}."
            yield Hit(file.name, assignment.at, message, _FIX)


def _in_json(file: File) -> Iterator[Hit]:
    if file.kind == "deepspeed_json" and file.get("comet", "api_key"):
        message = f"comet.api_key holds the key itself; {_KEPT}."
        yield hit(file, ("comet", "api_key"), message, "Delete it, and pass COMET_API_KEY by name.")


def _shaped(file: File) -> Iterator[Hit]:
    lines = Lines(file.text)
    for match in SHAPES.finditer(file.text):
        assigned = file.text[file.text.rfind("\n", 0, match.start()) + 1 : match.start()]
        name = re.search(r"([A-Za-z_]\w*)=[\"']?$", assigned)
        at = lines.position(match.start() - len(name[0]) if name else match.start())
        yield Hit(file.name, at, "this has the shape of an access token or of a password in a URL.", _FIX)
