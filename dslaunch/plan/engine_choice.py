"""Which engines can execute the layouts, and what refuses the others."""

from __future__ import annotations

from collections.abc import Mapping

from dslaunch.engines.base import Engine, refusals
from dslaunch.engines.deepspeed_modes import RUNTIME
from dslaunch.engines.layout import Layout
from dslaunch.engines.modes import only_elsewhere
from dslaunch.engines.registry import ENGINES
from dslaunch.engines.torch import only_torch
from dslaunch.engines.versions import named
from dslaunch.errors import ConfigError, listed
from dslaunch.plan.grids import one_grid
from dslaunch.schema.config import RunConfig
from dslaunch.schema.model import Decoder


def capable(config: RunConfig, layouts: Mapping[str, Layout]) -> dict[str, list[str]]:
    """By engine, in order of preference: why it can't execute the layouts; empty where it can."""
    return {name: engine_faults(config, layouts, name) for name in ENGINES}


def engine_faults(config: RunConfig, layouts: Mapping[str, Layout], name: str) -> list[str]:
    """Why one engine can't execute the layouts: a sentence each."""
    engine, training = ENGINES[name], config.training
    order = training.order(max(layout.vpp for layout in layouts.values()))
    decoders = sum(isinstance(component, Decoder) for component in config.model.components.values())
    return [
        *_not_allowed(config, name),
        *refusals(engine, layouts, config.strategy.sharding, training.precision, order, decoders),
        *engine.limits(config, layouts),
        *_lacks(config, name),
        *_own_modules(config, name),
        *([] if engine.per_component else one_grid(config, layouts, name)),
    ]


def _own_modules(config: RunConfig, name: str) -> list[str]:
    """Megatron's programs build the model from their arguments, and would pass over a module of the user's."""
    if not name.startswith("megatron"):
        return []
    own = [part for part, component in config.model.components.items() if component.module]
    return [f"model.components.{part}.module is built by dslaunch.runtime, not by {name}" for part in own]


def candidates(config: RunConfig) -> list[str]:
    """The engines among which a search chooses."""
    asked = config.engine.name
    if asked != "auto":
        return [asked]
    out = left_out(config)
    return [name for name in ENGINES if not _not_allowed(config, name) and name not in out]


def left_out(config: RunConfig) -> dict[str, str]:
    """Engines that a search passes over, with the reason.

    They run nothing but an entry that nobody has named; or an entry is named, whose layers and meshes they would
    take for those of their own program.
    """
    if config.engine.name != "auto" or config.goal.engines:
        return {}
    if entry := config.script or config.module:
        if entry == RUNTIME:
            return {}
        asks = f"not searched: {entry} would have to make an engine and a mesh for each component"
        return {"native": f"{asks}; where it does, say engine=native"}
    return {
        name: f"not searched: it runs {engine.program}; name it, or say engine={name}"
        for name, engine in ENGINES.items()
        if engine.own_entry
    }


def choose(
    config: RunConfig, layouts: Mapping[str, Layout], preferred: str = ""
) -> tuple[Engine | None, list[str], list[str]]:
    """(the engine, every engine that can execute the layouts with the chosen one first, faults).

    Args:
        preferred: what a search chose, where engine is auto.
    """
    verdicts = capable(config, layouts)
    able = [name for name, faults in verdicts.items() if not faults]
    asked = config.engine.name if config.engine.name != "auto" else preferred
    if not asked:
        if able:
            return ENGINES[able[0]], able, version_faults(config, ENGINES[able[0]])
        return None, [], _no_engine(config, verdicts, layouts)
    if verdicts[asked]:
        return None, able, [f"engine {asked}: {reason}" for reason in verdicts[asked]] + _others(able, asked)
    ordered = [asked, *(name for name in able if name != asked)]
    return ENGINES[asked], ordered, version_faults(config, ENGINES[asked])


def _not_allowed(config: RunConfig, name: str) -> list[str]:
    allowed = config.goal.engines
    return [f"goal.engines allows {listed(allowed)}; not {name}"] if allowed and name not in allowed else []


def grad_accum(config: RunConfig, engine: Engine, layouts: Mapping[str, Layout]) -> tuple[str, list[str]]:
    """(type that gradients are accumulated in, faults)."""
    training = config.training
    accumulates = any(layout.num_microbatches > 1 for layout in layouts.values())
    stages = {layout.zero for layout in layouts.values()}
    allowed = frozenset.intersection(*(engine.grad_accum_choices(training.precision, z) for z in stages))
    wanted = training.grad_accum_dtype
    if wanted is None:
        chosen = engine.grad_accum(training.precision, accumulates)
        return (chosen if chosen in allowed else training.precision), []
    if wanted not in allowed:
        return wanted, [
            f"training.grad_accum_dtype is {wanted}; {engine.name} in {training.precision} at ZeRO-"
            f"{listed(sorted(stages))} takes {listed(sorted(allowed))}"
        ]
    return wanted, []


def require_version(config: RunConfig) -> None:
    """Raises ConfigError for an engine.version that no files are rendered for, whatever the layout."""
    asked = [config.engine.name] if config.engine.name != "auto" else candidates(config)
    faults = [fault for name in asked for fault in version_faults(config, ENGINES[name])]
    if asked and len(faults) == len(asked):
        fix = "Choose one of these, or leave engine.version (or a site's versions) out."
        raise ConfigError(".\n".join(faults) + f". {fix}")


def version_faults(config: RunConfig, engine: Engine) -> list[str]:
    """An engine.version that no files are rendered for."""
    wanted = config.engine.version
    if not wanted or named(wanted, engine.versions) in engine.versions:
        return []
    return [
        f"engine.version is {wanted}; {engine.name} is rendered for {listed(engine.versions)}, or for the newest "
        f"of a series, such as {engine.versions[0].rpartition('.')[0]}"
    ]


def _no_engine(
    config: RunConfig, verdicts: Mapping[str, list[str]], layouts: Mapping[str, Layout]
) -> list[str]:
    """What every engine has against the layouts; where not every one takes all settings, of those that do."""
    shown = ", ".join(f"{name} {layout.describe()}" for name, layout in layouts.items())
    lacks = {name: _lacks(config, name) for name in verdicts}
    taking = [name for name, settings in lacks.items() if not settings]
    asked = dict.fromkeys(setting.split(";")[0] for settings in lacks.values() for setting in settings)
    if asked and not taking:
        together = "  no engine has these together: leave one out" if len(asked) > 1 else "  leave it out"
        return [f"no engine executes {shown}:", *(f"  {setting}" for setting in asked), together]
    reasons = sorted(((name, verdicts[name]) for name in taking), key=lambda each: len(each[1]))
    return [
        f"no engine executes {shown}:",
        *(f"  {setting}" for setting in asked),
        *(f"  {name}: {_short(against)}" for name, against in reasons),
    ]


def _lacks(config: RunConfig, name: str) -> list[str]:
    """Settings that are asked for and that an engine does not have."""
    return [*only_elsewhere(config, name), *only_torch(config, name)]


def _short(reasons: list[str], most: int = 3) -> str:
    more = f"; and {len(reasons) - most} more" if len(reasons) > most else ""
    return "; ".join(reasons[:most]) + more


def _others(able: list[str], asked: str) -> list[str]:
    return [f"this layout can be executed by engine={able[0]}"] if able and able[0] != asked else []
