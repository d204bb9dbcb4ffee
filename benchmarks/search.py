"""`python -m benchmarks.search`: how fast strategy=auto is, and how its time grows with the cluster.

    python -m benchmarks.search                    llama3_405b and vla70b from 8 to 131,072 GPUs
    python -m benchmarks.search --recipe mixtral_8x7b --most 1024

Seconds are those of the search alone, in a process that has done none before, on one core (process time); covered
are the layouts that were looked at or that a bound stands for.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator

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


def measured(recipe: str, gpus: int) -> str:
    """One row: the search of a recipe on so many GPUs, in this process."""
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
    rate = f"{covered / cpu:12,.0f}" if covered else f"{'':12}"
    return f"{recipe:16} {gpus:8,} {cpu:8.2f} {wall:8.2f} {covered:10,} {rate}  {found}"


def main() -> None:
    """Print a row for each size, each from a process of its own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--recipe", action="append", help="recipes; llama3_405b and vla70b where none is given"
    )
    parser.add_argument("--most", type=int, default=131_072, help="GPUs of the largest cluster")
    parser.add_argument("--gpus", type=int, help="this size alone, in this process, without a heading")
    arguments = parser.parse_args()
    recipes = arguments.recipe or _RECIPES
    if arguments.gpus:
        print(*(measured(recipe, arguments.gpus) for recipe in recipes), sep="\n")
        return
    print(f"{'recipe':16} {'GPUs':>8} {'cpu s':>8} {'wall s':>8} {'covered':>10} {'a second':>12}  found")
    for recipe in recipes:
        for gpus in sizes(arguments.most):
            words = [sys.executable, "-m", "benchmarks.search", "--recipe", recipe, "--gpus", str(gpus)]
            subprocess.run(words, check=True)


if __name__ == "__main__":
    main()
