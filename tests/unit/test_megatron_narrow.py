"""Megatron's flags for 8-bit weights and for the optimizer's states: what they change, where they are refused."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.predict import predict
from benchmarks.records import Record
from dslaunch.hardware.workspaces import weight_bytes
from tests.command import CommandLine, planned, refused
from tests.unit.test_cluster_data import cluster

WORDS = (
    "plan recipe=llama3_8b cluster=8x{gpu} engine=megatron strategy.llm.zero=1 strategy.llm.tp=1 "
    "--accept memory.gpu"
)
MATRICES = 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336)
"""Parameters of Llama 3 8B's linear layers, head and embedding apart."""
TRAINED = MATRICES + 2 * 128256 * 4096 + 65 * 4096
ON_HOST = "engine.extra.optimizer-cpu-offload=true engine.extra.use-precision-aware-optimizer=true"
GIB = 2**30


def planned_with(dslaunch: CommandLine, words: str, gpu: str = "H100") -> Any:
    return planned(dslaunch, f"{WORDS.format(gpu=gpu)} {words}")


def gib(plan: Any, term: str) -> float:
    return float(plan["components"]["llm"]["stages"][0]["memory_gib"][term])


@pytest.mark.parametrize(
    ("gpu", "recipe", "copies"),
    [
        ("H100", "tensorwise", 2),
        ("H100", "blockwise", 2),
        ("B200", "tensorwise", 1),
        ("B200", "mxfp8", 2 + 2 / 32),
    ],
)
def test_weights_stand_in_the_type_of_their_products_too(
    dslaunch: CommandLine, gpu: str, recipe: str, copies: float
) -> None:
    """Hopper's products need a transposed copy; with fp8-param-gather nothing stands in bf16 beside them."""
    fp8 = f"engine.extra.fp8-format=e4m3 engine.extra.fp8-recipe={recipe}"
    plain = gib(planned_with(dslaunch, "", gpu), "weights")
    beside = gib(planned_with(dslaunch, fp8, gpu), "weights")
    instead = gib(planned_with(dslaunch, f"{fp8} engine.extra.fp8-param-gather=true", gpu), "weights")
    assert beside - plain == pytest.approx(copies * MATRICES / GIB)
    assert beside - instead == pytest.approx(2 * MATRICES / GIB)
    assert weight_bytes(cluster(gpu, gpus=8).gpu, "none") == 0


@pytest.mark.parametrize(("recipe", "faster"), [("tensorwise", True), ("mxfp8", False)])
def test_eight_bit_weights_are_gathered_faster_but_for_small_scales(
    dslaunch: CommandLine, recipe: str, faster: bool
) -> None:
    words = f"engine.extra.fp8-format=e4m3 engine.extra.fp8-recipe={recipe} training.overlap_comm=false"
    wide, narrow = (
        planned_with(dslaunch, f"{words}{gather}", "B200")["components"]["llm"]["stages"][0]["time_s"]["dp"]
        for gather in ("", " engine.extra.fp8-param-gather=true")
    )
    assert (narrow < 0.9 * wide) is faster
    assert narrow <= wide


def test_an_optimizer_on_the_host_leaves_the_gpu_its_share(dslaunch: CommandLine) -> None:
    half = f"{ON_HOST} engine.extra.optimizer-offload-fraction=0.5"
    plain, some, none = (planned_with(dslaunch, words) for words in ("", half, ON_HOST))
    assert [gib(plan, "optimizer") for plan in (plain, some, none)] == pytest.approx(
        [12 * TRAINED / 8 / GIB, 6 * TRAINED / 8 / GIB, 0], abs=0.01
    )
    on_host = [plan["host_memory_gib"] - plain["host_memory_gib"] for plan in (some, none)]
    assert on_host == pytest.approx([8 * TRAINED / GIB, 16 * TRAINED / GIB], rel=0.01)
    assert plain["step_time_s"] < some["step_time_s"] < none["step_time_s"]
    overlapped = planned_with(dslaunch, f"{ON_HOST} engine.extra.overlap-cpu-optimizer-d2h-h2d=true")
    assert some["step_time_s"] < overlapped["step_time_s"] < none["step_time_s"]


def test_moments_in_16_bits_take_half(dslaunch: CommandLine) -> None:
    words = "engine.extra.exp-avg-dtype=bf16 engine.extra.exp-avg-sq-dtype=bf16"
    made = planned_with(dslaunch, f"engine.extra.use-precision-aware-optimizer=true {words}")
    assert gib(made, "optimizer") == pytest.approx(8 * TRAINED / 8 / GIB, rel=0.01)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("engine.extra.exp-avg-dtype=bf16", "exp-avg-dtype is bf16: Megatron takes it beside"),
        (
            "engine.extra.optimizer-cpu-offload=true",
            "beside engine.extra.use-precision-aware-optimizer=true only",
        ),
        (f"{ON_HOST} strategy.llm.zero=0", "Set strategy.llm.zero=1"),
        (f"{ON_HOST} engine.extra.optimizer-offload-fraction=2", "optimizer-offload-fraction is 2: a share"),
        ("engine.extra.fp8-param-gather=true", "Set engine.extra.fp8-format, such as hybrid"),
        (
            f"{ON_HOST} engine.extra.fp8-format=e4m3 engine.extra.fp8-recipe=blockwise "
            "engine.extra.fp8-param-gather=true",
            "with fp8-recipe=delayed only, found blockwise",
        ),
    ],
)
def test_flags_that_megatron_stops_at_are_refused(dslaunch: CommandLine, words: str, message: str) -> None:
    assert message in refused(dslaunch, f"{WORDS.format(gpu='H100')} {words}")


@pytest.mark.parametrize(
    "said",
    [
        {"offload": "optimizer->cpu", "flags": {}},
        {"flags": {"optimizer-cpu-offload": True, "use-precision-aware-optimizer": True}},
    ],
)
def test_a_record_names_its_optimizer_on_the_host(said: dict[str, Any]) -> None:
    shape = {
        "layers": 32, "hidden": 4096, "ffn_hidden": 14336, "heads": 32, "kv_heads": 8, "vocab": 128256,
        "gated_mlp": True, "untied_embeddings": True,
    }  # fmt: skip
    run = {
        "id": "run", "model": shape, "framework": "Megatron-LM", "gpu": {"type": "H100-80GB"}, "n_gpus": 8,
        "seq_len": 4096, "micro_batch": 1, "global_batch": 64, "precision": "bf16", "distributed_optimizer": True,
    }  # fmt: skip
    plain, away = (predict(Record.model_validate({**run, **more})) for more in ({"flags": {}}, said))
    assert plain.peak_memory_gib is not None
    assert away.peak_memory_gib is not None
    assert plain.peak_memory_gib - away.peak_memory_gib == pytest.approx(12 * TRAINED / 8 / GIB, rel=0.01)
