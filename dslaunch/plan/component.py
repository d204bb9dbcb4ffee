"""One component of a larger model, as a model of its own."""

from __future__ import annotations

from collections.abc import Sequence

from dslaunch.errors import ConfigError, listed, nearest
from dslaunch.model.tokens import own_tokens
from dslaunch.schema.config import RunConfig
from dslaunch.schema.model import Mlp, Model, Other


def alone(config: RunConfig, name: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration with `name` as the whole model; tokens that others join stand in its sequence still.

    Args:
        overrides: KEY=VALUE words that made the configuration, none of which may be left without effect.

    Raises:
        ConfigError: there is no such component, it is nothing without another, or an override is about what is
            left out.
    """
    model = config.model
    _require_whole(model, name)
    _require_used(config, name, overrides)
    reduced = Model(
        name=f"{model.name}.{name}",
        source=model.source,
        weights=model.weights,
        components={name: model.components[name]},
    )
    kept = {key: value for key, value in config.strategy.components.items() if key == name}
    seq_len = own_tokens(model, name, config.training.seq_len)
    return config.model_copy(
        update={
            "name": f"{config.name}.{name}",
            "model": reduced,
            "training": config.training.model_copy(update={"seq_len": seq_len}),
            "strategy": config.strategy.model_copy(update={"components": kept}),
        }
    )


def _require_used(config: RunConfig, name: str, overrides: Sequence[str]) -> None:
    others = config.model.components.keys() - {name}
    tokens = own_tokens(config.model, name, config.training.seq_len)
    lines = []
    for key in (word.partition("=")[0] for word in overrides):
        path = key.split(".")
        if _component_of(path) in others:
            lines.append(f"{key}: --component {name} leaves that out, so it would change nothing. Take one away")
        if key == "training.seq_len" and tokens != config.training.seq_len:
            lines.append(f"{key}: --component {name} runs over the {tokens} tokens of its own. Leave it out")
    if lines:
        raise ConfigError("\n".join(lines))


def _component_of(path: Sequence[str]) -> str:
    """The component that a key of the command line is about; empty where it is about none."""
    at = {"strategy": 1, "layouts": 2}.get(path[0], 2 if path[:2] == ["model", "components"] else 0)
    at += path[:2] == ["strategy", "components"]
    return path[at] if 0 < at < len(path) else ""


def _require_whole(model: Model, name: str) -> None:
    if name not in model.components:
        raise ConfigError(
            f"--component {name}: {model.name} has no such component. It has {listed(model.components)}."
            f"{nearest(name, model.components)}"
        )
    if isinstance(model.components[name], Mlp | Other):
        raise ConfigError(
            f"--component {name}: it has no layers that a framework could train alone. Components that have are "
            f"{listed(n for n, c in model.components.items() if not isinstance(c, Mlp | Other))}"
        )
    for edge in model.edges:
        reads = {"cross_attention": (edge.to,), "shared_attention": (edge.source, edge.to)}.get(edge.join, ())
        if name in reads:
            raise ConfigError(
                f"--component {name}: its layers attend over the edge {edge.source} -> {edge.to} "
                f"({edge.join}), so it is nothing without its other end. Leave --component out"
            )
