"""Ranks that train under one layout after another, save, and go on from one another's checkpoints."""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dslaunch import planfile
from dslaunch.run.agent import free_port
from tests.real import plans
from tests.real.hetero_ranks import SAMPLES, WORLD, Case, Layout, model_of, training_of
from tests.real.hetero_ranks import write as write_native
from tests.real.ranks import PRELOAD, wait_for

LIMIT_S = 240.0
"""Of one training."""
HALF = 2
"""Steps before the checkpoint, and after it."""
RATE = 2e-3
CLIP = 0.3
NATIVE = {
    "twin of vla70b": Case(
        Layout(dp=4, tp=2, zero=2), Layout(dp=8, zero=2),
        Layout(pp=2, dp=2, tp=2, zero=1, micro_batches=3), clip=CLIP,
    ),
    "separate ranks": Case(
        Layout(dp=3, zero=2, micro_batches=2), Layout(dp=3, zero=1, micro_batches=2),
        Layout(pp=2, dp=2, zero=1, offset=3, micro_batches=2), clip=CLIP,
    ),
    "four stages, four shards": Case(
        Layout(dp=2, tp=4, zero=1), Layout(dp=4, tp=2, zero=0), Layout(pp=4, dp=1, tp=2, zero=0, micro_batches=4),
        clip=CLIP,
    ),
    "three shards": Case(
        Layout(pp=2, dp=1, tp=3, zero=0, micro_batches=2), Layout(dp=2, tp=3, zero=2), Layout(dp=2, tp=3, zero=2),
        clip=CLIP,
    ),
    "optimizer in host memory": Case(
        Layout(dp=4, tp=2, zero=2, offload="cpu"), Layout(dp=8, zero=1, offload="cpu"),
        Layout(pp=2, dp=4, zero=1, offload="cpu", micro_batches=2), clip=CLIP,
    ),
    "interleaved, ZeRO-3": Case(
        Layout(dp=2, tp=4, zero=3, micro_batches=2), Layout(dp=8, zero=3),
        Layout(pp=2, vpp=2, dp=2, tp=2, zero=1, micro_batches=2), schedule="interleaved", clip=CLIP,
    ),
}  # fmt: skip
UNIFORM = ("ddp", "fsdp2", "zero0", "zero1", "zero2", "zero3")
KEPT = "zero3, small ones kept"
BF16 = "twin of vla70b in bf16"
BF16_UNIFORM = "zero1 in bf16"


def write_all(root: Path) -> None:
    """A folder with plan.json and the rendered files for each layout."""
    for name, case in NATIVE.items():
        write_native(replace(case, steps=2 * HALF), root / name)
    write_native(replace(NATIVE["twin of vla70b"], steps=2 * HALF, precision="bf16"), root / BF16)
    for name in UNIFORM:
        plans.write(uniform_plan(name, "fp32"), root / name)
    plans.write(uniform_plan("zero3", "fp32"), root / KEPT)
    config = root / KEPT / "ds_config.json"
    kept = json.loads(config.read_text())
    kept["zero_optimization"]["stage3_param_persistence_threshold"] = 1000
    config.write_text(json.dumps(kept))
    plans.write(uniform_plan("zero1", "bf16"), root / BF16_UNIFORM)


def uniform_plan(strategy: str, precision: str) -> planfile.Plan:
    """All components alike, on all ranks."""
    case = replace(NATIVE["twin of vla70b"], steps=2 * HALF, precision=precision)
    plan = plans.plan_for(strategy, WORLD, replace(training_of(case), lr=RATE), model_of(case))
    for name in plan.components:
        plan = plans.with_component(plan, name, micro_batch=1, num_microbatches=SAMPLES // WORLD, lr=RATE)
    return plan


def train_all(root: Path, whole: Sequence[str], pairs: Sequence[tuple[str, str]]) -> None:
    """Train 2 * HALF steps under each of `whole`, with a checkpoint half way; then go on from it for each pair.

    Args:
        pairs: (layout that saved, layout that goes on). A first that ends in `merged` is its converted checkpoint.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    port = free_port()
    ranks = [
        context.Process(target=_rank, args=(str(root), list(whole), list(pairs), rank, port))
        for rank in range(WORLD)
    ]
    for rank in ranks:
        rank.start()
    wait_for(ranks, LIMIT_S * (len(whole) + len(pairs)))


def _rank(root: str, whole: list[str], pairs: list[tuple[str, str]], rank: int, port: int) -> None:
    import torch
    import torch.distributed as dist

    from dslaunch.runtime.engine_deepspeed import join_deepspeed
    from dslaunch.runtime.world import World, join_world

    output = open(Path(root) / f"rank{rank}.txt", "a")  # noqa: SIM115  (lives as long as the process)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    sys.stdout = sys.stderr = output
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD), OMP_NUM_THREADS="1",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    torch.set_num_threads(1)
    world = World(rank, rank, WORLD, torch.device("cpu"))
    join_world(world, uniform_plan("ddp", "fp32"))
    join_deepspeed(world)
    try:
        for before, name in [("", name) for name in whole] + pairs:
            faulthandler.dump_traceback_later(LIMIT_S, exit=True, file=output)
            _train(Path(root), before, name, world)
    except BaseException:
        traceback.print_exc()
        output.flush()
        os._exit(1)
    dist.barrier()
    os._exit(0)


def saved_by(root: Path, name: str) -> Path:
    return root / name / "checkpoints" / f"step-{HALF:08d}"


def _train(root: Path, before: str, name: str, world: Any) -> None:
    """All steps under layout `name`, or those behind the checkpoint of layout `before`."""
    from dslaunch.runtime import checkpoints
    from dslaunch.runtime.checks import read_plan
    from dslaunch.runtime.data import open_data
    from dslaunch.runtime.engines import make_engine
    from dslaunch.runtime.metrics import measure
    from dslaunch.runtime.saving import Saver

    began = time.monotonic()
    plan = read_plan(root / name / "plan.json")
    folder = _converted(root, before, world) if before.endswith(" merged") else saved_by(root, before)
    start = checkpoints.check_readable(folder, plan) if before else 0
    engine = make_engine(plan, world, open_data(plan), root / name, lambda _phase: None)
    if before:
        checkpoints.restore(engine, plan, world, folder)
    rows = []
    for step in range(start, 2 * HALF):
        result = engine.step(step)
        rows.append((measure(step + 1, result, 1.0, plan, world).loss, result.grad_norm, result.lr))
        if step + 1 == HALF:
            Saver(engine, plan, world, root / name / "checkpoints", lambda _saved: None).save(HALF)
    if world.rank == 0:
        (root / f"{before} to {name}.json").write_text(json.dumps(rows))
    print(before, "to", name, f"{time.monotonic() - began:.1f} s", flush=True)


def _converted(root: Path, before: str, world: Any) -> Path:
    import torch.distributed as dist

    from dslaunch.runtime.convert import convert

    to = root / before
    if world.rank == 0 and not to.exists():
        convert(saved_by(root, before.removesuffix(" merged")), to)
    dist.barrier()
    return to
