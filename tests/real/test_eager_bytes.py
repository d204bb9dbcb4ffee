"""The ledger of Hugging Face's and PyTorch's own layers, against what autograd keeps and makes for real ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from dslaunch.hardware.software import Software
from dslaunch.model.activations import layer_bytes, logits_bytes
from dslaunch.model.eager import kept_loss_bytes
from dslaunch.model.passes import Pass
from dslaunch.schema.layer import Lora
from dslaunch.schema.model import Decoder
from tests.real.parts import need

need("torch", "transformers", "peft")

import torch  # noqa: E402
from peft import LoraConfig, inject_adapter_in_model  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.checkpoint import (  # noqa: E402
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers.models.llama.modeling_llama import (  # noqa: E402
    LlamaConfig,
    LlamaDecoderLayer,
    LlamaRotaryEmbedding,
)

from dslaunch.runtime import layers as runtime  # noqa: E402
from dslaunch.runtime.components import decoder_block  # noqa: E402
from dslaunch.runtime.tensor_parallel import ALONE, summed_cross_entropy  # noqa: E402
from tests.real.live_bytes import peak_bytes, saved_bytes  # noqa: E402

LLAMA = Decoder(arch="decoder", layers=2, hidden=256, heads=8, kv_heads=2, ffn=704, vocab=512)
TOKENS = 128
HF = Software("transformers")


def layer(attention: str, dtype: torch.dtype) -> LlamaDecoderLayer:
    """The first layer of a Llama with LLAMA's shape."""
    config = LlamaConfig(
        hidden_size=LLAMA.hidden, num_attention_heads=LLAMA.heads, num_key_value_heads=LLAMA.kv_heads,
        intermediate_size=LLAMA.ffn, num_hidden_layers=LLAMA.layers, vocab_size=LLAMA.vocab,
    )  # fmt: skip
    config._attn_implementation = attention
    return LlamaDecoderLayer(config, 0).to(dtype).train()


def call(module: LlamaDecoderLayer, dtype: torch.dtype) -> Callable[[], Tensor]:
    """A pass of one sample; the tables of positions are made outside of it."""
    x = torch.randn(1, TOKENS, LLAMA.hidden, dtype=dtype, requires_grad=True)
    positions = LlamaRotaryEmbedding(module.self_attn.config)(x, torch.arange(TOKENS)[None])
    return lambda: module(x, position_embeddings=positions, attention_mask=None)


def small(dtype: torch.dtype) -> int:
    """Not counted by the ledger: two norms' factors, and the tables of positions, in the pass's own type."""
    return 2 * 4 * TOKENS + 2 * dtype.itemsize * TOKENS * LLAMA.hidden // LLAMA.heads


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_llama_layer_keeps_what_the_ledger_says(attention: str, dtype: torch.dtype) -> None:
    software = Software("transformers", flash_attention=attention == "sdpa")
    module = layer(attention, dtype)
    counted = layer_bytes(LLAMA, Pass(TOKENS, width=dtype.itemsize, software=software))
    assert saved_bytes(call(module, dtype), module) == counted + small(dtype)


@pytest.mark.parametrize(
    "targets", [("q", "v"), ("q", "k", "v", "o", "gate", "up", "down")], ids=["qv", "all"]
)
def test_frozen_llama_layer_keeps_inputs_of_adapters_alone(targets: Any) -> None:
    """On the CPU a mask of dropout has the input's own type, where the ledger counts a byte; adapters keep rank
    more elements a matrix."""
    rank = 4
    names = [f"{name}_proj" for name in targets]
    module = layer("sdpa", torch.bfloat16)
    inject_adapter_in_model(LoraConfig(r=rank, target_modules=names, lora_dropout=0.1), module)
    module.to(torch.bfloat16)
    model = LLAMA.model_copy(update={"train": "lora", "lora": Lora(rank=rank, targets=targets)})
    counted = layer_bytes(model, Pass(TOKENS, software=HF))
    inputs = sum(LLAMA.ffn if name == "down" else LLAMA.hidden for name in targets)
    masks, inner = TOKENS * inputs, 2 * TOKENS * rank * len(targets)
    found = saved_bytes(call(module, torch.bfloat16), module)
    assert found == counted + masks + inner + small(torch.bfloat16)


