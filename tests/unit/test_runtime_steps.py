"""One optimizer step as tasks and messages: who owns which sample, who sends it to whom, in which order."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import fields, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dslaunch.engines.layout import Layout as Degrees
from dslaunch.engines.registry import ENGINES
from dslaunch.errors import ConfigError
from dslaunch.plan.case import cases as ledger_cases
from dslaunch.planfile import ComponentPlan, Plan, to_json
from dslaunch.runtime.__main__ import main
from dslaunch.runtime.checks import check_executable
from dslaunch.runtime.drawing import mermaid, table
from dslaunch.runtime.grid import Grid, Place
from dslaunch.runtime.messages import PIPELINE, Step, step_of
from dslaunch.runtime.tasks import Task
from tests.command import CommandLine
from tests.golden.cases import planned
from tests.real.hetero_draws import drawn
from tests.real.hetero_ranks import SAMPLES, Case, Layout, plan_of

GIB = 2**30
TWIN = Case(Layout(dp=4, tp=2, zero=2), Layout(dp=8, zero=2), Layout(pp=2, dp=2, tp=2, micro_batches=4))
APART = Case(
    Layout(dp=3, zero=2, micro_batches=4),
    Layout(dp=3, micro_batches=4),
    Layout(pp=2, dp=2, offset=3, micro_batches=4),
)
numbers = st.integers(0, 10**6)
cases = st.builds(drawn, numbers, interleaved=st.booleans(), head=st.booleans())
many = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def step_of_case(case: Case) -> Step:
    return step_of(plan_of(case), case.rounds)


def test_ranks_are_numbered_by_shard_then_replica_then_stage() -> None:
    grid = Grid(tp=2, dp=3, pp=2, offset=4)
    assert [grid.rank(1, 0, 0), grid.rank(0, 2, 1)] == [10, 9]
    assert grid.place(10) == Place(stage=1, replica=0, shard=0)
    assert grid.place(3) is None
    assert grid.stage_ranks(1) == [10, 11, 12, 13, 14, 15]


@many
@given(cases)
def test_every_replica_set_owns_each_sample_once(case: Case) -> None:
    for part in step_of_case(case).parts.values():
        owned = [
            sample
            for replica in range(part.grid.dp)
            for index in range(part.shares.micro_batches)
            for sample in part.shares.of(replica, index)
        ]
        assert sorted(owned) == list(range(SAMPLES))


@many
@given(cases)
def test_every_task_gets_each_of_its_samples_from_one_rank(case: Case) -> None:
    """Forward over each edge that comes in, backward over each that goes out, and from stage to stage."""
    step = step_of_case(case)
    got: dict[tuple[Task, int, int], list[int]] = defaultdict(list)
    for message in step.messages:
        got[message.receiver, message.destination, message.edge].extend(message.samples)
    for task in step.tasks:
        for rank in step.parts[task.component].grid.stage_ranks(task.stage):
            for edge in _expected(step, task):
                assert sorted(got.pop((task, rank, edge), [])) == list(step.samples(task, rank)), (task, rank)
    assert not got, "messages that no task waits for"


def _expected(step: Step, task: Task) -> list[int]:
    """Edges (or PIPELINE) over which `task` gets its samples."""
    stages = step.parts[task.component].grid.stages
    if 0 <= task.stage + (-1 if task.forward else 1) < stages:
        return [PIPELINE]
    end = "to" if task.forward else "from"
    return [number for number, edge in enumerate(step.edges) if edge[end] == task.component]


@many
@given(cases)
def test_no_task_waits_for_a_later_one(case: Case) -> None:
    step = step_of_case(case)
    position = {task: at for at, task in enumerate(step.tasks)}
    assert len(position) == len(step.tasks)
    assert all(position[message.sender] < position[message.receiver] for message in step.messages)


@many
@given(cases)
def test_each_pair_of_ranks_sends_a_task_s_messages_in_the_order_of_samples(case: Case) -> None:
    """What a rank receives is a block of its own micro-batch, and a block of the sender's."""
    step = step_of_case(case)
    for message in step.messages:
        for task, rank in ((message.sender, message.source), (message.receiver, message.destination)):
            samples = step.samples(task, rank)
            start = samples.index(message.samples[0])
            assert samples[start : start + len(message.samples)] == message.samples


