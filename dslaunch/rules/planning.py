"""What a plan said of itself when it was made: kept in prediction.json, and repeated here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from dslaunch.files.fileset import File, FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, Severity, rule
from dslaunch.rules.settings import Settings

_OURS = "dslaunch's own ledger: dslaunch/plan/findings.py"


def _repeated(rule_id: str, files: FileSet) -> Iterator[Hit]:
    for file in files.of("prediction"):
        for finding in _findings(file):
            if finding.get("rule") == rule_id:
                severity = cast(Severity, finding.get("severity"))
                where, message = str(finding.get("where")), str(finding.get("message"))
                yield Hit(where, None, message, str(finding.get("fix")), severity)


def _findings(file: File) -> list[dict[str, Any]]:
    found = file.get("findings")
    return [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []


@rule("memory.gpu", severity="error", raised_by="nobody", evidence=_OURS)
def memory_gpu(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """The fullest GPU needs more memory than it has, or than goal.memory_fraction leaves."""
    yield from _repeated("memory.gpu", files)


@rule("memory.host", severity="error", raised_by="nobody", evidence=_OURS)
def memory_host(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A node needs more host memory than it has: offloaded states and the processes themselves."""
    yield from _repeated("memory.host", files)


@rule("training.grad-accum", severity="info", raised_by="nobody", evidence=_OURS)
def grad_accum(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """The type that gradients are accumulated in was chosen by the plan."""
    yield from _repeated("training.grad-accum", files)


@rule("recompute.script", severity="info", raised_by="nobody", evidence=_OURS)
def recompute_script(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """The plan counts on recompute that only the user's script can do."""
    yield from _repeated("recompute.script", files)


@rule("recompute.selective", severity="info", raised_by="nobody", evidence=_OURS)
def recompute_selective(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """Selective recompute saves next to nothing beside a fused attention kernel."""
    yield from _repeated("recompute.selective", files)


@rule("model.positions", severity="wrong", raised_by="nobody", evidence=_OURS)
def model_positions(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """Sequences are longer than the model was made for."""
    yield from _repeated("model.positions", files)


@rule("program.missing", severity="info", raised_by="nobody", evidence=_OURS)
def program_missing(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """No program is named, and the engine has none of its own."""
    yield from _repeated("program.missing", files)


@rule("runtime.native", severity="info", raised_by="nobody", evidence=_OURS)
def runtime_native(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """dslaunch.runtime does not execute a layout per component yet."""
    yield from _repeated("runtime.native", files)


@rule("pipeline.bubble", severity="slow", raised_by="nobody", evidence=_OURS)
def pipeline_bubble(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """Few micro-batches in many stages leave the pipeline idle."""
    yield from _repeated("pipeline.bubble", files)
