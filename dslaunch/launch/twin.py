"""The small twin of a model: the same components, joins and data, a fraction of the width, and two layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from dslaunch.schema.config import RunConfig
from dslaunch.schema.model import Model

_FRACTIONS = (64, 32, 16, 8, 4, 2)
"""Widths are divided by the first that all of them can be."""
_LAYERS = 2
_WIDTHS = ("hidden", "ffn")
_FIXED = (
    "module", "weights", "experts", "mla", "mamba", "pattern", "train_layers", "window", "cross", "mtp_layers",
)  # fmt: skip
_LAYERED = ("decoder", "transformer", "vit")


@dataclass(frozen=True)
class Twin:
    """A configuration of a small model."""

    config: RunConfig
    words: str
    """How small it is."""


def twins(config: RunConfig) -> Iterator[Twin]:
    """The smallest twin of the configuration's model; none where a part of it has no shape to scale."""
    components = {name: each.model_dump(exclude_unset=True) for name, each in config.model.components.items()}
    if any(not _scalable(each) for each in components.values()):
        return
    for fraction in _FRACTIONS:
        small = {name: _small(each, fraction) for name, each in components.items()}
        if any(each is None for each in small.values()):
            continue
        edges = [each.model_dump(by_alias=True) for each in config.model.edges]
        try:
            model = Model.model_validate({"name": config.model.name, "components": small, "edges": edges})
        except ValidationError:
            continue
        words = f"its twin of 1/{fraction} the width and {_LAYERS} layers"
        yield Twin(config.model_copy(update={"model": model, "layouts": {}}), words)
        return


def _scalable(component: dict[str, Any]) -> bool:
    """Whether layers and widths are all that its size comes from."""
    return component["arch"] in (*_LAYERED, "mlp") and not any(component.get(key) for key in _FIXED)


def _small(component: dict[str, Any], fraction: int) -> dict[str, Any] | None:
    """The component with its widths divided; None where they cannot be."""
    if component["arch"] == "mlp":
        narrow = [each // fraction for each in component["dims"]]
        return None if any(each % fraction for each in component["dims"]) else {**component, "dims": narrow}
    widths = {key: component[key] for key in _WIDTHS if component.get(key)}
    heads = component["heads"]
    fewer = heads // fraction if heads % fraction == 0 else heads
    if any(each % fraction for each in widths.values()) or (component["hidden"] // fraction) % fewer:
        return None
    small = {key: each // fraction for key, each in widths.items()}
    small |= {"heads": fewer, "layers": min(_LAYERS, component["layers"])}
    if kv_heads := component.get("kv_heads"):
        small["kv_heads"] = kv_heads // fraction if kv_heads % fraction == 0 else min(kv_heads, fewer)
    return {**component, **small}
