"""The model as a whole: components joined by the edges of the plan, ending in the decoder's loss."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dslaunch.errors import ConfigError, listed
from dslaunch.planfile import Plan
from dslaunch.runtime.components import Decoder, ViT, build_component, whole
from dslaunch.runtime.coupled import executed
from dslaunch.runtime.data import Batch
from dslaunch.runtime.own import Piece, build_for, call_factory, check_count, is_own, judged_count, reads
from dslaunch.runtime.supported import Spec, tokens_after, trunk_of
from dslaunch.runtime.tensor_parallel import ALONE
from dslaunch.runtime.weights import fresh_in, read_weights
from dslaunch.runtime.world import World

TABLE_STD = 0.02


class Graph(nn.Module):
    """Images and text in, the loss out.

    A component's input is what its edges bring: `channel` joins features of the same tokens, `add` adds
    them, `sequence` puts tokens one after the other. The decoder takes `sequence` edges only: their tokens
    stand before its text. The loss is the decoder's, or that of a head which reads it.
    """

    def __init__(self, parts: dict[str, nn.Module], edges: list[dict[str, Any]], trunk: str) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(parts)
        self.edges = edges
        self.trunk = trunk
        self.judge = next((edge["to"] for edge in edges if edge["from"] == trunk), trunk)

    def forward(self, batch: Batch, share: float | None = None) -> Tensor:
        """The loss summed over what is judged (labels that are not -100, or what a head counts), over `share`.

        Args:
            share: as `counted` gives it; by default what is judged in `batch`.
        """
        return self._output(self.judge, batch) / (self.judged(batch) if share is None else share)

    def judged(self, batch: Batch) -> Tensor:
        """How many terms the loss of `batch` has."""
        return judged_count(self.parts[self.judge], batch)

    def _incoming(self, name: str) -> list[dict[str, Any]]:
        return [edge for edge in self.edges if edge["to"] == name]

    def _output(self, name: str, batch: Batch) -> Tensor:
        part, edges = self.parts[name], self._incoming(name)
        x = joined(edges, [self._output(edge["from"], batch) for edge in edges]) if edges else None
        out: Tensor = part(*arguments(part, x, batch))
        return out


@dataclass(frozen=True)
class Counted:
    """What the global batch of a step holds."""

    share: float
    """What is judged, over its micro-batches. Sums of micro-batches over it have a mean, over micro-batches and
    ranks, that is the one over all that is judged, however many labels each of them has."""
    images: int


def counted(graph: Graph, batches: Sequence[Batch], world: World, number: int) -> Counted:
    """Of step `number` (from 0), from each rank's micro-batches; every rank calls it.

    Raises:
        ConfigError: on every rank alike, where nothing is judged.
    """
    own = [int(sum(graph.judged(each) for each in batches)), int(sum(each.image_count for each in batches))]
    counts = torch.tensor(own, device=world.device)
    dist.all_reduce(counts)
    judged, images = counts.tolist()
    if not judged:
        raise no_label(number)
    return Counted(judged / (len(batches) * world.size), images)


def no_label(number: int) -> ConfigError:
    """Step `number` (from 0) has nothing to learn from."""
    return ConfigError(f"data.path: no token of step {number + 1} has a label, in the whole global batch.")


def arguments(part: nn.Module, x: Tensor | None, batch: Batch | None) -> tuple[Any, ...]:
    """What a component's module is called with, before its last stage and after.

    Args:
        x: what its edges bring, or the stage before.
        batch: the micro-batch, where the module reads it.
    """
    if is_own(part):
        return x, batch if reads(part) else None
    if isinstance(part, Decoder):
        return (x, batch.tokens, batch.labels) if batch else (x, None, None)
    return (batch.images if isinstance(part, ViT) and batch else x,)


def joined(edges: list[dict[str, Any]], outputs: list[Tensor]) -> Tensor:
    """What a component reads: the outputs that its edges bring, each edge by its own join."""
    x = outputs[0]
    for edge, other in zip(edges[1:], outputs[1:], strict=True):
        match edge["join"]:
            case "channel":
                x = torch.cat([x, other], dim=-1)
            case "add":
                x = x + other
            case "sequence":
                x = torch.cat([x, other], dim=1)
    return x


def build_model(plan: Plan) -> Graph:
    """The model of `plan` on the host in fp32, with the same weights on every rank and for every strategy.

    The graph is one that `check_model` let pass.

    Raises:
        ConfigError: nothing trains, or one tower is read at several layers.
    """
    model = unset_model(plan)
    initialise(model, plan.training.seed, given_weights(plan))
    for name, folder in given_weights(plan).items():
        read_weights(Path(folder), name, model.parts[name], model.parts[name], ALONE)
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError("model.components: every component has `train: nothing`; let at least one train.")
    return model


def unset_model(plan: Plan) -> Graph:
    """The modules of `plan`, without start values; on the device that torch makes tensors on."""
    specs, edges = executed(plan.model["components"], plan.model["edges"])
    parts = {name: build_piece(plan, name, None) for name in specs}
    for name, part in parts.items():
        if is_own(part):
            check_count(plan, name, part)
    return Graph(parts, edges, trunk_of(specs))


def build_piece(plan: Plan, name: str, piece: Piece | None) -> nn.Module:
    """What a rank holds of component `name` (None: all), without start values; frozen where it is."""
    spec: Spec = plan.model["components"][name]
    _, edges = executed(plan.model["components"], plan.model["edges"])
    layer = _layer_read(name, edges)
    if spec.get("module"):
        module = call_factory(build_for(plan, name, piece or whole(spec), layer))
    else:
        tokens = tokens_after(name, edges)
        module = build_component(spec, plan.components[name].recompute, layer, piece, tokens)
    if spec["train"] == "nothing":
        module.requires_grad_(False)
    return module


def given_weights(plan: Plan) -> dict[str, str]:
    """The folder that a component's weights come from, by component; those without start from random ones."""
    specs, _ = executed(plan.model["components"], plan.model["edges"])
    folders = {name: spec.get("weights") or plan.files.weights for name, spec in specs.items()}
    return {name: folder for name, folder in folders.items() if folder}


