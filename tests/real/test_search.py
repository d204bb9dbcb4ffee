"""strategy=auto finds what trying everything finds, and what it takes for granted of the ledgers is so."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from statistics import median
from typing import cast

import pytest

from dslaunch.engines.base import Engine
from dslaunch.engines.layout import Layout
from dslaunch.engines.registry import ENGINES
from dslaunch.flow import Request, configured
from dslaunch.hardware.efficiency import UNCALIBRATED
from dslaunch.plan import layouts as layouts_of
from dslaunch.plan.bound import least_s, undivided_s
from dslaunch.plan.case import cases
from dslaunch.plan.engine_choice import candidates, engine_faults, grad_accum
from dslaunch.plan.evaluate import Evaluated, evaluate
from dslaunch.plan.findings import fits
from dslaunch.plan.goals import resized
from dslaunch.plan.memory import stage_memory
from dslaunch.plan.search import Found, search
from dslaunch.plan.sharding import sharded
from dslaunch.plan.time import Known, step_time
from dslaunch.schema.components import Decoder, ViT
from dslaunch.schema.config import RunConfig
from dslaunch.schema.layer import Experts
from dslaunch.schema.model import Edge, Model
from dslaunch.schema.strategy import ComponentStrategy

LLM = Decoder(
    arch="decoder", layers=4, hidden=256, heads=4, kv_heads=2, ffn=512, vocab=1000, max_positions=512
)
TOWER = ViT(arch="vit", layers=2, hidden=128, heads=2, ffn=256, patch=16, image=64)
DENSE = Model(name="dense", components={"llm": LLM})
MIXED = Model(
    name="mixed", components={"llm": LLM.model_copy(update={"experts": Experts(count=2, top_k=1, ffn=128)})}
)
VLM = Model(
    name="vlm",
    components={"tower": TOWER, "llm": LLM},
    edges=(Edge(source="tower", to="llm", tokens=16, join="channel"),),
)
JOINED = VLM.model_copy(update={"edges": (Edge(source="tower", to="llm", tokens=16, join="sequence"),)})
"""What dslaunch.runtime executes."""
SMALL = ComponentStrategy(recompute="full")
Wanted = dict[str, ComponentStrategy]


@dataclass(frozen=True)
class Tried:
    """What brute force found."""

    engine: str
    schedule: str
    found: Evaluated

    @property
    def point(self) -> tuple[float, float]:
        return self.found.time.step_s, self.found.peak_gib


@cache
def recipe_config(*words: str) -> RunConfig:
    return configured(Request(words, None, (), ()))


def config_of(
    model: Model,
    cluster: str,
    batch: int,
    pins: Mapping[str, ComponentStrategy],
    words: tuple[str, ...] = (),
    **goal: object,
) -> RunConfig:
    base = recipe_config("recipe=llama3_8b", f"cluster={cluster}", "strategy=auto", *words)
    return base.model_copy(
        update={
            "model": model,
            "training": base.training.model_copy(
                update={"global_batch": batch, "seq_len": 256, "micro_batch": None}
            ),
            "strategy": base.strategy.model_copy(update={"components": dict(pins)}),
            "goal": base.goal.model_copy(update=goal),
        }
    )


def everything(config: RunConfig, offload: str = "none") -> Iterator[tuple[str, str, Wanted]]:
    """(engine, schedule, strategies): every combination of every value but of offload, legal or not."""
    pinned = layouts_of.pinned(config)
    world = config.cluster.world_size
    for name, cut in itertools.product(candidates(config), range(world)):
        engine = ENGINES[name]
        if cut and (not engine.per_component or len(pinned) == 1):
            continue
        trunk = config.model.trunk
        places = {part: (cut, world - cut) if part == trunk else (0, cut or world) for part in pinned}
        if engine.per_component:
            choices = [list(_choices(config, part, pin, *places[part])) for part, pin in pinned.items()]
            together = [dict(zip(pinned, each, strict=True)) for each in itertools.product(*choices)]
        else:
            together = list(_one_layout(config, pinned))
        for each in together:
            wanted = {part: want.model_copy(update={"offload": offload}) for part, want in each.items()}
            for schedule in _orders(engine, wanted[trunk]):
                yield name, schedule, wanted


def _orders(engine: Engine, trunk: ComponentStrategy) -> list[str]:
    """Every order of micro-batches that goes with the trunk's stages."""
    if (trunk.vpp or 1) > 1:
        return ["interleaved"]
    return ["1f1b"] if trunk.pp == 1 else sorted({"1f1b"} | engine.schedules - {"interleaved"})


