"""`auto`, which Hugging Face fills in and DeepSpeed doesn't."""

from __future__ import annotations

from collections.abc import Iterator

from dslaunch.errors import listed
from dslaunch.files.fileset import File, FileSet
from dslaunch.files.position import Path, dotted
from dslaunch.planfile import Plan
from dslaunch.rules.deepspeed.keytable import Entry, entries
from dslaunch.rules.deepspeed.values import ACCELERATE_FILLED, HF_FILLED, fits, is_placeholder
from dslaunch.rules.registry import Hit, RaisedBy, Severity, hit, rule
from dslaunch.rules.settings import Settings

_BATCH = frozenset({"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"})
_TRUE_AS_TEXT = frozenset({"optimizer.params.torch_adam"})
"""What DeepSpeed takes out before the optimizer sees it, and only asks whether it is true: any text is."""
_LISTED = 4
_FIX = "Write the value, or let Hugging Face Trainer or accelerate read this file."


@rule(
    "json.auto",
    severity="error",
    raised_by="deepspeed.initialize",
    evidence="deepspeedai/DeepSpeed:deepspeed/runtime/config_utils.py DeepSpeedConfigModel.__init__ 0.19.8, run; "
    "huggingface/transformers:src/transformers/integrations/deepspeed.py 5.24.0; deepspeedai/DeepSpeed#1270",
)
def auto(_plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """`auto` where nobody fills it in."""
    for file in files.of("deepspeed_json"):
        left_open = []
        for path, entry in _autos(file):
            if settings.huggingface and dotted(path) in HF_FILLED | ACCELERATE_FILLED:
                continue
            if settings.huggingface is None and (_is_pydantic(entry) or dotted(path) in HF_FILLED):
                left_open.append(path)
                continue
            severity, raised_by, effect = _effect(path, entry)
            message = f"'{dotted(path)}' is auto; {effect}."
            yield hit(file, path, message, _FIX, severity=severity, raised_by=raised_by)
        if left_open:
            names = listed((dotted(path) for path in left_open), limit=_LISTED)
            verb = "is" if len(left_open) == 1 else "are"
            message = f"{names} {verb} auto; only Hugging Face fills that in; whether it reads this isn't known."
            yield hit(file, left_open[0], message, _FIX, severity="info", raised_by="nobody")


def _autos(file: File) -> Iterator[tuple[Path, Entry | None]]:
    """Each `auto` that is no value of DeepSpeed's own; the entry is None below where the key table ends.

    Keys that aren't known, and those where the text `auto` itself is refused, are left to the key.* rules.
    """
    known = {entry.path: entry for entry in entries(file)}
    for path, value in _leaves(file.value, ()):
        entry = known.get(tuple(str(part) for part in path))
        if value != "auto" or dotted(path) in _TRUE_AS_TEXT:
            continue
        if entry is not None and (entry.key is None or entry.key.auto):
            continue
        if entry is None or is_placeholder(entry) or _passes_as_text(entry):
            yield path, entry


def _passes_as_text(entry: Entry) -> bool:
    return entry.key is not None and fits(entry, entry.key) and not entry.key.choices


def _leaves(value: object, path: Path) -> Iterator[tuple[Path, object]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))
    else:
        yield path, value


def _effect(path: Path, entry: Entry | None) -> tuple[Severity | None, RaisedBy | None, str]:
    if dotted(path) in _BATCH:
        return None, "DeepSpeedConfig", "DeepSpeed computes with the text and raises TypeError at start-up"
    if _is_pydantic(entry):
        return "wrong", "nobody", "nobody fills it in, and DeepSpeed takes its default without a word"
    return None, None, "DeepSpeed takes the text as the value and fails when it is used"


def _is_pydantic(entry: Entry | None) -> bool:
    return entry is not None and entry.section.parser == "pydantic"
