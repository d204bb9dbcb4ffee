"""The memory ledger of dslaunch.runtime: what comes and goes around a step, and copies in the host's memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dslaunch.engines.layout import Layout
from dslaunch.engines.registry import ENGINES
from dslaunch.plan.case import Case, cases
from dslaunch.plan.memory_native import Buffers, buffers, judged_share
from dslaunch.planfile import StagePrediction
from dslaunch.schema.model import Edge
from tests.golden.cases import planned

LARGE = ("recipe=vla70b", "cluster=64xA100")
SMALL = ("recipe=vla_tiny", "cluster=local", "strategy=hetero", "training.precision=bf16")
GIB = 2**30
READ = Edge.model_validate({"from": "llm", "to": "head", "tokens": 4, "join": "sequence"})


def case_of(words: tuple[str, ...], **layout: int) -> Case:
    """The decoder under another layout, with gradients added up in fp32."""
    plan, _, config = planned(*words)
    llm = plan.components["llm"]
    made = Layout(
        tp=llm.tp, pp=1, vpp=1, cp=1, ep=1, dp=4, zero=1, offload="none", recompute="none", micro_batch=1,
        num_microbatches=4, rank_offset=0, layers_per_stage=(sum(llm.layers_per_stage),),
    )  # fmt: skip
    layouts = {"llm": Layout(**{**vars(made), **layout})}
    return cases(config, ENGINES["native"], layouts, "fp32")["llm"]


def of(words: tuple[str, ...], **layout: int) -> tuple[Buffers, int]:
    """(buffers, trained parameters on the rank)"""
    case = case_of(words, **layout)
    held = case.counts(0)
    return buffers(case, held), held.trained


def test_stage_1_with_fp32_sums_has_no_buckets_and_reduces_a_copy_in_bf16() -> None:
    found, trained = of(SMALL, zero=1)
    assert (found.forward, found.standing) == (0, 0)
    assert found.reducing == 2 * trained


def test_stage_2_gives_its_bucket_back_before_the_next_forward_pass() -> None:
    found, trained = of(SMALL, zero=2)
    assert found.forward == 0
    assert (found.standing, found.reducing) == (2 * trained, 4 * trained)


def test_stage_3_holds_its_bucket_while_the_optimizer_steps() -> None:
    found, trained = of(SMALL, zero=3)
    assert found.forward - found.standing == 2 * trained  # what arrives
    assert found.stepping == 2 * trained + (4 + 8) * trained / 4


def test_adam_makes_two_temporaries_on_a_cpu_and_none_on_a_gpu() -> None:
    on_cpu, trained = of(SMALL, zero=1)
    assert on_cpu.stepping == 8 * trained / 4
    on_gpu, _ = of(LARGE, zero=1)
    assert on_gpu.stepping == 0


def test_a_copy_of_what_is_saved_in_the_background_is_in_the_hosts_ledger() -> None:
    later = "checkpoint.async=true"
    plan, now, _ = planned(*LARGE, "checkpoint.every=100")
    _, copied, _ = planned(*LARGE, "checkpoint.every=100", later)
    for name, layout in plan.components.items():
        for stage, more, less in zip(layout.stages, copied.components[name], now.components[name], strict=True):
            assert difference(more, less) == pytest.approx(12 * stage.trainable_on_rank / layout.dp)
    every = 12 * sum(layout.trainable for layout in plan.components.values()) / 8 / GIB
    assert copied.host_memory_gib - now.host_memory_gib == pytest.approx(every, rel=0.05)


def difference(more: StagePrediction, less: StagePrediction) -> float:
    """Bytes of host memory."""
    return (more.host_gib_per_rank - less.host_gib_per_rank) * GIB


def test_tokens_of_other_components_have_no_logits() -> None:
    """Nor has a decoder that a head reads."""
    *_, config = planned(*SMALL)
    assert judged_share(case_of((*SMALL, "training.seq_len=64"))) == 1 - 16 / 64
    headed = config.model_copy(
        update={"model": config.model.model_copy(update={"edges": (*config.model.edges, READ)})}
    )
    assert judged_share(replace(case_of(SMALL), config=headed)) == 0
