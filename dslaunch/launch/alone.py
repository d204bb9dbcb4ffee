"""A run's plan for one process of this machine: the same model, batch, order of samples and learning rate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from dslaunch.errors import ConfigError, PlanError
from dslaunch.launch.replan import rendered
from dslaunch.launch.twin import twins
from dslaunch.paths import data_dirs
from dslaunch.planfile import Plan
from dslaunch.render.blueprint import BLUEPRINT, read_blueprint
from dslaunch.run.checkpoints import SavedState
from dslaunch.schema.cluster import Cluster
from dslaunch.schema.config import RunConfig
from dslaunch.schema.strategy import Strategy
from dslaunch.schema.supervision import Restart

_RUNTIME = "dslaunch.runtime"
_DRIVERS = {"cuda": Path("/dev/nvidiactl"), "rocm": Path("/dev/kfd")}
"""What is there where a host has such GPUs."""


@dataclass(frozen=True)
class Alone:
    """The plan for one process, and where it starts."""

    plan: Plan
    files: Mapping[str, str]
    words: str
    """Where it runs, in words."""
    start: str
    """What it starts from, in words."""
    copied: Path | None
    """Checkpoints that the program is to find in the folder of its own; None: the plan names what it loads."""


def planned_alone(plan: Plan, files: Mapping[str, str], work_dir: Path, saved: SavedState | None) -> Alone:
    """The plan for one process.

    Args:
        plan: of the run.
        files: its rendered files.
        saved: what it starts from; None: the beginning.

    Raises:
        ConfigError: nobody wrote down what the plan was made from.
        PlanError: it does not fit one process, or no engine of the run's executes it there.
    """
    if BLUEPRINT not in files:
        raise ConfigError(
            f"{plan.name}: holds no {BLUEPRINT}, from which a plan for one process is made: an earlier version of "
            "dslaunch rendered it. Launch the recipe again"
        )
    blueprint = read_blueprint(files[BLUEPRINT], BLUEPRINT)
    site = work_dir / blueprint.site if blueprint.site else None
    ours = plan.program.module == _RUNTIME
    refused: list[str] = []
    for words, config in _tried(blueprint.config, plan, saved if ours else None):
        try:
            made, texts = rendered(config, blueprint, site)
        except (PlanError, ConfigError) as error:
            refused.append(str(error))
            continue
        started = None if words else saved
        copied = started.path.parent if started and not ours else None
        start = started.path.name if started else "the beginning"
        who = f"{words}, on one process" if words else "one process"
        return Alone(made, texts, f"{who} of this machine ({made.cluster.gpu})", start, copied)
    raise PlanError(f"one process of this machine cannot repeat it: {refused[0]}")


def _tried(config: RunConfig, plan: Plan, loaded: SavedState | None) -> Iterator[tuple[str, RunConfig]]:
    """What is planned for, in this order: the model itself; its twin, where dslaunch.runtime builds the model."""
    for each in _configurations(config, plan, loaded):
        yield "", each
    for twin in twins(config) if plan.program.module == _RUNTIME else ():
        for each in _configurations(twin.config, plan, None):
            yield twin.words, each


def _configurations(config: RunConfig, plan: Plan, loaded: SavedState | None) -> Iterator[RunConfig]:
    """What is tried, in this order: the run's own strategy, a search, and plain replicas."""
    nobody = {"hostfile": "", "hosts_command": "", "include": "", "exclude": "", "subnet": ""}
    launcher = {"name": "local", "runner": "auto", **nobody}
    checkpoint = {"dir": "", "every": 0, "load": str(loaded.path) if loaded else config.checkpoint.load}
    engine = {"name": plan.engine.name, "version": plan.engine.version}
    changes: dict[str, object] = {
        "cluster": _one_process(config.cluster),
        "launcher": config.launcher.model_copy(update=launcher),
        "checkpoint": config.checkpoint.model_copy(update=checkpoint),
        "engine": config.engine.model_copy(update=engine),
        "restart": Restart(),
    }
    here = config.model_copy(update=changes)
    yield here
    yield here.model_copy(update={"strategy": Strategy(name="auto")})
    if plan.program.module == _RUNTIME:
        free = config.engine.model_copy(update={"name": "auto", "version": ""})
        yield here.model_copy(update={"strategy": Strategy(name="auto"), "engine": free})


def _one_process(cluster: Cluster) -> Cluster:
    """One GPU of the run's kind where this machine has such, else one process on its CPU."""
    driver = _DRIVERS.get(cluster.gpu.accelerator)
    if driver and not driver.exists():
        path = next(folder / "cluster" / "local.yaml" for folder in data_dirs("conf"))
        cluster = Cluster.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    size = {"gpus": None, "nodes": 1, "gpus_per_node": 1, "hosts": (), "local": True, "mixed": ()}
    return cluster.model_copy(update=size)