def _one_layout(config: RunConfig, pinned: Mapping[str, ComponentStrategy]) -> Iterator[Wanted]:
    """The trunk's choices for all components; each recompute for those that pin none."""
    trunk, zeros = config.model.trunk, {pin.zero for pin in pinned.values() if pin.zero is not None}
    free = pinned[trunk].model_copy(update={"recompute": None})
    for want in _choices(config, trunk, free, 0, config.cluster.world_size):
        if zeros <= {want.zero}:
            yield {
                part: want.model_copy(update={"recompute": pin.recompute or want.recompute})
                for part, pin in pinned.items()
            }


def _choices(
    config: RunConfig, name: str, pin: ComponentStrategy, offset: int, ranks: int
) -> Iterator[ComponentStrategy]:
    degrees, layers = range(1, ranks + 1), config.model.components[name].layers  # type: ignore[union-attr]
    virtual = range(1, layers + 1) if name == config.model.trunk else [1]
    component = config.model.components[name]
    cuts = (None, 1) if isinstance(component, Decoder) and component.experts else (None,)
    for tp, pp, vpp, cp, ep, etp, zero, recompute, micro in itertools.product(
        degrees, degrees, virtual, degrees, degrees, cuts, range(4), ("none", "selective", "full"),
        range(1, config.training.global_batch + 1),
    ):  # fmt: skip
        if etp != tp and ranks % (tp * pp * cp) == 0 and layers % pp == 0:
            want = ComponentStrategy(
                tp=tp, pp=pp, vpp=vpp, cp=cp, ep=ep, etp=etp, dp=ranks // (tp * pp * cp), zero=zero,
                offload="none", recompute=recompute, micro_batch=micro, rank_offset=offset,  # type: ignore[arg-type]
            )  # fmt: skip
            if all(getattr(want, key) == value for key, value in pin.model_dump(exclude_none=True).items()):
                yield want


def brute_force(config: RunConfig, offload: str = "none") -> list[Tried]:
    """All that is legal, whether it fits or not; gradients in the type that the engine itself would take."""
    found = []
    for name, schedule, wanted in everything(config, offload):
        training = config.training.model_copy(update={"schedule": schedule})
        for tried in every_sharding(config.model_copy(update={"training": training})):
            layouts, faults = layouts_of.resolve(tried, wanted)
            if faults or engine_faults(tried, layouts, name):
                continue
            engine = ENGINES[name]
            accum, faults = grad_accum(tried, engine, layouts)
            several = any(layout.num_microbatches > 1 for layout in layouts.values())
            if not faults and accum == engine.grad_accum(training.precision, several):
                found.append(Tried(name, schedule, evaluate(tried, engine, layouts, accum, UNCALIBRATED)))
    return found


def every_sharding(config: RunConfig) -> Iterator[RunConfig]:
    """Under ZeRO, DDP, FSDP2, and HSDP over each number of ranks but one and all; as pinned where it is."""
    if "sharding" in config.strategy.model_fields_set:
        yield config
        return
    pin = config.strategy.shard
    yield from (sharded(config, sharding, pin) for sharding in ("zero", "ddp", "fsdp2"))
    yield from (sharded(config, "hsdp", n) for n in range(2, config.cluster.world_size) if pin in (None, n))


