"""Formulas of pipelines that split the backward pass, against the orders that frameworks have, run as events."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from dslaunch.plan.schedules import filling_s, held, waiting_s
from dslaunch.planfile import ComponentPlan
from dslaunch.review.timeline import spans
from tests.real.parts import need

Op = tuple[str, int, int]
"""(F | B | W, part of the model, micro-batch)."""
Seconds = Callable[[str, int], float]
"""Of F, B or W of a part."""
OF_TORCH = {
    "zb-h1": ("ScheduleInterleavedZeroBubble", "loop"),
    "zb-v": ("ScheduleZBVZeroBubble", "v"),
    "dualpipe-v": ("ScheduleDualPipeV", "v"),
}


def order_of_torch(schedule: str, ranks: int, chunks: int, m: int) -> dict[int, list[Op]]:
    """What each rank does, as torch/distributed/pipelining/schedules.py has it."""
    import torch.distributed.pipelining.schedules as torch_schedules

    name, style = OF_TORCH[schedule]
    made: Any = object.__new__(getattr(torch_schedules, name))
    made.pp_group_size, made._n_microbatches, made.n_local_stages = ranks, m, chunks
    made._num_stages = made.num_stages = ranks * chunks
    made.number_of_rounds = max(1, m // ranks)
    made.microbatches_per_round = m // made.number_of_rounds
    made.stage_index_to_group_rank = torch_schedules.generate_stage_to_rank_mapping(
        ranks, ranks * chunks, style
    )
    found: dict[int, list[Op]] = {}
    for rank in range(ranks):
        actions = [each for each in made._calculate_single_rank_operations(rank) if each]
        found[rank] = [
            op for each in actions for single in each.sub_actions or (each,) for op in _ops(single)
        ]
    return found


def _ops(action: Any) -> list[Op]:
    kinds = {"FORWARD": "F", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "BW"}
    return [
        (kind, action.stage_index, action.microbatch_index) for kind in kinds[action.computation_type.name]
    ]


def order_of_h2(ranks: int, m: int) -> dict[int, list[Op]]:
    """ZB-H2, arXiv:2401.10241 figure 3: 2 (p - i) - 1 forwards first, weights 2 i micro-batches later."""
    found: dict[int, list[Op]] = {}
    for rank in range(ranks):
        ahead, late = min(m, 2 * (ranks - rank) - 2), 2 * rank
        found[rank] = []
        for done in range(m + ahead + late):
            found[rank] += [("F", rank, done)] if done < m else []
            found[rank] += [("B", rank, done - ahead)] if 0 <= done - ahead < m else []
            found[rank] += [("W", rank, done - ahead - late)] if done >= ahead + late else []
    return found


def run(orders: Mapping[int, Sequence[Op]], parts: int, seconds: Seconds) -> tuple[float, float, list[int]]:
    """(seconds until all is done; the longest from a rank's first to its last; parts of micro-batches that each
    rank holds at most, from F to W)."""
    done: dict[Op, float] = {}
    at, now = dict.fromkeys(orders, 0), dict.fromkeys(orders, 0.0)
    began: dict[int, float] = {}
    while any(at[rank] < len(order) for rank, order in orders.items()):
        before = dict(at)
        for rank, order in orders.items():
            while at[rank] < len(order) and all(need in done for need in _needs(order[at[rank]], parts)):
                op = order[at[rank]]
                start = max([now[rank], *(done[need] for need in _needs(op, parts))])
                began.setdefault(rank, start)
                now[rank] = done[op] = start + seconds(op[0], op[1])
                at[rank] += 1
        assert at != before, "a rank waits for ever"
    fullest = []
    for order in orders.values():
        held_now = most = 0
        for kind, _, _ in order:
            held_now += {"F": 1, "B": 0, "W": -1}[kind]
            most = max(most, held_now)
        fullest.append(most)
    return max(now.values()), max(now[rank] - began[rank] for rank in orders), fullest


def _looked_up(each: Mapping[tuple[str, int], float]) -> Seconds:
    return lambda kind, part: each[kind, part]


def _needs(op: Op, parts: int) -> list[Op]:
    kind, part, micro_batch = op
    if kind == "F":
        return [("F", part - 1, micro_batch)] if part else []
    if kind == "W":
        return [("B", part, micro_batch)]
    return [("F", part, micro_batch), *([("B", part + 1, micro_batch)] if part < parts - 1 else [])]


@pytest.mark.parametrize(("schedule", "chunks"), [("zb-h1", 1), ("zb-h1", 2), ("zb-v", 2), ("dualpipe-v", 2)])
@pytest.mark.parametrize(("ranks", "m"), [(2, 8), (4, 16), (8, 32)])
@pytest.mark.parametrize("times", [(1, 1, 1), (1, 1.1, 0.9), (1, 1.3, 0.9), (1, 1.6, 0.8), (1, 2.1, 1)])
def test_equal_stages_take_what_pytorchs_order_takes(
    schedule: str, chunks: int, ranks: int, m: int, times: tuple[float, float, float]
) -> None:
    """F, B, W of a rank: of plain layers, of long sequences, of full recompute."""
    need("torch")
    each = dict(zip("FBW", times, strict=True))
    orders = order_of_torch(schedule, ranks, chunks, m)
    ended, _, fullest = run(orders, ranks * chunks, lambda kind, part: each[kind] / chunks)
    filling = (ranks - 1) * filling_s(schedule, ranks, chunks, *times)
    assert ended == pytest.approx(m * sum(times) + filling, rel=1e-3)
    assert [parts / chunks for parts in fullest] == [held(schedule, ranks, rank, m) for rank in range(ranks)]


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v", "dualpipe-v"])
def test_stages_that_differ_take_nearly_that(schedule: str) -> None:
    """Each up to 15 % off the mean: the slowest is the clock. The formula takes the others' own time for filling,
    of which some hides behind the slowest."""
    need("torch")
    drawn = random.Random(7)
    chunks = 1 if schedule == "zb-h1" else 2
    for _ in range(20):
        ranks, m = drawn.choice([(4, 16), (8, 32)])
        scale = [drawn.uniform(0.85, 1.15) for _ in range(ranks)]
        rank_of = [*range(ranks), *reversed(range(ranks))][: ranks * chunks]
        times = (1.0, drawn.uniform(1, 1.5), drawn.uniform(0.8, 1))
        each = {
            (kind, part): seconds * scale[rank] / chunks
            for part, rank in enumerate(rank_of)
            for kind, seconds in zip("FBW", times, strict=True)
        }
        ended, *_ = run(order_of_torch(schedule, ranks, chunks, m), ranks * chunks, _looked_up(each))
        others = sorted(scale)[:-1]
        filling = sum(filling_s(schedule, ranks, chunks, *(by * t for t in times)) for by in others)
        assert ended == pytest.approx(max(scale) * m * sum(times) + filling, rel=0.05)


@pytest.mark.parametrize("times", [(1, 1, 1), (1, 1.3, 0.9), (1, 1.6, 0.8)])
@pytest.mark.parametrize(("ranks", "m"), [(2, 8), (4, 16), (8, 32)])
def test_zb_h2_starts_a_step_while_the_last_one_ends(
    ranks: int, m: int, times: tuple[float, float, float]
) -> None:
    each = dict(zip("FBW", times, strict=True))
    _, period, fullest = run(order_of_h2(ranks, m), ranks, lambda kind, part: each[kind])
    assert period == pytest.approx(
        m * sum(times) + (ranks - 1) * filling_s("zb-h2", ranks, 1, *times), rel=1e-3
    )
    assert fullest == [held("zb-h2", ranks, rank, m) for rank in range(ranks)]


def order_in_slots(schedule: str, ranks: int, m: int) -> dict[int, list[Op]]:
    """V-Half and V-Min, arXiv:2405.15362 section 3: each micro-batch six slots after the last one, F and B of both
    chunks at fixed slots, and W in those that are free."""
    found: dict[int, list[Op]] = {}
    for rank in range(ranks):
        last, gap = 2 * ranks - 1 - rank, {0: 2}.get(ranks % 3, 0)
        starts = (rank, last, 2 * ranks + gap + rank, 4 * ranks + gap - rank - 1)
        if schedule == "zb-v-half":
            gap = {0: 3}.get(ranks % 2, 0)
            starts = (
                2 * rank,
                3 * ranks - rank - 2,
                3 * ranks + gap + 2 * rank - 1,
                6 * ranks + gap - rank - 2,
            )
        kinds = (("F", rank), ("F", last), ("B", last), ("B", rank))
        slots = {
            start + 6 * at: (*kind, at) for kind, start in zip(kinds, starts, strict=True) for at in range(m)
        }
        late: list[Op] = []
        found[rank] = []
        for slot in range(max(slots) + 1):
            if op := slots.get(slot):
                late += [("W", *op[1:])] if op[0] == "B" else []
                found[rank].append(op)
            elif late:
                found[rank].append(late.pop(0))
        found[rank] += late
    return found


@pytest.mark.parametrize("schedule", ["zb-v-half", "zb-v-min"])
@pytest.mark.parametrize("times", [(1, 1, 1), (1, 1.2, 0.8), (1, 1.6, 0.8), (1, 2, 1)])
@pytest.mark.parametrize("ranks", [4, 8, 9])
def test_schedules_of_less_memory_wait_in_every_round(
    schedule: str, times: tuple[float, float, float], ranks: int
) -> None:
    each = dict(zip("FBW", times, strict=True))
    ended = [0.0, 0.0]
    for at, m in enumerate((24, 48)):
        orders = order_in_slots(schedule, ranks, m)
        ended[at], _, fullest = run(orders, 2 * ranks, lambda kind, part: each[kind] / 2)
        assert max(fullest) / 2 == pytest.approx(held(schedule, ranks, 0, m), abs=0.7)
    assert (ended[1] - ended[0]) / 24 == pytest.approx(sum(times) + waiting_s(schedule, *times))


@pytest.mark.parametrize("m", [2, 4, 9])
def test_the_drawn_order_is_legal_and_holds_what_the_ledger_says(m: int) -> None:
    """Megatron-DeepSpeed's, as the report draws it."""
    plan = ComponentPlan(
        tp=1, pp=4, vpp=1, cp=1, ep=1, dp=1, zero=1, offload="none", recompute="none", micro_batch=1,
        num_microbatches=m, rank_offset=0, params=1, trainable=1, lr=0.1, weight_decay=0.0,
        layers_per_stage=(1, 1, 1, 1), stages=(),
    )  # fmt: skip
    drawn = [span for span in spans(plan, [{"compute": 3.0 * m}] * 4, "zb-h1") if span.micro_batch >= 0]
    kinds = {"forward": "F", "backward": "B", "weights": "W"}
    orders = {
        stage: [(kinds[s.what], stage, s.micro_batch) for s in drawn if s.stage == stage]
        for stage in range(4)
    }
    ended, _, fullest = run(orders, 4, lambda kind, part: 1.0)
    assert ended == pytest.approx(max(span.end for span in drawn))
    assert all(len(order) == len(set(order)) == 3 * m for order in orders.values())
    assert fullest == [held("zb-h1", 4, stage, m) for stage in range(4)]