@many
@given(numbers)
def test_a_head_has_each_micro_batch_before_the_trunk_takes_it_back(number: int) -> None:
    """Forward and backward in turn, so that it holds one of its own and the trunk no more than without it."""
    case = replace(drawn(number, head=True), frozen=())
    tasks = step_of_case(case).tasks
    own = [task for task in tasks if task.component == "action_head"]
    assert [(task.index, task.forward) for task in own] == [
        (index, way) for index in range(len(own) // 2) for way in (True, False)
    ]
    trunk = [task for task in tasks if task.component == "llm"]
    alone = [task for task in step_of_case(replace(case, action_head=None)).tasks if task.component == "llm"]
    for stage in range(case.llm.pp):
        order = [[task for task in some if task.stage == stage] for some in (trunk, alone)]
        assert order[0] == order[1]


@many
@given(numbers)
def test_1f1b_holds_as_many_as_stages_are_left_and_gpipe_all(number: int) -> None:
    for schedule in ("1f1b", "gpipe"):
        case = replace(drawn(number), schedule=schedule, frozen=())
        step = step_of_case(case)
        for stage in range(case.llm.pp):
            held = most = 0
            for task in step.tasks:
                if task.component == "llm" and task.stage == stage:
                    held += 1 if task.forward else -1
                    most = max(most, held)
            left = min(case.llm.pp - stage, case.llm.micro_batches)
            if schedule == "1f1b":
                assert most <= left
            else:
                assert most >= case.llm.micro_batches // step.rounds


def test_a_decoder_alone_is_one_pipeline() -> None:
    """All its micro-batches pass through it in one round."""
    plan = plan_of(TWIN)
    model = {**plan.model, "components": {"llm": plan.model["components"]["llm"]}, "edges": []}
    alone = step_of(replace(plan, model=model, components={"llm": plan.components["llm"]}))
    first = [task for task in alone.tasks if task.stage == 0]
    order = "".join(f"{'F' if task.forward else 'B'}{task.index} " for task in first)
    assert order == "F0 F1 B0 F2 B1 F3 B2 B3 "


def test_a_front_of_its_own_works_ahead_of_the_trunk() -> None:
    tower = [task for task in step_of_case(APART).tasks if task.component == "vision_encoder"]
    order = "".join(f"{'F' if task.forward else 'B'}{task.index} " for task in tower)
    assert order == "F0 F1 F2 B0 F3 B1 B2 B3 "


def test_a_rank_keeps_what_it_has_and_a_node_what_is_in_it() -> None:
    def sources(plan: Plan) -> dict[int, int]:
        return {
            each.destination: each.source
            for each in step_of(plan).messages
            if each.edge == 0 and each.sender.forward
        }

    plan = plan_of(replace(TWIN, projector=Layout(dp=2, offset=3)))
    assert sources(plan)[3] == 3
    halves = plan_of(Case(Layout(tp=8), Layout(tp=4), Layout(tp=4, offset=4)))
    halves = replace(halves, cluster=replace(halves.cluster, nodes=2, gpus_per_node=4))
    apart = [each for each in step_of(halves).messages if each.edge == 1 and each.sender.forward]
    assert {each.destination: each.source for each in apart} == {4: 0, 5: 1, 6: 2, 7: 3}
    assert sources(halves) == {0: 0, 1: 1, 2: 2, 3: 3}


def test_a_frozen_component_gets_no_gradient_and_what_trains_behind_it_does() -> None:
    step = step_of_case(replace(TWIN, frozen=("vision_encoder",)))
    assert {task.component for task in step.tasks if not task.forward} == {"projector", "llm"}
    assert not [each for each in step.messages if each.edge == 0 and not each.sender.forward]
    frozen_trunk = step_of_case(replace(TWIN, frozen=("llm",)))
    assert {task.component for task in frozen_trunk.tasks if not task.forward} == set(TWIN.layouts)


def test_the_redistribution_is_shown() -> None:
    step = step_of_case(TWIN)
    assert table(step, 0, forward=True).splitlines()[2:5] == [
        "| 0 | itself | 0-2 |", "| 1 | itself | 3-5 |", "| 2 | itself | 6-8 |",
    ]  # fmt: skip
    assert "| 0 | 4 | 12-14 |" not in table(step, 1, forward=True)
    assert "| 3 | 4 | 12-14 |" in table(step, 1, forward=True)
    assert '  projector0_4 -->|"12-14"| llm0_3' in mermaid(step)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llm": {"pp": 2, "zero": 2}}, "components.llm.zero: found 2"),
        ({"llm": {"cp": 2}}, "components.llm.cp: found 2"),
        ({"llm": {"offload": "nvme"}}, "components.llm.offload: found nvme"),
        ({"vision_encoder": {"zero": 4}}, "components.vision_encoder.zero: found 4"),
        (
            {"projector": {"micro_batch": 5}},
            "components.projector: micro_batch x num_microbatches x dp is 40",
        ),
        ({"projector": {"tp": 5}}, "strategy.projector.tp is 5; dims[1] 36 is not divisible by it"),
        ({"llm": {"tp": 5}}, "heads 12 is not divisible by it"),
        ({"projector": {"pp": 2, "zero": 1}}, "strategy.projector.pp is 2"),
    ],
)
def test_a_plan_that_it_cannot_execute_is_refused_by_key(changes: dict[str, Any], message: str) -> None:
    plan = plan_of(TWIN)
    check_executable(plan)
    components = {n: replace(at, **changes.get(n, {})) for n, at in plan.components.items()}
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_executable(replace(plan, components=components))