@pytest.mark.parametrize(
    ("software", "make"),
    [
        (Software("torch"), lambda logits: logits.float()),
        (Software("torch", half_loss=True), lambda logits: logits * 1),
    ],
    ids=["fp32", "bf16"],
)
def test_cross_entropy_takes_what_the_ledger_says(software: Software, make: Any) -> None:
    """The logits themselves are made, and gone, before the gradients are."""
    logits = torch.randn(TOKENS, LLAMA.vocab, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, LLAMA.vocab, (TOKENS,))

    def step() -> None:
        functional.cross_entropy(make(logits), labels).backward()

    counted = logits_bytes(LLAMA, Pass(TOKENS, software=software)) - 2 * 2 * TOKENS * LLAMA.hidden
    assert peak_bytes(step) == pytest.approx(counted, rel=0.01)


class Block(nn.Module):
    """A Llama layer in plain torch, with keys and values copied for each query head."""

    def __init__(self) -> None:
        super().__init__()
        h, f, kv = LLAMA.hidden, LLAMA.ffn, LLAMA.hidden * LLAMA.kv_heads // LLAMA.heads
        self.norms = nn.ModuleList(nn.RMSNorm(h) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(h, width, bias=False) for width in (h, kv, kv, h))
        self.gate, self.up, self.down = (nn.Linear(*shape, bias=False) for shape in ((h, f), (h, f), (f, h)))

    def forward(self, x: Tensor) -> Tensor:
        y, width = self.norms[0](x), LLAMA.hidden // LLAMA.heads
        q, k, v = (
            linear(y).view(1, TOKENS, -1, width).transpose(1, 2) for linear in (self.q, self.k, self.v)
        )
        k, v = (each.repeat_interleave(LLAMA.heads // LLAMA.kv_heads, 1) for each in (k, v))
        core = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(core.transpose(1, 2).reshape(x.shape))
        y = self.norms[1](x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


def every_second_product() -> Any:
    """torchtitan's policy of selective checkpointing by operation."""
    seen: Counter[bool] = Counter()
    kept = (torch.ops.aten.mm.default, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default)

    def policy(context: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        seen[context.is_recompute] += function is torch.ops.aten.mm.default
        odd = function is not torch.ops.aten.mm.default or seen[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if function in kept and odd else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_compiled_llama_layer_keeps_what_the_ledger_says(recompute: str) -> None:
    module = Block().bfloat16()
    x = torch.randn(1, TOKENS, LLAMA.hidden, dtype=torch.bfloat16, requires_grad=True)

    def run(y: Tensor) -> Any:
        if recompute == "none":
            return module(y)
        context = {"context_fn": every_second_product} if recompute == "selective" else {}
        return checkpoint(module, y, use_reentrant=False, preserve_rng_state=False, **context)

    compiled = torch.compile(run, backend="aot_eager_decomp_partition", fullgraph=True)
    software = Software("torch", compiled=True, repeated_kv=True, recompute_modules=("matmul",))
    counted = layer_bytes(LLAMA, Pass(TOKENS, recompute=recompute, software=software))
    norms = 2 * 4 * TOKENS if recompute == "none" else 0
    assert saved_bytes(lambda: compiled(x), module) == counted + norms


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_a_layer_of_dslaunch_runtime_keeps_what_the_ledger_says_on_a_cpu(dtype: torch.dtype) -> None:
    """Not counted: a factor a token of each norm, in fp32."""
    spec = LLAMA.model_dump(mode="json")
    module = runtime.Block(decoder_block(spec, "none")).to(dtype)
    x = torch.randn(1, TOKENS, LLAMA.hidden, dtype=dtype, requires_grad=True)
    by = runtime.rotation(TOKENS, LLAMA.hidden // LLAMA.heads, LLAMA.rope_theta, x)
    tables = 2 * by[0].nbytes
    software = Software("torch", composed_norms=True)
    counted = layer_bytes(LLAMA, Pass(TOKENS, width=dtype.itemsize, software=software))
    assert saved_bytes(lambda: module(x, by), module) == counted + 2 * 4 * TOKENS + tables


def test_a_loss_that_waits_for_its_backward_pass_keeps_what_the_ledger_says() -> None:
    """Not counted: the sum of weights, one number."""
    logits = torch.randn(TOKENS, LLAMA.vocab, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, LLAMA.vocab, (TOKENS,))
    norm_and_input = 2 * 2 * TOKENS * LLAMA.hidden
    counted = kept_loss_bytes(LLAMA, Pass(TOKENS, software=Software("torch"))) - norm_and_input
    kept = saved_bytes(lambda: summed_cross_entropy(logits, labels, ALONE), nn.Identity())
    assert kept == pytest.approx(counted, abs=8)
