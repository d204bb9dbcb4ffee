"""Plans: the layouts that recipes promise, the arithmetic of batch and ranks, the ledgers' terms."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from dslaunch.planfile import plan_from_json, to_json
from tests.command import CommandLine

GIB = 2**30


def planned(dslaunch: CommandLine, words: str) -> Any:
    ran = dslaunch(f"plan {words} --json")
    assert ran.status in (0, 3), ran.err
    return ran.json


@pytest.mark.parametrize(
    ("gpus", "llm", "encoder", "projector"),
    [
        (16, (4, 4, 1, 1), (2, 1, 8, 2), (1, 1, 16, 2)),
        (64, (8, 4, 2, 1), (2, 1, 32, 2), (1, 1, 64, 2)),
        (256, (8, 8, 4, 1), (2, 1, 128, 2), (1, 1, 256, 2)),
    ],
)
def test_vla70b_layouts(
    dslaunch: CommandLine,
    gpus: int,
    llm: tuple[int, ...],
    encoder: tuple[int, ...],
    projector: tuple[int, ...],
) -> None:
    plan = planned(dslaunch, f"recipe=vla70b cluster={gpus}xA100")
    found = {name: (c["tp"], c["pp"], c["dp"], c["zero"]) for name, c in plan["components"].items()}
    assert found == {"llm": llm, "vision_encoder": encoder, "projector": projector}
    assert plan["engines"] == ["native"]
    assert plan["world_size"] == gpus


def test_the_64_gpu_plan_in_full(dslaunch: CommandLine) -> None:
    plan = planned(dslaunch, "recipe=vla70b cluster=64xA100")
    assert plan["schema"] == "dslaunch.plan-json/1"
    assert plan["global_batch"] == 512
    assert plan["training"]["precision"] == "bf16"
    assert plan["training"]["clip"] == 1.0
    assert plan["training"]["schedule"] == "1f1b"
    assert {c["recompute"] for c in plan["components"].values()} == {"selective", "none"}
    assert plan["components"]["llm"]["params"] == 70_553_706_496
    assert plan["components"]["llm"]["recompute"] == "selective"
    for component in plan["components"].values():
        assert component["micro_batch"] * component["num_microbatches"] * component["dp"] == 512
        ranks = list(itertools.chain.from_iterable(stage["ranks"] for stage in component["stages"]))
        assert sorted(ranks) == list(range(64))
    stages = plan["components"]["llm"]["stages"]
    assert stages[1]["ranks"] == list(range(16, 32))
    for key in ("overhead_gib", "worst", "peak_memory_gib", "gpu_memory_gib", "host_memory_gib", "step_time_s",
                "tokens_per_s", "mfu", "hfu", "engines", "findings"):  # fmt: skip
        assert key in plan
    assert plan["memory_band"]["low"] <= 1 <= plan["memory_band"]["high"]
    assert plan["allocated_gib"] < plan["reserved_gib"] < plan["nvidia_smi_gib"] < plan["gpu_memory_gib"]
    assert plan["band"].startswith("band: memory ")


def test_the_peak_is_the_worst_ranks_sum(dslaunch: CommandLine) -> None:
    plan = planned(dslaunch, "recipe=vla70b cluster=64xA100")
    totals = dict.fromkeys(range(64), plan["overhead_gib"])
    for component in plan["components"].values():
        for stage in component["stages"]:
            terms = stage["memory_gib"]
            assert terms["total"] == pytest.approx(sum(v for k, v in terms.items() if k != "total"))
            for rank in stage["ranks"]:
                totals[rank] += terms["total"]
    assert plan["peak_memory_gib"] == pytest.approx(max(totals.values()))
    assert totals[plan["worst"]["rank"]] == pytest.approx(plan["peak_memory_gib"])
    assert sum(plan["worst"]["memory_gib"].values()) == pytest.approx(plan["peak_memory_gib"])


@pytest.mark.parametrize(("dtype", "per_param"), [("fp32", 8 + 12 / 2), ("bf16", 4 + 12 / 2)])
def test_zero1_keeps_a_whole_fp32_buffer_where_it_accumulates_in_fp32(
    dslaunch: CommandLine, dtype: str, per_param: float
) -> None:
    """28.7 or 20.5 GiB for an average stage of vla70b's LLM."""
    plan = planned(dslaunch, f"recipe=vla70b cluster=64xA100 training.grad_accum_dtype={dtype}")
    llm = plan["components"]["llm"]
    states = [sum(s["memory_gib"][k] for k in ("weights", "gradients", "optimizer")) for s in llm["stages"]]
    params = [s["params_on_rank"] for s in llm["stages"]]
    for gib, count in zip(states, params, strict=True):
        assert gib == pytest.approx(count * per_param / GIB)
    average = llm["params"] / 32 * per_param / GIB
    assert average == pytest.approx({"fp32": 28.7, "bf16": 20.5}[dtype], abs=0.05)


