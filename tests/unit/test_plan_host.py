"""Host memory: what offload takes, and the moment at which every process of a node has the whole model."""

from __future__ import annotations

import pytest

from tests.command import CommandLine, planned

WORDS = (
    "plan recipe=llama3_70b cluster=8x8xH100 strategy=zero3 cluster.node.host_memory_gib={gib} "
    "--accept memory.gpu"
)
COPIES = 8 * (70553706496 * 2 / 2**30 + 2)


def warned(dslaunch: CommandLine, words: str, gib: float) -> bool:
    found = planned(dslaunch, f"{WORDS.format(gib=round(gib))} {words}")["findings"]
    (*warnings,) = [each for each in found if each["rule"] == "memory.host"]
    assert all(
        each["severity"] == "memory" and f"take {COPIES:.0f} of" in each["message"] for each in warnings
    )
    return bool(warnings)


@pytest.mark.parametrize(
    ("words", "loads_whole"),
    [
        ("engine=deepspeed script=t.py", True),
        ("engine=deepspeed script=t.py engine.huggingface=true", False),
        ("engine=native module=dslaunch.runtime", False),
    ],
)
def test_a_script_that_loads_the_model_in_each_process_is_warned_of(
    dslaunch: CommandLine, words: str, loads_whole: bool
) -> None:
    assert warned(dslaunch, words, COPIES - 10) is loads_whole
    assert not warned(dslaunch, words, COPIES + 10)


@pytest.mark.parametrize(
    ("words", "loading"),
    [("engine=deepspeed script=t.py", COPIES), ("engine=native module=dslaunch.runtime", None)],
)
def test_the_peak_while_loading_is_in_the_prediction(
    dslaunch: CommandLine, words: str, loading: float | None
) -> None:
    found = planned(dslaunch, f"{WORDS.format(gib=2000)} {words}")
    assert found["host_loading_gib"] == (loading and pytest.approx(loading))


SHARD = 8030261248 // 8
ZERO2 = "plan recipe=llama3_8b cluster=8xA100 strategy=zero2_cpu_offload"
UNLOCKED = "engine.extra.zero_optimization.offload_optimizer.pin_memory=false"
VOCABULARY = 2 * 128256 * 4096


def host_bytes(dslaunch: CommandLine, words: str) -> float:
    """Of a rank."""
    return float(planned(dslaunch, words)["components"]["llm"]["stages"][0]["host_gib_per_rank"]) * 2**30


def test_page_locked_blocks_are_rounded_up_to_powers_of_two(dslaunch: CommandLine) -> None:
    """Master weights and gradients, new 16-bit weights, and one parameter's gradient; moments are pageable."""
    assert host_bytes(dslaunch, ZERO2) == pytest.approx(2 * 2**32 + 2**31 + 2**30 + 8 * SHARD)
    assert host_bytes(dslaunch, f"{ZERO2} {UNLOCKED}") == pytest.approx(18 * SHARD + VOCABULARY)


def test_gradients_of_earlier_micro_batches_wait_in_host_memory_in_the_models_type(
    dslaunch: CommandLine,
) -> None:
    words = f"{ZERO2} {UNLOCKED} training.grad_accum_dtype=bf16"
    assert host_bytes(dslaunch, words) == pytest.approx(20 * SHARD + VOCABULARY)


def test_nodes_too_small_for_page_locked_blocks_are_told_of_them(dslaunch: CommandLine) -> None:
    ran = dslaunch(f"{ZERO2} cluster.node.host_memory_gib=160")
    assert ran.status == 3
    assert UNLOCKED in ran.out + ran.err
    assert planned(dslaunch, f"{ZERO2} cluster.node.host_memory_gib=160 {UNLOCKED}")["host_memory_gib"] < 160


@pytest.mark.parametrize(("stage", "embedding"), [(2, 1), (3, 0)])
def test_the_gpu_has_a_buffer_for_the_largest_gradient_on_its_way_back(
    dslaunch: CommandLine, stage: int, embedding: int
) -> None:
    words = f"plan recipe=llama3_8b cluster=8xH100 engine=deepspeed strategy=zero{stage}"
    here, away = (
        planned(dslaunch, f"{words} {more} --accept memory.gpu")["components"]["llm"]["stages"][0]["memory_gib"]
        for more in ("", "strategy.every.offload=cpu")
    )
    assert away["buffers"] - here["buffers"] == pytest.approx(embedding * 128256 * 4096 * 2 / 2**30, abs=1e-3)


@pytest.mark.parametrize(
    ("words", "locked_gib"),
    [
        ("strategy=zero2_cpu_offload", 4 + 2 + 4 + 1),
        (f"strategy=zero2_cpu_offload {UNLOCKED}", 0),
        ("strategy=zero2", 0),
    ],
)
def test_page_locked_memory_is_a_figure_of_its_own(
    dslaunch: CommandLine, words: str, locked_gib: float
) -> None:
    """Rounded up: fp32 weights, 16-bit ones, fp32 gradients of an eighth of 8.03B, and a table's gradient."""
    line = f"plan recipe=llama3_8b cluster=8xA100 {words} --accept memory.gpu"
    plan = planned(dslaunch, line)
    assert plan["host_pinned_gib"] == pytest.approx(8 * locked_gib)
    (stage,) = plan["components"]["llm"]["stages"]
    assert stage["pinned_gib_per_rank"] == pytest.approx(locked_gib)
    assert (f", {8 * locked_gib} of it page-locked" in dslaunch(line).out) is (locked_gib > 0)


@pytest.mark.parametrize(
    "words",
    [
        "strategy=zero3_cpu_offload",
        "strategy=zero3_cpu_offload training.grad_accum_dtype=fp32",
        "strategy=zero1_cpu_offload model.components.llm.train=lora model.components.llm.lora.rank=8",
        "strategy=zero3_nvme_offload strategy.nvme.path=/nvme",
    ],
)
def test_no_more_is_page_locked_than_host_memory_is_taken(dslaunch: CommandLine, words: str) -> None:
    plan = planned(dslaunch, f"plan recipe=llama3_8b cluster=8xA100 {words} --accept memory.gpu")
    (stage,) = plan["components"]["llm"]["stages"]
    assert 0 < stage["pinned_gib_per_rank"] <= stage["host_gib_per_rank"]
    assert 0 < plan["host_pinned_gib"] <= plan["host_memory_gib"]
