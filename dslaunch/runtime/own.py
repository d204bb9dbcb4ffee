"""A component of one's own: what `model.components.NAME.module` names, and what it promises.

    model.components.llm.module: my_package.models:decoder

names a factory, called once on each rank that holds a part of the component:

    def decoder(build: Build) -> torch.nn.Module

It gives the piece that `build.piece` asks for, as a module with

    forward(x, batch) -> Tensor

x is what the component's edges bring, joined (a stage after the first: what the stage before gave), [B, S, H],
or None where nothing leads to it; batch is the micro-batch itself where the module has `reads = True`, else None.
A component gives [B, build.tokens, H], a stage before the last [B, build.between, H]; the decoder's last stage,
or a head that an edge from the decoder leads to, gives the loss, summed over what `judged(batch)` counts (without
that method: the labels that are not -100).

A parameter has the same name in a piece as in the whole component. What is cut over tensor-parallel ranks is
marked so (`dslaunch.runtime.tensor_parallel`), and outputs are equal on all of them. A forward pass reaches every
parameter that trains, whatever is in the batch. `units`, where a module has it, lists what FSDP2 shards one by
one; `file_names` and `fresh` say how weights are read (`dslaunch.runtime.weights`).

A decoder whose layers attend together with another component's (`build.guests`, joined by shared_attention) makes
that component's layers too; between its stages it gives both streams, as `side_by_side` joins them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dslaunch.errors import ConfigError, listed
from dslaunch.planfile import Plan
from dslaunch.runtime.coupled import executed, guests_of, streams_of
from dslaunch.runtime.data import IGNORE, Batch
from dslaunch.runtime.naming import imported
from dslaunch.runtime.supported import Spec, tokens_after, tokens_between
from dslaunch.runtime.tensor_parallel import ALONE, Shard

COUNT_TOLERANCE = 0.05
"""How far the parameters of a module may be from those that the plan's memory was reckoned with."""


@dataclass(frozen=True)
class Piece:
    """What a rank holds of a component: one pipeline stage, cut over a tensor-parallel group."""

    layers: range
    first: bool = True
    last: bool = True
    shard: Shard = ALONE


@dataclass(frozen=True)
class Build:
    """What a factory is asked for."""

    name: str
    """The component's, in the model's file."""
    spec: Spec
    """Its settings, as plan.json holds them."""
    args: Mapping[str, Any]
    """Its `module_args`."""
    piece: Piece
    recompute: str
    """none | selective (attention's core) | full (each layer)"""
    from_layer: int
    """The layer that the next component reads; -1: the last."""
    tokens: int
    """Tokens per sample that it passes on; where a sample has fewer, what stands behind them is never read."""
    between: int
    """Tokens per sample between its pipeline stages."""
    guests: Mapping[str, Spec] = field(default_factory=dict)
    """Settings of the components whose layers attend in its own (`shared_attention`): it makes them too."""
    streams: tuple[tuple[int, int], ...] = ()
    """With guests: (tokens, width) of a sample's own stream, and of each guest's."""

    def argument(self, key: str, kind: type, default: Any = None) -> Any:
        """`module_args.KEY`; ConfigError where it is missing, without a default, or of another type."""
        value = self.args.get(key, default)
        if not isinstance(value, kind):
            raise self.fault(f"module_args.{key}", value, f"a {kind.__name__}")
        return value

    def fault(self, key: str, found: object, allowed: str) -> ConfigError:
        return ConfigError(f"model.components.{self.name}.{key}: found {found!r}. Allowed: {allowed}.")


def build_for(plan: Plan, name: str, piece: Piece, from_layer: int) -> Build:
    specs, every = plan.model["components"], plan.model["edges"]
    _, edges = executed(specs, every)
    between = tokens_between(name, specs, edges, plan.training.seq_len)
    guests = {guest: specs[guest] for guest in guests_of(name, every)}
    return Build(
        name, specs[name], specs[name].get("module_args", {}), piece, plan.components[name].recompute, from_layer,
        tokens_after(name, edges), between, guests,
        tuple(streams_of(name, specs, every, between)) if guests else (),
    )  # fmt: skip


def side_by_side(streams: Sequence[Tensor]) -> Tensor:
    """What a stage before the last gives of a component with guests: streams [B, S, H] as [B, 1, all S * H]."""
    return torch.cat([stream.flatten(1) for stream in streams], dim=1).unsqueeze(1)


def apart(x: Tensor, streams: Sequence[tuple[int, int]]) -> list[Tensor]:
    """The streams, each [B, S, H], that `side_by_side` joined."""
    parts = torch.split(x.squeeze(1), [tokens * width for tokens, width in streams], dim=1)
    return [part.view(-1, *shape) for part, shape in zip(parts, streams, strict=True)]


def call_factory(build: Build) -> nn.Module:
    """The module that the component's factory gives.

    Raises:
        ConfigError: there is no such factory, or it gives something else.
    """
    target = build.spec["module"]
    made = imported(target, f"model.components.{build.name}.module")(build)
    if not isinstance(made, nn.Module):
        raise build.fault("module", f"{target}, which gives a {type(made).__name__}", "one that gives a nn.Module")
    made.dslaunch_own = True  # type: ignore[assignment]
    return made


def is_own(module: nn.Module) -> bool:
    """Whether a factory made it: it is called with (x, batch)."""
    return hasattr(module, "dslaunch_own")


def reads(module: nn.Module) -> bool:
    """Whether a module of one's own wants the micro-batch."""
    return bool(getattr(module, "reads", False))


def judged_count(module: nn.Module, batch: Batch) -> Tensor:
    """How many terms the trunk's loss has in `batch`."""
    judged: Callable[[Batch], Tensor] = getattr(module, "judged", _labels)
    return judged(batch)


def _labels(batch: Batch) -> Tensor:
    return judged_in(batch.labels).sum()


def judged_in(labels: Tensor) -> Tensor:
    """Which of labels[:, 1:] the loss falls on."""
    return labels[:, 1:] != IGNORE


def check_count(plan: Plan, name: str, whole: nn.Module) -> None:
    """Refuse a module whose size is not the one that the plan was made with.

    Args:
        whole: the component, uncut; may be on the meta device.
    """
    found, guests = sum(p.numel() for p in whole.parameters()), guests_of(name, plan.model["edges"])
    planned = sum(plan.components[each].params for each in (name, *guests))
    if planned and abs(found - planned) > COUNT_TOLERANCE * planned:
        raise ConfigError(
            f"model.components.{name}: {plan.model['components'][name]['module']} makes {found:,} parameters; the "
            f"plan's memory was reckoned with {planned:,}, by the settings of {listed((name, *guests))}. Make "
            "them agree, and plan again."
        )
