"""The time ledger: what changes it, and by how much."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dslaunch.engines.layout import Layout
from dslaunch.engines.registry import ENGINES
from dslaunch.hardware.efficiency import UNCALIBRATED
from dslaunch.hardware.software import Software
from dslaunch.plan.case import cases
from dslaunch.plan.time import StepTime, step_time
from dslaunch.schema.config import RunConfig
from tests.unit.test_cluster_data import cluster

MEGATRON = Software("megatron", own_attention=True)


def layout(**changes: Any) -> Layout:
    base: dict[str, Any] = {
        "tp": 1, "pp": 1, "vpp": 1, "cp": 1, "ep": 1, "dp": 8, "zero": 1, "offload": "none", "recompute": "none",
        "micro_batch": 1, "num_microbatches": 8, "rank_offset": 0, "layers_per_stage": (32,),
    }  # fmt: skip
    return Layout(**{**base, **changes})


def timed(
    where: Layout, software: Software = MEGATRON, engine: str = "megatron", gpu: str = "H100",
    decoder: dict[str, Any] | None = None, **training: Any,
) -> StepTime:  # fmt: skip
    """The ledger of an 8B decoder in a layout."""
    config = configuration(where, engine, gpu, decoder, **training)
    return step_time(cases(config, ENGINES[engine], {"llm": where}, "fp32", software), UNCALIBRATED)


def configuration(
    where: Layout, engine: str, gpu: str = "H100", decoder: dict[str, Any] | None = None, **training: Any
) -> RunConfig:
    shape = {
        "arch": "decoder", "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256,
    }  # fmt: skip
    return RunConfig.model_validate(
        {
            "name": "run",
            "model": {"name": "model", "components": {"llm": {**shape, **(decoder or {})}}},
            "cluster": cluster(gpu, gpus=where.ranks).model_dump(exclude_none=True),
            "training": {
                "global_batch": where.micro_batch * where.num_microbatches * where.dp, "seq_len": 4096, "steps": 1,
                "optimizer": {"lr": 1e-4}, **training,
            },
            "strategy": {"name": "layouts"},
            "engine": {"name": engine},
        }
    )  # fmt: skip


def terms(found: StepTime, stage: int = 0) -> dict[str, float]:
    return found.stages["llm"][stage]


def test_full_recompute_adds_a_forward() -> None:
    plain, full = timed(layout()), timed(layout(recompute="full"))
    assert terms(plain)["recompute"] == 0
    assert terms(full)["recompute"] / terms(full)["compute"] == pytest.approx(1 / 3, abs=0.06)
    half = timed(layout(recompute="full"), replace(MEGATRON, recompute_layers=16))
    assert terms(half)["recompute"] == pytest.approx(terms(full)["recompute"] / 2)


@pytest.mark.parametrize("engine", ["deepspeed", "torch"])
def test_what_was_computed_before_changes_nothing(engine: str) -> None:
    """A search hands on what micro-batches of other layouts took; ZeRO stage and number of them differ."""
    where = [layout(zero=zero, num_microbatches=number) for zero in (0, 1, 2, 3) for number in (1, 2, 8)]
    software, known = Software("transformers"), dict[tuple[object, ...], Any]()
    for each in where:
        every = cases(configuration(each, engine), ENGINES[engine], {"llm": each}, "bf16", software)
        assert step_time(every, UNCALIBRATED, known) == step_time(every, UNCALIBRATED)


def test_accumulation_saves_reductions_at_stage_1_but_not_at_stage_3() -> None:
    eight, one = layout(dp=64), layout(dp=64, num_microbatches=1)
    once = [terms(timed(where))["dp"] for where in (eight, one)]
    assert once[0] == pytest.approx(once[1], rel=0.3)
    every = [terms(timed(replace(w, zero=3), engine="deepspeed"))["dp"] for w in (eight, one)]
    assert every[0] > 4 * every[1]


def test_overlap_hides_reductions() -> None:
    where = layout(dp=64)
    assert terms(timed(where))["dp"] < 0.5 * terms(timed(where, overlap_comm=False))["dp"]


def test_tensor_parallelism_across_nodes_is_slow() -> None:
    near, far = timed(layout(tp=8, dp=2)), timed(layout(tp=16, dp=1, num_microbatches=16))
    assert terms(far)["tp"] > 3 * terms(near)["tp"]


def test_user_buffers_hide_tensor_parallelism() -> None:
    where = layout(tp=8, dp=1)
    assert terms(timed(where, replace(MEGATRON, overlap_tp=True)))["tp"] < 0.5 * terms(timed(where))["tp"]


def test_the_bubble_shrinks_with_virtual_stages() -> None:
    where = layout(pp=4, dp=2, layers_per_stage=(8, 8, 8, 8))
    plain = timed(where, decoder={"vocab": 128})
    virtual = timed(replace(where, vpp=2), decoder={"vocab": 128}, schedule="interleaved")
    assert plain.bubble == pytest.approx(3 / 11, abs=0.03)
    assert virtual.bubble == pytest.approx(3 / 19, abs=0.03)


def test_what_waits_in_host_memory_goes_there_and_back() -> None:
    """Llama 3 8B keeps some 0.5 GiB a layer at 4,096 tokens: more than PCIe carries beside the forward pass."""
    away = replace(MEGATRON, offloaded_layers=32)
    plain, slow = timed(layout()), timed(layout(), away)
    fast = timed(layout(), away, gpu="GB200")
    assert (terms(plain)["offload"], terms(timed(layout(), gpu="GB200"))["offload"]) == (0, 0)
    assert terms(fast)["offload"] < 0.25 * terms(slow)["offload"]
    some = timed(layout(), replace(MEGATRON, offloaded_modules=("core_attn", "attn_proj")))
    assert 0 < terms(some)["offload"] < terms(slow)["offload"]
    assert slow.step_s - plain.step_s == pytest.approx(terms(slow)["offload"], rel=1e-3)


@pytest.mark.parametrize(("schedule", "chunks", "share"), [("zb-h1", 1, 0.4), ("zb-h1", 2, 0.2), ("zb-v", 2, 0.2)])
def test_the_bubble_shrinks_where_weights_gradients_wait(schedule: str, chunks: int, share: float) -> None:
    """By 1F1B's (p - 1) (F + B + W): a third or a sixth in arXiv:2401.10241, where B is as long as W."""
    where, tiny = layout(pp=4, dp=2, layers_per_stage=(8, 8, 8, 8)), {"vocab": 128}
    plain = timed(where, decoder=tiny)
    split = timed(replace(where, vpp=chunks), decoder=tiny, schedule=schedule)
    idle = [found.bubble * found.step_s for found in (plain, split)]
    assert idle[1] / idle[0] == pytest.approx(share, abs=0.07)
    assert terms(split)["compute"] == pytest.approx(terms(plain)["compute"], rel=0.01)


