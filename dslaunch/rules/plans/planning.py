"""What a plan said of itself when it was made: kept in prediction.json, and repeated here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dslaunch.files.fileset import File, FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.registry import SEVERITIES, Hit, Severity, hit, rule
from dslaunch.rules.settings import Settings

_OURS = "dslaunch's own ledger: dslaunch/plan/findings.py"
_TEXTS = ("where", "message", "fix")


def _repeats(rule_id: str, severity: Severity, summary: str) -> None:
    """Register a rule that repeats the plan's findings of this id."""

    def check(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
        for file in files.of("prediction"):
            for row in _findings(file):
                if isinstance(row, dict) and row.get("rule") == rule_id and not _fault(row):
                    yield Hit(row["where"], None, row["message"], row["fix"], row["severity"])

    check.__doc__ = summary
    rule(rule_id, severity=severity, raised_by="nobody", evidence=_OURS)(check)


_REPEATED: tuple[tuple[str, Severity, str], ...] = (
    ("memory.gpu", "error", "The fullest GPU needs more than goal.memory_fraction of its memory."),
    ("memory.host", "error", "A node needs more host memory than it has: offloaded states and the processes."),
    ("memory.nvme", "error", "A node needs more NVMe than it has, or as much as is said."),
    ("search.micro-batch", "info", "The search took another micro-batch than training.micro_batch."),
    ("training.grad-accum", "info", "The type that gradients are accumulated in was chosen by the plan."),
    ("recompute.script", "info", "The plan counts on recompute that only the user's script can do."),
    ("recompute.selective", "info", "Selective recompute saves next to nothing beside fused attention."),
    ("model.positions", "wrong", "Sequences are longer than the model was made for."),
    ("program.missing", "info", "No program is named, and the engine has none of its own."),
    ("pipeline.bubble", "slow", "Few micro-batches in many stages leave the pipeline idle."),
    ("autotp.script", "info", "AutoTP's ranks need the same samples, and a model that it knows how to cut."),
    ("ulysses.script", "info", "Ulysses leaves cutting sequences, and attention over them, to the script."),
    ("activation-checkpointing.script", "info", "Only a script that calls deepspeed.checkpointing reads it."),
    ("learning-rate.script", "info", "Learning rates per component that only the user's script can apply."),
    ("huggingface.arguments", "info", "The Trainer must get the arguments that the plan was made for."),
)
for _row in _REPEATED:
    _repeats(*_row)


@rule("own.prediction", severity="error", raised_by="nobody", evidence="dslaunch's own: dslaunch.prediction/1")
def prediction(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A finding in prediction.json that can't be read, such as one whose severity was written by hand."""
    for file in files.of("prediction"):
        for index, row in enumerate(_findings(file)):
            if fault := _fault(row):
                fix = "Render again, or take the finding out; --accept RULE waives one."
                yield hit(file, ("findings", index), f"finding {index}: {fault}.", fix)


def _findings(file: File) -> list[Any]:
    found = file.get("findings")
    return found if isinstance(found, list) else []


def _fault(row: Any) -> str:
    """What is wrong with one finding; empty where nothing is."""
    if not isinstance(row, dict):
        return "is no object"
    if row.get("severity") not in SEVERITIES:
        return f"severity is {row.get('severity')!r}; allowed is {' | '.join(SEVERITIES)}"
    missing = [name for name in _TEXTS if not isinstance(row.get(name), str)]
    return f"'{missing[0]}' is no text" if missing else ""
