"""What the key table says of each key in a DeepSpeed JSON: the key.* rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dslaunch.engines.deepspeed_keys import rejects_unknown, release, table
from dslaunch.errors import nearest
from dslaunch.files.fileset import File, FileSet
from dslaunch.files.position import dotted
from dslaunch.planfile import Plan
from dslaunch.rules.deepspeed.config import Config
from dslaunch.rules.deepspeed.keytable import Entry, entries
from dslaunch.rules.deepspeed.values import (
    allowed,
    effect_of_range,
    effect_of_type,
    expected,
    fits,
    in_range,
    is_placeholder,
    shown,
)
from dslaunch.rules.deepspeed.zero_options import reads_factor
from dslaunch.rules.edits import deleted, renamed, revalued
from dslaunch.rules.registry import Edit, Hit, RaisedBy, Severity, hit, rule
from dslaunch.rules.settings import Settings

_CONFIG = "deepspeed/runtime/config.py"
_NOTE_PREFIXES = ("_", "//", "#", "$")
_MAX_HOMES = 3
"""A key that stands in more sections than this, such as `enabled`, says nothing of where it belongs."""


@rule(
    "key.unknown",
    severity="error",
    raised_by="DeepSpeedConfig",
    evidence=f"deepspeedai/DeepSpeed:{_CONFIG}, runtime/config_utils.py (extra='forbid') 0.19.8, run",
)
def unknown(_plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """A key that the section doesn't have: refused at start-up, or silently ignored, as the section decides."""
    for file, entry in _entries(files):
        if entry.key is None and not _is_note(entry) and not _homes(entry):
            guess = nearest(entry.path[-1], entry.section.keys)
            found = _unread(file, entry, settings, f"{_where(entry)} has no key '{entry.path[-1]}'.{guess}")
            yield replace(found, edit=_respelt(file, entry))


