"""`--component`: one component of a larger model, planned and rendered as a model of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command import CommandLine

VLA = ["recipe=vla70b", "cluster=64xA100"]


def test_the_llm_of_a_larger_model_under_megatron(dslaunch: CommandLine, tmp_path: Path) -> None:
    data = ["data.path=/d/x", "data.tokenizer=/t", "engine.path=/opt/Megatron-LM"]
    ran = dslaunch("render", *VLA, "--component", "llm", "engine=megatron", *data, "-o", str(tmp_path / "out"))
    assert ran.status == 0, ran.err
    lines = (tmp_path / "out" / "megatron_args.txt").read_text().splitlines()
    wanted = ["--num-layers 80", "--seq-length 2048", "--tensor-model-parallel-size 8"]
    assert set(wanted) <= set(lines)
    assert not any("image" in line for line in lines)


def test_its_layout_is_the_recipes_and_nothing_else_is_left(dslaunch: CommandLine) -> None:
    whole = dslaunch("plan", *VLA, "--json").json
    alone = dslaunch("plan", *VLA, "--component", "llm", "--json").json
    assert list(alone["components"]) == ["llm"]
    assert "megatron" in alone["engines"]
    assert "megatron" not in whole["engines"]
    same = ("tp", "pp", "dp", "zero", "micro_batch", "num_microbatches", "params", "recompute")
    assert {k: alone["components"]["llm"][k] for k in same} == {k: whole["components"]["llm"][k] for k in same}
    assert alone["name"] == "vla70b.llm"


def test_a_tower_alone_runs_over_its_own_tokens(dslaunch: CommandLine) -> None:
    words = ["strategy=zero2", "training.global_batch=512"]
    found = dslaunch("plan", *VLA, "--component", "vision_encoder", *words, "--json").json
    assert found["training"]["seq_len"] == 257
    assert found["components"]["vision_encoder"]["dp"] == 64


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*VLA, "--component", "lm"], "vla70b has no such component. It has vision_encoder, projector, llm"),
        ([*VLA, "--component", "lm"], "Did you mean 'llm'"),
        ([*VLA, "--component", "projector"], "vision_encoder, llm"),
        (["recipe=llama3_8b", "model=pi0", "--component", "action_expert"], "shared_attention"),
        ([*VLA, "--component", "llm", "strategy.vision_encoder.tp=2"], "leaves that out"),
        ([*VLA, "--component", "llm", "strategy.components.projector.tp=2"], "strategy.components.projector.tp:"),
        ([*VLA, "--component", "llm", "model.components.vision_encoder.lr=1e-5"], "leaves that out"),
        ([*VLA, "--component", "llm", "layouts.64.projector.tp=2"], "layouts.64.projector.tp: --component llm"),
        (
            [*VLA, "--component", "vision_encoder", "strategy=zero2", "training.seq_len=4096"],
            "training.seq_len: --component vision_encoder runs over the 257 tokens of its own",
        ),
    ],
)
def test_what_is_nothing_alone_is_refused(dslaunch: CommandLine, words: list[str], message: str) -> None:
    ran = dslaunch("plan", *words)
    assert ran.status == 2
    assert message in ran.err
