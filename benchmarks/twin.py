"""`python -m benchmarks.twin`: vla70b's own layouts against one grid for all, with sleeps in the place of compute.

Two cores make idle time in a pipeline free, so that real compute cannot show it. Here every pass of the plan for
64 GPUs sleeps for what the ledger says of it (forward and backward 1 to 2), times a factor; order, ranks and
messages are those of dslaunch.runtime. Ranks of one tensor-parallel group do the same at the same time, and each
group is one process: 8 of them. Messages have the plan's number, order and samples, and a share of its bytes.

    own layouts   vision encoder and projector on all ranks, then the decoder's pipeline, then back (the recipe)
    one grid      vision encoder and projector on the ranks of the decoder's first stage, with each micro-batch, as
                  frameworks with one grid run them: four times the work on a quarter of the ranks
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.processes import run_ranks
from dslaunch.cli import run
from dslaunch.planfile import Plan, Prediction, plan_from_json, prediction_from_json
from dslaunch.run.agent import free_port
from dslaunch.runtime.messages import PIPELINE, Message, Step, step_of

RANKS = 8
SHRINK = 2048
"""By which rows are narrower than the model's: gloo on one host is no NVLink."""
WIDTH = 4
"""Bytes of a number that is sent."""
WORDS = ("recipe=vla70b", "cluster=64xA100", "training.precision=bf16")
Seconds = dict[tuple[str, int, bool], float]
"""By component, stage and whether it is forward: seconds of one pass."""


@dataclass(frozen=True)
class Variant:
    """What is run: a step, what its passes take, and what the planner's formula makes of that."""

    name: str
    plan: Plan
    seconds: Seconds
    predicted_s: float


def main(arguments: Sequence[str]) -> int:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser("python -m benchmarks.twin", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3, help="steps of each variant")
    parser.add_argument("--factor", type=float, default=0.4, help="seconds slept by those of the ledger")
    asked = parser.parse_args(arguments)
    plan, prediction = _planned()
    print("| layouts | measured, s | planner's formula, s | ratio | sent, MB | by the plan, MB |")
    print("|---|---|---|---|---|---|")
    for variant in (own_layouts(plan, prediction), one_grid(plan, prediction)):
        seconds, sent = measured(variant, asked.steps, asked.factor)
        step = step_of(variant.plan)
        remote = [each for each in step.messages if each.source != each.destination]
        expected = sum(_bytes(each, step, variant.plan) for each in remote)
        print(
            f"| {variant.name} | {seconds / asked.factor:.2f} | {variant.predicted_s:.2f} | "
            f"{seconds / asked.factor / variant.predicted_s:.3f} | {sent / 1e6:.3f} | {expected / 1e6:.3f} |",
            flush=True,
        )
        assert sent == expected, (sent, expected)
    return 0


