"""compose -> validate -> plan -> render -> check: the steps that every verb takes, in their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dslaunch.errors import ConfigError, PlanError
from dslaunch.output import step
from dslaunch.paths import data_dirs

if TYPE_CHECKING:
    from dslaunch.planfile import Finding, Plan, Prediction
    from dslaunch.schema.config import RunConfig


@dataclass(frozen=True)
class Request:
    """What was typed, of the part that decides a plan."""

    overrides: tuple[str, ...]
    """KEY=VALUE words, recipe= among them."""
    site: Path | None
    accepted: tuple[str, ...]
    script_arguments: tuple[str, ...]
    """What follows --."""
    component: str = ""
    """The component that is planned alone; empty: the whole model."""


def configured(request: Request) -> RunConfig:
    """compose and validate."""
    from dslaunch.compose import compose
    from dslaunch.schema.validate import validate

    recipes = [word.removeprefix("recipe=") for word in request.overrides if word.startswith("recipe=")]
    if len(recipes) != 1 or not recipes[0]:
        found = f"is given {len(recipes)} times" if len(recipes) > 1 else "is missing"
        raise ConfigError(
            f"recipe= {found}. Give one, such as recipe=vla_tiny; `dslaunch recipes` lists them."
        )
    if request.site is not None and not request.site.is_dir():
        raise ConfigError(f"--config-dir {request.site}: no such folder.")
    overrides = [word for word in request.overrides if not word.startswith("recipe=")]
    composed = compose(recipes[0], overrides, request.site)
    given = {"script_args": list(request.script_arguments)} if request.script_arguments else {}
    config = validate({**composed.tree, **given}, composed.locate)
    if request.script_arguments and not (config.script or config.module):
        raise ConfigError("arguments follow --, but no script is named: script=train.py -- ARGS")
    if request.component:
        from dslaunch.plan.component import alone

        config = alone(config, request.component, overrides)
    return _of_site(config, config.engine.name, request.site)


def _of_site(config: RunConfig, engine: str, folder: Path | None) -> RunConfig:
    """The configuration for the version that the site has of the engine's framework, where none is asked for."""
    from dslaunch.rules.site import site

    version = site(folder).version_for(engine)
    if config.engine.version or not version:
        return config
    pinned = config.engine.model_copy(update={"name": engine, "version": version})
    return config.model_copy(update={"engine": pinned})


def planned(request: Request) -> tuple[RunConfig, Plan, Prediction]:
    """... and plan."""
    from dslaunch.hardware.efficiency import of_site
    from dslaunch.plan.planner import plan, settled
    from dslaunch.rules.site import site
    from dslaunch.rules.waivers import require_current

    require_current(request.accepted)
    with step("compose and validate"):
        config, accepted = configured(request), (*request.accepted, *site(request.site).accept)
    with step("plan"):
        tables = of_site(request.site)
        made, prediction = plan(config, tables, accepted)
        chosen = _of_site(config, made.engine.name, request.site)
        if chosen.engine.version not in (config.engine.version, made.engine.version):
            config = chosen
            made, prediction = plan(config, tables, accepted)
    return settled(config, made), made, prediction


def rendered(request: Request) -> tuple[RunConfig, Plan, dict[str, str], tuple[Finding, ...]]:
    """... and render and check; nothing that is refused leaves here. The findings are those that stand.

    Raises:
        PlanError: the plan does not fit.
        ConfigError: a rule finds an error in the rendered files.
    """
    from dslaunch.launch.checks import check_hostfile
    from dslaunch.rules.checking import fails
    from dslaunch.rules.output import format_text
    from dslaunch.rules.waivers import waive

    config, plan, prediction = planned(request)
    check_hostfile(plan, Path.cwd())
    if stopping := refusing(prediction.findings, plan.accepted):
        raise PlanError("\n".join(f"{f.rule}: {f.message}; {f.fix}" for f in stopping))
    files, findings = _files(request, config, plan, prediction)
    standing, _ = waive(findings, plan.accepted)
    if fails(standing, "error"):
        raise ConfigError(format_text(standing))
    return config, plan, files, standing


def judged(request: Request) -> tuple[RunConfig, Plan, Prediction, tuple[Finding, ...]]:
    """... and every finding on the plan and on its files; those of the plan are in its prediction.json."""
    config, plan, prediction, _, findings = reviewed(request)
    return config, plan, prediction, findings


def reviewed(
    request: Request,
) -> tuple[RunConfig, Plan, Prediction, dict[str, str], tuple[Finding, ...]]:
    """The same with the files: what a review looks at, of a plan that need not fit."""
    config, plan, prediction = planned(request)
    return config, plan, prediction, *_files(request, config, plan, prediction)


def explanation(request: Request, prediction: Prediction) -> list[str]:
    """Why the plan is what it is, what would change it, and the smallest cluster that would do."""
    from dslaunch.hardware.efficiency import of_site
    from dslaunch.plan.explain import explain

    words = [word for word in request.overrides if not word.startswith("strategy=")]
    free = configured(replace(request, overrides=(*words, "strategy=auto")))
    with step("explain"):
        return explain(configured(request), free, prediction, of_site(request.site))


def refusing(findings: Sequence[Finding], accepted: Sequence[str]) -> list[Finding]:
    """Findings of the plan's own that stop it, unless the user accepts them."""
    from dslaunch.plan.findings import REFUSING
    from dslaunch.rules.waivers import waive

    standing, _ = waive(findings, accepted)
    return [f for f in standing if f.rule in REFUSING and f.severity == "error"]


def _files(
    request: Request, config: RunConfig, plan: Plan, prediction: Prediction
) -> tuple[dict[str, str], tuple[Finding, ...]]:
    from dslaunch.render import render
    from dslaunch.render.blueprint import with_blueprint
    from dslaunch.rules.checking import check_rendered
    from dslaunch.rules.site import site

    with step("render"):
        files = render(plan, prediction, config, data_dirs("templates", request.site))
        files = with_blueprint(files, configured(request), request.site, plan.accepted)
    with step("check"):
        return files, check_rendered(plan, files, selection=site(request.site).selection)
