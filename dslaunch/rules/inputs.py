"""The files as such: can they be read, by whom, and does the run folder hold what was reviewed?"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace

from dslaunch.engines.deepspeed_keys import release, table
from dslaunch.engines.megatron_catalogue import megatron_versions
from dslaunch.engines.versions import named
from dslaunch.errors import listed, nearest
from dslaunch.files.fileset import FileSet
from dslaunch.files.position import START
from dslaunch.files.rendered import left_out
from dslaunch.planfile import Plan
from dslaunch.rules.megatron.run import stock_runs
from dslaunch.rules.registry import Hit, RaisedBy, hit, rule, rules
from dslaunch.rules.selection import comments
from dslaunch.rules.settings import Settings

_PARSERS = (
    "each kind's own reader, run: hjson as in deepspeed/runtime/config.py 0.19.8, Python's ast 3.11, PyYAML 6.0, "
    "bash 5.2"
)
_PARSER = "deepspeedai/DeepSpeed:deepspeed/runtime/config.py (hjson), runtime/config_utils.py 0.19.8, run"
_AGAIN = "Render again; what is to stay belongs into the recipe, an override, or a template of your own."


@rule("file.syntax", severity="error", raised_by="DeepSpeedConfig", evidence=_PARSERS)
def syntax(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A text that can't be read as the kind of file it is."""
    fix = "Correct the text here; nothing else of it was checked."
    shells = {file.name for file in files.of("shell")}
    for found in _problems(files, "file.syntax", fix):
        as_it_stands = replace(found, fix="Correct the text here; the rest was read as it stands.")
        yield as_it_stands if found.name in shells else found


@rule("file.duplicate-key", severity="error", raised_by="DeepSpeedConfig", evidence=_PARSER)
def duplicate_key(_plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """A key that stands twice in one object."""
    for found in _problems(files, "file.duplicate-key", "Keep one."):
        if found.raised_by == "DeepSpeedConfig" and not settings.huggingface:
            yield replace(found, message=f"{found.message} DeepSpeed raises ValueError.")
        else:
            message = f"{found.message} The last one counts, and nothing is said."
            yield replace(found, message=message, severity="wrong", raised_by="nobody")


@rule("file.unread", severity="info", raised_by="nobody", evidence="dslaunch's own")
def unread(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A file that can't be read, or of a kind that no rule reads but for secrets."""
    yield from _problems(files, "file.unread", "Leave it out, or name the files that are to be checked.")
    for file in files.of("other", "json", "yaml"):
        if not file.problems:
            message = "the kind of this file isn't known: only secrets were looked for."
            yield Hit(file.name, START, message, "Check the name; a DeepSpeed JSON may be called ds_config.json.")


@rule("check.ignore", severity="wrong", raised_by="nobody", evidence="dslaunch's own")
def ignore(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A comment `dslaunch: ignore[RULE]` that names no rule."""
    for file in files.files:
        for comment in comments(file):
            for name in comment.rules:
                if name not in rules():
                    near = nearest(name, rules())
                    message = f"no rule is called '{name}', so this comment waives nothing.{near}"
                    yield Hit(file.name, comment.at, message, "`dslaunch explain` lists the rules.")


@rule("check.version", severity="info", raised_by="nobody", evidence="dslaunch's own")
def version(_plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """A version of DeepSpeed or Megatron that the tables don't have."""
    first, last = table().versions[0], table().versions[-1]
    asked = release(settings.deepspeed_version)
    if files.of("deepspeed_json") and not release(first) <= asked <= release(last):
        message = f"DeepSpeed {settings.deepspeed_version} is outside the key table ({first} to {last})."
        fix = "Take findings about keys as hints, or choose a version inside."
        yield Hit("deepspeed_version", None, message, fix)
    known = megatron_versions()
    asked_for = named(settings.megatron_version, known)
    if asked_for and asked_for not in known and next(stock_runs(files, settings), None):
        message = f"the arguments of megatron-core {asked_for} aren't known: those of {known[-1]} were taken."
        fix = f"Choose one of {listed(known, limit=len(known))}, or take findings about flags as hints."
        yield Hit("megatron_version", None, message, fix)


@rule("check.world-size", severity="info", raised_by="nobody", evidence="dslaunch's own")
def world_size(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """The number of ranks isn't known, so batch arithmetic was checked in part only."""
    for file in files.of("deepspeed_json"):
        if plan is None and settings.world_size is None and isinstance(file.get("train_batch_size"), int):
            message = "the number of ranks isn't known: whether train_batch_size fits them wasn't checked."
            yield hit(file, ("train_batch_size",), message, "Give --world-size.")


@rule("own.manifest", severity="error", raised_by="nobody", evidence="dslaunch's own: dslaunch.manifest/1")
def manifest(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A file of the run folder isn't the one that the manifest was written for, or one is missing."""
    by_name = {file.name: file for file in files.files}
    for own in files.of("manifest"):
        folder = own.name.rpartition("/")[0]
        hashes = own.get("files")
        for name, digest in hashes.items() if isinstance(hashes, dict) else ():
            file = by_name.get(f"{folder}/{name}" if folder else name)
            if file is not None and hashlib.sha256(file.text.encode()).hexdigest() != digest:
                message = f"{file.name} was changed after the manifest was written."
                yield hit(own, ("files", name), message, _AGAIN)


def incomplete(files: FileSet) -> Iterator[Hit]:
    """What a rendered folder and its manifest do not both hold; `files` are all of the folder's."""
    manifests = files.of("manifest")
    if not manifests:
        yield Hit("manifest.json", None, "a rendered folder holds one, and it isn't there.", _AGAIN)
    for own in manifests:
        hashes = own.get("files")
        names = set(hashes) if isinstance(hashes, dict) else set()
        here = {file.name.rpartition("/")[2] for file in files.files}
        for name in sorted(names - here):
            yield hit(own, ("files", name), f"{name} isn't in the folder.", _AGAIN)
        for name in left_out(names, here):
            yield hit(own, ("files",), f"{name} isn't listed, so nothing proves what it holds.", _AGAIN)


def _problems(files: FileSet, rule_id: str, fix: str) -> Iterator[Hit]:
    for file in files.files:
        raised_by: RaisedBy = "DeepSpeedConfig" if file.kind == "deepspeed_json" else "nobody"
        for problem in file.problems:
            if problem.rule == rule_id:
                yield Hit(file.name, problem.at, problem.message + ".", fix, raised_by=raised_by)
