"""What each word of the goal does to the plan, and what a plan says of the search."""

from __future__ import annotations

import re

import pytest

from tests.command import CommandLine, planned

TINY = "plan recipe=llama3_8b cluster=4x8xH100 strategy=auto training.global_batch=64 training.seq_len=2048"


def test_throughput_takes_all_gpus_and_is_the_fastest_of_the_front(dslaunch: CommandLine) -> None:
    plan = planned(dslaunch, TINY)
    assert plan["world_size"] == 32
    assert plan["candidates"][0]["verdict"] == "chosen"
    front = plan["search"]["front"]
    assert plan["step_time_s"] == pytest.approx(min(each["step_time_s"] for each in front))
    memory, time = ([each[key] for each in front] for key in ("peak_memory_gib", "step_time_s"))
    assert memory == sorted(memory)
    assert time == sorted(time, reverse=True)


def test_lowest_memory_takes_less_and_longer(dslaunch: CommandLine) -> None:
    fast, small = planned(dslaunch, TINY), planned(dslaunch, f"{TINY} goal=lowest_memory")
    assert small["peak_memory_gib"] < fast["peak_memory_gib"]
    assert small["step_time_s"] > fast["step_time_s"]


def test_fewest_gpus_takes_whole_nodes_and_says_how_many(dslaunch: CommandLine) -> None:
    plan = planned(dslaunch, f"{TINY} goal=fewest_gpus")
    assert (plan["world_size"], plan["cluster"]["nodes"]) == (8, 1)
    assert "8 of 32 GPUs (1 of 4 nodes)" in plan["search"]["goal"]
    assert "8 GPUs = 1 node x 8" in dslaunch(f"{TINY} goal=fewest_gpus").out


def test_a_deadline_takes_the_fewest_nodes_that_meet_it(dslaunch: CommandLine) -> None:
    steps = {
        n: planned(dslaunch, f"{TINY} cluster.gpus=null cluster.nodes={n}")["step_time_s"] for n in (1, 2)
    }
    assert steps[2] < steps[1]
    tokens, days = 64 * 2048 * 1000, (steps[1] + steps[2]) / 2 * 1000 / 86400
    plan = planned(dslaunch, f"{TINY} goal=deadline goal.tokens={tokens} goal.days={days:.6f}")
    assert plan["cluster"]["nodes"] == 2
    late = dslaunch(f"{TINY} goal=deadline goal.tokens={tokens} goal.days={days / 100:.6f}")
    assert late.status == 3
    assert "the fastest plan that fits takes" in late.err
    longer = re.search(r"goal\.days=([\d.e+-]+)$", late.err.strip())
    assert longer is not None
    again = planned(dslaunch, f"{TINY} goal=deadline goal.tokens={tokens} goal.days={longer[1]}")
    assert again["cluster"]["nodes"] == 4


def test_cost_takes_the_cheapest_size(dslaunch: CommandLine) -> None:
    words = f"{TINY} goal=cost cluster.price_per_gpu_hour=2"
    plan = planned(dslaunch, words)
    for nodes in (1, 4):
        other = planned(
            dslaunch, f"{TINY} cluster.gpus=null cluster.nodes={nodes} cluster.price_per_gpu_hour=2"
        )
        assert plan["usd_per_step"] <= other["usd_per_step"] * (1 + 1e-9)
    assert "the lowest price of a step" in plan["search"]["goal"]


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ("goal=cost", 3, "cluster.price_per_gpu_hour is missing"),
        ("goal=deadline", 2, "give goal.tokens and goal.days"),
        ("goal=cost goal.days=3 cluster.price_per_gpu_hour=2", 2, "go together"),
        ("goal.days=3 goal.tokens=100", 2, "goal is throughput"),
        ("goal=fewest_gpus strategy=zero3", 3, "Set strategy=auto"),
        ("goal.engines=[megatron] engine=deepspeed", 3, "add it"),
    ],
)
def test_a_goal_that_has_no_effect_is_refused(
    dslaunch: CommandLine, words: str, status: int, said: str
) -> None:
    ran = dslaunch(f"{TINY} {words}")
    assert (ran.status, ran.out) == (status, "")
    assert said in ran.err