def test_folded_pipelines_have_the_head_beside_the_embedding() -> None:
    where = layout(pp=4, dp=2, vpp=2, layers_per_stage=(8, 8, 8, 8))
    plain, folded = (timed(where, schedule=schedule) for schedule in ("interleaved", "zb-v"))
    assert terms(folded, 0)["compute"] > 1.1 * terms(plain, 0)["compute"]
    assert terms(folded, 3)["compute"] < 0.9 * terms(plain, 3)["compute"]


def test_the_head_makes_the_last_stage_the_clock() -> None:
    even = timed(layout(pp=4, dp=2, layers_per_stage=(8, 8, 8, 8)))
    shifted = timed(layout(pp=4, dp=2, layers_per_stage=(9, 9, 9, 5)))
    assert terms(even, 3)["compute"] > 1.15 * terms(even, 1)["compute"]
    assert shifted.step_s < even.step_s


def test_fp8_speeds_up_the_layers_but_not_twice() -> None:
    slow, fast = timed(layout()), timed(layout(), replace(MEGATRON, fp8="tensorwise"))
    assert 0.55 * slow.step_s < fast.step_s < 0.9 * slow.step_s


def test_fp4_is_as_fast_as_the_hardware_has_it() -> None:
    """Blackwell Ultra's products in fp4 run at 15 PFLOPS, Blackwell's at 10, and both at 5 in fp8."""
    spent = {
        (gpu, how): terms(timed(layout(), replace(MEGATRON, fp8=how), gpu=gpu))["compute"]
        for gpu in ("GB200", "GB300")
        for how in ("mxfp8", "nvfp4")
    }
    assert spent["GB200", "mxfp8"] == pytest.approx(spent["GB300", "mxfp8"], rel=0.06)
    assert spent["GB300", "nvfp4"] < 0.95 * spent["GB200", "nvfp4"] < 0.95 * spent["GB200", "mxfp8"]