@pytest.mark.parametrize(
    ("schedule", "changes"),
    [
        ("interleaved", {}),
        ("1f1b", {"vpp": 2, "layers_per_stage": (4, 4)}),
        ("interleaved", {"vpp": 2, "layers_per_stage": (4, 4), "num_microbatches": 3, "micro_batch": 4}),
    ],
)
def test_an_order_that_does_not_go_with_the_stages_is_refused(schedule: str, changes: dict[str, Any]) -> None:
    plan = plan_of(TWIN)
    components = {**plan.components, "llm": replace(plan.components["llm"], **changes)}
    training = replace(plan.training, schedule=schedule)
    with pytest.raises(ConfigError, match=rf"training\.schedule: found {schedule}, where components\.llm"):
        check_executable(replace(plan, components=components, training=training))


@pytest.mark.parametrize(
    "words",
    ["pp=2 dp=2 tp=2", "pp=4 dp=2 tp=1", "pp=4 dp=1 tp=2", "pp=2 dp=4 tp=1 micro_batch=4"],
)
@pytest.mark.parametrize("vpp", [1, 2, 3])
def test_a_stage_holds_as_many_micro_batches_as_the_ledger_says(vpp: int, words: str) -> None:
    asked = [f"strategy.llm.{word}" for word in (*words.split(), f"vpp={vpp}")]
    plan, _, config = planned(
        "recipe=vla_tiny", "cluster=local", "strategy=hetero", "model.components.llm.layers=24", *asked
    )
    layout = plan.components["llm"]
    names = [each.name for each in fields(Degrees) if hasattr(layout, each.name)]
    same = Degrees(**{name: getattr(layout, name) for name in names})
    case = ledger_cases(config, ENGINES["native"], {"llm": same}, "fp32")["llm"]
    tasks = step_of(plan).tasks
    for group in range(layout.pp):
        own = [task for task in tasks if task.component == "llm" and task.stage % layout.pp == group]
        held = accumulate(1 if task.forward else -1 for task in own)
        assert max(held) / vpp == case.in_flight(group)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
