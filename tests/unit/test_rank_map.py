"""Which ranks talk to one another and over which link, as the report shows them."""

from __future__ import annotations

import time

from dslaunch.review.rank_map import domain_words, groups, rows
from tests.golden.cases import planned

MIXTRAL = [
    "recipe=llama3_8b", "model=mixtral_8x7b", "cluster=64xH100", "strategy=zero1", "engine=megatron",
    "training.global_batch=512", "training.micro_batch=1", "strategy.llm.tp=4", "strategy.llm.cp=2",
]  # fmt: skip


def ranks(*words: str) -> dict[str, str]:
    plan, _, _ = planned(*MIXTRAL, *words)
    return {group.what: group.ranks for group in groups(plan, plan.components["llm"])}


def test_experts_are_shared_out_beside_tensor_parallel_ranks_whatever_cp_is() -> None:
    found = ranks("strategy.llm.ep=4")
    assert (found["tp"], found["cp"], found["ep"]) == ("0, 1, 2, 3", "0, 4", "0, 4, 8, 12")
    assert "etp" not in found


def test_whole_experts_are_on_neighbouring_ranks() -> None:
    assert ranks("strategy.llm.ep=4", "strategy.llm.etp=1")["ep"] == "0, 1, 2, 3"
    halved = ranks("strategy.llm.ep=4", "strategy.llm.etp=2")
    assert (halved["etp"], halved["ep"]) == ("0, 1", "0, 2, 4, 6")


def test_groups_say_which_link_they_cross() -> None:
    plan, _, _ = planned("recipe=llama3_405b", "cluster=16384xH100", "engine.path=/megatron")
    llm = plan.components["llm"]
    assert {group.what: group.crosses for group in groups(plan, llm)} == {
        "tp": "inside a node, over NVLink",
        "dp": "128 nodes, over the network",
        "pp": "16 nodes, over the network",
    }
    assert domain_words(plan) == "An NVLink domain is a node, 8 GPUs; there are 2,048, joined by the network."
    stages = rows(plan, llm)
    assert len(stages) == 16
    assert (stages[1].name, stages[1].domains, stages[1].replicas) == ("nodes 128-255", "128-255", "dp 0-127")


def test_a_domain_may_span_nodes() -> None:
    layout = ["layouts.144.llm.tp=8", "layouts.144.llm.pp=2", "training.global_batch=144", "engine=megatron"]
    plan, _, _ = planned("recipe=llama3_70b", "cluster=144xGB200-NVL72", *layout, "engine.path=/megatron")
    crosses = {group.what: group.crosses for group in groups(plan, plan.components["llm"])}
    assert crosses["tp"] == "2 nodes, over NVLink"
    assert crosses["pp"] == "2 nodes, over the network"
    assert domain_words(plan) == "An NVLink domain is 18 nodes, 72 GPUs; there are 2, joined by the network."
    assert [row.domains for row in rows(plan, plan.components["llm"])][:2] == ["0", "0"]


def test_without_nvlink_nothing_is_said_of_domains() -> None:
    plan, _, _ = planned("recipe=llama3_8b", "cluster=16xL40S", "strategy=zero3")
    (dp,) = groups(plan, plan.components["llm"])
    assert dp.crosses == "2 nodes, over the network"
    assert {row.domains for row in rows(plan, plan.components["llm"])} == {""}
    assert domain_words(plan) == "NVLink joins no GPUs here."


def test_the_map_takes_as_much_longer_as_there_are_more_nodes() -> None:
    """All nodes alike, in one row: 16 times the nodes, and far less than 256 times the time."""

    def seconds(nodes: int) -> float:
        words = (f"cluster={nodes}x8xH100", f"training.global_batch={8 * nodes}", "training.micro_batch=1")
        plan, _, _ = planned("recipe=llama3_8b", *words, "strategy.llm.tp=1", "strategy.llm.pp=1")
        tries = []
        for _ in range(5):
            start = time.process_time()
            (row,) = rows(plan, plan.components["llm"])
            tries.append(time.process_time() - start)
            assert (row.last, row.replicas) == (nodes - 1, f"dp 0-{8 * nodes - 1}")
        return min(tries)

    assert seconds(2048) < 64 * seconds(128)