def limited(config: RunConfig, gib: float) -> RunConfig:
    """The configuration on GPUs on which plans may use so much."""
    gpu = config.cluster.gpu.model_copy(update={"memory_gib": gib / config.goal.memory_fraction})
    return config.model_copy(update={"cluster": config.cluster.model_copy(update={"gpu": gpu})})


SCRIPT = ("script=train.py", "goal.engines=[deepspeed,torch,native,megatron_mimo]")
TORCH = ("engine=torch",)
SPLIT = ("engine=megatron_deepspeed", "engine.version=0.17.4")
"""Which can split the backward pass."""
FIXED, SOME = (
    ComponentStrategy(recompute="full", zero=1, cp=1, ep=1),
    ComponentStrategy(recompute="selective"),
)
STAGES = ComponentStrategy(pp=2, recompute="none")
CASES = [
    (DENSE, "1xA100", {}, ()),
    (DENSE, "2xA100", {}, ()),
    (DENSE, "4xA100", {"llm": ComponentStrategy(zero=1)}, ()),
    (DENSE, "2x2xA100", {"llm": ComponentStrategy(recompute="none")}, ()),
    (DENSE, "4xA100", {}, TORCH),
    (DENSE, "2x2xA100", {"llm": ComponentStrategy(recompute="none")}, (*TORCH, "strategy.sharding=hsdp")),
    (DENSE, "4xA100", {}, (*TORCH, "strategy.shard=2")),
    (DENSE, "4xA100", {"llm": ComponentStrategy(tp=1)}, SPLIT),
    (MIXED, "2xA100", {"llm": ComponentStrategy(recompute="full")}, ()),
    (MIXED, "4xA100", {"llm": ComponentStrategy(recompute="full", zero=1)}, ("engine=megatron",)),
    (VLM, "1xA100", {"tower": SMALL}, ()),
    (VLM, "2xA100", {"tower": SMALL, "llm": ComponentStrategy(zero=1, recompute="none")}, SCRIPT),
    (JOINED, "2xA100", {"tower": SMALL, "llm": STAGES}, ()),
    (VLM, "3xA100", {"tower": FIXED, "llm": FIXED}, ("engine=megatron_mimo",)),
    (VLM, "2x1xA100", {"tower": ComponentStrategy(zero=2), "llm": SOME}, SCRIPT),
]


@pytest.mark.parametrize(("model", "cluster", "pins", "words"), CASES)
def test_the_search_finds_what_brute_force_finds(
    model: Model, cluster: str, pins: dict[str, ComponentStrategy], words: tuple[str, ...]
) -> None:
    """At many limits of memory: from one where all fits to one where nothing does."""
    draw = random.Random(f"{model.name} {cluster}")
    config = config_of(model, cluster, 4, pins, words)
    tried = brute_force(config)
    assert tried
    peaks = sorted({each.found.peak_gib for each in tried})
    between = [draw.choice(peaks) * draw.uniform(0.999, 1.001) for _ in range(4)]
    limits = [peaks[-1] * 1.01, *between, peaks[0] * 0.99]
    for limit, by_memory in itertools.product(limits, (False, True)):
        name = "lowest_memory" if by_memory else "throughput"
        small = limited(config_of(model, cluster, 4, pins, words, name=name), limit)
        assert_best(small, tried, by_memory=by_memory)


@pytest.mark.parametrize("cluster", ["1xA100", "2xA100"])
def test_offload_is_the_best_of_its_kind_and_only_where_nothing_else_fits(cluster: str) -> None:
    """From a limit at which the plain ones all fit to one at which not even the least offloaded one does."""
    pins = {"llm": ComponentStrategy(cp=1)}
    config = config_of(DENSE, cluster, 4, pins, ("engine=deepspeed",))
    plain, away = brute_force(config), [*brute_force(config, "cpu"), *brute_force(config, "cpu_params")]
    least, smallest = (min(each.found.peak_gib for each in tried) for tried in (plain, away))
    assert smallest < least
    for limit in (
        least * 1.0001,
        least * 0.9999,
        (least + smallest) / 2,
        smallest * 1.0001,
        smallest * 0.9999,
    ):
        small = limited(config, limit)
        legal = plain if limit > least else away
        fitting = [each.point for each in legal if fits(small, each.found)]
        found = search(small, layouts_of.pinned(small), UNCALIBRATED)
        if not fitting:
            assert not isinstance(found, Found)
            continue
        assert isinstance(found, Found)
        assert (found.chosen.layouts["llm"].offload == "none") == (limit > least)
        assert (found.chosen.step_s, found.chosen.peak_gib) == pytest.approx(min(fitting))