@pytest.mark.parametrize(
    ("strategy", "per_param"),
    [
        ("zero1", 8 + 12 / 8),
        ("zero2", 2 + (4 + 12) / 8),
        ("zero3", (2 + 4 + 12) / 8),
        ("ddp", 16 + 2 + 4),
        ("fsdp2", 16 / 8),
    ],
)
def test_static_bytes_per_parameter(dslaunch: CommandLine, strategy: str, per_param: float) -> None:
    plan = planned(dslaunch, f"recipe=llama3_8b cluster=8xH100 strategy={strategy}")
    (stage,) = plan["components"]["llm"]["stages"]
    states = sum(stage["memory_gib"][k] for k in ("weights", "gradients", "optimizer"))
    assert states * GIB == pytest.approx(8_030_261_248 * per_param)


def test_activations_in_flight_fall_along_the_pipeline(dslaunch: CommandLine) -> None:
    plan = planned(dslaunch, "recipe=vla70b cluster=64xA100")
    kept = [s["memory_gib"]["activations"] for s in plan["components"]["llm"]["stages"]]
    one = kept[0] - kept[1]
    assert one > 0
    assert kept[1] - kept[2] == pytest.approx(one), "a micro-batch fewer on each stage"
    assert kept[2] > kept[3]


def test_sixteen_gpus_do_not_fit_and_the_plan_says_what_would(dslaunch: CommandLine) -> None:
    plan = planned(dslaunch, "recipe=vla70b cluster=16xA100")
    assert plan["peak_memory_gib"] > plan["gpu_memory_gib"]
    (finding,) = [f for f in plan["findings"] if f["rule"] == "memory.gpu"]
    assert finding["severity"] == "error"
    assert "llm stage 0 optimizer 50.8" in finding["message"]
    first = finding["fix"].removeprefix("what would fit: ").split(" (")[0]
    again = dslaunch(f"plan recipe=vla70b cluster=16xA100 {first}")
    assert again.status == 0, again.err


def test_an_accepted_misfit_is_recorded_and_passes(dslaunch: CommandLine) -> None:
    assert dslaunch("plan recipe=vla70b cluster=16xA100").status == 3
    ran = dslaunch("plan recipe=vla70b cluster=16xA100 --accept memory.gpu --json")
    assert ran.status == 0
    assert ran.json["accepted"] == ["memory.gpu"]


def test_a_plan_survives_its_file(dslaunch: CommandLine) -> None:
    from dslaunch.flow import Request
    from dslaunch.flow import planned as make

    _, plan, _ = make(Request(("recipe=vla70b", "cluster=64xA100"), None, (), ()))
    assert plan_from_json(to_json(plan)) == plan


def test_frozen_components_cost_weights_only(dslaunch: CommandLine) -> None:
    plan = planned(dslaunch, "recipe=vla70b cluster=64xA100 model.components.vision_encoder.train=nothing")
    encoder = plan["components"]["vision_encoder"]
    memory = encoder["stages"][0]["memory_gib"]
    assert encoder["trainable"] == 0
    assert memory["gradients"] == memory["optimizer"] == memory["activations"] == 0
    assert memory["weights"] * GIB == pytest.approx(2 * encoder["stages"][0]["params_on_rank"])


