"""The runtime's modules against transformers' own, with the same weights."""

from __future__ import annotations

import pytest

from tests.real import plans
from tests.real.parts import need

need("torch", "transformers")

import torch  # noqa: E402
import transformers  # noqa: E402

from dslaunch.runtime.components import Decoder, ViT, build_component  # noqa: E402
from dslaunch.schema.model import Model  # noqa: E402

Weights = dict[str, torch.Tensor]


def component(**spec: object) -> torch.nn.Module:
    model = {"name": "one", "components": {"part": spec, "llm": plans.LLM}, "edges": [
        {"from": "part", "to": "llm", "tokens": 1, "join": "sequence"}]}  # fmt: skip
    return build_component(Model.model_validate(model).model_dump()["components"]["part"], "none", -1)


def renamed(weights: Weights, names: dict[str, str]) -> Weights:
    """`weights` under our names: each part of a name replaced, in order."""
    result = {}
    for name, tensor in weights.items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        result[name] = tensor
    return result


def loss_of(decoder: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    total: torch.Tensor = decoder(None, tokens, tokens)
    return total / tokens[:, 1:].numel()


@pytest.mark.parametrize("tied", [False, True])
def test_llama(tied: bool) -> None:
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=64, max_position_embeddings=64, rms_norm_eps=1e-5,
            tie_word_embeddings=tied, rope_theta=10000.0,
        )
    ).eval()  # fmt: skip
    ours = component(**{**plans.LLM, "tied_embeddings": tied})
    assert isinstance(ours, Decoder)
    ours.load_state_dict(
        renamed(
            theirs.state_dict(),
            {
                "model.embed_tokens": "embedding", "model.layers": "blocks", "model.norm": "norm",
                "lm_head": "head", "input_layernorm": "norm1", "post_attention_layernorm": "norm2",
                "self_attn": "attention", "q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "out",
                "mlp": "feed_forward", "_proj": "",
            },
        )
    )  # fmt: skip
    tokens = torch.randint(0, 64, (3, 20))
    with torch.no_grad():
        assert loss_of(ours, tokens) == pytest.approx(float(theirs(tokens, labels=tokens).loss), rel=1e-5)


def test_dinov2() -> None:
    """Class token with a position, LayerScale, GELU, biases."""
    torch.manual_seed(0)
    theirs = transformers.Dinov2Model(
        transformers.Dinov2Config(
            hidden_size=48, num_hidden_layers=2, num_attention_heads=4, mlp_ratio=2, patch_size=2, image_size=8,
            layer_norm_eps=1e-6, layerscale_value=0.5,
        )
    ).eval()  # fmt: skip
    ours = component(**{**plans.VISION, "channels": 3, "class_token": True, "layer_scale": True})
    assert isinstance(ours, ViT)
    weights = {name: tensor for name, tensor in theirs.state_dict().items() if "mask_token" not in name}
    ours.load_state_dict(
        renamed(
            weights,
            {
                "embeddings.cls_token": "class_token", "embeddings.position_embeddings": "positions",
                "embeddings.patch_embeddings.projection": "patch", "encoder.layer.": "blocks.",
                "q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "out",
                "layer_scale1.lambda1": "scale1.scale", "layer_scale2.lambda1": "scale2.scale",
                "mlp.fc1": "feed_forward.up", "mlp.fc2": "feed_forward.down", "layernorm": "post_norm",
            },
        )
    )  # fmt: skip
    images = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        wanted = theirs(images).last_hidden_state[:, 1:]
        torch.testing.assert_close(ours(images), wanted, rtol=1e-4, atol=1e-5)


def test_gpt2() -> None:
    """Learned positions, LayerNorm, biases, two-matrix MLP, tied head."""
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_embd=64, n_inner=160, n_layer=2, n_head=4, vocab_size=64, n_positions=32, activation_function="gelu",
        )
    ).eval()  # fmt: skip
    ours = component(
        **{
            **plans.LLM, "kv_heads": 4, "norm": "layernorm", "position": "learned", "max_positions": 32,
            "gated_mlp": False, "qkv_bias": True, "out_bias": True, "mlp_bias": True, "tied_embeddings": True,
        }
    )  # fmt: skip
    assert isinstance(ours, Decoder)
    ours.load_state_dict(_from_gpt2(theirs.state_dict()))
    tokens = torch.randint(0, 64, (3, 20))
    with torch.no_grad():
        assert loss_of(ours, tokens) == pytest.approx(float(theirs(tokens, labels=tokens).loss), rel=1e-5)


def _from_gpt2(weights: Weights) -> Weights:
    """GPT-2 keeps its matrices transposed, and query, key and value in one."""
    names = {
        "transformer.wte": "embedding", "transformer.wpe.weight": "positions", "transformer.h.": "blocks.",
        "transformer.ln_f": "norm", "lm_head": "head", "ln_": "norm", "attn.c_proj": "attention.out",
        "mlp.c_fc": "feed_forward.up", "mlp.c_proj": "feed_forward.down",
    }  # fmt: skip
    result: Weights = {}
    for name, tensor in renamed(weights, names).items():
        matrix = any(part in name for part in ("c_attn.weight", "out.weight", "up.weight", "down.weight"))
        turned = tensor.T if matrix else tensor
        if "attn.c_attn" not in name:
            result[name] = turned
            continue
        for part, piece in zip(("query", "key", "value"), turned.chunk(3), strict=True):
            result[name.replace("attn.c_attn", f"attention.{part}")] = piece
    return result