def assert_best(config: RunConfig, tried: list[Tried], *, by_memory: bool) -> None:
    """The search's best, its front and its engines are those of brute force."""
    fitting = [each for each in tried if fits(config, each.found)]
    found = search_without_offload(config)
    assert found is None or not engine_faults(found.config, found.chosen.layouts, found.chosen.engine)
    if not fitting:
        assert found is None
        return
    order = (lambda p: (p[1], p[0])) if by_memory else (lambda p: p)
    best = min((each.point for each in fitting), key=order)
    assert found is not None
    assert order((found.chosen.step_s, found.chosen.peak_gib)) == pytest.approx(order(best))
    alike = {each.schedule for each in fitting if order(each.point) == pytest.approx(order(best))}
    assert found.chosen.schedule == found.config.training.schedule
    assert found.chosen.schedule in alike
    worst = 1.25 * order(best)[0]
    front = {p for p in (e.point for e in fitting) if order(p)[0] <= worst and not beaten(p, fitting)}
    points = [(each.step_s, each.peak_gib) for each in found.front.skyline]
    for point in front:
        assert any(p == pytest.approx(point) for p in points), point


def beaten(point: tuple[float, float], others: list[Tried]) -> bool:
    slack = 1 + 1e-9
    return any(
        other.point[0] <= point[0] * slack
        and other.point[1] <= point[1] * slack
        and (other.point[0] * slack < point[0] or other.point[1] * slack < point[1])
        for other in others
    )


def search_without_offload(config: RunConfig) -> Found | None:
    """What a search finds where host memory holds nothing."""
    node = config.cluster.node.model_copy(update={"host_memory_gib": 2.0 * config.cluster.slots})
    small = config.model_copy(update={"cluster": config.cluster.model_copy(update={"node": node})})
    found = search(small, layouts_of.pinned(small), UNCALIBRATED)
    return found if isinstance(found, Found) else None


# --- what the search takes for granted


@pytest.mark.parametrize("engine", ["deepspeed", "torch", "megatron", "native"])
@pytest.mark.parametrize("recipe", ["llama3_70b", "mixtral_8x7b", "vla70b", "deepseek_v3", "gpt3_175b"])
def test_more_recompute_never_takes_more_memory_or_less_time(recipe: str, engine: str) -> None:
    for layout in some_layouts(recipe):
        levels = [replace(layout, recompute=each) for each in ("none", "selective", "full")]
        totals = [peak_and_time(recipe, engine, each) for each in levels]
        assert totals[2][0] <= min(t[0] for t in totals) * (1 + 1e-12), layout
        assert [t[1] for t in totals] == sorted(t[1] for t in totals), layout


@pytest.mark.parametrize("engine", ["deepspeed", "torch", "megatron", "native"])
@pytest.mark.parametrize("recipe", ["llama3_70b", "mixtral_8x7b", "vla70b", "deepseek_v3", "gpt3_175b"])
def test_a_larger_micro_batch_never_takes_less_memory(recipe: str, engine: str) -> None:
    for layout in some_layouts(recipe):
        halved = replace(layout, micro_batch=1, num_microbatches=layout.num_microbatches * layout.micro_batch)
        small, large = (peak_and_time(recipe, engine, each)[0] for each in (halved, layout))
        assert small <= large * (1 + 1e-12), layout


