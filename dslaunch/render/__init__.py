"""A plan becomes files: `render` gives name -> text, and touches no disk but to read templates.

templates (site's, then package's) + context (dslaunch.context/1) -> text -> read again and compared
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dslaunch.errors import ConfigError, listed
from dslaunch.planfile import ComponentPlan, Plan, Prediction, to_json
from dslaunch.render import huggingface, kubernetes, profile
from dslaunch.render.accelerate import accelerate_config, accelerate_follows, torch_settings
from dslaunch.render.context import Context, as_variables, context
from dslaunch.render.deepspeed import RUNTIME_MODULE, deepspeed_config, trained
from dslaunch.render.deepspeed_modes import with_modes
from dslaunch.render.extra import merge_deepspeed
from dslaunch.render.manifest import MANIFEST, manifest
from dslaunch.render.megatron import megatron_flags
from dslaunch.render.megatron_deepspeed import megatron_deepspeed_config, megatron_deepspeed_flags
from dslaunch.render.megatron_flags import Flags
from dslaunch.render.megatron_mimo import megatron_mimo_flags
from dslaunch.render.preflight import preflight_plan
from dslaunch.render.program import launch_blocker
from dslaunch.render.templates import Templates, require_json, require_lines, require_yaml
from dslaunch.runtime.checks import check_executable
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
    if plan.program.module == RUNTIME_MODULE:
        check_executable(plan)
    templates = Templates(template_dirs)
    configurations = _ENGINE_FILES[plan.engine.name](plan, config)
    ctx = context(plan, config, ds_config="ds_config.json" in configurations)
    files = {"plan.json": to_json(plan), "prediction.json": to_json(prediction)}
    files["preflight.json"] = to_json(preflight_plan(plan, config))
    files |= {name: _ds_config(templates, ctx, wanted) for name, wanted in configurations.items()}
    if arguments := _ARGUMENTS.get(plan.engine.name):
        files["megatron_args.txt"] = _megatron_args(templates, ctx, arguments(plan, config))
    if plan.engine.name == "torch" and plan.program.module != RUNTIME_MODULE:
        if accelerate_follows(plan):
            files["accelerate.yaml"] = _accelerate(templates, ctx, accelerate_config(plan))
        files["torch.json"] = to_json(torch_settings(plan, config))
    if ctx.profile:
        files[profile.FILE] = profile.profiled_program()
    if ctx.bind_cpus:
        files[profile.CORES] = profile.binding_program()
    if ctx.counters:
        files[profile.COUNTERS] = profile.counting_program()
    if config.engine.huggingface:
        files[huggingface.ARGUMENTS] = to_json(huggingface.arguments(plan, _first_trained(plan)))
    if ctx.hosts:
        files["hostfile"] = _hostfile(templates, ctx)
    if ctx.stage_to:
        files["stage.sh"] = templates.render("stage.sh.j2", as_variables(ctx))
    if ctx.remote:
        files["ds_env"] = _ds_env(templates, ctx)
    files |= {name: templates.render(f"{name}.j2", as_variables(ctx)) for name in _SCRIPTS}
    if plan.launcher.name == "kubernetes":
        files[kubernetes.FILE] = _kubernetes(
            templates, ctx, kubernetes.kubernetes_manifests(plan, config, files)
        )
    files[MANIFEST] = manifest(files)
    return dict(sorted(files.items()))


def _one_for_all(plan: Plan, config: RunConfig) -> dict[str, dict[str, Any]]:
    """One strategy for the whole model; the first component that trains stands for all."""
    component, by_trainer = _first_trained(plan), config.engine.huggingface
    gradients = sum(map(trained, plan.components.values()))
    made = deepspeed_config(plan, component, gradients, shared=True, scheduled=not by_trainer)
    made = with_modes(made, plan, config, component)
    made = merge_deepspeed(made, config.engine.extra, plan.engine.version)
    return {"ds_config.json": huggingface.with_auto(made) if by_trainer else made}


def _first_trained(plan: Plan) -> ComponentPlan:
    return next(each for each in plan.components.values() if each.trainable)


def _one_each(plan: Plan, config: RunConfig) -> dict[str, dict[str, Any]]:
    """A configuration for each component that trains; a frozen one has no engine, and dslaunch.runtime has one for
    all whose layers attend together."""
    joined = plan.program.module == RUNTIME_MODULE
    guests = {edge.to for edge in config.model.edges if joined and edge.join == "shared_attention"}
    made = {
        name: deepspeed_config(plan, component, trained(component), shared=False)
        for name, component in plan.components.items()
        if component.trainable and name not in guests
    }
    extra, version = config.engine.extra, plan.engine.version
    return {f"ds_config.{name}.json": merge_deepspeed(each, extra, version) for name, each in made.items()}


def _beside_arguments(plan: Plan, config: RunConfig) -> dict[str, dict[str, Any]]:
    """What DeepSpeed reads under Megatron-DeepSpeed's script."""
    return {"ds_config.json": megatron_deepspeed_config(plan, config)}


def _none(plan: Plan, config: RunConfig) -> dict[str, dict[str, Any]]:
    """No DeepSpeed; engine.extra has no reader then, but a script's flags."""
    if config.engine.extra and plan.engine.name not in _ARGUMENTS:
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
    "megatron_deepspeed": _beside_arguments,
    "megatron_mimo": _none,
    "torch": _none,
}
_ARGUMENTS: dict[str, Callable[[Plan, RunConfig], Flags]] = {
    "megatron": megatron_flags,
    "megatron_deepspeed": megatron_deepspeed_flags,
    "megatron_mimo": megatron_mimo_flags,
}


def _ds_config(templates: Templates, ctx: Context, wanted: dict[str, Any]) -> str:
    name = "ds_config.json.j2"
    text = templates.render(name, {**as_variables(ctx), "config": wanted})
    require_json(templates.path(name), text, wanted)
    return text


def _accelerate(templates: Templates, ctx: Context, wanted: dict[str, Any]) -> str:
    name = "accelerate.yaml.j2"
    text = templates.render(name, {**as_variables(ctx), "config": wanted})
    require_yaml(templates.path(name), text, wanted)
    return text


def _kubernetes(templates: Templates, ctx: Context, wanted: list[dict[str, Any]]) -> str:
    name = "kubernetes.yaml.j2"
    text = templates.render(name, {**as_variables(ctx), "manifests": wanted})
    require_yaml(templates.path(name), text, wanted)
    return text


def _megatron_args(templates: Templates, ctx: Context, flags: Flags) -> str:
    name = "megatron_args.txt.j2"
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