def own_layouts(plan: Plan, prediction: Prediction) -> Variant:
    """The recipe's plan without tensor parallelism: RANKS processes."""
    changed = {
        name: replace(layout, tp=1, dp=RANKS // layout.pp, micro_batch=_micro(plan, name, RANKS // layout.pp))
        for name, layout in plan.components.items()
    }
    seconds: Seconds = {}
    for name, layout in changed.items():
        for stage in range(layout.pp):
            seconds |= _passes(name, stage, _spent(prediction, name, stage) / layout.num_microbatches)
    predicted = sum(_span(prediction, name, layout.num_microbatches) for name, layout in changed.items())
    return Variant("own layouts", replace(plan, world_size=RANKS, components=changed), seconds, predicted)


def one_grid(plan: Plan, prediction: Prediction) -> Variant:
    """The decoder alone, whose first stage does the others' work too."""
    (trunk,) = [name for name, layout in plan.components.items() if layout.pp > 1]
    layout = plan.components[trunk]
    layout = replace(layout, tp=1, dp=RANKS // layout.pp)
    front = sum(_spent(prediction, name, 0) * layout.pp for name in plan.components if name != trunk)
    stages = [_spent(prediction, trunk, stage) for stage in range(layout.pp)]
    stages[0] += front
    seconds: Seconds = {}
    for stage, spent in enumerate(stages):
        seconds |= _passes(trunk, stage, spent / layout.num_microbatches)
    model = {**plan.model, "components": {trunk: plan.model["components"][trunk]}, "edges": []}
    alone = replace(plan, world_size=RANKS, components={trunk: layout}, model=model)
    slowest = max(stages)
    return Variant("one grid", alone, seconds, slowest + (sum(stages) - slowest) / layout.num_microbatches)


def _micro(plan: Plan, name: str, dp: int) -> int:
    return plan.global_batch // dp // plan.components[name].num_microbatches


def _spent(prediction: Prediction, name: str, stage: int) -> float:
    """Seconds of a step that one rank of a stage computes."""
    terms = prediction.components[name][stage].time_s
    return terms["compute"] + terms["recompute"]


def _passes(name: str, stage: int, spent: float) -> Seconds:
    return {(name, stage, True): spent / 3, (name, stage, False): spent * 2 / 3}


def _span(prediction: Prediction, name: str, micro_batches: int) -> float:
    """As the planner's ledger of time: the slowest stage, and the others' share of one micro-batch."""
    stages = [_spent(prediction, name, stage) for stage in range(len(prediction.components[name]))]
    return max(stages) + (sum(stages) - max(stages)) / micro_batches


def _planned() -> tuple[Plan, Prediction]:
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stdout(io.StringIO()):
            status = run(["render", *WORDS, "-o", folder, "-q"])
        assert status == 0
        plan = plan_from_json((Path(folder) / "plan.json").read_text(encoding="utf-8"), "plan")
        text = (Path(folder) / "prediction.json").read_text(encoding="utf-8")
    return plan, prediction_from_json(text, "prediction")


def _shape(message: Message, step: Step, plan: Plan) -> tuple[int, int]:
    """(tokens, width) of one sample of a message."""
    specs = plan.model["components"]
    if message.edge != PIPELINE:
        edge = step.edges[message.edge]
        return edge["tokens"], _width(specs[edge["from"]]) // SHRINK
    return plan.training.seq_len, _width(specs[message.sender.component]) // SHRINK


def _width(spec: dict[str, Any]) -> int:
    return int(spec["dims"][-1] if spec["arch"] == "mlp" else spec["hidden"])


def _bytes(message: Message, step: Step, plan: Plan) -> int:
    tokens, width = _shape(message, step, plan)
    return len(message.samples) * tokens * width * WIDTH


def measured(variant: Variant, steps: int, factor: float) -> tuple[float, int]:
    """(seconds of the fastest step, bytes that all ranks sent in it)."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["dslaunch.runtime.exchange"])
        port = free_port()
        run_ranks(context, _rank, [(folder, variant, rank, port, steps, factor) for rank in range(RANKS)])
        rows = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(RANKS)]
    slowest = [max(times) for times in zip(*(row["seconds"] for row in rows), strict=True)]
    return min(slowest), sum(row["bytes"] for row in rows)


def _rank(folder: str, variant: Variant, rank: int, port: int, steps: int, factor: float) -> None:
    import torch
    import torch.distributed as dist

    from dslaunch.runtime.exchange import Exchange

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo")
    step = step_of(variant.plan)
    device = torch.device("cpu")
    exchange = Exchange(step, rank, torch.float32, device, lambda message: _shape(message, step, variant.plan))
    seconds = []
    for _ in range(steps):
        exchange.sent_bytes.clear()
        dist.barrier()
        began = time.perf_counter()
        exchange.begin()
        for task in step.tasks:
            if rank in step.parts[task.component].grid.stage_ranks(task.stage):
                for message in exchange.incoming[task]:
                    exchange.take(message)
                time.sleep(variant.seconds[task.component, task.stage, task.forward] * factor)
                for message in exchange.outgoing[task]:
                    rows = len(message.samples)
                    exchange.send(message, torch.zeros(rows, *_shape(message, step, variant.plan)))
        exchange.end()
        seconds.append(time.perf_counter() - began)
    row = {"seconds": seconds, "bytes": exchange.sent_bytes.total()}
    (Path(folder) / f"{rank}.json").write_text(json.dumps(row))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