@pytest.mark.parametrize("micro", [2, 4, 8])
def test_a_tower_ahead_of_the_decoder_holds_what_the_ledger_says(schedule: str, micro: int) -> None:
    apart = ("dp=2", "tp=1", "rank_offset=0", "micro_batch=2")
    words = [f"strategy.{name}.{word}" for name in ("vision_encoder", "projector") for word in apart]
    vpp = 2 if schedule == "interleaved" else 1
    trunk = ("pp=3", "tp=1", "dp=2", "rank_offset=2", f"micro_batch={micro}", f"vpp={vpp}")
    plan, _, config = planned(
        "recipe=vla_tiny", "cluster=local", "strategy=hetero", "model.components.llm.layers=12",
        "training.global_batch=96", f"training.schedule={schedule}", *words,
        *(f"strategy.llm.{word}" for word in trunk),
    )  # fmt: skip
    names = [each.name for each in fields(Degrees) if hasattr(plan.components["llm"], each.name)]
    degrees = {
        name: Degrees(**{each: getattr(layout, each) for each in names})
        for name, layout in plan.components.items()
    }
    made = ledger_cases(config, ENGINES["native"], degrees, "fp32")
    tasks = step_of(plan).tasks
    for name in ("vision_encoder", "projector"):
        held = accumulate(1 if task.forward else -1 for task in tasks if task.component == name)
        assert max(held) == made[name].in_flight(0)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_macro_batches_are_held_as_the_ledger_says(parts: int, schedule: str) -> None:
    """Each part of a step goes forward and back through all components before the next begins."""
    words = [f"strategy.{name}.micro_batch=1" for name in ("vision_encoder", "projector", "llm")]
    vpp = 2 if schedule == "interleaved" else 1
    plan, predicted, config = planned(
        "recipe=vla_tiny", "cluster=local", "strategy=hetero", f"training.schedule={schedule}", *words,
        f"strategy.llm.vpp={vpp}", f"training.macro_batches={parts}",
    )  # fmt: skip
    layouts = {name: degrees(each) for name, each in plan.components.items()}
    made = ledger_cases(config, ENGINES["native"], layouts, "fp32")
    step = step_of(plan)
    assert step.rounds == parts
    for name, layout in plan.components.items():
        for group in range(layout.pp):
            own = [each for each in step.tasks if each.component == name and each.stage % layout.pp == group]
            held = accumulate(1 if task.forward else -1 for task in own)
            assert max(held) / layout.vpp == made[name].in_flight(group), name
    whole, prediction, _ = planned(
        "recipe=vla_tiny", "cluster=local", "strategy=hetero", f"training.schedule={schedule}", *words,
        f"strategy.llm.vpp={vpp}",
    )  # fmt: skip
    boundary = [each.components["llm"][0].memory_gib.boundary for each in (prediction, predicted)]
    if schedule != "gpipe":  # which sends as many micro-batches less to the next stage
        assert boundary[0] - boundary[1] == pytest.approx(joined_bytes(whole) / GIB * (1 - 1 / parts))
    assert (predicted.step_time_s > prediction.step_time_s) == (parts > 1)


def joined_bytes(plan: Plan) -> int:
    """What a rank of the decoder's first stage gets from the projector in a step, and gives back."""
    tokens = sum(edge["tokens"] for edge in plan.model["edges"] if edge["to"] == "llm")
    width, layout = plan.model["components"]["llm"]["hidden"], plan.components["llm"]
    return 2 * layout.micro_batch * layout.num_microbatches * tokens * width * 4


