"""Whole searches of large models: what strategy=auto takes, what it refuses and why, and remedies as promised."""

from __future__ import annotations

import re

import pytest

from tests.command import CommandLine, planned, refused

VLA = "plan recipe=vla70b cluster=64xA100"
LLM = "plan recipe=llama3_8b cluster=8xH100"


def test_auto_says_what_other_than_memory_refuses(dslaunch: CommandLine) -> None:
    err = refused(dslaunch, f"{VLA} strategy=auto strategy.sharding=fsdp2 training.global_batch=100")
    assert "100 / (micro_batch 1 x dp 64" in err
    assert "training.global_batch=64 or 128" in err
    assert "more GPUs" not in err
    heads = refused(dslaunch, f"{VLA} strategy=auto strategy.llm.tp=7")
    assert "heads 64 / tp 7 = 9.143" in heads
    assert "none of 0" not in heads


def test_auto_takes_a_smaller_micro_batch_where_the_given_one_is_illegal(dslaunch: CommandLine) -> None:
    llm = planned(dslaunch, f"{LLM} strategy=auto training.micro_batch=32")["components"]["llm"]
    assert 32 % llm["micro_batch"] == 0
    assert llm["micro_batch"] * llm["num_microbatches"] * llm["dp"] == 128
    pinned = f"{LLM} strategy=auto strategy.llm.micro_batch=3"
    assert "strategy.llm.micro_batch is 3" in refused(dslaunch, pinned)


@pytest.mark.parametrize(
    "words",
    [
        "plan recipe=vla70b cluster=16xA100",
        "plan recipe=vla70b cluster=2x8xA100",
        "plan recipe=vla70b cluster=16xA100 strategy=zero2",
        "plan recipe=llama3_70b cluster=64xH100 strategy.llm.layers_per_stage=[5,5,5,65]",
        "plan recipe=llama3_8b cluster=4xA10G strategy=zero2",
    ],
)
def test_a_remedy_gives_the_figures_that_it_promises(dslaunch: CommandLine, words: str) -> None:
    before = planned(dslaunch, words)
    (finding,) = [f for f in before["findings"] if f["rule"] == "memory.gpu"]
    promises = re.findall(r"(?:^|; )(\S.*?) \((\d+\.\d) GiB, step time x([\d.]+)(?:, by engine (\w+))?\)",
                          finding["fix"].removeprefix("what would fit: "))  # fmt: skip
    assert promises
    for change, gib, times, engine in promises:
        ran = dslaunch(f"{words} {change} --json")
        assert ran.status == 0, ran.err
        assert ran.json["peak_memory_gib"] == pytest.approx(float(gib), abs=0.051)
        assert ran.json["step_time_s"] / before["step_time_s"] == pytest.approx(float(times), abs=0.0051)
        assert ran.json["engine"]["name"] == (engine or before["engine"]["name"])


@pytest.mark.parametrize("gpus", [8, 64])
def test_auto_takes_no_engine_whose_script_has_no_flags_for_the_model(
    dslaunch: CommandLine, gpus: int
) -> None:
    words = f"plan recipe=mixtral_8x7b cluster={gpus}xH100 strategy=auto"
    assert planned(dslaunch, words)["engine"]["name"] != "megatron_deepspeed"
    err = refused(dslaunch, f"{words} engine=megatron_deepspeed")
    assert "components.llm.experts: Megatron-DeepSpeed's pretrain script has no flags for it" in err


def test_auto_is_at_least_as_fast_as_the_pinned_layout_and_keeps_what_is_pinned(
    dslaunch: CommandLine,
) -> None:
    pinned = planned(dslaunch, "plan recipe=vla70b cluster=64xA100")
    searched = planned(dslaunch, "plan recipe=vla70b cluster=64xA100 strategy=auto")
    assert searched["step_time_s"] <= pinned["step_time_s"]
    assert searched["peak_memory_gib"] <= searched["memory_limit_gib"]
    assert searched["candidates"][0]["verdict"] == "chosen"
    kept = planned(dslaunch, "plan recipe=vla70b cluster=64xA100 strategy=auto strategy.llm.pp=8")
    assert kept["components"]["llm"]["pp"] == 8


def test_auto_finds_a_layout_for_sizes_that_the_recipe_does_not_pin(dslaunch: CommandLine) -> None:
    plan = planned(dslaunch, "plan recipe=vla70b cluster=128xA100 strategy=auto")
    stages = [stage for component in plan["components"].values() for stage in component["stages"]]
    assert {rank for stage in stages for rank in stage["ranks"]} == set(range(128))


def test_auto_says_why_nothing_fits(dslaunch: CommandLine) -> None:
    ran = dslaunch("plan recipe=vla70b cluster=1xA100 strategy=auto cluster.node.host_memory_gib=256")
    assert ran.status == 3
    assert "none of" in ran.err
    assert "GiB" in ran.err


def test_a_recipe_whose_own_layout_is_interleaved_may_take_whole_stages(dslaunch: CommandLine) -> None:
    found = planned(dslaunch, "plan recipe=llama3_405b cluster=512xH100 strategy=auto")
    vpp = found["components"]["llm"]["vpp"]
    assert found["training"]["schedule"] == ("interleaved" if vpp > 1 else "1f1b")
