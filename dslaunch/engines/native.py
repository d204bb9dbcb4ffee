"""dslaunch.runtime: one DeepSpeed engine per component, each on a mesh of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from dslaunch.engines import deepspeed
from dslaunch.engines.deepspeed_modes import RUNTIME
from dslaunch.engines.layout import Layout
from dslaunch.errors import ConfigError
from dslaunch.runtime.supported import check_model, check_weights, cut_faults, macro_faults
from dslaunch.schema.config import RunConfig


def layers_of(engine: str, entry: str) -> str:
    """The engine whose usual layers run: a user's own program has its own under native too, as under DeepSpeed.

    Args:
        entry: the program's script or module, empty where the engine has one of its own.
    """
    return "deepspeed" if engine == "native" and entry not in ("", RUNTIME) else engine


def limits(config: RunConfig, layouts: Mapping[str, Layout]) -> list[str]:
    """What the runtime itself would refuse: adapters, layers trained apart, components that it lacks modules for,
    sizes that it can't cut.

    A script of the user's may do all of it, from the same plan.
    """
    if config.script or config.module not in ("", RUNTIME):
        return []
    model = config.model.model_dump(mode="json", by_alias=True)
    try:
        check_model(model["components"], model["edges"])
        check_weights(model["components"], config.model.weights, model["edges"])
    except ConfigError as error:
        return [str(error)]
    training, specs, edges = config.training, model["components"], model["edges"]
    return [
        *cut_faults(specs, edges, layouts, training.precision, training.seq_len),
        *macro_faults(specs, edges, layouts, training.macro_batches),
    ]


ENGINE = dataclasses.replace(
    deepspeed.ENGINE,
    name="native",
    program="dslaunch.runtime",
    per_component=True,
    degrees=frozenset({"tp", "pp", "vpp"}),
    zero=frozenset({0, 1, 2, 3}),
    offload=frozenset({"none", "cpu"}),
    precisions=frozenset({"bf16", "fp32"}),
    schedules=frozenset({"1f1b", "gpipe", "interleaved"}),
    overlaps_reduction=True,
    source="deepspeed/runtime/pipe/engine.py, 0.19.8: gradients must stay whole while micro-batches are in flight",
    limits=limits,
)
