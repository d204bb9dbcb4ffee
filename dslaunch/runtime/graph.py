"""The model as a whole: components joined by the edges of the plan, ending in the decoder's loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dslaunch.errors import ConfigError, listed
from dslaunch.planfile import Plan
from dslaunch.runtime.components import Decoder, Piece, ViT, build_component, judged_in
from dslaunch.runtime.supported import Spec, trunk_of

TABLE_STD = 0.02


class Graph(nn.Module):
    """Images and text in, the loss out.

    A component's input is what its edges bring: `channel` joins features of the same tokens, `add` adds
    them, `sequence` puts tokens one after the other. The decoder takes `sequence` edges only: their tokens
    stand before its text.
    """

    def __init__(self, parts: dict[str, nn.Module], edges: list[dict[str, Any]], trunk: str) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(parts)
        self.edges = edges
        self.trunk = trunk

    def forward(self, images: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
        """images [B, C, h, w], tokens and labels [B, T] -> the mean loss over labels that are not -100."""
        incoming = self._incoming(self.trunk)
        prefix = self._joined(incoming, images) if incoming else None
        total: Tensor = self.parts[self.trunk](prefix, tokens, labels)
        return total / judged_in(labels).sum()

    def _incoming(self, name: str) -> list[dict[str, Any]]:
        return [edge for edge in self.edges if edge["to"] == name]

    def _output(self, name: str, images: Tensor) -> Tensor:
        part = self.parts[name]
        out: Tensor = part(images if isinstance(part, ViT) else self._joined(self._incoming(name), images))
        return out

    def _joined(self, edges: list[dict[str, Any]], images: Tensor) -> Tensor:
        return joined(edges, [self._output(edge["from"], images) for edge in edges])


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
    initialise(model, plan.training.seed)
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError("model.components: every component has `train: nothing`; let at least one train.")
    return model


def unset_model(plan: Plan) -> Graph:
    """The modules of `plan`, without start values; on the device that torch makes tensors on."""
    specs: dict[str, Spec] = plan.model["components"]
    edges: list[dict[str, Any]] = list(plan.model["edges"])
    parts = {name: build_piece(plan, name, None) for name in specs}
    return Graph(parts, edges, trunk_of(specs))


def build_piece(plan: Plan, name: str, piece: Piece | None) -> nn.Module:
    """What a rank holds of component `name` (None: all), without start values; frozen where it is."""
    spec: Spec = plan.model["components"][name]
    layer = _layer_read(name, list(plan.model["edges"]))
    module = build_component(spec, plan.components[name].recompute, layer, piece)
    if spec["train"] == "nothing":
        module.requires_grad_(False)
    return module


def initialise(model: nn.Module, seed: int) -> None:
    """The start values of every parameter of `model`."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, value in start_values(model, seed):
            parameters[name].copy_(value)


def start_values(model: nn.Module, seed: int) -> Iterator[tuple[str, Tensor]]:
    """(name, value in fp32 on the host): matrices with variance 1 / inputs, tables with standard deviation 0.02,
    biases zero; norms stay one, and are left out.

    The draws follow the order of the modules and the seed alone. `model` may be on the meta device.
    """
    generator = torch.Generator().manual_seed(seed)
    for prefix, module in model.named_modules():
        matrix = isinstance(module, nn.Linear | nn.Conv2d)
        for name, parameter in module.named_parameters(prefix, recurse=False):
            if parameter.ndim >= 2:
                std = parameter[0].numel() ** -0.5 if matrix else TABLE_STD
                yield name, torch.empty(parameter.shape).normal_(0.0, std, generator=generator)
            elif name.endswith("bias"):
                yield name, torch.zeros(parameter.shape)


def parameter_groups(model: Graph, plan: Plan) -> list[dict[str, Any]]:
    """One group per component that trains, the decoder first, with its learning rate and weight decay."""
    names = sorted(model.parts, key=lambda name: not isinstance(model.parts[name], Decoder))
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