def test_only_the_engines_that_are_allowed_are_used(dslaunch: CommandLine) -> None:
    every = planned(dslaunch, TINY)["search"]["engines"]
    assert {"deepspeed", "megatron", "native"} <= set(every)
    assert [name for name, verdict in every.items() if verdict == "chosen"]
    plan = planned(dslaunch, f"{TINY} goal.engines=[deepspeed]")
    assert plan["engine"]["name"] == "deepspeed"
    assert plan["search"]["engines"] == {"deepspeed": "chosen"}
    pinned = planned(dslaunch, "plan recipe=llama3_70b cluster=64xH100 goal.engines=[megatron_deepspeed]")
    assert pinned["engine"]["name"] == "megatron_deepspeed"


def test_less_memory_leaves_less_choice_and_the_refusals_have_figures(dslaunch: CommandLine) -> None:
    plan = planned(dslaunch, "plan recipe=llama3_70b cluster=64xH100 strategy=auto goal.memory_fraction=0.5")
    assert plan["peak_memory_gib"] <= plan["memory_limit_gib"]
    refused = [each["verdict"] for each in plan["candidates"] if each["verdict"].startswith("refused")]
    assert refused
    for verdict in refused:
        figures = re.match(r"refused: ([\d.]+) of ([\d.]+) GiB( on stage \d+)?: \w+ [\d.]+", verdict)
        assert figures is not None, verdict
        assert float(figures[1]) > float(figures[2])


def test_offload_is_taken_only_where_nothing_else_fits(dslaunch: CommandLine) -> None:
    roomy = planned(dslaunch, TINY)["components"]["llm"]
    assert roomy["offload"] == "none"
    tight = planned(dslaunch, "plan recipe=llama3_70b cluster=8xH100 strategy=auto training.global_batch=16")
    assert tight["components"]["llm"]["offload"] != "none"


def test_another_micro_batch_than_the_recipes_is_said_aloud_and_a_pin_is_kept(dslaunch: CommandLine) -> None:
    free = planned(dslaunch, f"{TINY} training.micro_batch=64")
    taken = free["components"]["llm"]["micro_batch"]
    assert taken != 64
    (finding,) = [f for f in free["findings"] if f["rule"] == "search.micro-batch"]
    assert f"takes {taken} for llm" in finding["message"]
    pinned = planned(dslaunch, f"{TINY} strategy.every.micro_batch=1")
    assert pinned["components"]["llm"]["micro_batch"] == 1


def test_the_explanation_says_why_what_would_change_it_and_the_smallest_cluster(
    dslaunch: CommandLine,
) -> None:
    words = "plan recipe=llama3_8b cluster=2x8xH100 strategy=auto training.global_batch=64 --explain"
    said = planned(dslaunch, words)["explanation"]
    assert "won by goal throughput" in said[0]
    assert said[1].startswith("Of the step, the trunk spends compute")
    assert said[2].startswith("The next best is")
    assert any(re.match(r"With a network of [\d.]+ GB/s a GPU: .* x[\d.]+ a sample", each) for each in said)
    assert any(each.startswith("With training.global_batch=128") for each in said)
    assert any(each.startswith("Without engine") for each in said)
    assert "The smallest cluster that fits is 8 GPUs = 1 node" in said[-1]
    pinned = planned(dslaunch, "plan recipe=llama3_8b cluster=8xH100 --explain")["explanation"]
    searched = planned(dslaunch, "plan recipe=llama3_8b cluster=8xH100 strategy=auto")["candidates"][0]
    assert pinned[0].startswith(f"The layout is pinned; strategy=auto would take {searched['layout']}: ")


def test_nothing_that_fits_names_the_nearest_of_each_kind(dslaunch: CommandLine) -> None:
    ran = dslaunch("plan recipe=llama3_405b cluster=8xA10G strategy=auto")
    assert ran.status == 3
    nearest = r"need too much memory; nearest:\n\s+[\w ]+: TP\d+ PP\d+ .*: [\d.]+ of [\d.]+ GiB"
    assert re.search(nearest, ran.err)