@rule(
    "key.misplaced",
    severity="error",
    raised_by="DeepSpeedConfig",
    evidence=f"deepspeedai/DeepSpeed:{_CONFIG} and the section's own module, 0.19.8, run",
)
def misplaced(_plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """A key that belongs to another section: refused or silently ignored where it stands."""
    for file, entry in _entries(files):
        homes = _homes(entry)
        if entry.key is None and not _is_note(entry) and homes:
            places = " or ".join(home or "the top level" for home in homes)
            message = f"'{entry.path[-1]}' belongs in {places}, not in {_where(entry)}."
            yield _unread(file, entry, settings, message, f"Move it to {places}, or delete it.")


@rule(
    "key.removed",
    severity="error",
    raised_by="DeepSpeedConfig",
    since="0.19.7",
    evidence=f"deepspeedai/DeepSpeed:{_CONFIG} _reject_removed_config_keys 0.19.8, run; DeepSpeed#8489",
)
def removed(_plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """A key of a feature that DeepSpeed has removed: its mere presence raises, `enabled: false` too."""
    for file, entry in _entries(files):
        key = entry.key
        if key is not None and key.gone(settings.deepspeed_version):
            name = dotted(entry.path)
            moved = f"Use {key.moved_to} instead." if key.moved_to else f"Delete '{name}'."
            message = (
                f"'{name}' was removed in DeepSpeed {key.removed}, which raises DeepSpeedConfigError for it."
            )
            fix = f"{moved} DeepSpeed {key.until} was the last to take it."
            yield hit(
                file, entry.path, message, fix, edit=None if key.moved_to else deleted(file, entry.path)
            )


@rule(
    "key.too-new",
    severity="error",
    raised_by="DeepSpeedConfig",
    evidence="sdists of deepspeed 0.16.9 to 0.19.8 compared; deepspeedai/DeepSpeed#3827 for ZeRO++",
)
def too_new(_plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """A key that the chosen DeepSpeed doesn't have yet."""
    newer: set[tuple[str, ...]] = set()
    for file, entry in _entries(files):
        key = entry.key
        if key is None or not key.lacks(settings.deepspeed_version):
            continue
        newer.add((file.name, *entry.path))
        if (file.name, *entry.path[:-1]) in newer:
            continue
        message = f"'{dotted(entry.path)}' came with DeepSpeed {key.since}."
        fix = f"Use DeepSpeed {key.since} or newer, or delete the key."
        yield _unread(file, entry, settings, message, fix)


@rule(
    "key.type",
    severity="error",
    raised_by="DeepSpeedConfig",
    evidence=f"deepspeedai/DeepSpeed:{_CONFIG} and the models of each section, 0.19.8, run",
)
def wrong_type(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """A value of the wrong type: refused, or taken as it is and wrong later."""
    for file, entry in _entries(files):
        key = entry.key
        if key is None or key.removed or entry.shadowed or is_placeholder(entry) or fits(entry, key):
            continue
        message = f"'{dotted(entry.path)}' is {shown(entry.value)}; DeepSpeed expects {expected(key)}"
        severity, raised_by, effect = effect_of_type(entry, key)
        if key.pipeline and not _has_pipeline(file, plan, files, settings):
            severity, raised_by, effect = "info", "nobody", "raises in a pipeline, which alone reads it"
        severity, raised_by, effect = _elsewhere(file, entry, plan, settings) or (severity, raised_by, effect)
        yield hit(
            file, entry.path, f"{message}, and {effect}.", f"Write {expected(key)}.",
            severity=severity, raised_by=raised_by,
        )  # fmt: skip


@rule(
    "key.range",
    severity="error",
    raised_by="DeepSpeedConfig",
    evidence=f"deepspeedai/DeepSpeed:{_CONFIG} and the models of each section, 0.19.8, run",
)
def out_of_range(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """A value outside its range, or none of the choices."""
    version = release(settings.deepspeed_version)
    for file, entry in _entries(files):
        key = entry.key
        if key is None or is_placeholder(entry) or not fits(entry, key) or in_range(key, entry.value):
            continue
        if key.range_since and version < release(key.range_since):
            continue
        message = f"'{dotted(entry.path)}' is {shown(entry.value)}; allowed is {allowed(key)}"
        severity, raised_by, effect = effect_of_range(entry, key)
        severity, raised_by, effect = _elsewhere(file, entry, plan, settings) or (severity, raised_by, effect)
        yield hit(
            file, entry.path, f"{message}; {effect}.", f"Write {allowed(key)}.",
            severity=severity, raised_by=raised_by,
        )  # fmt: skip


@rule(
    "key.deprecated",
    severity="deprecated",
    raised_by="nobody",
    evidence="deepspeedai/DeepSpeed:deepspeed/runtime/zero/config.py 0.19.8, run",
)
def deprecated(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A key, or a form of it, that DeepSpeed still takes with a warning."""
    for file, entry in _entries(files):
        key = entry.key
        if key is not None and key.deprecated:
            message = f"'{dotted(entry.path)}' is deprecated; DeepSpeed takes it with a warning."
            again = entry.section.keys.get(key.deprecated)
            now = (again.alias_of or again.name) if again else key.deprecated
            edit = renamed(file, entry.path, now) if again and again.type == key.type else None
            yield hit(file, entry.path, message, f"Use {now}.", edit=edit)
        if entry.path == ("zero_optimization",) and isinstance(entry.value, bool):
            message = "'zero_optimization' as a bool is deprecated: true is stage 1, false is stage 0."
            edit = revalued(file, entry.path, {"stage": int(entry.value)})
            yield hit(file, entry.path, message, 'Write {"stage": N}.', edit=edit)


@rule(
    "key.ignored",
    severity="wrong",
    raised_by="nobody",
    evidence=f"deepspeedai/DeepSpeed:{_CONFIG}, runtime/pipe/module.py, swap_tensor/aio_config.py 0.19.8, run",
)
def ignored(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A key that DeepSpeed takes, and never reads."""
    for file, entry in _entries(files):
        if entry.key is not None and entry.key.ignored:
            message = f"'{dotted(entry.path)}' is taken and never read: {entry.key.ignored} decides."
            yield hit(file, entry.path, message, f"Delete it, and set {entry.key.ignored}.")


@rule(
    "key.alias",
    severity="error",
    raised_by="DeepSpeedConfig",
    evidence="deepspeedai/DeepSpeed:deepspeed/runtime/config_utils.py, runtime/precision_config.py 0.19.8, run",
)
def alias(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """Two names of one setting in the same section."""
    for file, entry in _entries(files):
        name, twin = dotted(entry.path), _twin(file, entry)
        if entry.key is not None and entry.shadowed:
            message = f"'{name}' is silently ignored, since '{entry.key.alias_of}' stands beside it."
            fix = f"Keep '{entry.key.alias_of}' alone."
            yield hit(
                file, entry.path, message, fix, severity="wrong", raised_by="nobody",
                edit=deleted(file, entry.path),
            )  # fmt: skip
        elif twin is not None:
            message = f"'{name}' and '{twin}' are one setting; DeepSpeed refuses both together."
            yield hit(file, entry.path, message, f"Keep '{twin}' alone.")


def _elsewhere(
    file: File, entry: Entry, plan: Plan | None, settings: Settings
) -> tuple[Severity, RaisedBy, str] | None:
    """What becomes of a wrong value that DeepSpeed never gets to see; None where it does."""
    if _is_unread(Config(file, plan, settings), entry):
        return "wrong", "nobody", "it isn't looked at here"
    if entry.path == ("steps_per_print",) and (settings.huggingface or _by_accelerate(file)):
        return "info", "nobody", "accelerate puts a number of its own in its place"
    return None


def _by_accelerate(file: File) -> bool:
    """Whether only accelerate can read the file: `auto` in the place of a batch."""
    return any(file.get(each) == "auto" for each in ("train_batch_size", "train_micro_batch_size_per_gpu"))


def _is_unread(config: Config, entry: Entry) -> bool:
    """Whether other settings of the file keep DeepSpeed from reading this one."""
    if entry.path == ("gradient_predivide_factor",):
        return not reads_factor(config)
    half = config.precision != "fp32" or config.precision_open
    return entry.path == ("data_types", "buffer_dtype") and not half


def _has_pipeline(file: File, plan: Plan | None, files: FileSet, settings: Settings) -> bool:
    """Whether a pipeline is known to run with the file: by the plan, the options or a script."""
    scripts = any("PipelineModule" in each.text for each in files.of("python"))
    return scripts or Config(file, plan, settings).stages > 1


def _respelt(file: File, entry: Entry) -> Edit | None:
    """The one key of the section that a slip of the pen leads to, where it doesn't stand beside it."""
    name, siblings = entry.path[-1], file.get(*entry.path[:-1]) if len(entry.path) > 1 else file.value
    near = [key for key in entry.section.keys if is_slip(name, key)]
    meant = near[0] if len(near) == 1 and near[0] not in siblings else ""
    return renamed(file, entry.path, meant) if meant else None


def is_slip(name: str, right: str) -> bool:
    """Whether one letter too many, too few, wrong, or swapped with the next makes `name` of `right`."""
    pairs = zip(name, right, strict=False)
    same = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(name), len(right)))
    found, meant = name[same:], right[same:]
    swapped = found[:2] == meant[1::-1] and found[2:] == meant[2:]
    slip = found[1:] == meant[1:] or found[1:] == meant or found == meant[1:] or swapped
    return len(right) >= _SHORTEST and found != meant and slip


_SHORTEST = 5
"""Letters of a key below which a slip may as well be another word."""


def _entries(files: FileSet) -> Iterator[tuple[File, Entry]]:
    for file in files.of("deepspeed_json"):
        for entry in entries(file):
            yield file, entry


def _is_note(entry: Entry) -> bool:
    """A remark that people put in as a key; it does no harm where unknown keys are ignored."""
    name = entry.path[-1]
    return entry.section.unknown == "ignored" and (
        name.startswith(_NOTE_PREFIXES) or "comment" in name.lower()
    )


def _homes(entry: Entry) -> list[str]:
    homes = table().homes(entry.path[-1])
    return homes if len(homes) <= _MAX_HOMES else []


def _where(entry: Entry) -> str:
    return f"'{dotted(entry.path[:-1])}'" if len(entry.path) > 1 else "the top level"


def _unread(
    file: File,
    entry: Entry,
    settings: Settings,
    message: str,
    fix: str = "",
) -> Hit:
    """A hit on a key that the section doesn't read in this version."""
    dropped = entry.value == "auto" and entry.section.parser == "pydantic"
    if rejects_unknown(entry.section, settings.deepspeed_version) and not dropped:
        fix = fix or "Correct the name, or delete the key."
        return hit(file, entry.path, f"{message} DeepSpeed refuses the file (ValidationError).", fix)
    effect = "DeepSpeed ignores it without a word."
    fix = fix or "Correct the name, or delete the key, unless your own program reads it here."
    return hit(file, entry.path, f"{message} {effect}", fix, severity="wrong", raised_by="nobody")


def _twin(file: File, entry: Entry) -> str | None:
    """The other name of this key in the same object, where pydantic would take both for one field."""
    key, siblings = entry.key, file.get(*entry.path[:-1])
    if key is None or entry.section.parser != "pydantic":
        return None
    other = key.alias_of or (key.deprecated if key.exclusive else "")
    for name in (other, entry.section.keys[other].alias_of if other in entry.section.keys else ""):
        if name and name in siblings:
            return name
    return None
