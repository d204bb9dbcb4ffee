"""A layout for each component, executed by DeepSpeed engines on 8 CPU ranks, against one process in fp32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.real.parts import need

need("torch", "deepspeed", "sklearn")

import torch  # noqa: E402

from dslaunch.runtime.messages import PIPELINE, step_of  # noqa: E402
from tests.real.hetero_draws import drawn  # noqa: E402
from tests.real.hetero_ranks import (  # noqa: E402
    HEAD_TOKENS,
    WORLD,
    Case,
    Layout,
    execute,
    plan_of,
    whole,
    write,
)
from tests.real.hetero_reference import train_alone  # noqa: E402

TOLERANCE = 1e-6
DRAWN = 48
DRAWN_INTERLEAVED = 16
DRAWN_HEADS = 8
TOGETHER = 8
"""Cases that one set of processes executes."""
FP32_BYTES = 4
TWIN = Case(
    Layout(dp=4, tp=2, zero=2, recompute="selective", lr=1e-3),
    Layout(dp=8, zero=2),
    Layout(pp=2, dp=2, tp=2, zero=1, micro_batches=6, recompute="selective"),
    clip=0.3,
)
"""vla70b on 64 GPUs, scaled down to 8."""
CASES = {
    "twin of vla70b": TWIN,
    "fewer replicas before more, masked, gpipe": Case(
        Layout(pp=2, dp=2, tp=2, zero=1, micro_batches=3),
        Layout(dp=3, tp=2, zero=0, offset=1, weight_decay=0.0),
        Layout(dp=8, zero=2, micro_batches=3, recompute="full"),
        masked=True,
        schedule="gpipe",
        optimizer="SGD",
        clip=0.3,
    ),
    "separate ranks, lockstep, three replicas against two": Case(
        Layout(dp=3, zero=2, micro_batches=4),
        Layout(dp=3, zero=1, micro_batches=4),
        Layout(pp=2, dp=2, zero=1, offset=3, micro_batches=4),
        masked=True,
        clip=0.3,
    ),
    "frozen tower on four stages, ZeRO-0": Case(
        Layout(pp=4, dp=2, micro_batches=2),
        Layout(dp=4, tp=2, zero=1),
        Layout(pp=4, dp=1, tp=2, zero=0, micro_batches=6),
        frozen=("vision_encoder",),
        optimizer="SGD",
    ),
    "frozen trunk, rounds, heads shared by shards": Case(
        Layout(dp=4, tp=2, zero=2, micro_batches=2, recompute="full"),
        Layout(dp=2, tp=4, zero=2, micro_batches=2),
        Layout(dp=2, tp=4, micro_batches=4),
        rounds=2,
        frozen=("llm",),
        masked=True,
        decoder={"kv_heads": 2},
    ),
    "uneven stages, three shards, rounds": Case(
        Layout(dp=1, tp=3, zero=1, offset=4, micro_batches=4),
        Layout(dp=2, zero=1, micro_batches=2),
        Layout(pp=3, dp=2, zero=1, micro_batches=6),
        rounds=2,
        clip=0.3,
    ),
    "interleaved, shards, replicas, recompute": Case(
        Layout(dp=4, tp=2, zero=2, micro_batches=2),
        Layout(dp=8, zero=2),
        Layout(pp=2, vpp=2, dp=2, tp=2, micro_batches=4, recompute="full"),
        schedule="interleaved",
        masked=True,
        clip=0.3,
    ),
    "ZeRO-3 of several micro-batches at once, shards": Case(
        Layout(dp=2, tp=2, zero=3, micro_batches=3, recompute="full"),
        Layout(dp=3, zero=3, offset=4, micro_batches=2),
        Layout(dp=3, tp=2, zero=3, offset=1, micro_batches=4),
        masked=True,
        clip=0.3,
    ),
    "a head on ranks of its own": Case(
        Layout(dp=3, zero=2),
        Layout(dp=2, tp=2, zero=2),
        Layout(pp=2, dp=2, zero=1, micro_batches=4),
        action_head=Layout(dp=3, zero=2, offset=5, micro_batches=4),
        masked=True,
        clip=0.3,
    ),
    "two towers, one frozen": Case(
        Layout(dp=4, tp=2, zero=2, micro_batches=2),
        Layout(dp=2, tp=2, zero=1, offset=2),
        Layout(pp=2, dp=4, zero=1, micro_batches=3),
        second_encoder=Layout(pp=2, dp=3, zero=1, offset=2),
        frozen=("vision_encoder",),
        masked=True,
        clip=0.3,
    ),
}
MORE = {
    "interleaved on separate ranks, uneven stages, frozen tower": Case(
        Layout(dp=2, zero=1, micro_batches=3),
        Layout(dp=2, zero=2, micro_batches=3),
        Layout(pp=3, vpp=2, dp=2, zero=0, offset=2, micro_batches=6),
        schedule="interleaved",
        frozen=("vision_encoder",),
        optimizer="SGD",
        decoder={"layers": 8},
    ),
    "a head on all ranks, interleaved, lockstep": Case(
        Layout(dp=3, zero=2, micro_batches=2),
        Layout(dp=2, zero=3, micro_batches=2),
        Layout(pp=2, vpp=2, dp=2, offset=4, micro_batches=4),
        action_head=Layout(dp=3, tp=2, zero=3, offset=1, micro_batches=8),
        schedule="interleaved",
        masked=True,
        clip=0.3,
    ),
    "a head alone trains": Case(
        Layout(dp=4, tp=2),
        Layout(dp=8),
        Layout(pp=4, dp=2, micro_batches=6),
        action_head=Layout(dp=4, micro_batches=6),
        schedule="gpipe",
        frozen=("vision_encoder", "projector", "llm"),
        optimizer="SGD",
    ),
    "ZeRO-3 on separate ranks, states in host memory": Case(
        Layout(dp=2, zero=3, micro_batches=2, offload="cpu"),
        Layout(dp=3, zero=3, micro_batches=2, recompute="full"),
        Layout(dp=4, tp=1, zero=3, offset=4, micro_batches=3),
        clip=0.3,
    ),
    "tied embeddings, learned positions": Case(
        Layout(pp=2, dp=4, zero=1),
        Layout(dp=2, tp=2, zero=2),
        Layout(dp=4, tp=2, zero=2, micro_batches=2),
        decoder={"tied_embeddings": True, "position": "learned", "max_positions": 32},
        clip=0.3,
    ),
    "class token, registers, an inner layer on four stages": Case(
        Layout(pp=4, dp=2, zero=1, micro_batches=2),
        Layout(dp=4, zero=2, offset=4),
        Layout(dp=4, tp=2, zero=2),
        vision={"class_token": True, "registers": 2},
        from_layer=-2,
        optimizer="SGD",
    ),
    "optimizer states in host memory": Case(
        Layout(dp=4, tp=2, zero=2, offload="cpu"),
        Layout(dp=2, tp=2, zero=1, offload="cpu", micro_batches=2),
        Layout(pp=2, dp=2, tp=2, zero=1, offload="cpu", micro_batches=3),
        clip=0.3,
    ),
}
BF16 = {
    "in bf16": replace(TWIN, precision="bf16"),
    "in bf16, without ZeRO-2": replace(
        TWIN, precision="bf16", vision_encoder=replace(TWIN.vision_encoder, zero=1)
    ),
}
SAVED = {
    "saved and loaded": replace(TWIN, save_at=2),
    "separate ranks, saved and loaded": replace(
        CASES["separate ranks, lockstep, three replicas against two"], save_at=2
    ),
    "in bf16, saved and loaded": replace(BF16["in bf16"], save_at=2),
}
SLOW = (
    MORE
    | {f"drawn {number}": drawn(number) for number in range(DRAWN)}
    | {f"drawn {number}, interleaved": drawn(number, interleaved=True) for number in range(DRAWN_INTERLEAVED)}
    | {f"drawn {number}, a head": drawn(number, number % 2 == 1, head=True) for number in range(DRAWN_HEADS)}
)


def run_all(cases: Mapping[str, Case], root: Path) -> Path:
    folders = [root / folder_of(name) for name in cases]
    for folder, case in zip(folders, cases.values(), strict=True):
        write(case, folder)
    execute(folders, root / "logs")
    return root


def folder_of(name: str) -> str:
    return name.replace(" ", "_").replace(",", "")


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_all(CASES | BF16 | SAVED, tmp_path_factory.mktemp("hetero"))


@pytest.fixture(scope="module")
def slow_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a slow case, which is executed with its neighbours when one of them is first asked for."""

    @cache
    def executed_together(group: int) -> Path:
        names = list(SLOW)[group * TOGETHER : (group + 1) * TOGETHER]
        return run_all({name: SLOW[name] for name in names}, tmp_path_factory.mktemp("slow"))

    return lambda name: executed_together(list(SLOW).index(name) // TOGETHER) / folder_of(name)


@pytest.mark.parametrize("name", CASES)
def test_against_one_process(name: str, executed: Path) -> None:
    compare(CASES[name], executed / folder_of(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_more_layouts_against_one_process(name: str, slow_folder: Callable[[str], Path]) -> None:
    compare(SLOW[name], slow_folder(name))


def compare(case: Case, folder: Path) -> None:
    """Losses, norms, each step's gradients, and the parameters in the end, against one process in fp64.

    Where one process in fp32 is itself further away than a third of the tolerance in one of the steps, three times
    that is allowed: how far it is in a single step is chance.
    """
    parts, exact = parts_in(folder), train_alone(case, torch.float64)
    alone = train_alone(case, torch.float32)
    rows = parts[0]["rows"]
    assert all(part["rows"] == rows for part in parts), "ranks disagree"
    assert [row[0] for row in rows] == pytest.approx(exact.losses, rel=1e-6), case.describe()
    assert [row[1] for row in rows] == pytest.approx(exact.norms, rel=1e-5), case.describe()
    steps = [errors(alone.gradients[step], expected) for step, expected in enumerate(exact.gradients)]
    rounding = {component: max(step[component] for step in steps) for component in steps[0]}
    for step, expected in enumerate(exact.gradients):
        found = errors(whole([part["gradients"][step] for part in parts]), expected)
        for component, error in found.items():
            limit = max(TOLERANCE, 3 * rounding[component])
            assert error < limit, (step, component, error, rounding[component], case.describe())
    rounding = differences(alone.parameters, exact.parameters)
    for component, error in differences(whole([part["parameters"] for part in parts]), exact.parameters).items():
        assert error < max(TOLERANCE, 3 * rounding[component]), (component, error, case.describe())


def errors(found: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, float]:
    """By component, the largest difference as a share of the component's largest gradient."""
    largest = differences({name: torch.zeros_like(gradient) for name, gradient in expected.items()}, expected)
    apart = differences(found, expected)
    return {component: apart[component] / largest[component] for component in largest}


def differences(found: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, float]:
    """By component, the largest difference."""
    assert set(found) == set(expected)
    largest: dict[str, float] = {}
    for name, tensor in expected.items():
        component = name.split(".")[1]
        largest[component] = max(largest.get(component, 0.0), float((found[name] - tensor).abs().max()))
    return largest


def parts_in(folder: Path) -> list[dict[str, Any]]:
    """What the ranks wrote; where one did not, what all of them said."""
    if not (folder / f"rank{WORLD - 1}.pt").exists():
        logs = sorted((folder.parent / "logs").glob("*.txt"))
        pytest.fail("\n".join(f"{log.name}:\n{log.read_text()[-3000:]}" for log in logs), pytrace=False)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(WORLD)]


@pytest.mark.parametrize("name", BF16)
def test_bf16_follows_fp32(name: str, executed: Path) -> None:
    rows = parts_in(executed / folder_of(name))[0]["rows"]
    exact = [row[0] for row in parts_in(executed / folder_of("twin of vla70b"))[0]["rows"]]
    losses = [row[0] for row in rows]
    assert losses == pytest.approx(exact, rel=1e-2)
    assert losses != pytest.approx(exact, rel=1e-6), "it ran in fp32"


@pytest.mark.parametrize("name", SAVED)
def test_a_resumed_run_is_the_run_that_never_stopped(name: str, executed: Path) -> None:
    """To the bit: losses, norms and parameters of every rank."""
    unbroken = next(key for key, case in (CASES | BF16).items() if replace(case, save_at=2) == SAVED[name])
    pairs = zip(parts_in(executed / folder_of(name)), parts_in(executed / folder_of(unbroken)), strict=True)
    for resumed, never_stopped in pairs:
        assert resumed["rows"] == never_stopped["rows"]
        for key, (tensor, *_) in never_stopped["parameters"].items():
            assert torch.equal(resumed["parameters"][key][0], tensor), key


def test_1f1b_holds_as_many_micro_batches_as_stages_are_left(executed: Path) -> None:
    for name in ("twin of vla70b", "frozen tower on four stages, ZeRO-0"):
        stages = CASES[name].llm.pp
        for part in parts_in(executed / folder_of(name)):
            for (component, stage), held in part["most_held"].items():
                if component == "llm":
                    assert held == stages - stage, (name, stage)


def test_gpipe_holds_them_all(executed: Path) -> None:
    for part in parts_in(executed / folder_of("fewer replicas before more, masked, gpipe")):
        assert part["most_held"]["llm", 0] == 3


@pytest.mark.parametrize("name", CASES)
def test_the_bytes_sent_are_those_of_the_step_that_the_plan_says(name: str, executed: Path) -> None:
    case = CASES[name]
    step = step_of(plan_of(case), case.rounds)
    for rank, part in enumerate(parts_in(executed / folder_of(name))):
        wanted = {"pipeline": 0, "redistribution": 0}
        for message in step.messages:
            if message.source != rank or message.destination == rank:
                continue
            kind = "pipeline" if message.edge == PIPELINE else "redistribution"
            if message.edge != PIPELINE:
                sample = {"projector": 4 * 48, "llm": 4 * 32, "action_head": HEAD_TOKENS * 32}[
                    step.edges[message.edge]["to"]
                ]
            else:
                sample = 16 * 32 if message.sender.component == "llm" else 4 * 48
            wanted[kind] += case.steps * len(message.samples) * sample * FP32_BYTES
        assert part["sent_bytes"] == {kind: count for kind, count in wanted.items() if count}
