"""One component of a larger model, as a model of its own."""

from __future__ import annotations

from dslaunch.errors import ConfigError, listed, nearest
from dslaunch.model.tokens import own_tokens
from dslaunch.schema.config import RunConfig
from dslaunch.schema.model import Mlp, Model, Other


def alone(config: RunConfig, name: str) -> RunConfig:
    """The configuration with `name` as the whole model; tokens that others join stand in its sequence still.

    Raises:
        ConfigError: there is no such component, or it is nothing without another.
    """
    model = config.model
    _require_whole(model, name)
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
