"""Pipelines that split the backward pass: who executes them, and what they take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.command import CommandLine, planned, refused

WORDS = "plan recipe=llama3_70b cluster=64xA100"
LAST = "engine=megatron_deepspeed engine.version=0.17.4"
"""The last DeepSpeed with which Megatron-DeepSpeed's zero-bubble pipeline runs."""
PLAIN = f"{WORDS} {LAST} training.micro_batch=1 --accept memory.gpu"


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
    assert "training.schedule is zb-h1; megatron takes 1f1b, interleaved" in err


def test_megatron_deepspeed_takes_zb_h1_with_a_deepspeed_that_it_calls(dslaunch: CommandLine) -> None:
    words = f"{WORDS} engine=megatron_deepspeed training.schedule=zb-h1 --accept memory.gpu"
    for version in ("", "engine.version=0.17.5", "engine.version=0.17"):
        err = refused(dslaunch, f"{words} {version}")
        assert "which DeepSpeed has no more from 0.17.5 on" in err
        assert "set engine.version=0.17.4" in err
    assert planned(dslaunch, f"{words} engine.version=0.17.4")["training"]["schedule"] == "zb-h1"


def test_zb_h1_goes_without_sequence_parallelism_and_its_exact_semantics_with_nothing_else(
    dslaunch: CommandLine,
) -> None:
    words, exact = f"{WORDS} {LAST} --accept memory.gpu", "engine.extra.enable-zbh1-exact-semantics=true"
    split = f"{words} training.schedule=zb-h1"
    assert "leave one of them out" in refused(dslaunch, f"{split} engine.extra.sequence-parallel=true")
    assert "is for training.schedule=zb-h1" in refused(dslaunch, f"{words} {exact}")
    assert planned(dslaunch, f"{split} {exact}")["training"]["schedule"] == "zb-h1"


SEARCHED = f"recipe=gpt3_175b cluster=128xA100 strategy=auto {LAST} strategy.llm.tp=8 strategy.llm.pp=16"


def test_a_search_tries_it_and_what_it_takes_is_rendered_and_passes_check(
    dslaunch: CommandLine, tmp_path: Path
) -> None:
    plan = planned(dslaunch, f"plan {SEARCHED}")
    assert plan["training"]["schedule"] == "zb-h1"
    assert plan["candidates"][0]["layout"].endswith(" micro-batch 1 zb-h1")
    older = planned(dslaunch, f"plan {SEARCHED} training.schedule=1f1b")
    assert plan["step_time_s"] < older["step_time_s"]
    newer = planned(dslaunch, f"plan {SEARCHED} engine.version=0.19.8")
    assert (newer["training"]["schedule"], newer["step_time_s"]) == ("1f1b", older["step_time_s"])
    assert "schedule zb-h1" in dslaunch(f"plan {SEARCHED}").out.splitlines()[1]
    assert dslaunch(f"render {SEARCHED} data.path=/data/tokens data.tokenizer=/data/tok -o {tmp_path}").status == 0
    assert "--enable-zbh1-pipeline" in (tmp_path / "megatron_args.txt").read_text()
    checked = dslaunch(f"check {tmp_path} --json")
    assert [f for f in checked.json["findings"] if f["severity"] in ("error", "hang", "wrong")] == []


def test_where_recompute_has_been_done_memory_grows_along_the_pipeline_and_the_search_knows(
    dslaunch: CommandLine,
) -> None:
    words = f"{WORDS} {LAST} training.schedule=zb-h1 strategy=auto strategy.llm.tp=8 strategy.llm.pp=8"
    plan = planned(dslaunch, f"{words} strategy.llm.recompute=full")
    assert kept(plan)[0] < kept(plan)[6]
    assert plan["peak_memory_gib"] == pytest.approx(float(plan["candidates"][0]["peak_memory_gib"]))
