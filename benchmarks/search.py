"""`python -m benchmarks.search`: how fast strategy=auto is, and how its time grows with the cluster.

    python -m benchmarks.search                    llama3_405b and vla70b from 8 to 131,072 GPUs
    python -m benchmarks.search --recipe mixtral_8x7b --most 1024

Seconds are those of the search alone, in a process that has done none before, on one core (process time);
growth is their ratio to the row above; covered are the layouts that were looked at or that a bound stands for.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from dslaunch.errors import PlanError
from dslaunch.flow import Request, configured
from dslaunch.plan.planner import plan

_RECIPES = ("llama3_405b", "vla70b")
_GPUS = {"llama3_405b": "H100", "vla70b": "A100"}


def sizes(most: int) -> Iterator[int]:
    """8, 64, 512 ... up to `most`, and it."""
    gpus = 8
    while gpus < most:
        yield gpus
        gpus *= 8
    yield most


@dataclass(frozen=True)
class Row:
    """One search. Times in s."""

    recipe: str
    gpus: int
    cpu_s: float
    wall_s: float
    covered: int
    found: str

    def line(self, before: Row | None) -> str:
        """The row of the table, after the one of a smaller cluster, if any."""
        growth = f"x {self.cpu_s / before.cpu_s:.1f}" if before else ""
        rate = f"{self.covered / self.cpu_s:,.0f}" if self.covered else ""
        return (
            f"{self.recipe:16} {self.gpus:8,} {self.cpu_s:8.2f} {self.wall_s:8.2f} {growth:>7} "
            f"{self.covered:10,} {rate:>12}  {self.found}"
        )


def measured(recipe: str, gpus: int) -> Row:
    """The search of a recipe on so many GPUs, in this process."""
    cluster = f"cluster={gpus}x{_GPUS.get(recipe, 'H100')}"
    config = configured(Request((f"recipe={recipe}", cluster, "strategy=auto"), None, (), ()))
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        _, prediction = plan(config)
    except PlanError as error:
        found, covered = str(error).splitlines()[0], 0
    else:
        search = prediction.search
        assert search is not None
        found, covered = prediction.candidates[0].layout, search.considered
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return Row(recipe, gpus, cpu, wall, covered, found)


def apart(recipe: str, gpus: int) -> Row:
    """`measured` in a process of its own."""
    words = [sys.executable, "-m", "benchmarks.search", "--recipe", recipe, "--gpus", str(gpus)]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
    return Row(**json.loads(done.stdout))


def main() -> None:
    """Print a row for each size, each from a process of its own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--recipe", action="append", help="recipes; llama3_405b and vla70b where none is given"
    )
    parser.add_argument("--most", type=int, default=131_072, help="GPUs of the largest cluster")
    parser.add_argument("--gpus", type=int, help="this size alone, in this process, as JSON")
    arguments = parser.parse_args()
    recipes = arguments.recipe or _RECIPES
    if arguments.gpus:
        print(*(json.dumps(asdict(measured(recipe, arguments.gpus))) for recipe in recipes), sep="\n")
        return
    print(
        f"{'recipe':16} {'GPUs':>8} {'cpu s':>8} {'wall s':>8} {'growth':>7} "
        f"{'covered':>10} {'a second':>12}  found"
    )
    for recipe in recipes:
        before: Row | None = None
        for gpus in sizes(arguments.most):
            row = apart(recipe, gpus)
            print(row.line(before), flush=True)
            before = row


if __name__ == "__main__":
    main()