def test_counts_of_tokens_make_the_host_wait_unless_experts_are_padded() -> None:
    decoder = {"experts": {"count": 64, "top_k": 4, "ffn": 1024}}
    where = layout(ep=8)
    waiting = timed(where, decoder=decoder)
    padded = timed(where, replace(MEGATRON, known_counts=True), decoder=decoder)
    assert terms(padded)["launch"] < terms(waiting)["launch"]
    assert terms(padded)["compute"] < terms(waiting)["compute"]


def test_unfused_attention_and_unfused_kernels_take_longer() -> None:
    fused = timed(layout()).step_s
    assert timed(layout(), replace(MEGATRON, flash_attention=False)).step_s > 1.05 * fused
    assert timed(layout(), Software("transformers")).step_s > 1.05 * fused


def test_a_tiny_model_waits_for_its_host() -> None:
    tiny = {"layers": 4, "hidden": 256, "heads": 4, "kv_heads": 4, "ffn": 1024, "vocab": 1024}
    found = timed(layout(layers_per_stage=(4,)), decoder=tiny)
    assert terms(found)["launch"] > terms(found)["compute"]
    graphs = timed(layout(layers_per_stage=(4,)), replace(MEGATRON, graphs=True), decoder=tiny)
    assert graphs.step_s < found.step_s


def test_ulysses_exchanges_and_a_ring_hides() -> None:
    where = layout(cp=8, dp=1)
    ring = timed(where, seq_len=65536)
    ulysses = timed(replace(where, zero=3), engine="deepspeed", seq_len=65536)
    assert 0 < terms(ring)["cp"] < 0.1 * terms(ring)["compute"]
    assert terms(ulysses)["cp"] > 0
    assert terms(timed(layout()))["cp"] == 0


def test_experts_are_reached_once_a_node_by_deepep() -> None:
    moe = {"experts": {"count": 64, "top_k": 8, "ffn": 2048}}
    where = layout(ep=32, dp=32)
    each, once = (
        terms(timed(where, replace(MEGATRON, dispatcher=way), decoder=moe))["ep"]
        for way in ("alltoall", "deepep")
    )
    assert 0.2 * each < once < 0.7 * each


def test_adapters_save_the_weights_gradients_and_add_kernels() -> None:
    lora = {"train": "lora", "lora": {"rank": 8}}
    plain, adapted = timed(layout()), timed(layout(), decoder=lora)
    assert 0.6 < terms(adapted)["compute"] / terms(plain)["compute"] < 0.9
    packed = timed(layout(), decoder={"train": "qlora", "lora": {"rank": 8}})
    assert packed.step_s > adapted.step_s


@pytest.mark.parametrize(
    ("where", "gpu", "least", "most"),
    [
        (
            layout(tp=4, pp=8, vpp=5, dp=2, num_microbatches=64, layers_per_stage=(10,) * 8),
            "H100",
            0.38,
            0.55,
        ),
        (layout(tp=8, pp=4, dp=2, num_microbatches=64, layers_per_stage=(20,) * 4), "A100", 0.42, 0.62),
    ],
)
def test_a_70b_model_reaches_what_such_runs_reach(where: Layout, gpu: str, least: float, most: float) -> None:
    """Model FLOPs of the dense 16-bit peak: published runs of this size reach 40 to 55 %."""
    shape = {"layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672}
    found = timed(where, replace(MEGATRON, overlap_tp=True), gpu=gpu, decoder=shape)
    peak = {"H100": 989.5e12, "A100": 312e12}[gpu]
    assert least < found.model_flops / found.step_s / where.ranks / peak < most