def degrees(layout: ComponentPlan) -> Degrees:
    names = [each.name for each in fields(Degrees) if hasattr(layout, each.name)]
    return Degrees(**{name: getattr(layout, name) for name in names})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("strategy.llm.zero=2", "strategy.llm.zero is 2; native takes 0, 1 where pp is 2"),
        ("strategy.llm.zero=3", "strategy.llm.zero is 3; native takes 0, 1 where pp is 2"),
        (
            "strategy.projector.zero=3 model.components.projector.train=nothing",
            "strategy.projector.zero is 3; dslaunch.runtime keeps a frozen component whole",
        ),
        ("training.macro_batches=3", "it does not divide the 8 micro-batches of llm, the 1 of "),
        (
            "training.macro_batches=2 strategy.llm.vpp=2 strategy.llm.micro_batch=8 "
            "strategy.projector.micro_batch=2 strategy.vision_encoder.micro_batch=4",
            "interleaved, each has 1 micro-batches of llm, no multiple of pp 2",
        ),
        (
            "training.macro_batches=2 strategy.vision_encoder.tp=1 strategy.vision_encoder.dp=4 "
            "strategy.vision_encoder.rank_offset=0 strategy.projector.dp=4 strategy.projector.rank_offset=0 "
            "strategy.llm.rank_offset=4 strategy.llm.dp=1",
            "vision_encoder, projector stand on ranks of their own",
        ),
        ("strategy.vision_encoder.vpp=2", "interleaves the stages of a decoder alone"),
        ("strategy.llm.cp=2 strategy.llm.pp=1", "strategy.llm.cp is 2; native takes cp 1"),
        ("training.precision=bf16 strategy.projector.zero=0", "strategy.projector.zero is 0; in bf16"),
        ("strategy.projector.pp=2 strategy.projector.zero=1", "strategy.projector.pp is 2"),
        ("model.components.llm.tied_embeddings=true", "keeps tied embeddings in one stage"),
        ("strategy.projector.offload=nvme", "strategy.projector.offload is nvme; native takes cpu, none"),
    ],
)
def test_the_planner_refuses_what_the_runtime_does_not_execute(
    words: str, message: str, dslaunch: CommandLine
) -> None:
    ran = dslaunch(f"plan recipe=vla_tiny cluster=local strategy=hetero engine=native {words}")
    assert ran.status == 3
    assert message in ran.err


def test_a_launch_without_the_runtime_s_data_is_refused_before_it_is_submitted(
    dslaunch: CommandLine, tmp_path: Path
) -> None:
    words = f"recipe=vla_tiny cluster=local strategy=hetero run.root={tmp_path} data.path=elsewhere"
    ran = dslaunch(words)
    assert ran.status == 2
    assert "data.path: elsewhere: dslaunch.runtime reads `digits`" in ran.err


def test_show_prints_who_sends_which_samples_to_whom(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(to_json(plan_of(TWIN)), encoding="utf-8")
    assert main(["--plan", str(path), "--show"]) == 0
    shown = capsys.readouterr().out
    assert "gradients llm -> projector" in shown
    assert "| 3 | 4 | 12-14 |" in shown


@pytest.mark.parametrize("rank", ["0", "3"])
def test_whichever_rank_ends_first_has_said_why(
    rank: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher ends the others at once, before they could say it."""
    monkeypatch.setenv("LOCAL_RANK", rank)
    assert main(["--plan", str(tmp_path / "plan.json"), "--show"]) == 2
    assert "plan.json" in capsys.readouterr().err


def test_bf16_without_zero_and_tied_embeddings_over_stages_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"strategy\.projector\.zero is 0; in bf16"):
        check_executable(plan_of(replace(TWIN, projector=Layout(dp=8, zero=0), precision="bf16")))
    with pytest.raises(ConfigError, match="keeps tied embeddings in one stage"):
        check_executable(plan_of(replace(TWIN, decoder={"tied_embeddings": True})))