@pytest.mark.parametrize("engine", ["deepspeed", "torch", "megatron", "native"])
@pytest.mark.parametrize("recipe", ["llama3_70b", "mixtral_8x7b", "vla70b", "llama3_70b_lora", "deepseek_v3"])
def test_no_step_is_shorter_than_its_bound(recipe: str, engine: str) -> None:
    """Whatever the stages, the ring, the experts' ranks and the recompute, none of which the bound knows."""
    config = recipe_config(f"recipe={recipe}")
    trunk, known = config.model.trunk, dict[tuple[object, ...], object]()
    shares = []
    for layout in [*some_layouts(recipe), *further_layouts(recipe)]:
        every = cases(config, ENGINES[engine], {trunk: layout}, "fp32")
        undivided = undivided_s(every[trunk], UNCALIBRATED, cast("Known", known))
        bound = least_s(undivided, layout.pp, layout.vpp, layout.num_microbatches, "1f1b")
        shares.append(bound / step_time(every, UNCALIBRATED).step_s)
        assert shares[-1] <= 1 + 1e-12, layout
    assert max(shares) > 0.6  # or it would rule nothing out


@pytest.mark.parametrize("recipe", ["llama3_70b", "gpt3_175b"])
def test_a_split_backward_pass_has_its_bound_and_its_least_memory_is_that_of_some_recompute(recipe: str) -> None:
    """A larger micro-batch takes no less with the recompute that takes least, and more recompute no less time."""
    config = recipe_config(f"recipe={recipe}")
    config = config.model_copy(update={"training": config.training.model_copy(update={"schedule": "zb-h1"})})
    trunk, engine, shares = config.model.trunk, ENGINES["megatron_deepspeed"], []

    def weighed(layout: Layout) -> list[tuple[float, float]]:
        every = [
            cases(config, engine, {trunk: replace(layout, recompute=each)}, "fp32")
            for each in ("none", "selective", "full")
        ]
        return [
            (
                max(stage_memory(case[trunk], stage).total for stage in range(layout.pp)),
                step_time(case, UNCALIBRATED).step_s,
            )
            for case in every
        ]

    for layout in some_layouts(recipe):
        if layout.pp == 1:
            continue
        found = weighed(layout)
        halved = replace(layout, micro_batch=1, num_microbatches=layout.num_microbatches * layout.micro_batch)
        assert min(weighed(halved))[0] <= min(found)[0] * (1 + 1e-12), layout
        assert [each[1] for each in found] == sorted(each[1] for each in found), layout
        case = cases(config, engine, {trunk: layout}, "fp32")[trunk]
        bound = least_s(
            undivided_s(case, UNCALIBRATED, {}), layout.pp, 1, layout.num_microbatches, "zb-h1"
        )
        shares.append(bound / found[0][1])
        assert shares[-1] <= 1 + 1e-12, layout
    assert max(shares) > 0.6


@pytest.mark.parametrize("recipe", ["llama3_70b", "mixtral_8x7b", "vla70b"])
def test_gpipe_takes_as_long_as_1f1b_and_no_less_memory(recipe: str) -> None:
    """Which is why no search tries it."""
    plain = recipe_config(f"recipe={recipe}")
    orders = {
        order: plain.model_copy(update={"training": plain.training.model_copy(update={"schedule": order})})
        for order in ("1f1b", "gpipe")
    }
    trunk, worse = plain.model.trunk, 0
    for layout in some_layouts(recipe):
        one, other = (
            cases(config, ENGINES["native"], {trunk: layout}, "fp32") for config in orders.values()
        )
        assert step_time(other, UNCALIBRATED).step_s == step_time(one, UNCALIBRATED).step_s
        for stage in range(layout.pp):
            least, most = (stage_memory(each[trunk], stage).total for each in (one, other))
            assert least <= most
            worse += least < most
    assert worse > 0


