"""Ranks that execute one layout per component after another: torch and deepspeed are imported once for all cases.

Each rank writes into a case's folder what it holds after each step; `whole` puts the ranks' parts together.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dslaunch import planfile
from dslaunch.run.agent import free_port
from tests.real import plans
from tests.real.ranks import PRELOAD, wait_for

WORLD = 8
CASE_LIMIT_S = 240.0
"""Of one case; the machine may be busy with other things."""
STEPS = 5
SAMPLES = 24
TEXT = 12
VISION = {
    "arch": "vit", "layers": 4, "hidden": 48, "heads": 12, "ffn": 48, "patch": 4, "image": 8, "channels": 1,
}  # fmt: skip
PROJECTOR = {"arch": "mlp", "dims": [48, 36, 32]}
LLM = {
    "arch": "decoder", "layers": 4, "hidden": 32, "heads": 12, "kv_heads": 6, "head_dim": 4, "ffn": 48,
    "vocab": 72, "norm_eps": 0.1,
}  # fmt: skip
"""Sizes that 2, 3 and 4 shards divide; a larger eps, since a norm with a small one blows up small start values."""
HEAD = {"arch": "mlp", "dims": [32, 24, 8], "module": "tests.real.hetero_head:head"}
HEAD_TOKENS = 6
EDGES = [
    {"from": "vision_encoder", "to": "projector", "tokens": 4, "join": "channel"},
    {"from": "projector", "to": "llm", "tokens": 4, "join": "sequence"},
]
NAMES = ("vision_encoder", "projector", "llm")


@dataclass(frozen=True)
class Layout:
    """One component: degrees, ZeRO stage, first rank, micro-batches of a replica."""

    pp: int = 1
    dp: int = 1
    tp: int = 1
    zero: int = 1
    offset: int = 0
    micro_batches: int = 1
    recompute: str = "none"
    offload: str = "none"
    vpp: int = 1
    lr: float = 2e-3
    weight_decay: float = 0.1


@dataclass(frozen=True)
class Case:
    """A layout for each component, and what else a step depends on."""

    vision_encoder: Layout
    projector: Layout
    llm: Layout
    schedule: str = "1f1b"
    rounds: int = 0
    clip: float = 0.0
    masked: bool = False
    frozen: tuple[str, ...] = ()
    optimizer: str = "AdamW"
    precision: str = "fp32"
    steps: int = STEPS
    save_at: int = 0
    """Steps after which a checkpoint is written and read again by engines made anew; 0: none is."""
    vision: dict[str, Any] = field(default_factory=dict)
    """Other settings of the tower."""
    decoder: dict[str, Any] = field(default_factory=dict)
    from_layer: int = -1
    """The tower's layer that the projector reads."""
    model: dict[str, Any] | None = None
    """Another model than the one above: its configuration, of components with the same names."""
    data: str = "digits"
    seq_len: int = TEXT + 4
    action_head: Layout | None = None
    """A head behind the decoder, which makes the loss."""
    second_encoder: Layout | None = None
    """A second tower on the same image, whose features stand beside the first one's channel by channel."""

    @property
    def layouts(self) -> dict[str, Layout]:
        found = {name: getattr(self, name) for name in NAMES}
        more = {"second_encoder": self.second_encoder, "action_head": self.action_head}
        return {**found, **{name: at for name, at in more.items() if at}}

    def describe(self) -> str:
        shown = [
            f"{name[:3]} pp{at.pp} vpp{at.vpp} dp{at.dp} tp{at.tp} z{at.zero} +{at.offset} m{at.micro_batches}"
            for name, at in self.layouts.items()
        ]
        more = [self.schedule, f"rounds {self.rounds}", f"clip {self.clip}", self.optimizer, *self.frozen]
        return f"{'; '.join(shown)}; {' '.join(more)}{' masked' if self.masked else ''}"


def training_of(case: Case) -> planfile.TrainingPlan:
    return replace(
        plans.training_plan(case.steps, case.precision, SAMPLES),
        seq_len=case.seq_len, clip=case.clip, schedule=case.schedule, eps=1e-4, warmup_steps=1,
        lr_schedule="linear",
    )  # fmt: skip


def model_of(case: Case) -> dict[str, Any]:
    if case.model:
        specs = {**case.model["components"]}
        for name in case.frozen:
            specs[name] = {**specs[name], "train": "nothing"}
        return {**case.model, "components": specs}
    tower, projector = {**VISION, **case.vision}, dict(PROJECTOR)
    edges = [{**EDGES[0], "from_layer": case.from_layer}, EDGES[1]]
    specs: dict[str, Any] = {"vision_encoder": tower, "projector": projector, "llm": {**LLM, **case.decoder}}
    if case.second_encoder:
        specs["second_encoder"] = {**VISION, "layers": 3}
        specs["projector"] = {**projector, "dims": [96, 36, 32]}
        edges.insert(1, {**EDGES[0], "from": "second_encoder"})
    if case.action_head:
        specs["action_head"] = HEAD
        edges.append({"from": "llm", "to": "action_head", "tokens": HEAD_TOKENS, "join": "sequence"})
    for name in case.frozen:
        specs[name] = {**specs[name], "train": "nothing"}
    return {"name": "vla_hetero", "components": specs, "edges": edges}


