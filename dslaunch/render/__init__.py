"""A plan becomes files: `render` gives name -> text, and touches no disk but to read templates.

    templates (site's, then package's) + context (dslaunch.context/1) -> text -> read again and compared
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dslaunch.errors import ConfigError, listed
from dslaunch.planfile import Plan, Prediction, to_json
from dslaunch.render.context import Context, as_variables, context
from dslaunch.render.deepspeed import deepspeed_config, trained
from dslaunch.render.extra import merge_deepspeed, merge_megatron
from dslaunch.render.manifest import MANIFEST, manifest
from dslaunch.render.megatron import megatron_flags
from dslaunch.render.program import launch_blocker
from dslaunch.render.templates import Templates, require_json, require_lines
from dslaunch.schema.config import RunConfig

__all__ = ["MANIFEST", "launch_blocker", "manifest", "render"]

_SCRIPTS = ("launch.sh", "job.sbatch", "rank.sh", "env.sh")


def render(
    plan: Plan, prediction: Prediction, config: RunConfig, template_dirs: list[Path]
) -> dict[str, str]:
    """Every file of a run folder: name -> text, sorted by name; the same arguments give the same bytes.

    Args:
        config: what the plan was made from; SLURM, container, environment and engine.extra are read from it.
        template_dirs: folders of templates, the site's first.

    Raises:
        ConfigError: something that a framework or a script cannot hold, or a mistake in a template.
    """
    if plan.engine.name not in _ENGINE_FILES:
        raise ConfigError(
            f"engine is {plan.engine.name}: no files can be rendered for it; "
            f"allowed are {listed(sorted(_ENGINE_FILES))}"
        )
    templates = Templates(template_dirs)
    configurations = _ENGINE_FILES[plan.engine.name](plan, config)
    ctx = context(plan, config, ds_config="ds_config.json" in configurations)
    files = {"plan.json": to_json(plan), "prediction.json": to_json(prediction)}
    files |= {name: _ds_config(templates, ctx, wanted) for name, wanted in configurations.items()}
    if ctx.megatron:
        files["megatron_args.txt"] = _megatron_args(templates, ctx, plan, config)
    if ctx.hosts:
        files["hostfile"] = _hostfile(templates, ctx)
    if ctx.remote:
        files["ds_env"] = _ds_env(templates, ctx)
    files |= {name: templates.render(f"{name}.j2", as_variables(ctx)) for name in _SCRIPTS}
    files[MANIFEST] = manifest(files)
    return dict(sorted(files.items()))


def _one_for_all(plan: Plan, config: RunConfig) -> dict[str, dict[str, Any]]:
    """One strategy for the whole model; the first component that trains stands for all."""
    component = next(each for each in plan.components.values() if each.trainable)
    made = deepspeed_config(plan, component, sum(map(trained, plan.components.values())), shared=True)
    return {"ds_config.json": merge_deepspeed(made, config.engine.extra)}


def _one_each(plan: Plan, config: RunConfig) -> dict[str, dict[str, Any]]:
    """A configuration for each component that trains; a frozen one has no engine."""
    made = {
        name: deepspeed_config(plan, component, trained(component), shared=False)
        for name, component in plan.components.items()
        if component.trainable
    }
    return {f"ds_config.{name}.json": merge_deepspeed(each, config.engine.extra) for name, each in made.items()}


def _none(plan: Plan, config: RunConfig) -> dict[str, dict[str, Any]]:
    """No DeepSpeed; engine.extra has no reader then, but Megatron's flags."""
    if config.engine.extra and plan.engine.name != "megatron":
        key = next(iter(config.engine.extra))
        raise ConfigError(
            f"engine.extra.{key}: engine {plan.engine.name} has no configuration file that it could go into. "
            "Take it out, or hand it to your script after --"
        )
    return {}


_ENGINE_FILES: dict[str, Callable[[Plan, RunConfig], dict[str, dict[str, Any]]]] = {
    "deepspeed": _one_for_all,
    "native": _one_each,
    "megatron": _none,
    "torch": _none,
}


def _ds_config(templates: Templates, ctx: Context, wanted: dict[str, Any]) -> str:
    name = "ds_config.json.j2"
    text = templates.render(name, {**as_variables(ctx), "config": wanted})
    require_json(templates.path(name), text, wanted)
    return text


def _megatron_args(templates: Templates, ctx: Context, plan: Plan, config: RunConfig) -> str:
    name = "megatron_args.txt.j2"
    flags = merge_megatron(megatron_flags(plan, config), config.engine.extra, plan.engine.version)
    pairs = [(flag, list(values)) for flag, values in flags.items()]
    text = templates.render(name, {**as_variables(ctx), "flags": pairs})
    require_lines(templates.path(name), text, [" ".join((flag, *values)) for flag, values in flags.items()])
    return text


def _hostfile(templates: Templates, ctx: Context) -> str:
    name = "hostfile.j2"
    text = templates.render(name, as_variables(ctx))
    require_lines(templates.path(name), text, [f"{host.name} slots={host.slots}" for host in ctx.hosts])
    return text


def _ds_env(templates: Templates, ctx: Context) -> str:
    """Lines of NAME=VALUE; DeepSpeed's runner stops at a blank line or a comment, so there is neither."""
    name = "ds_env.j2"
    text = templates.render(name, as_variables(ctx))
    wanted = "".join(f"{each.name}={each.value}\n" for each in ctx.carried)
    if text != wanted:
        raise ConfigError(
            f"{templates.path(name)}: it must render one NAME=VALUE a line of `carried`, nothing else"
        )
    return text