@pytest.mark.parametrize("goal", ["fewest_gpus", "deadline", "cost"])
def test_each_goal_takes_the_size_that_brute_force_takes(goal: str) -> None:
    """Of one to four nodes, the schedule among what is tried."""
    words, pins = (*SPLIT, "cluster.price_per_gpu_hour=2"), {"llm": ComponentStrategy(tp=1, pp=2)}
    config = config_of(DENSE, "4x1xA100", 8, pins, words)
    tried = {nodes: brute_force(resized(config, nodes)) for nodes in (1, 2, 3, 4)}
    limit = median(each.found.peak_gib for each in tried[2]) * 1.001
    best: dict[int, tuple[float, float]] = {
        nodes: min(fitting)
        for nodes, every in tried.items()
        if (fitting := [each.point for each in every if fits(limited(resized(config, nodes), limit), each.found)])
    }
    assert sorted(best) == [2, 4]
    slow = sorted(step for step, _ in best.values())
    days = (slow[0] + slow[-1]) / 2 * 1000 / 86400
    asked = {"name": goal, **({"tokens": 8 * 256 * 1000, "days": days} if goal == "deadline" else {})}
    wanted = {
        "fewest_gpus": min(best),
        "deadline": min(n for n, (step, _) in best.items() if step <= days * 86400 / 1000),
        "cost": min(best, key=lambda n: (n * best[n][0], n)),
    }[goal]
    found = search_without_offload(limited(config_of(DENSE, "4x1xA100", 8, pins, words, **asked), limit))
    assert found is not None
    assert found.config.cluster.world_size == wanted
    assert (found.chosen.step_s, found.chosen.peak_gib) == pytest.approx(best[wanted])
    alike = {e.schedule for e in tried[wanted] if e.point == pytest.approx(best[wanted])}
    assert found.chosen.schedule in alike


def further_layouts(recipe: str) -> Iterator[Layout]:
    """The same with uneven or virtual stages, a cut sequence and experts apart, where the shapes have them."""
    draw = random.Random(recipe)
    model = recipe_config(f"recipe={recipe}").model
    component = model.components[model.trunk]
    experts = isinstance(component, Decoder) and component.experts is not None
    for layout in some_layouts(recipe):
        per = layout.layers_per_stage
        if layout.pp > 2 and per[0] > 1:
            per = (per[0] - 1, *per[1:-1], per[-1] + 1)
        vpp = 2 if layout.pp > 1 and per == layout.layers_per_stage and per[0] % 2 == 0 else 1
        cp, ep = draw.choice([1, 2, 4]), draw.choice([2, 4]) if experts else 1
        etp = draw.choice([None, 1]) if experts and layout.tp > 1 else None
        dp = max(layout.dp, ep)
        yield replace(layout, layers_per_stage=per, vpp=vpp, cp=cp, ep=ep, expert_tp=etp, dp=dp)


def some_layouts(recipe: str) -> Iterator[Layout]:
    """Layouts of the trunk, drawn at random."""
    config = recipe_config(f"recipe={recipe}")
    layers = config.model.components[config.model.trunk].layers  # type: ignore[union-attr]
    draw = random.Random(recipe)
    for _ in range(12):
        pp = draw.choice([n for n in range(1, 17) if layers % n == 0] or [1])
        yield Layout(
            tp=draw.choice([1, 2, 4, 8]), pp=pp, vpp=1, cp=1, ep=1, dp=draw.choice([1, 2, 8]),
            zero=draw.choice([0, 1] if pp > 1 else [0, 1, 2, 3]), offload="none",
            recompute=draw.choice(["none", "full"]), micro_batch=draw.choice([2, 4]),
            num_microbatches=draw.choice([2, 8, 64]), rank_offset=0, layers_per_stage=(layers // pp,) * pp,
        )  # fmt: skip


def peak_and_time(recipe: str, engine: str, layout: Layout) -> tuple[float, float]:
    """(GiB of the fullest stage, seconds of a step) of the trunk alone."""
    config = recipe_config(f"recipe={recipe}")
    trunk = config.model.trunk
    every = cases(config, ENGINES[engine], {trunk: layout}, "fp32")
    peak = max(stage_memory(every[trunk], stage).total for stage in range(layout.pp))
    return peak, step_time(every, UNCALIBRATED).step_s