def plan_of(case: Case) -> planfile.Plan:
    training = training_of(case)
    files = planfile.FilesPlan(data_path=case.data)
    whole = plans.plan_for("zero1", WORLD, training, model_of(case), files)
    components = {}
    for name, at in case.layouts.items():
        layers = model_of(case)["components"][name].get("layers", 0)
        components[name] = replace(
            whole.components[name],
            tp=at.tp, pp=at.pp, vpp=at.vpp, dp=at.dp, zero=at.zero, rank_offset=at.offset,
            recompute=at.recompute, offload=at.offload,
            num_microbatches=at.micro_batches, micro_batch=SAMPLES // at.dp // at.micro_batches,
            lr=at.lr, weight_decay=at.weight_decay, layers_per_stage=_split(layers, at.pp, at.vpp),
        )  # fmt: skip
    for edge in model_of(case)["edges"]:
        if edge["join"] == "shared_attention":
            components[edge["to"]] = components[edge["from"]]
    engine = replace(whole.engine, name="native")
    return replace(whole, components=components, engine=engine)


def _split(layers: int, pp: int, vpp: int) -> tuple[int, ...]:
    """Uneven where it can be: the first stages have one more in each of their vpp parts."""
    parts = layers // vpp
    return tuple(vpp * (parts // pp + (stage < parts % pp)) for stage in range(pp))


def config_of(case: Case, name: str) -> dict[str, Any]:
    """The DeepSpeed JSON of one component."""
    plan, at = plan_of(case), case.layouts[name]
    params: dict[str, Any] = {"lr": at.lr, "weight_decay": at.weight_decay}
    if case.optimizer == "AdamW":
        params |= {"betas": [0.9, 0.95], "eps": 1e-4, "torch_adam": True}
    zero: dict[str, Any] = {"stage": at.zero, "stage3_param_persistence_threshold": 0}
    if at.offload == "cpu":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    return {
        "train_batch_size": SAMPLES,
        "train_micro_batch_size_per_gpu": plan.components[name].micro_batch,
        "gradient_accumulation_steps": at.micro_batches,
        "gradient_clipping": case.clip,
        "bf16": {"enabled": case.precision == "bf16"},
        "optimizer": {"type": case.optimizer, "params": params},
        "data_types": {"grad_accum_dtype": "fp32"} if at.zero else {},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,  # SGD
        "checkpoint": {"tag_validation": "Ignore"},
    }


def write(case: Case, folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text(planfile.to_json(plan_of(case)), encoding="utf-8")
    for name in case.layouts:
        if name not in case.frozen:
            (folder / f"ds_config.{name}.json").write_text(
                json.dumps(config_of(case, name)), encoding="utf-8"
            )
    beside = {"rounds": case.rounds, "masked": case.masked, "steps": case.steps, "save_at": case.save_at}
    (folder / "case.json").write_text(json.dumps(beside), encoding="utf-8")


def execute(folders: Sequence[Path], logs: Path, preload: Sequence[str] = ()) -> None:
    """Run the cases in `folders`; after one that fails, new ranks go on with the next.

    Args:
        preload: what they import besides.
    """
    left = list(folders)
    while left:
        _set_of_ranks(left, logs, preload)
        done = [folder for folder in left if (folder / f"rank{WORLD - 1}.pt").exists()]
        left = left[len(done) + 1 :]


def _set_of_ranks(folders: Sequence[Path], logs: Path, preload: Sequence[str]) -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, *preload])
    logs.mkdir(exist_ok=True)
    port = free_port()
    names = [str(folder) for folder in folders]
    ranks = [context.Process(target=_rank, args=(names, rank, port, str(logs))) for rank in range(WORLD)]
    for rank in ranks:
        rank.start()
    wait_for(ranks, CASE_LIMIT_S * (len(folders) + 1))


def _rank(folders: list[str], rank: int, port: int, logs: str) -> None:
    """Every case in turn; at a failure, or past the limit, what this rank is doing goes into its log."""
    import torch
    import torch.distributed as dist

    from dslaunch.runtime.engine_deepspeed import join_deepspeed
    from dslaunch.runtime.world import World, join_world

    output = open(Path(logs) / f"rank{rank}.txt", "a")  # noqa: SIM115  (lives as long as the process)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    sys.stdout = sys.stderr = output
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )  # fmt: skip
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    world = World(rank, rank, WORLD, torch.device("cpu"))
    plan = planfile.plan_from_json((Path(folders[0]) / "plan.json").read_text(), "plan.json")
    join_world(world, plan)
    join_deepspeed(world)
    for folder in folders:
        faulthandler.dump_traceback_later(CASE_LIMIT_S, exit=True, file=output)
        began = time.monotonic()
        try:
            _run_case(Path(folder), world)
        except BaseException:
            print(folder, flush=True)
            traceback.print_exc()
            output.flush()
            os._exit(1)
        print(folder, f"{time.monotonic() - began:.1f} s", flush=True)
    dist.barrier()
    os._exit(0)


