"""Traps of models with several components, seen in the plan: heads, layers, frozen and skipped towers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dslaunch.files.fileset import FileSet
from dslaunch.model.shapes import counted_ends
from dslaunch.planfile import ComponentPlan, Plan
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.settings import Settings

_ENCODERS = ("vit", "siglip")


def _parts(plan: Plan | None) -> Iterator[tuple[str, ComponentPlan, dict[str, Any]]]:
    """Each component with its layout and its architecture (empty where the plan holds none)."""
    shapes = plan.model.get("components", {}) if plan else {}
    for name, part in plan.components.items() if plan else ():
        yield name, part, shapes.get(name) or {}


@rule(
    "component.heads", severity="error", raised_by="nobody",
    evidence="NVIDIA/Megatron-LM:megatron/core/transformer/attention.py 0.16.1; arithmetic",
)  # fmt: skip
def heads(plan: Plan | None, _files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """Attention heads or key-value heads that tensor parallelism can't cut."""
    for name, part, shape in _parts(plan):
        count, groups = shape.get("heads"), shape.get("kv_heads") or shape.get("heads")
        if not isinstance(count, int) or not isinstance(groups, int) or part.tp == 1:
            continue
        if count % part.tp:
            message = f"{name} has {count} heads, which {part.tp} ranks can't share evenly."
            yield Hit(f"strategy.{name}.tp", None, message, f"Use a tp that divides {count}.")
        elif groups % part.tp and part.tp % groups:
            message = (
                f"{name} has {groups} key-value heads: {part.tp} ranks can neither share nor copy "
                "them evenly."
            )
            yield Hit(
                f"strategy.{name}.tp", None, message, f"Use a tp that divides {groups}, or a multiple of it."
            )
        elif groups < part.tp:
            copies = part.tp // groups
            message = f"{name} has {groups} key-value heads for tp {part.tp}: each is kept {copies} times."
            fix = f"tp {groups} keeps each once; the copies are in the memory that was planned."
            yield Hit(f"strategy.{name}.tp", None, message, fix, severity="info")


@rule(
    "component.layers",
    severity="info",
    raised_by="nobody",
    evidence="dslaunch's own ledger: dslaunch/plan/layouts.py",
)
def layers(plan: Plan | None, _files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """Layers that don't divide evenly over the stages: the fullest stage sets the pace."""
    for name, part, _ in _parts(plan):
        counts = part.layers_per_stage
        if part.pp > 1 and len(set(counts)) > 1 and not any(counted_ends(counts, part.vpp)):
            message = (
                f"{name}: {sum(counts)} layers as {'+'.join(map(str, counts))}; the stage of "
                f"{max(counts)} sets the pace."
            )
            yield Hit(
                f"strategy.{name}.pp", None, message, f"Use a pp that divides {sum(counts)} for equal stages."
            )


@rule(
    "component.coupled", severity="error", raised_by="nobody",
    evidence="Physical-Intelligence/openpi:src/openpi/models/gemma.py Module, as of 2025; dslaunch's own runtime",
)  # fmt: skip
def coupled(plan: Plan | None, _files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """An expert that attends inside each layer of the LLM, on another mesh than the LLM."""
    for edge in plan.model.get("edges", ()) if plan else ():
        ends = [plan.components.get(edge.get(end)) for end in ("from", "to")] if plan else []
        if edge.get("join") == "shared_attention" and None not in ends:
            first, second = ends
            assert first is not None
            assert second is not None
            if _mesh(first) != _mesh(second):
                message = (
                    f"{edge['from']} and {edge['to']} share each layer's attention, on different meshes."
                )
                fix = "Give both the same tp, pp, cp, dp and ranks."
                yield Hit(f"strategy.{edge['to']}", None, message, fix)


def _mesh(part: ComponentPlan) -> tuple[int, ...]:
    return part.tp, part.pp, part.cp, part.dp, part.rank_offset


_FROZEN = ("nothing", "lora", "qlora")
"""What a component trains where some of its weights take no gradient."""


@rule(
    "component.frozen", severity="info", raised_by="torch", until="0.19.3",
    evidence="deepspeedai/DeepSpeed#8148, fixed after DeepSpeed 0.19.3; huggingface/transformers#47254; "
    "0.16.9, run",
)  # fmt: skip
def frozen(plan: Plan | None, _files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """Frozen weights that are recomputed under ZeRO-3: a frozen tower, or what stands beneath adapters."""
    for name, part, shape in _parts(plan):
        if shape.get("train") in _FROZEN and part.zero == 3 and part.recompute == "full":
            message = (
                f"{name} holds frozen weights, recomputed at ZeRO-3: without re-entry, as transformers does it by "
                "default, torch raises CheckpointError where a frozen norm is gathered no more."
            )
            fix = "Use DeepSpeed 0.19.4 or newer, checkpoint(..., use_reentrant=True), or no recompute."
            yield Hit(f"strategy.{name}.recompute", None, message, fix)


@rule(
    "component.every-rank", severity="info", raised_by="nobody",
    evidence="deepspeedai/DeepSpeed#7170; modelscope/ms-swift#9104",
)  # fmt: skip
def every_rank(plan: Plan | None, _files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A tower at ZeRO-3 that some ranks may not call in a step: the others wait for ever."""
    if plan is None or plan.engine.sharding != "zero":
        return
    sources = {edge.get("from") for edge in plan.model.get("edges", ())}
    for name, part, shape in _parts(plan):
        if part.zero == 3 and name in sources and shape.get("arch") in _ENCODERS:
            message = f"{name} at ZeRO-3: its weights are gathered by all ranks together, in each step."
            fix = f"Call {name} on every rank; without an image, with a dummy whose loss has weight 0."
            yield Hit(f"strategy.{name}.zero", None, message, fix)
