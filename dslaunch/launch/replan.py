"""Plan a run anew for other nodes: the configuration that it was launched with, on a cluster of another size.

Global batch and learning rate stay. What the configuration pins is kept or refused, as in any plan; a recipe's own
layouts, which are for the sizes that it names, give way to strategy=auto under the same engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dslaunch.errors import ConfigError, PlanError
from dslaunch.hardware.efficiency import of_site
from dslaunch.launch.reload import conversion_fault, reload_fault
from dslaunch.paths import data_dirs
from dslaunch.plan.findings import REFUSING
from dslaunch.plan.planner import plan, settled
from dslaunch.planfile import ComponentPlan, Plan
from dslaunch.render import render
from dslaunch.render.blueprint import Blueprint, with_blueprint
from dslaunch.rules.checking import check_rendered, fails
from dslaunch.rules.output import format_text
from dslaunch.rules.site import site
from dslaunch.rules.waivers import waive
from dslaunch.schema.config import RunConfig
from dslaunch.schema.strategy import Strategy


@dataclass(frozen=True)
class Replanned:
    """A plan for other nodes, and its files."""

    plan: Plan
    files: Mapping[str, str]
    refused: tuple[str, ...]
    """What was tried for more nodes, each with why not."""


class NoPlanError(PlanError):
    """No number of nodes that is left can be planned for; the message says why, one line a number."""


def replan(
    blueprint: Blueprint, before: Plan, most: int, least: int, hosts: Sequence[str], work_dir: Path, *,
    zero_saved: bool,
) -> Replanned:  # fmt: skip
    """The plan for the largest number of nodes from `most` down to `least` for which there is one.

    Args:
        before: the plan that wrote the newest checkpoint.
        hosts: the `most` hosts, of which the first ones are taken; empty where the scheduler names them.
        work_dir: what the site's folder starts from.
        zero_saved: the newest checkpoint has ZeRO states of DeepSpeed, a file of each rank.

    Raises:
        NoPlanError: there is none.
    """
    folder = work_dir / blueprint.site if blueprint.site else None
    refused: list[str] = []
    for nodes in range(most, least - 1, -1):
        for config in _configurations(blueprint.config, before, nodes, hosts[:nodes]):
            try:
                made, files = _reading(config, blueprint, folder, before, zero_saved=zero_saved)
            except (PlanError, ConfigError) as error:
                refused.append(f"{nodes} nodes, strategy {config.strategy.name}: {error}")
                continue
            return Replanned(made, files, tuple(refused))
    raise NoPlanError("\n".join(refused) or f"{most} nodes are left, and restart.min_nodes is {least}")


def _reading(
    config: RunConfig, blueprint: Blueprint, folder: Path | None, before: Plan, *, zero_saved: bool
) -> tuple[Plan, dict[str, str]]:
    """A plan that reads what `before` saved, as it is or once DeepSpeed has converted it; errors as `rendered`."""
    made, files = rendered(config, blueprint, folder)
    fault = reload_fault(before, made)
    if not fault:
        return made, files
    if reason := conversion_fault(before, made):
        raise PlanError(f"{fault} ({reason})")
    if config.launcher.container.kind != "none":
        raise PlanError(f"{fault} (what converts it runs outside of the container, launcher.container)")
    if not zero_saved:
        return made, files
    checkpoint = config.checkpoint.model_copy(update={"universal": True})
    return rendered(config.model_copy(update={"checkpoint": checkpoint}), blueprint, folder)


def _configurations(config: RunConfig, before: Plan, nodes: int, hosts: Sequence[str]) -> Iterator[RunConfig]:
    """What is tried for so many nodes, in this order."""
    cluster = config.cluster
    size = {"gpus": None, "nodes": nodes, "gpus_per_node": cluster.slots, "hosts": tuple(hosts)}
    engine = {"name": before.engine.name, "version": before.engine.version}
    changes: dict[str, object] = {
        "cluster": cluster.model_copy(update=size),
        "engine": config.engine.model_copy(update=engine),
    }
    if hosts:
        named = {"hostfile": "", "hosts_command": "", "include": "", "exclude": ""}
        changes["launcher"] = config.launcher.model_copy(update=named)
    resized = config.model_copy(update=changes)
    yield resized
    if config.strategy.name == "layouts":
        yield resized.model_copy(update={"strategy": Strategy(name="auto")})


def rendered(config: RunConfig, blueprint: Blueprint, folder: Path | None) -> tuple[Plan, dict[str, str]]:
    """Plan, render and check, as the launch did.

    Raises:
        PlanError: it cannot be, or does not fit.
        ConfigError: it cannot be rendered, or a rule finds an error.
    """
    made, prediction = plan(config, of_site(folder), blueprint.accepted)
    standing, _ = waive(prediction.findings, made.accepted)
    if stopping := [each for each in standing if each.rule in REFUSING and each.severity == "error"]:
        raise PlanError("; ".join(each.message for each in stopping))
    files = render(made, prediction, settled(config, made), data_dirs("templates", folder))
    found, _ = waive(check_rendered(made, files, selection=site(folder).selection), made.accepted)
    if fails(found, "error"):
        raise ConfigError(format_text(found))
    return made, with_blueprint(files, blueprint.config, blueprint.site, blueprint.accepted)


def layout_words(plan: Plan) -> str:
    """Such as `2 nodes x 1 GPUs; llm: dp 2, ZeRO-1, 4 passes of 4 samples`."""
    parts = dict.fromkeys(map(_grid, plan.components.values()))
    names = [", ".join(name for name, each in plan.components.items() if _grid(each) == grid) for grid in parts]
    rows = [f"{name}: {grid}" for name, grid in zip(names, parts, strict=True)]
    return f"{plan.cluster.nodes} nodes x {plan.cluster.gpus_per_node} GPUs; {'; '.join(rows)}"


def _grid(component: ComponentPlan) -> str:
    sizes = [f"{name} {size}" for name in ("tp", "pp", "cp", "ep") if (size := getattr(component, name)) > 1]
    batch = f"{component.num_microbatches} passes of {component.micro_batch} samples"
    return ", ".join([*sizes, f"dp {component.dp}", f"ZeRO-{component.zero}", batch])
