"""What there is: recipes, models, clusters. One line each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dslaunch.conffiles import loaded, names
from dslaunch.errors import ConfigError
from dslaunch.model.params import params
from dslaunch.paths import data_dirs
from dslaunch.schema.cluster import Gpu, Node
from dslaunch.schema.model import Model

_NOT_VALID = "not valid: `dslaunch plan` with it says why"


@dataclass(frozen=True)
class Recipe:
    """A recipe that there is."""

    name: str
    about: str
    """One line; why it is not valid, where it is not."""


@dataclass(frozen=True)
class ModelSummary:
    """A model that there is."""

    name: str
    parameters: int = 0
    components: tuple[str, ...] = ()
    source: str = ""
    """Where its shapes were published."""
    problem: str = ""
    """Why the file can't be read; nothing else is known then."""


@dataclass(frozen=True)
class ClusterSummary:
    """A kind of node that there is; sizes go before its name: 64xA100."""

    name: str
    same_as: str = ""
    """The file that this is a second name of."""
    gpu: str = ""
    memory_gib: float | None = None
    """Of one GPU."""
    gpus_per_node: int | None = None
    network: str = ""
    problem: str = ""
    """Why the file can't be read."""


def recipes(site: Path | None) -> list[Recipe]:
    return [Recipe(name, _about(name, site)) for name in names("recipes", site)]


def recipe_rows(site: Path | None) -> list[tuple[str, ...]]:
    """(name, what it is)."""
    return [(each.name, each.about) for each in recipes(site)]


def _about(name: str, site: Path | None) -> str:
    try:
        return str(_load(data_dirs("recipes", site), name).get("about", ""))
    except ConfigError as error:
        return f"not valid: {error}"


def models(site: Path | None) -> list[ModelSummary]:
    return [_model(name, site) for name in names("model", site)]


def _model(name: str, site: Path | None) -> ModelSummary:
    try:
        model = Model.model_validate(_load(_folders("model", site), name))
    except ConfigError as error:
        return ModelSummary(name, problem=f"not valid: {error}")
    except ValidationError:
        return ModelSummary(name, problem=_NOT_VALID)
    total = sum(params(component) for component in model.components.values())
    return ModelSummary(name, total, tuple(model.components), model.source)


def model_rows(found: Sequence[ModelSummary]) -> list[tuple[str, ...]]:
    """(name, parameters, components and source)."""
    return [(each.name, *_model_cells(each)) for each in found]


def _model_cells(found: ModelSummary) -> tuple[str, str]:
    if found.problem:
        return "", found.problem
    about = f"{', '.join(found.components)} ({first_source(found.source)})"
    return f"{found.parameters / 1e9:.3g}B", about


def clusters(site: Path | None) -> list[ClusterSummary]:
    return [_cluster(name, site) for name in names("cluster", site)]


def cluster_rows(site: Path | None) -> list[tuple[str, ...]]:
    """(name, GPU, memory, GPUs a node, network); sizes go before the name: 64xA100."""
    return [(each.name, *_cluster_cells(each)) for each in clusters(site)]


def _cluster_cells(found: ClusterSummary) -> tuple[str, str, str, str]:
    if found.same_as or found.problem:
        return found.problem or f"= {found.same_as}", "", "", ""
    return found.gpu, f"{found.memory_gib:g} GiB", f"{found.gpus_per_node} a node", found.network


def _cluster(name: str, site: Path | None) -> ClusterSummary:
    try:
        own = _load(_folders("cluster", site), name)
    except ConfigError as error:
        return ClusterSummary(name, problem=f"not valid: {error}")
    if set(own) == {"defaults"}:
        return ClusterSummary(name, same_as=next(d for d in own["defaults"] if d != "_self_"))
    tree = _joined(own, site)
    try:
        gpu, node = Gpu.model_validate(tree["gpu"]), Node.model_validate(tree["node"])
    except (KeyError, ValidationError):
        return ClusterSummary(name, problem=_NOT_VALID)
    network = str((tree.get("network") or {}).get("kind", "one node"))
    return ClusterSummary(name, "", gpu.name, gpu.memory_gib, node.gpus, network)


def _joined(tree: dict[str, Any], site: Path | None) -> dict[str, Any]:
    """A cluster file laid over the one it names in its defaults, section by section."""
    bases = [str(base) for base in tree.get("defaults", []) if base != "_self_"]
    below = _joined(_load(_folders("cluster", site), bases[0]), site) if bases else {}
    return {
        key: {**below.get(key, {}), **value} if isinstance(value, dict) else value
        for key, value in {**below, **tree}.items()
    }


def _load(folders: list[Path], name: str) -> dict[str, Any]:
    file = next((f for folder in folders if (f := folder / f"{name}.yaml").is_file()), None)
    if file is None:
        return {}
    tree = loaded(file)
    return tree if isinstance(tree, dict) else {}


def _folders(group: str, site: Path | None) -> list[Path]:
    return [folder / group for folder in data_dirs("conf", site)]


def first_source(text: str, most: int = 80) -> str:
    """The first source of several, cut where it is long."""
    first = text.strip().partition("\n")[0].partition(";")[0]
    return first if len(first) <= most else first[: most - 3] + "..."