def test_offload_moves_the_states_to_the_host(dslaunch: CommandLine) -> None:
    stay = planned(dslaunch, "recipe=llama3_8b cluster=8xH100 strategy=zero3")
    move = planned(dslaunch, "recipe=llama3_8b cluster=8xH100 strategy=zero3_cpu_offload")
    assert move["components"]["llm"]["stages"][0]["memory_gib"]["optimizer"] == 0
    assert move["peak_memory_gib"] < stay["peak_memory_gib"]
    unlocked = planned(
        dslaunch,
        "recipe=llama3_8b cluster=8xH100 strategy=zero3_cpu_offload "
        "engine.extra.zero_optimization.offload_optimizer.pin_memory=false "
        "engine.extra.zero_optimization.offload_param.pin_memory=false",
    )
    states, gradients, weights = 16 / 8, 4 / 8, 2 / 8
    moved = (states + gradients) * 8_030_261_248 * 8 / GIB
    rounded = 8 * 2**31 / GIB  # weights/8 of a rank are 1.87 GiB, in one page-locked block
    assert weights * 8_030_261_248 < 2**31
    assert unlocked["host_memory_gib"] - stay["host_memory_gib"] == pytest.approx(moved + rounded)
    assert move["host_memory_gib"] > unlocked["host_memory_gib"]


def test_uneven_stages_sum_to_the_layers(dslaunch: CommandLine) -> None:
    words = "recipe=llama3_70b cluster=64xH100 strategy.llm.layers_per_stage=[19,21,21,19]"
    plan = planned(dslaunch, words)
    assert [s["layers"] for s in plan["components"]["llm"]["stages"]] == [19, 21, 21, 19]
    refused = dslaunch(f"plan {words.replace('19]', '18]')}")
    assert refused.status == 3
    assert "19 + 21 + 21 + 18 = 79" in refused.err


def test_interleaved_needs_whole_rounds(dslaunch: CommandLine) -> None:
    words = "recipe=llama3_70b cluster=64xH100 strategy.llm.vpp=2"
    assert (
        planned(dslaunch, words)["bubble"] < planned(dslaunch, "recipe=llama3_70b cluster=64xH100")["bubble"]
    )
    refused = dslaunch(f"plan {words} training.global_batch=508")
    assert refused.status == 3
    assert "multiple of strategy.llm.pp 4" in refused.err
    refused = dslaunch(f"plan {words} training.schedule=1f1b")
    assert refused.status == 3
    assert "strategy.llm.vpp is 2, but training.schedule is 1f1b" in refused.err


def test_the_page_names_what_decides(dslaunch: CommandLine) -> None:
    page = dslaunch("plan recipe=vla70b cluster=64xA100").out
    assert "64 GPUs = 8 nodes x 8 A100-SXM4-80GB" in page
    assert "1 x 256 x 2" in page
    assert "512 samples a step" in page
    assert "\nfullest GPU  rank 0: llm 46.9 + vision_encoder 6.4 + overhead 2.1" in page
    assert "\nmemory       56.1 of 76.0 GiB; the GPU has 80; band " in page
    assert "published runs" in page
    assert "\x1b" not in page


def test_a_long_pipeline_is_folded(dslaunch: CommandLine) -> None:
    """The ends and the fullest stage keep rows of their own; JSON has every stage."""
    words = "plan recipe=llama3_70b cluster=160xH100 strategy=zero1 strategy.llm.tp=4 strategy.llm.pp=20"
    page = dslaunch(words).out
    rows = [line.split("  ")[0] for line in page.splitlines() if line.startswith("llm stage")]
    assert rows == ["llm stage 0", "llm stage 1", "llm stages 2-17, at most", "llm stage 18", "llm stage 19"]
    stages = dslaunch(f"{words} --json").json["components"]["llm"]["stages"]
    most = max(stage["memory_gib"]["total"] for stage in stages[2:18])
    (folded,) = [line for line in page.splitlines() if line.startswith("llm stages")]
    assert folded.split()[-1] == f"{most:.1f}"
    assert len(stages) == 20


def test_a_command_that_prints_the_hosts_names_them(dslaunch: CommandLine) -> None:
    words = ["recipe=vla70b", "cluster=64xA100", "launcher=ssh"]
    assert "no host is named" in dslaunch("plan", *words).err
    ran = dslaunch("plan", *words, "launcher.hosts_command=cat hosts")
    assert ran.status == 0, ran.err


def test_hosts_of_a_mixed_cluster_are_asked_for_with_their_own_slots(dslaunch: CommandLine) -> None:
    mixed = "cluster.mixed=[{nodes: 2, gpus: 8}, {nodes: 1, gpus: 4}]"
    ran = dslaunch("plan", "recipe=llama3_8b", "cluster=A100", mixed, "training.global_batch=120", "launcher=ssh")
    assert "ssh on 3 nodes" in ran.err
    assert "`HOST slots=8` and `HOST slots=4`" in ran.err