def _run_case(folder: Path, world: Any) -> None:
    import torch
    import torch.distributed as dist

    from dslaunch.runtime import store
    from dslaunch.runtime.data import open_data
    from dslaunch.runtime.engine_native import NativeEngine

    beside = json.loads((folder / "case.json").read_text())
    plan = planfile.plan_from_json((folder / "plan.json").read_text(), str(folder))
    data: Any = open_data(plan)
    if beside["masked"]:
        data = Masked(data)
    gradients: list[dict[str, Any]] = []

    class Watched(NativeEngine):
        def _update(self, number: int) -> float:
            gradients.append(_gradients(self))
            return super()._update(number)

    engine = Watched(plan, world, data, folder, beside["rounds"])
    rows = []
    for step in range(beside["steps"]):
        result = engine.step(step)
        rows.append((float(result.loss), result.grad_norm, result.lr))
        if step + 1 == beside["save_at"]:
            (folder / "saved").mkdir(exist_ok=True)
            store.share(engine, world, copied=False).write(folder / "saved")
            dist.barrier()
            engine = Watched(plan, world, data, folder, beside["rounds"])
            store.restore(engine, store.Source(folder / "saved"), step + 1)
    held = {
        "rows": rows,
        "gradients": gradients,
        "parameters": _parameters(engine),
        "most_held": {key: stage.most_held for key, stage in engine.stages.items()},
        "sent_bytes": dict(engine.exchange.sent_bytes),
    }
    torch.save(held, folder / f"part{world.rank}.pt")
    dist.barrier()
    (folder / f"part{world.rank}.pt").rename(folder / f"rank{world.rank}.pt")
    for mesh in {stage.name: stage.mesh for stage in engine.stages.values()}.values():
        for group in (mesh.shards, mesh.replicas, mesh.stage):
            dist.destroy_process_group(group)


def _named(engine: Any) -> Any:
    """(name in the whole model, parameter, its stage, its place in a cut parameter)"""
    for stage in engine.stages.values():
        for name, parameter in stage.module.named_parameters():
            yield f"parts.{stage.name}.{name}", parameter, stage


def _gradients(engine: Any) -> dict[str, Any]:
    """By name: (gradient, dimension that is cut or None, parts cut apart, shard), of the first replica."""
    from deepspeed.utils import safe_get_full_grad

    found = {}
    for name, parameter, stage in _named(engine):
        if stage.engine is None or not parameter.requires_grad:
            continue
        zero = stage.engine.zero_optimization_stage()
        gradient = safe_get_full_grad(parameter) if zero else parameter.grad
        if stage.mesh.place.replica == 0:
            shape = getattr(parameter, "ds_shape", parameter.shape)
            gradient = None if gradient is None else gradient.detach().clone().view(shape)
            found[name] = (gradient, *_cut(parameter), stage.mesh.place.shard)
    return found


def _cut(parameter: Any) -> tuple[int | None, int]:
    return getattr(parameter, "tp_dim", None), getattr(parameter, "tp_parts", 1)


def _parameters(engine: Any) -> dict[str, Any]:
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    found = {}
    for name, parameter, stage in _named(engine):
        with GatheredParameters([parameter], enabled=hasattr(parameter, "ds_shape")):
            if stage.mesh.place.replica == 0:
                found[name] = (parameter.detach().float().clone(), *_cut(parameter), stage.mesh.place.shard)
    return found


class Masked:
    """Every third sample has no label, every fourth all but one: the loss is not spread evenly over replicas."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def at(self, numbers: Any) -> Any:
        numbers = list(numbers)
        batch = self.data.at(numbers)
        labels = batch.labels.clone()
        for position, number in enumerate(numbers):
            if number % 3 == 0:
                labels[position] = -100
            elif number % 4 == 1:
                labels[position, :7] = -100
        return replace(batch, labels=labels)


def whole(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The tensors that ranks hold parts of: shards put together, and replicas of shards equal."""
    import torch

    from dslaunch.runtime.tensor_parallel import put_together

    pieces: dict[str, dict[int, Any]] = {}
    cuts = {}
    for part in parts:
        for name, (tensor, dim, cut_apart, shard) in part.items():
            pieces.setdefault(name, {})[shard] = tensor
            cuts[name] = (dim, cut_apart)
    found = {}
    for name, by_shard in pieces.items():
        ordered = [by_shard[shard] for shard in sorted(by_shard)]
        dim, cut_apart = cuts[name]
        if dim is None:
            for other in ordered[1:]:
                torch.testing.assert_close(
                    other, ordered[0], rtol=0, atol=1e-6, msg=f"{name} differs over shards"
                )
            found[name] = ordered[0]
        else:
            found[name] = put_together(ordered, dim, cut_apart)
    return found
