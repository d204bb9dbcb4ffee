"""One side of a comparison: a plan with its figures, its files, and what the rules say of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dslaunch.errors import ConfigError
from dslaunch.files.rendered import is_rendered
from dslaunch.planfile import Finding, Plan, Prediction, plan_from_json, prediction_from_json
from dslaunch.rules.checking import check_rendered
from dslaunch.rules.selection import EVERY_RULE, Selection
from dslaunch.rules.waivers import waive

OWN = frozenset({"plan.json", "prediction.json", "manifest.json", "blueprint.json"})
"""Files that say what the others hold."""


@dataclass(frozen=True)
class Side:
    """What is compared with another, or reported on."""

    title: str
    """As the user named it."""
    plan: Plan
    prediction: Prediction | None
    """None where a folder holds none."""
    files: dict[str, str]
    """Rendered texts by name."""
    findings: tuple[Finding, ...]
    """Those that stand, the gravest first."""


def side_of_folder(folder: Path, title: str, selection: Selection = EVERY_RULE) -> Side:
    """A rendered folder or a run folder, as it stands on disk.

    Raises:
        ConfigError: without the title: no plan.json, or a file of it that can't be read.
    """
    plan_file = folder / "plan.json"
    if not plan_file.is_file():
        what = "holds no plan.json" if folder.is_dir() else "no such folder"
        raise ConfigError(
            f"{what}. Name a folder that `dslaunch render -o DIR` or a launch made, or a recipe in "
            'quotes: "recipe=NAME cluster=8xH100".'
        )
    files = {path.name: _text(path) for path in sorted(folder.iterdir()) if is_rendered(path.name)}
    plan = plan_from_json(files["plan.json"], str(plan_file))
    figures = files.get("prediction.json")
    prediction = prediction_from_json(figures, str(folder / "prediction.json")) if figures else None
    standing, _ = waive(check_rendered(plan, files, selection=selection), plan.accepted)
    return Side(title, plan, prediction, files, standing)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as text: {error}. Render it again.") from error
