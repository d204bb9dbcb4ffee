"""What a component's layers may hold beside plain attention and an MLP. Keys of Hugging Face keep their names."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from dslaunch.schema.base import NonNegative, Part, Positive

Target = Literal[
    "q", "k", "v", "qkv", "o", "gate", "up", "down", "experts", "modulation", "patch", "output", "pooling"
]


class Lora(Part):
    """Low-rank adapters beside frozen matrices: rank * (inputs + outputs) parameters each."""

    rank: Positive
    """Inner width of an adapter."""
    alpha: Positive | None = None
    """Scale of the adapters' output; the rank where it is not given."""
    targets: Annotated[tuple[Target, ...], Field(strict=False, min_length=1)] = (
        "q", "k", "v", "o", "gate", "up", "down",
    )  # fmt: skip
    """Which matrices: projections of attention (qkv is one fused matrix) and MLP, routed experts, adaptive
    norms' projections, the patch embedding, the output head, the pooling head; of latent attention q is both
    query matrices, k the down- and v the up-projection. An MLP component adapts all it has."""


class Experts(Part):
    """A mixture of experts in place of the MLP."""

    count: Positive
    """Routed experts of a layer."""
    top_k: Positive
    """Experts that a token goes to."""
    ffn: Positive
    """Inner width of one routed expert."""
    shared_ffn: NonNegative = 0
    """Inner width of the experts that every token goes to, all together; 0: there are none."""
    shared_gate: bool = False
    """A learnt gate per token on the shared experts' output (Qwen2-MoE)."""
    dense_layers: NonNegative = 0
    """First layers with an ordinary MLP of the component's `ffn`."""
    biased_router: bool = False
    """The router's linear layer has a bias that trains (gpt-oss)."""
    router_bias: bool = False
    """A bias per expert that balances the load without a gradient (DeepSeek-V3): a buffer, not a parameter."""
    n_group: Positive = 1
    """Groups that the experts stand in, as many in each."""
    topk_group: Positive = 1
    """Groups that a token's experts come from (DeepSeek-V3: 4 of 8)."""
    routed_scaling_factor: Annotated[float, Field(gt=0)] = 1.0
    """Factor on the routed experts' output (DeepSeek-V3: 2.5)."""
    latent: NonNegative = 0
    """Width that tokens are projected to before they go to the routed experts, and back from afterwards
    (Nemotron 3 Super); 0: experts take the hidden width."""

    @model_serializer(mode="wrap")
    def _latent_where_given(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without `latent` where experts have none, as most."""
        return {key: value for key, value in dump(self).items() if value or key != "latent"}

    @model_validator(mode="after")
    def _equal_groups(self) -> Experts:
        if self.count % self.n_group or self.topk_group > self.n_group:
            raise ValueError(
                f"count {self.count} in n_group {self.n_group}, of which topk_group {self.topk_group}: give "
                "groups of equal size, and a topk_group of n_group at most"
            )
        return self


class LatentAttention(Part):
    """Multi-head latent attention (DeepSeek): queries, keys and values through low-rank latents."""

    q_lora_rank: NonNegative = 0
    """Width of the queries' latent; 0: queries are projected directly."""
    kv_lora_rank: Positive
    """Width of the latent that keys and values share."""
    qk_nope_head_dim: Positive
    """Part of a query or key head without positions."""
    qk_rope_head_dim: Positive
    """Part with rotary positions; one key part serves all heads."""
    v_head_dim: Positive
    """Width of a head's values."""


class Mamba(Part):
    """Mamba-2 (arXiv:2405.21060): a state for each head in place of keys and values that stay."""

    heads: Positive
    """Heads of a Mamba-2 layer."""
    head_dim: Positive = 64
    """Channels of a head; heads * head_dim is the inner width."""
    state: Positive = 128
    """Width of the state, for each channel."""
    groups: Positive = 8
    """Sets of input and output projections of the state, which heads share; as many tensor-parallel ranks at
    most."""
    conv: Positive = 4
    """Tokens that the causal convolution reads."""
    chunk: Positive = 128
    """Tokens that are worked on as one matrix product; states go from chunk to chunk."""

    @property
    def inner(self) -> int:
        """Width of what the scan runs on."""
        return self.heads * self.head_dim

    @property
    def convolved(self) -> int:
        """Width of what the convolution runs on: the input, and both projections of the state."""
        return self.inner + 2 * self.groups * self.state

    @property
    def projected(self) -> int:
        """Output width of the input's projection: the gate, what is convolved, a time step for each head."""
        return self.inner + self.convolved + self.heads

    @model_validator(mode="after")
    def _equal_groups(self) -> Mamba:
        if self.heads % self.groups:
            raise ValueError(
                f"heads {self.heads} / groups {self.groups} is not whole; give groups that divide the heads"
            )
        return self


class Window(Part):
    """Attention within a window of tokens."""

    tokens: Positive
    """Keys that a query sees: those before it where attention is causal, its window's otherwise."""
    full_every: NonNegative = 0
    """Every n-th layer sees everything (2: Gemma 2, 6: Gemma 3, 8: Qwen2.5-VL's tower); 0: none does."""


class CrossAttention(Part):
    """Layers that read another component's tokens, which come over an edge."""

    width: Positive
    """Width of the tokens that keys and values are projected from."""
    first: NonNegative = 0
    """The first layer that has it."""
    every: Positive = 1
    """It stands in every n-th layer from `first` on."""
    instead: bool = False
    """In place of self-attention (GR00T's DiT, SmolVLA), not beside it with a norm of its own."""
    bias: bool = True
    """Bias of the query, key and value projections."""
    context_norm: bool = False
    """A norm on the tokens that are read (a resampler's)."""


class Modulation(Part):
    """Adaptive norms: scales and shifts projected from a condition, such as the diffusion time step."""

    width: Positive
    """Width of the condition."""
    factors: Positive
    """Vectors of hidden width for each layer: 2 (GR00T's DiT), 6 (DiT's adaLN-Zero, pi0.5's expert)."""
    final_factors: NonNegative = 0
    """Vectors for the last norm."""
