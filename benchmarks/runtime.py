"""`python -m benchmarks.runtime`: what dslaunch.runtime costs over plain DeepSpeed, on ranks of this host's CPU.

The same plan (one layout for all components) is executed by the engine native, with a DeepSpeed engine for each
component, and by one DeepSpeed engine over the whole model, in the same processes, step by step in turn: what else
the machine does meets both. The first steps of each are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import run_ranks
from dslaunch import planfile
from dslaunch.cli import run
from dslaunch.planfile import Plan
from dslaunch.run.agent import free_port
from dslaunch.runtime.engines import Engine

WARM_UP = 3
WORDS = (
    "recipe=vla_tiny", "cluster=local", "cluster.gpus_per_node=2", "training.global_batch=32",
    "strategy.every.micro_batch=8",
    "model.components.vision_encoder.hidden=256", "model.components.vision_encoder.ffn=1024",
    "model.components.projector.dims=[256,384,384]", "model.components.llm.hidden=384",
    "model.components.llm.ffn=1024",
)  # fmt: skip
"""vla_tiny with wider layers, so that passes take longer than calls."""
CASES = (("zero1", "fp32"), ("zero2", "fp32"), ("zero1", "bf16"))


@dataclass(frozen=True)
class Cost:
    """Seconds of steps in pairs, the slowest rank's: (native, plain DeepSpeed)."""

    strategy: str
    precision: str
    pairs: tuple[tuple[float, float], ...]

    @property
    def ratio(self) -> float:
        """Median over the pairs."""
        return statistics.median(native / plain for native, plain in self.pairs)

    def row(self) -> str:
        ratios = statistics.quantiles((native / plain for native, plain in self.pairs), n=4)
        native, plain = (1e3 * statistics.median(times) for times in zip(*self.pairs, strict=True))
        return (
            f"| {self.strategy} | {self.precision} | {native:.0f} | {plain:.0f} | {self.ratio:.3f} | "
            f"{ratios[0]:.3f} to {ratios[2]:.3f} |"
        )


def main(arguments: Sequence[str]) -> int:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser("python -m benchmarks.runtime", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="pairs of steps that are timed")
    asked = parser.parse_args(arguments)
    print("| strategy | precision | native, ms | plain DeepSpeed, ms | median ratio | middle half |")
    print("|---|---|---|---|---|---|")
    for strategy, precision in CASES:
        print(measured(strategy, precision, asked.steps).row(), flush=True)
    return 0


def measured(strategy: str, precision: str, steps: int) -> Cost:
    """Run both engines on the ranks of the plan."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        plan = _write(root, strategy, precision)
        context = multiprocessing.get_context("spawn")
        port = free_port()
        size = plan.world_size
        run_ranks(context, _rank, [(folder, rank, size, port, steps) for rank in range(size)])
        pairs = tuple((native, plain) for native, plain in json.loads((root / "pairs.json").read_text()))
    return Cost(strategy, precision, pairs)


def _write(root: Path, strategy: str, precision: str) -> Plan:
    """The rendered files of the plan for plain DeepSpeed, and of the same plan for the engine native."""
    for name in ("deepspeed", "native"):
        words = [*WORDS, f"strategy={strategy}", f"training.precision={precision}", f"engine={name}"]
        with contextlib.redirect_stdout(io.StringIO()):
            status = run(["render", *words, "-o", str(root / name), "-q"])
        assert status == 0, words
    return _read(root, "native")


def _read(root: Path, name: str) -> Plan:
    return planfile.plan_from_json((root / name / "plan.json").read_text(encoding="utf-8"), name)


def _rank(folder: str, rank: int, size: int, port: int, steps: int) -> None:
    import torch
    import torch.distributed as dist

    from dslaunch.runtime.data import open_data
    from dslaunch.runtime.engine_deepspeed import join_deepspeed
    from dslaunch.runtime.engines import make_engine
    from dslaunch.runtime.world import World, join_world, part

    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (DeepSpeed's banner; lives as long as the process)
    engines: list[Engine] = []
    world = World(rank, rank, size, torch.device("cpu"))
    for name in ("native", "deepspeed"):
        plan = _read(Path(folder), name)
        if not engines:
            join_world(world, plan)
            join_deepspeed(world)
        engines.append(make_engine(plan, world, open_data(plan), Path(folder) / name, lambda _phase: None))
    times: list[list[float]] = []
    for step in range(WARM_UP + steps):
        row = [0.0, 0.0]
        for which in (0, 1) if step % 2 else (1, 0):
            dist.barrier()
            began = time.perf_counter()
            engines[which].step(step)
            row[which] = time.perf_counter() - began
        times.append(row)
    slowest = torch.tensor(times)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    if rank == 0:
        (Path(folder) / "pairs.json").write_text(json.dumps(slowest[WARM_UP:].tolist()))
    part(world)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
