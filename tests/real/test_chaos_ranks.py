"""One of eight ranks is killed, in the middle of anything: the job ends, says where, and goes on exactly."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections.abc import Callable
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.golden.cases import rendered, written
from tests.real.parts import need
from tests.real.ranks import Outcome, run_ranks

need("torch", "deepspeed", "sklearn")

WORLD, STEPS, EVERY = 8, 5, 2
LIMIT_S = 240.0
ENDS_WITHIN_S = 60.0
"""From the death of one rank to the end of all; what a plan sets as watchdog.minutes is more."""
PLACES = {
    "forward": ("stage", "Stage", "forward"),
    "backward": ("stage", "Stage", "backward"),
    "redistribution, sending": ("exchange", "Exchange", "send"),
    "redistribution, receiving": ("exchange", "Exchange", "take"),
    "the global norm": ("engine_native", "", "squared_norm"),
    "new weights": ("engine_native", "", "take_norm"),
    "metrics": ("program", "", "measure"),
    "save, before a file": ("store", "", "write"),
    "save, in a file": ("store", "", "_rows"),
    "save, behind the files": ("saving", "", "sums"),
}
"""By moment: the function of dslaunch.runtime that is entered when the rank dies."""
ONCE = ("metrics", "save, before a file", "save, behind the files")
"""Entered once in a step."""
OF_RANK_0 = {"save, before the note": ("saving", "", "replace")}


def moment(number: int) -> tuple[str, int, int, int]:
    """(place, rank, step, calls in that step before the one that kills) of one number; the same each time."""
    dice = random.Random(number)
    place = [*PLACES, *OF_RANK_0][number % (len(PLACES) + len(OF_RANK_0))]
    rank = 0 if place in OF_RANK_0 else dice.randrange(WORLD)
    step = dice.choice([2, 4]) if place.startswith("save") else dice.randint(1, STEPS)
    return place, rank, step, 0 if place in ONCE else dice.randrange(2)


MOMENTS = [moment(number) for number in range(22)]
FAST = [1, 8]
PAGE = Path(__file__).parents[2] / "docs" / "runtime.md"
BEGIN, END = "<!-- moments: begin -->", "<!-- moments: end -->"
HEAD = "| | killed in | rank | step | all ended after, s | resumed run |\n|---|---|---|---|---|---|\n"


def in_run(run: str, _rank: int) -> None:
    """A rank of a run that dslaunch supervises, which is started again."""
    os.environ.update(DSLAUNCH_RUN_DIR=run, DSLAUNCH_RESUME="1")


def deadly(run: str, place: str, rank: int, step: int, before: int, own: int) -> None:
    """Kill rank `rank` at the moment, and note when."""
    os.environ["DSLAUNCH_RUN_DIR"] = run
    if own != rank:
        return
    module, owner, name = (PLACES | OF_RANK_0)[place]
    target: Any = import_module(f"dslaunch.runtime.{module}")
    target = getattr(target, owner) if owner else target
    engine: Any = import_module("dslaunch.runtime.engine_native").NativeEngine
    stands: dict[str, int] = {"step": 0, "calls": 0}
    true_step, true = engine.step, getattr(target, name)

    def counted(self: Any, number: int) -> Any:
        stands.update(step=number + 1, calls=0)
        return true_step(self, number)

    @wraps(true)
    def killing(*args: Any, **more: Any) -> Any:
        if stands["step"] == step:
            stands["calls"] += 1
            if stands["calls"] > before:
                Path(run, "died").write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
        return true(*args, **more)

    engine.step = counted
    setattr(target, name, killing)


def run(folder: Path, spoil: Callable[[int], None] | None = None) -> Outcome:
    plan = folder / "plan.json"
    if not plan.exists():
        words = ("recipe=vla_tiny", "cluster=local", "strategy=hetero", "training.optimizer.warmup_steps=1")
        written(folder, rendered(*words, f"training.steps={STEPS}", f"checkpoint.every={EVERY}"))
    return run_ranks(plan, WORLD, LIMIT_S, spoil)


def losses(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    return [row["loss"] for row in rows]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    outcome = run(folder)
    assert outcome.statuses == [0] * WORLD, outcome.output
    return losses(folder)


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in range(len(MOMENTS))]
)
def test_a_rank_killed_at_any_moment(
    number: int, unbroken: list[float], tmp_path: Path, update_docs: bool
) -> None:
    place, rank, step, before = MOMENTS[number]
    folder = tmp_path / "run"
    outcome = run(folder, partial(deadly, str(folder), place, rank, step, before))
    ended_in = time.time() - float((folder / "died").read_text())
    others = [status for other, status in enumerate(outcome.statuses) if other != rank]
    assert (outcome.statuses[rank], others) == (-signal.SIGKILL, [1] * (WORLD - 1)), (place, outcome.output)
    assert ended_in < ENDS_WITHIN_S
    phase = (folder / "ranks" / f"{rank}.phase").read_bytes().rstrip(b"\0").decode()
    wanted = f"saving step {step}" if place.startswith("save") else f"step {step}"
    assert wanted in phase or (place == "metrics" and "new weights" in phase), (place, phase)
    assert len(set(re.findall(r"rank (\d) on \S+ failed while \S.*: ", outcome.output))) == WORLD - 1
    again = run(folder, partial(in_run, str(folder)))
    assert again.statuses == [0] * WORLD, again.output
    assert losses(folder) == unbroken
    if update_docs:
        write_row(number, ended_in)


def write_row(number: int, ended_in: float) -> None:
    """Put this moment into the table of docs/runtime.md; what was not run this time stays as it was."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    old, after = rest.split(END)
    rows = {int(row.split("|")[1]): row for row in old.strip().splitlines()[2:]}
    place, rank, step, _ = MOMENTS[number]
    rows[number] = f"| {number} | {place} | {rank} | {step} | {ended_in:.1f} | the same losses to the bit |"
    table = HEAD + "".join(f"{rows[each]}\n" for each in sorted(rows))
    PAGE.write_text(f"{before}{BEGIN}\n{table}{END}{after}", encoding="utf-8")
