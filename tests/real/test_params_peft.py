"""Parameters of adapters, against those that peft puts beside models of transformers on the meta device."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from dslaunch.model.params import trainable
from dslaunch.paths import data_root
from dslaunch.schema.model import Component, Model
from tests.real.parts import need

need("torch", "transformers")
need("peft")

import torch  # noqa: E402
import transformers  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402

ATTENTION = {"q": ["q_proj"], "k": ["k_proj"], "v": ["v_proj"], "o": ["o_proj"]}
LLAMA = ATTENTION | {"gate": ["gate_proj"], "up": ["up_proj"], "down": ["down_proj"]}
DEEPSEEK = {"q": ["q_a_proj", "q_b_proj"], "k": ["kv_a_proj_with_mqa"], "v": ["kv_b_proj"], "o": ["o_proj"]}
GPT2 = {"qkv": ["c_attn"], "o": ["attn.c_proj"], "up": ["c_fc"], "down": ["mlp.c_proj"]}
"""Targets, and the modules that peft is to find by them."""


def adapted(name: str, rank: int, targets: list[str], **changes: Any) -> Component:
    tree = yaml.safe_load((data_root() / "conf" / "model" / f"{name}.yaml").read_text())
    tree["components"]["llm"] |= {"train": "lora", "lora": {"rank": rank, "targets": targets}} | changes
    return Model.model_validate(tree).components["llm"]


@pytest.mark.parametrize(
    ("name", "kind", "config", "modules", "changes"),
    [
        ("qwen2_5_1_5b", "Qwen2ForCausalLM",
         {"vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
          "num_attention_heads": 12, "num_key_value_heads": 2}, LLAMA, {}),
        ("deepseek_v3", "DeepseekV3ForCausalLM", {"num_hidden_layers": 4}, DEEPSEEK,
         {"layers": 4, "mtp_layers": 0}),
        ("gpt2", "GPT2LMHeadModel", {}, GPT2, {}),
    ],
    ids=["qwen2_5", "deepseek", "gpt2"],
)  # fmt: skip
def test_as_many_as_peft(
    name: str, kind: str, config: dict[str, Any], modules: dict[str, list[str]], changes: dict[str, Any]
) -> None:
    built = getattr(transformers, kind)
    found = [module for target in modules.values() for module in target]
    with torch.device("meta"):
        tuned = get_peft_model(built(built.config_class(**config)), LoraConfig(r=8, target_modules=found))
    published = sum(p.numel() for p in tuned.parameters() if p.requires_grad)
    assert trainable(adapted(name, 8, list(modules), **changes)) == published
