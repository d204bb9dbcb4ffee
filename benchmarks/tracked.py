"""`python -m benchmarks.tracked`: tensors that ranks of dslaunch.runtime hold at their fullest, and the ledger.

Eight CPU ranks build the engine native and train two steps while every storage that torch makes is counted. The
ledger of a rank is the sum over the components whose stages it holds, as prediction.json has it.
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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.processes import run_ranks
from dslaunch.cli import run
from dslaunch.planfile import Plan, Prediction, plan_from_json, prediction_from_json
from dslaunch.run.agent import free_port
from dslaunch.runtime.data import Batch, Digits, open_digits
from dslaunch.runtime.grid import grid_of

RANKS = 8
MIB = 2**20
WORDS = (
    "recipe=vla_tiny", "cluster=local", "strategy=hetero", "training.precision=bf16", "training.global_batch=64",
    "training.seq_len=128", "data.path=benchmarks.tracked:every_token",
    "model.components.projector.dims=[64,512,512]",
    "model.components.llm.hidden=512", "model.components.llm.ffn=2048", "model.components.llm.layers=8",
    "model.components.llm.heads=8", "model.components.llm.kv_heads=4", "model.components.llm.vocab=4096",
    "model.components.llm.max_positions=512",
)  # fmt: skip
"""The recipe with a wider decoder over longer samples: states, activations and logits are all more than what any
process holds."""
TOWER = (
    "model.components.vision_encoder.hidden=512 model.components.vision_encoder.ffn=2048 "
    "model.components.vision_encoder.layers=8 model.components.projector.dims=[512,512,512] "
    "model.components.llm.layers=4"
)
"""A tower as large as the decoder."""
APART = (
    "strategy.vision_encoder.tp=1 strategy.vision_encoder.dp=2 strategy.vision_encoder.rank_offset=0 "
    "strategy.projector.dp=2 strategy.projector.micro_batch=8 strategy.projector.rank_offset=0 "
    "strategy.llm.pp=3 strategy.llm.tp=1 strategy.llm.dp=2 strategy.llm.rank_offset=2 "
    "strategy.llm.layers_per_stage=[3,3,2]"
)
"""The decoder on ranks of its own."""
MACRO = (
    "training.schedule=gpipe training.macro_batches=4 strategy.llm.micro_batch=4 "
    "strategy.vision_encoder.micro_batch=4 strategy.projector.micro_batch=2"
)
NAMES = {
    APART: "the decoder on six ranks of its own, in three stages",
    TOWER: "a tower as large as the decoder",
    MACRO: "four macro-batches, by GPipe",
}
"""Of layouts that are long to write."""
LAYOUTS = (
    "",
    "strategy.llm.pp=4 strategy.llm.dp=1",
    "strategy.llm.vpp=2",
    "strategy.llm.recompute=full",
    "strategy.llm.recompute=none strategy.vision_encoder.recompute=none",
    "training.schedule=gpipe",
    "strategy.llm.micro_batch=4",
    "strategy.llm.tp=1 strategy.llm.dp=4",
    "strategy.llm.pp=1 strategy.llm.dp=4 strategy.llm.zero=2",
    "strategy.llm.pp=1 strategy.llm.tp=4 strategy.llm.dp=2 strategy.llm.zero=2",
    "strategy.llm.pp=1 strategy.llm.dp=4 strategy.llm.zero=3",
    "training.grad_accum_dtype=bf16",
    "training.precision=fp32",
    "training.precision=fp32 strategy.llm.zero=0",
    APART,
    TOWER,
    MACRO,
)


@dataclass(frozen=True)
class Tracked:
    """Bytes of one rank."""

    measured: int
    ledger: float

    @property
    def ratio(self) -> float:
        return self.measured / self.ledger


@dataclass(frozen=True)
class EveryToken:
    """The recipe's digits with a label on each token: the ledger reckons with logits of all of them."""

    digits: Digits

    def at(self, numbers: Iterable[int]) -> Batch:
        batch = self.digits.at(numbers)
        return replace(batch, labels=batch.tokens.clone())


def main(arguments: Sequence[str]) -> int:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser("python -m benchmarks.tracked", description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0, help="layouts to leave out")
    parser.add_argument("--number", type=int, default=len(LAYOUTS), help="layouts to run")
    asked = parser.parse_args(arguments)
    print("| words beside the recipe's | fullest rank, MiB | its ledger, MiB | ratio | ratios of all ranks |")
    print("|---|---|---|---|---|")
    for words in LAYOUTS[asked.first : asked.first + asked.number]:
        ranks = measured(words.split())
        fullest = max(ranks, key=lambda rank: rank.measured)
        ratios = sorted(rank.ratio for rank in ranks)
        print(
            f"| {NAMES.get(words, words)} | {fullest.measured / MIB:.1f} | {fullest.ledger / MIB:.1f} | "
            f"{fullest.ratio:.3f} | {ratios[0]:.3f} to {ratios[-1]:.3f} |",
            flush=True,
        )
    return 0


def every_token(plan: Plan) -> EveryToken:
    """The data set of these runs."""
    return EveryToken(open_digits(replace(plan, files=replace(plan.files, data_path="digits"))))


def measured(words: Sequence[str]) -> list[Tracked]:
    """By rank."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stdout(io.StringIO()):
            status = run(["render", *WORDS, *words, "-o", folder, "-q"])
        assert status == 0, words
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["deepspeed", "dslaunch.runtime.engine_native"])
        port = free_port()
        run_ranks(context, _rank, [(folder, rank, port) for rank in range(RANKS)])
        plan = _plan(folder)
        text = (Path(folder) / "prediction.json").read_text(encoding="utf-8")
        prediction = prediction_from_json(text, folder)
        return [
            Tracked(json.loads((Path(folder) / f"{rank}.json").read_text()), ledger(plan, prediction, rank))
            for rank in range(RANKS)
        ]


def ledger(plan: Plan, prediction: Prediction, rank: int) -> float:
    """Bytes that the prediction says of a rank, at the fullest moment of each component."""
    total = 0.0
    for name, layout in plan.components.items():
        if place := grid_of(layout).place(rank):
            total += prediction.components[name][place.stage].memory_gib.total
    return total * 2**30


def _plan(folder: str) -> Plan:
    return plan_from_json((Path(folder) / "plan.json").read_text(encoding="utf-8"), folder)


def _rank(folder: str, rank: int, port: int) -> None:
    import torch

    from dslaunch.runtime.data import open_data
    from dslaunch.runtime.engine_deepspeed import join_deepspeed
    from dslaunch.runtime.engines import make_engine
    from dslaunch.runtime.world import World, join_world, part
    from tests.real.live_bytes import LiveBytes

    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (DeepSpeed's banner; lives as long as the process)
    plan = _plan(folder)
    world = World(rank, rank, RANKS, torch.device("cpu"))
    join_world(world, plan)
    join_deepspeed(world)
    data = open_data(plan)
    with LiveBytes() as live:
        engine = make_engine(plan, world, data, Path(folder), lambda _phase: None)
        live.peak = live.now
        for step in range(2):
            engine.step(step)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(live.peak))
    part(world)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
