"""What a plan claims is so: grids, turns, idle time, limits, and changes that are legal when they are typed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.command import CommandLine, planned, refused

VLA = "plan recipe=vla70b cluster=64xA100"
LLM = "plan recipe=llama3_8b cluster=8xH100"
SAME_NODE = "strategy.vision_encoder.rank_offset=32 strategy.vision_encoder.dp=16"
APART = [
    "strategy.vision_encoder.rank_offset=0", "strategy.vision_encoder.dp=16",
    "strategy.projector.rank_offset=0", "strategy.projector.dp=32",
    "strategy.llm.rank_offset=32", "strategy.llm.dp=1",
]  # fmt: skip


def spans(plan: Any) -> dict[str, float]:
    """Seconds of each component of one stage."""
    return {
        name: sum(component["stages"][0]["time_s"].values())
        for name, component in plan["components"].items()
        if component["pp"] == 1
    }


# --- grids


def test_ranks_that_no_component_uses_are_refused(dslaunch: CommandLine) -> None:
    err = refused(dslaunch, f"{LLM} strategy.llm.rank_offset=4 strategy.llm.dp=4")
    assert "strategy.llm is on ranks 4 to 7: ranks 0 to 3, 4 of 8, are left without work" in err
    assert "ranks 4 to 7, 4 of 8" in refused(dslaunch, f"{LLM} strategy.llm.rank_offset=0 strategy.llm.dp=4")


def test_a_gap_between_two_grids_is_refused(dslaunch: CommandLine) -> None:
    words = " ".join(APART).replace("vision_encoder.dp=16", "vision_encoder.dp=8").replace("dp=32", "dp=16")
    assert "ranks 16 to 31, 16 of 64, are left without work" in refused(dslaunch, f"{VLA} {words}")


def test_grids_apart_and_grids_within_another_are_legal(dslaunch: CommandLine) -> None:
    assert planned(dslaunch, f"{VLA} {' '.join(APART)}")["engine"]["name"] == "native"
    assert planned(dslaunch, f"{VLA} {SAME_NODE}")["components"]["vision_encoder"]["rank_offset"] == 32


def test_grids_that_share_some_ranks_only_are_refused(dslaunch: CommandLine) -> None:
    words = " ".join(APART).replace("projector.dp=32", "projector.dp=48")
    err = refused(dslaunch, f"{VLA} {words} training.global_batch=768")
    assert "strategy.projector is on ranks 0 to 47, strategy.llm on ranks 32 to 63" in err
    assert "they share ranks 32 to 47 only" in err


def test_an_engine_with_one_layout_refuses_grids_apart(dslaunch: CommandLine) -> None:
    words = "strategy=zero2 strategy.vision_encoder.rank_offset=0 strategy.vision_encoder.dp=32"
    err = refused(dslaunch, f"{VLA} {words} engine=deepspeed")
    assert "strategy.vision_encoder is on ranks 0 to 31; deepspeed takes one layout" in err
    assert "leave strategy.vision_encoder.rank_offset out" in err


# --- time


def test_components_on_overlapping_ranks_take_turns(dslaunch: CommandLine) -> None:
    """On half of the trunk's ranks an encoder has twice as much to do on each, and the step takes longer."""
    whole, half = planned(dslaunch, VLA), planned(dslaunch, f"{VLA} {SAME_NODE}")
    more = spans(half)["vision_encoder"] - spans(whole)["vision_encoder"]
    assert more > 0
    assert half["step_time_s"] - whole["step_time_s"] == pytest.approx(more)


def test_components_on_ranks_of_their_own_run_beside_one_another(dslaunch: CommandLine) -> None:
    plan = planned(dslaunch, f"{VLA} {' '.join(APART)}")
    llm = planned(dslaunch, f"{VLA} {' '.join(APART)} model.components.vision_encoder.train=nothing")
    assert sum(spans(plan).values()) < plan["step_time_s"]
    assert plan["step_time_s"] == pytest.approx(llm["step_time_s"])