def initialise(model: nn.Module, seed: int, given: Collection[str] = ()) -> None:
    """The start values of every parameter of `model`, but of the components in `given`."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, value in start_values(model, seed, given):
            parameters[name].copy_(value)


def start_values(model: nn.Module, seed: int, given: Collection[str] = ()) -> Iterator[tuple[str, Tensor]]:
    """(name, value in fp32 on the host): matrices with variance 1 / inputs, tables with standard deviation 0.02,
    biases zero; norms stay one, and are left out. A vector that is neither is a token: drawn as a table.

    The draws follow the order of the modules and the seed alone. `model` may be on the meta device.

    Args:
        given: components that get their weights elsewhere, but for what is `fresh` in them.
    """
    generator = torch.Generator().manual_seed(seed)
    read = tuple(f"parts.{name}." for name in given)
    fresh = tuple(start + own for start in read for own in fresh_in(model.get_submodule(start[:-1])))
    for prefix, module in model.named_modules():
        if f"{prefix}.".startswith(read) and not f"{prefix}.".startswith(fresh):
            continue
        matrix = isinstance(module, nn.Linear | nn.Conv2d | nn.Conv3d)
        for name, parameter in module.named_parameters(prefix, recurse=False):
            if parameter.ndim >= 2:
                std = parameter[0].numel() ** -0.5 if matrix else TABLE_STD
                yield name, torch.empty(parameter.shape).normal_(0.0, std, generator=generator)
            elif name.endswith("bias"):
                yield name, torch.zeros(parameter.shape)
            elif not name.endswith(("weight", "scale")):
                yield name, torch.empty(parameter.shape).normal_(0.0, TABLE_STD, generator=generator)


def parameter_groups(model: Graph, plan: Plan) -> list[dict[str, Any]]:
    """One group per component that trains, the decoder first, with its learning rate and weight decay."""
    names = sorted(model.parts, key=lambda name: name != model.trunk)
    groups = []
    for name in names:
        trainable = [p for p in model.parts[name].parameters() if p.requires_grad]
        layout = plan.components[name]
        if trainable:
            groups.append({"params": trainable, "lr": layout.lr, "weight_decay": layout.weight_decay})
    return groups


def _layer_read(name: str, edges: list[dict[str, Any]]) -> int:
    layers = {edge["from_layer"] for edge in edges if edge["from"] == name}
    if len(layers) > 1:
        raise ConfigError(
            f"model.edges: {name} is read at layers {listed(sorted(layers))}; dslaunch.runtime reads one."
        )
    return int(layers.pop()) if layers else -1
