"""A run's figures in Weights & Biases, written by its supervisor: what metrics.jsonl says, and the run's attempts.

The package is imported where notify.wandb names a project, and not before. By default W&B writes into the run
folder alone (`wandb sync RUN/wandb/offline-run-*` uploads it); notify.wandb_mode=online sends, with the key that
the supervisor's environment holds (WANDB_API_KEY): no file of the run has it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dslaunch.planfile import Plan
from dslaunch.run.attempts import attempt_of
from dslaunch.run.lines import Lines, number
from dslaunch.run.records import read_ranks

PACKAGE = "wandb"


def missing() -> str:
    """What to do where the package is not there; empty where it is."""
    if find_spec(PACKAGE):
        return ""
    return (
        f"notify.wandb: {sys.executable}, which dslaunch runs with, has no package wandb. Install it there "
        "(pip install wandb), or take notify.wandb out; engine.monitor.wandb lets the training program log itself"
    )


class Tracker:
    """Of one run; what fails is said once, and the run goes on."""

    def __init__(self, run_dir: Path, plan: Plan, echo: Callable[[str], None]) -> None:
        self._run_dir, self._echo = run_dir, echo
        self._lines = Lines(run_dir / "metrics.jsonl")
        self._run: Any = None
        if not plan.supervision.wandb:
            return
        try:
            wandb: Any = import_module(PACKAGE)
            self._run = wandb.init(
                project=plan.supervision.wandb, name=run_dir.name, id=run_dir.name[-128:], resume="allow",
                dir=str(run_dir), mode=plan.supervision.wandb_mode, config=_described(plan),
                settings=wandb.Settings(silent=True, console="off", save_code=False, disable_git=True),
            )  # fmt: skip
        except Exception as error:  # whatever W&B raises does not end a run
            echo(f"notify.wandb: nothing is logged: {error}")

    def write(self) -> None:
        """Log the rows that metrics.jsonl has gained, each at its step."""
        with self._logging():
            for row in self._lines.new() if self._run else ():
                figures = {name: value for name, value in row.items() if number(value) is not None}
                failed = sum(1 for each in read_ranks(self._run_dir / "ranks") if each.status)
                supervised = {"dslaunch/attempt": attempt_of(self._run_dir), "dslaunch/ranks_failed": failed}
                told = {**{f"train/{name}": value for name, value in figures.items()}, **supervised}
                self._run.log(told, step=int(figures["step"]) if "step" in figures else None)

    def tell(self, kind: str, text: str) -> None:
        """Note an event, such as a breach or an attempt's end."""
        with self._logging():
            if self._run:
                self._run.summary[f"dslaunch/{kind}"] = text

    def end(self, *, succeeded: bool) -> None:
        """Write what is left, and close."""
        self.write()
        with self._logging():
            if self._run:
                self._run.finish(exit_code=0 if succeeded else 1)
                self._run = None

    @contextlib.contextmanager
    def _logging(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever W&B raises does not end a run
            self._echo(f"notify.wandb: nothing more is logged: {error}")
            self._run = None


def _described(plan: Plan) -> dict[str, Any]:
    """What tells runs apart there; no environment, no path of the user's."""
    return {
        "recipe": plan.recipe, "strategy": plan.strategy, "engine": plan.engine.name,
        "world_size": plan.world_size, "global_batch": plan.global_batch, "lr": plan.training.lr,
        "precision": plan.training.precision,
    }  # fmt: skip