def test_stages_of_unlike_size_idle(dslaunch: CommandLine) -> None:
    words = "plan recipe=llama3_70b cluster=64xH100"
    even, uneven = planned(dslaunch, words), planned(
        dslaunch, f"{words} strategy.llm.layers_per_stage=[5,5,5,65]"
    )
    assert even["bubble"] < 0.06
    busy = [sum(stage["time_s"].values()) for stage in uneven["components"]["llm"]["stages"]]
    assert uneven["bubble"] == pytest.approx(1 - sum(busy) / 4 / uneven["step_time_s"])
    assert uneven["bubble"] > 0.6


# --- what is refused


def test_a_model_of_which_nothing_trains_is_refused(dslaunch: CommandLine) -> None:
    frozen = " ".join(
        f"model.components.{name}.train=nothing" for name in ("vision_encoder", "projector", "llm")
    )
    assert "nothing trains of vision_encoder, projector, llm" in refused(dslaunch, f"{VLA} {frozen}")
    assert "nothing trains" in refused(dslaunch, f"{VLA} strategy=auto {frozen}")


def test_the_memory_limit_binds_below_the_gpus_memory(dslaunch: CommandLine) -> None:
    fits = planned(dslaunch, VLA)
    share = (fits["peak_memory_gib"] * fits["memory_band"]["low"] - 0.5) / fits["gpu_memory_gib"]
    ran = dslaunch(f"{VLA} goal.memory_fraction={share:.4f} --json")
    (finding,) = [f for f in ran.json["findings"] if f["rule"] == "memory.gpu"]
    assert (ran.status, finding["severity"]) == (3, "error")
    assert finding["message"].startswith("does not fit")
    assert dslaunch(f"{VLA} goal.memory_fraction={share:.4f} --accept memory.gpu").status == 0


# --- batch


@pytest.mark.parametrize(
    "words",
    [
        f"{VLA} training.num_microbatches=16 training.micro_batch=1",
        f"{VLA} training.num_microbatches=16 training.micro_batch=1 training.global_batch=500",
        f"{VLA} training.num_microbatches=7",
        f"{VLA} training.global_batch=100",
        f"{VLA} training.micro_batch=6",
        f"{VLA} strategy.vision_encoder.micro_batch=5",
        "plan recipe=llama3_70b cluster=64xH100 training.schedule=interleaved strategy.llm.vpp=2 "
        "training.global_batch=511",
        f"{LLM} training.micro_batch=32",
    ],
)
def test_what_is_called_legal_is_legal_when_it_is_typed(dslaunch: CommandLine, words: str) -> None:
    err = refused(dslaunch, words)
    advice = err.split("Legal and nearest: ")[1].splitlines()[0].removesuffix(".").split(", or ")
    assert advice
    for way in advice:
        key, _, values = way.rpartition("=")
        for value in values.split(" or "):
            ran = dslaunch(f"{words} {key}={value} --json")
            assert ran.out, ran.err


def test_components_that_do_not_divide_get_one_message(dslaunch: CommandLine) -> None:
    err = refused(dslaunch, f"{VLA} training.global_batch=100")
    assert len(err.splitlines()) == 1
    assert "x dp 32, vision_encoder) = 3.125" in err
    assert "x dp 64, projector) = 1.562" in err
    assert err.rstrip().endswith("training.global_batch=64 or 128.")


def test_a_quotient_that_would_look_whole_is_left_out(dslaunch: CommandLine) -> None:
    err = refused(dslaunch, f"{VLA} training.global_batch=1000000000000001")
    assert "global_batch 1000000000000001 / (micro_batch 1 x dp 32, vision_encoder) is not whole" in err


# --- strategy=auto


# --- remedies


# --- merging and words


def test_every_wins_over_the_recipes_layout_and_a_component_over_every(dslaunch: CommandLine) -> None:
    plan = planned(dslaunch, f"{VLA} strategy.every.recompute=full strategy.projector.recompute=none")
    found = {name: component["recompute"] for name, component in plan["components"].items()}
    assert found == {"vision_encoder": "full", "projector": "none", "llm": "full"}


def test_one_is_singular_and_a_cpu_is_no_gpu(dslaunch: CommandLine) -> None:
    page = dslaunch("plan recipe=vla_tiny cluster.gpus_per_node=1").out
    assert "vla_tiny on 1 process on this machine" in page
    assert "\nfullest process  rank 0: " in page
    assert "; the process has 8; band 0.5 to " in page
    assert "the GPU has" not in page
