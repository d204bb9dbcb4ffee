"""Pipelines that split the backward pass: who executes them, and what they take."""

from __future__ import annotations

from typing import Any

import pytest

from tests.command import CommandLine, planned, refused

WORDS = "plan recipe=llama3_70b cluster=64xA100"
PLAIN = f"{WORDS} engine=megatron_deepspeed training.micro_batch=1 --accept memory.gpu"


def kept(plan: Any) -> list[float]:
    """GiB of activations by stage."""
    return [stage["memory_gib"]["activations"] for stage in plan["components"]["llm"]["stages"]]


def test_zb_h1_holds_as_much_on_every_stage_and_idles_less(dslaunch: CommandLine) -> None:
    words = f"{PLAIN} strategy.llm.recompute=none"
    plain, split = planned(dslaunch, words), planned(dslaunch, f"{words} training.schedule=zb-h1")
    assert kept(plain)[0] > kept(plain)[1] > kept(plain)[2] > kept(plain)[3]
    assert kept(split)[:3] == pytest.approx([kept(plain)[0]] * 3, rel=0.01)
    assert split["bubble"] < plain["bubble"]


def test_what_waits_for_its_weights_gradients_has_been_recomputed(dslaunch: CommandLine) -> None:
    """Stage s puts off s micro-batches, of which Megatron-DeepSpeed keeps every product's input, and
    the gradient of its output: not the layers' inputs alone."""
    words = f"{PLAIN} training.schedule=zb-h1"
    full, none = (
        kept(planned(dslaunch, f"{words} strategy.llm.recompute={how}")) for how in ("full", "none")
    )
    inputs = 20 * 8192 * 8192 * 2 / 2**30
    assert full[2] - full[1] == pytest.approx(none[1] / 4 - inputs, rel=0.02)
    assert full[1] > full[0]


@pytest.mark.parametrize("schedule", ["zb-h2", "zb-v", "zb-v-min", "dualpipe-v"])
def test_what_no_engine_executes_is_refused_with_what_each_takes(
    dslaunch: CommandLine, schedule: str
) -> None:
    err = refused(dslaunch, f"{WORDS} training.schedule={schedule}")
    assert f"training.schedule is {schedule}; megatron_deepspeed takes 1f1b, zb-h1" in err
    assert f"training.schedule is {schedule}; native takes 1f1b, gpipe, interleaved" in err


def test_megatron_refuses_zb_h1_and_names_who_takes_it(dslaunch: CommandLine) -> None:
    err = refused(dslaunch, f"{WORDS} engine=megatron training.schedule=zb-h1")
    assert "this layout can be executed by engine=megatron_deepspeed" in err
