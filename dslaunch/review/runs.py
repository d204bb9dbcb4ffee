"""The shelf: which runs there are, and several of them side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dslaunch.errors import ConfigError
from dslaunch.planfile import Plan, Prediction, plan_from_json, prediction_from_json
from dslaunch.review.changes import is_layout, layout_words, plan_keys, shown_key
from dslaunch.review.figures_text import value
from dslaunch.review.measured import Measured, measured
from dslaunch.run.now import look
from dslaunch.run.records import furthest, read_ranks

RUNS_SCHEMA = "dslaunch.runs/1"
COMPARE_SCHEMA = "dslaunch.compare/1"


@dataclass(frozen=True)
class RunFigures:
    """A run as `--json` shows it. What was measured is null where the program wrote no metrics."""

    run: str
    """Its folder."""
    state: str
    """`unreadable` where the folder can't be read; `why` says why, and nothing else is known."""
    why: str = ""
    exit_status: int | None = None
    recipe: str = ""
    engine: str = ""
    gpus: int | None = None
    gpu: str = ""
    global_batch: int | None = None
    steps: int | None = None
    steps_done: int = 0
    last_loss: float | None = None
    lowest_loss: float | None = None
    step_time_s: float | None = None
    """Median over the second half of the steps, as tokens_per_s."""
    predicted_step_time_s: float | None = None
    tokens_per_s: float | None = None
    predicted_tokens_per_s: float | None = None
    peak_memory_gib: float | None = None
    predicted_allocated_gib: float | None = None


@dataclass(frozen=True)
class Runs:
    """`dslaunch runs --json`"""

    runs: tuple[RunFigures, ...]
    """The last one first."""
    schema: str = RUNS_SCHEMA


@dataclass(frozen=True)
class Comparison:
    """`dslaunch compare --json`"""

    runs: tuple[RunFigures, ...]
    differences: dict[str, tuple[Any, ...]]
    """Key of plan.json -> a value a run, of the keys whose values differ."""
    schema: str = COMPARE_SCHEMA


@dataclass(frozen=True)
class Run:
    """One run folder."""

    folder: Path
    plan: Plan
    prediction: Prediction
    measured: Measured


@dataclass(frozen=True)
class Unreadable:
    """A folder that looks like a run's and can't be read."""

    folder: Path
    why: str


def read_run(folder: Path) -> Run:
    """The run in `folder`.

    Raises:
        ConfigError: it is no run folder, or a file of it can't be read.
    """
    found = measured(folder)
    if found is None:
        raise ConfigError(f"{folder}: holds no state.json, so it is no run. `dslaunch runs` lists them.")
    texts = {name: _text(folder / name) for name in ("plan.json", "prediction.json")}
    return Run(
        folder,
        plan_from_json(texts["plan.json"], str(folder / "plan.json")),
        prediction_from_json(texts["prediction.json"], str(folder / "prediction.json")),
        found,
    )


def runs_in(root: Path) -> list[Run | Unreadable]:
    """Every run under `root`, the last one first; none where there is no such folder."""
    folders = [path.parent for path in root.glob("*/state.json")]
    return [_run(folder) for folder in sorted(folders, key=_stamp, reverse=True)]


def run_rows(found: Sequence[Run | Unreadable]) -> list[tuple[str, ...]]:
    """(run, state, what on what, step, loss, throughput)."""
    return [_row(run) for run in found]


def run_objects(found: Sequence[Run | Unreadable]) -> Runs:
    return Runs(tuple(_figures(run) for run in found))


def comparison_rows(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """(name, a value a run): state and figures, then the keys of the plans that differ."""
    objects = [asdict(_figures(run)) for run in runs]
    rows = [("", *(run.folder.name for run in runs))]
    shown = [name for name in objects[0] if name not in ("run", "why")]
    rows += [(name, *(_said(each[name]) for each in objects)) for name in shown]
    rows += [
        (f"layout of {name}", *(_layout(run, name) for run in runs))
        for name in dict.fromkeys(name for run in runs for name in run.plan.components)
    ]
    differing = {key: values for key, values in _differing(runs).items() if not is_layout(key)}
    return rows + [(key, *map(value, values)) for key, values in differing.items()]


def comparison_object(runs: Sequence[Run]) -> Comparison:
    differences = {key: tuple(values) for key, values in _differing(runs).items()}
    return Comparison(tuple(_figures(run) for run in runs), differences)


def _run(folder: Path) -> Run | Unreadable:
    try:
        return read_run(folder)
    except ConfigError as error:
        return Unreadable(folder, str(error))


def _stamp(folder: Path) -> tuple[float, str]:
    return (folder / "state.json").stat().st_mtime, folder.name


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: cannot be read: {error}. A run folder holds what was launched."
        ) from error


def _row(run: Run | Unreadable) -> tuple[str, ...]:
    if isinstance(run, Unreadable):
        return run.folder.name, "unreadable", "", "", "", run.why
    steps, plan = run.measured.steps, run.plan
    done = _done(run)
    reached = f"step {done}/{plan.training.steps}" if done else ""
    loss = f"loss {run.measured.last_loss:.4g}" if steps else ""
    rate = run.measured.middle("tokens_per_s")
    speed = "nothing measured" if rate is None else f"{rate:,.0f} tokens/s"
    what = f"{plan.recipe} on {plan.world_size} x {plan.cluster.gpu}"
    return run.folder.name, look(run.folder).standing, what, reached, loss, speed


def _figures(run: Run | Unreadable) -> RunFigures:
    if isinstance(run, Unreadable):
        return RunFigures(str(run.folder), "unreadable", run.why)
    found = run.measured
    return RunFigures(
        run=str(run.folder),
        state=look(run.folder).standing,
        exit_status=found.state.exit_status,
        recipe=run.plan.recipe,
        engine=run.plan.engine.name,
        gpus=run.plan.world_size,
        gpu=run.plan.cluster.gpu,
        global_batch=run.plan.global_batch,
        steps=run.plan.training.steps,
        steps_done=_done(run),
        last_loss=found.last_loss,
        lowest_loss=min((float(row["loss"]) for row in found.steps), default=None),
        step_time_s=found.middle("step_time_s"),
        predicted_step_time_s=run.prediction.step_time_s,
        tokens_per_s=found.middle("tokens_per_s"),
        predicted_tokens_per_s=run.prediction.tokens_per_s,
        peak_memory_gib=max((float(row["memory_gib"]) for row in found.steps), default=None),
        predicted_allocated_gib=run.prediction.allocated_gib,
    )


def _done(run: Run) -> int:
    """Steps that the program measured, or else that every rank of it noted; 0 where it tells none."""
    steps = run.measured.steps
    return int(steps[-1]["step"]) if steps else furthest(read_ranks(run.folder / "ranks"))


def _said(figure: object) -> str:
    return f"{figure:,.4g}" if isinstance(figure, float) else "-" if figure is None else str(figure)


def _layout(run: Run, name: str) -> str:
    return layout_words(run.plan.components[name]) if name in run.plan.components else "(none)"


def _differing(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """The keys of plan.json whose values are not the same in all runs."""
    keys = [dict(plan_keys(run.plan)) for run in runs]
    names = [name for name in dict.fromkeys(key for each in keys for key in each) if shown_key(name)]
    rows = {name: [each.get(name) for each in keys] for name in names}
    return {name: values for name, values in rows.items() if any(v != values[0] for v in values)}
