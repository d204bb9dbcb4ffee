"""Every model file can be planned, and what trains, what is frozen and who holds experts shows in the ledger."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from dslaunch.errors import PlanError
from dslaunch.model.tokens import own_tokens
from dslaunch.paths import data_root
from dslaunch.planfile import MemoryGib, Plan, Prediction
from dslaunch.schema.model import Model
from tests.golden.cases import planned

FILES = sorted((data_root() / "conf" / "model").glob("*.yaml"))


def plan(model: str, seq_len: int, *words: str) -> tuple[Plan, Prediction]:
    made, prediction, _ = planned(
        "recipe=llama3_8b", f"model={model}", "cluster=64xH100", f"training.seq_len={seq_len}", *words
    )
    return made, prediction


def memory(model: str, *words: str) -> MemoryGib:
    """The ledger of the LLM's first stage."""
    return plan(model, 2048, *words)[1].components["llm"][0].memory_gib


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_model_can_be_planned(path: Path) -> None:
    tree = yaml.safe_load(path.read_text())
    model = Model.model_validate(tree)
    longest = getattr(model.components[model.trunk], "max_positions", 2048)
    tokens = own_tokens(model, model.trunk, min(1024, longest))
    words = ("recipe=llama3_8b", "cluster=64xH100", f"training.seq_len={tokens}")
    made, prediction, _ = planned(*words, model=tree)
    assert set(made.components) == set(model.components)
    assert prediction.step_time_s > 0
    assert 0 < prediction.mfu < 1


def test_adapters_take_optimizer_memory_for_themselves_alone() -> None:
    full, lora, qlora = (
        memory("llama3_8b", *words)
        for words in (
            ["strategy=zero1"],
            ["strategy=zero1", "model.components.llm.train=lora", "model.components.llm.lora.rank=16"],
            ["strategy=zero1", "model.components.llm.train=qlora", "model.components.llm.lora.rank=16"],
        )
    )
    adapters = 16 * 32 * (2 * 8192 + 2 * (4096 + 1024) + 3 * (4096 + 14336))
    assert lora.optimizer / full.optimizer == pytest.approx(adapters / 8_030_261_248, rel=0.01)
    assert lora.weights == pytest.approx(full.weights, rel=0.02)
    matrices = 8_030_261_248 - 2 * 128256 * 4096 - 65 * 4096
    assert lora.weights - qlora.weights == pytest.approx(matrices * (2 - 4.127 / 8) / 2**30, rel=0.001)


def test_layers_below_the_first_that_trains_keep_nothing() -> None:
    every, top = (
        memory("llama3_8b", "strategy=zero1", "cluster=64xH100", "training.micro_batch=2", *words)
        for words in (
            [],
            ["model.components.llm.train=layers", "model.components.llm.train_layers=[-4,-3,-2,-1]"],
        )
    )
    assert top.activations == pytest.approx(every.activations * 4 / 32)
    assert top.gradients < every.gradients / 7


def test_expert_parallelism_shares_out_experts_and_their_states() -> None:
    words = ("engine=megatron", "engine.path=/opt/Megatron-LM", "strategy=zero1")
    alone, shared = (memory("mixtral_8x7b", *words, f"strategy.llm.ep={ep}") for ep in (1, 8))
    routed = 32 * 8 * 3 * 4096 * 14336
    assert alone.weights - shared.weights == pytest.approx(2 * routed * 7 / 8 / 2**30)
    assert shared.gradients < alone.gradients / 4
    assert alone.optimizer == pytest.approx(shared.optimizer, rel=0.01), "sharded over 64, or 8 times over 8"


def test_whole_experts_beside_cut_layers() -> None:
    """tp 4 x dp 16 = 64 ranks: each of 8 experts is on 8 of them whole, or on 4 x 4 in quarters, at ep 4."""
    words = ("engine=megatron", "engine.path=/opt/Megatron-LM", "strategy=zero1", "strategy.llm.tp=4")
    layouts = (("strategy.llm.ep=4",), ("strategy.llm.ep=8", "strategy.llm.etp=1"))
    quartered, whole = (memory("mixtral_8x7b", *words, *layout) for layout in layouts)
    routed, others = 32 * 8 * 3 * 4096 * 14336, 46_702_792_704 - 32 * 8 * 3 * 4096 * 14336
    assert whole.weights - quartered.weights == pytest.approx(2 * routed * (1 / 8 - 1 / 16) / 2**30)
    assert 2 * routed / 8 / 2**30 < whole.weights < 2 * (routed / 8 + others / 3) / 2**30
    assert whole.optimizer == pytest.approx(quartered.optimizer, rel=0.01), "each expert's states stand once"


def test_what_shares_attention_needs_one_layout() -> None:
    told = "strategy.action_expert is TP1 .* strategy.llm is TP2 .* share attention layer by layer"
    with pytest.raises(PlanError, match=told):
        plan("pi0", 816, "strategy.llm.tp=2")
    with pytest.raises(PlanError, match=re.escape("experts.count 8 / ep 3 = 2.667 is not whole")):
        plan("mixtral_8x7b", 2048, "strategy.llm.ep=3")


def test_the_sequence_of_a_tower_follows_from_its_image() -> None:
    with pytest.raises(PlanError, match=r"runs over 1370 tokens a pass; training.seq_len can be 1370"):
        plan("dinov2_l", 2048)
