"""The architectures that a component may have, told apart by `arch`."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from dslaunch.errors import listed
from dslaunch.schema.base import Counts, NonNegative, NonNegativeFloat, Part, Positive, PositiveFloat
from dslaunch.schema.layer import CrossAttention, Experts, LatentAttention, Lora, Mamba, Modulation, Window

_SELDOM = ("module", "module_args", "weights", "mamba", "pattern", "mtp_pattern")
"""Keys that are left out of what is written where they are empty."""
_LAYER_KINDS = {"M": "Mamba", "*": "attention", "-": "an MLP", "E": "experts"}
"""Letters of Megatron's --hybrid-layer-pattern and of Nemotron's hybrid_override_pattern."""


class _Arguments(dict[str, Any]):
    """What a user's own factory gets; hashed, since the shapes of a component are reckoned once."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(json.dumps(self, sort_keys=True))


class _Component(Part):
    def __hash__(self) -> int:
        """Of a few fields that tell shapes apart: it is a key of what is reckoned once, and looked up often."""
        own = self.__dict__.get
        return hash((type(self), self.train, own("layers"), own("hidden"), own("ffn"), own("vocab"), own("dims")))

    train: Literal["all", "nothing", "lora", "qlora", "layers"] = "all"
    """Which parameters get a gradient; qlora keeps the frozen matrices of the layers in 4 bits."""
    lora: Lora | None = None
    """The adapters of `train: lora` and `train: qlora`."""
    train_layers: Annotated[tuple[int, ...], Field(strict=False)] = ()
    """Layers that `train: layers` trains; negative ones count from the end, -1 is the last."""
    train_ends: Annotated[tuple[Literal["stem", "tail"], ...], Field(strict=False)] = ()
    """What trains besides: what stands before the first layer, or after the last. Beside adapters it is a
    copy that trains (peft's modules_to_save)."""
    passes: Positive = 1
    """Forward passes per sample: 3 for three cameras, 8 for eight diffusion steps."""
    lr: PositiveFloat | None = None
    """Peak learning rate of this component; training.optimizer.lr where it is not given."""
    weight_decay: NonNegativeFloat | None = None
    """Weight decay of this component; training.optimizer.weight_decay where it is not given."""
    module: str = ""
    """`package.module:factory` that builds it for dslaunch.runtime; empty: the module of its `arch`."""
    module_args: Annotated[dict[str, Any], AfterValidator(_Arguments)] = Field(default_factory=_Arguments)
    """What the factory of `module` gets beside the settings here."""
    weights: str = ""
    """Folder of safetensors that it starts from in dslaunch.runtime; empty: random weights. Takes `module`."""

    @model_validator(mode="after")
    def _train_says_what(self) -> _Component:
        adapts = self.train in ("lora", "qlora")
        if adapts != (self.lora is not None):
            if adapts:
                raise ValueError(f"train is {self.train}, and lora is missing: give it, such as lora.rank=16")
            raise ValueError(
                f"train is {self.train}, and lora is given, which is read where train is lora or qlora: set train "
                "to one of them, or lora=null"
            )
        chosen = bool(self.train_layers or (self.train_ends and not adapts))
        if (self.train == "layers") != chosen:
            raise ValueError(
                f"train is {self.train} and train_layers is {list(self.train_layers)}: `train: layers` needs "
                "train_layers or train_ends, such as train_layers: [-2, -1]; adapters may have train_ends"
            )
        return self

    @model_serializer(mode="wrap")
    def _seldom_where_given(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without the keys that most components leave empty."""
        return {key: value for key, value in dump(self).items() if value or key not in _SELDOM}

    @model_validator(mode="after")
    def _module_is_named(self) -> _Component:
        package, _, factory = self.module.partition(":")
        words = [*package.split("."), factory]
        if self.module and not all(word.isidentifier() for word in words):
            raise ValueError(
                f"module is {self.module!r}. Allowed: package.module:factory, such as dslaunch.runtime.hf:decoder"
            )
        if (self.module_args or self.weights) and not self.module:
            given = "module_args" if self.module_args else "weights"
            raise ValueError(f"{given} is given without module, which reads it. Add module, or leave it out")
        return self


class _Layered(_Component):
    """What components made of transformer layers share."""

    layers: Positive
    """Transformer layers."""
    hidden: Positive
    """Width of the residual stream."""
    heads: Positive
    """Heads of attention; of the queries, where keys and values have fewer."""
    head_dim: Positive | None = None
    """hidden / heads where it is not given."""
    qk_norm: bool = False
    """A norm on each query and key head (Qwen 3, Gemma 3)."""
    window: Window | None = None
    """Attention within a window, in all layers or all but some."""

    @model_validator(mode="after")
    def _layers_exist(self) -> _Layered:
        if self.head_dim is None and self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} / heads {self.heads} is not whole; give head_dim")
        outside = [i for i in self.train_layers if not -self.layers <= i < self.layers]
        if outside:
            raise ValueError(
                f"train_layers names {listed(outside)}, but there are layers 0 to {self.layers - 1} "
                f"(-{self.layers} to -1 from the end)"
            )
        return self


class Decoder(_Layered):
    """A transformer decoder: Llama and its relatives, GPT, mixtures of experts, DeepSeek."""

    arch: Literal["decoder"]
    """A language model."""
    kv_heads: Positive
    """Key/value heads (GQA); equal to heads for multi-head attention."""
    ffn: Positive
    """Width of the MLP's inner layer (of each of its two halves, where it is gated)."""
    vocab: Positive
    """Rows of the embedding table, padding included."""
    tied_embeddings: bool = False
    """The output head is the embedding table."""
    gated_mlp: bool = True
    """SwiGLU or GeGLU: three matrices instead of two."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Of each layer, and after the last."""
    post_norms: bool = False
    """A norm on each branch's output too: four a layer (Gemma 2 and 3)."""
    qkv_bias: bool = False
    """The projections of queries, keys and values have a bias."""
    out_bias: bool = False
    """Bias of the attention's output projection."""
    mlp_bias: bool = False
    """The MLP's matrices have a bias."""
    position: Literal["rope", "learned"] = "rope"
    """Rotary, or a learnt vector per position."""
    max_positions: Positive = 8192
    """Longest sequence; rows of the table where positions are learned."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary positions."""
    norm_eps: PositiveFloat = 1e-5
    """What norms add to the variance."""
    sinks: bool = False
    """A learnt number per head and layer that takes part in attention's softmax (gpt-oss)."""
    experts: Experts | None = None
    """Mixture of experts in place of the MLP."""
    mla: LatentAttention | None = None
    """Multi-head latent attention."""
    mtp_layers: NonNegative = 0
    """Further layers that predict tokens beyond the next (DeepSeek-V3); they share embedding and head."""
    mamba: Mamba | None = None
    """Mamba-2 layers among the others."""
    pattern: str = ""
    """What each layer is, one letter a layer: M Mamba, * attention, - an MLP, E experts (Nemotron-H); empty: all
    layers have attention and then an MLP or experts."""
    mtp_pattern: str = ""
    """The same of one further layer: its parts, one after the other, of kinds that `pattern` has; empty: as the
    last layer."""

    @model_validator(mode="after")
    def _pattern_names_layers(self) -> Decoder:
        unknown = sorted(set(self.pattern) - set(_LAYER_KINDS))
        if unknown:
            allowed = ", ".join(f"{letter} ({words})" for letter, words in _LAYER_KINDS.items())
            raise ValueError(f"pattern has {listed(unknown)}. Allowed: {allowed}")
        if self.pattern and len(self.pattern) != self.layers:
            found = f"pattern has {len(self.pattern)} letters, but layers is {self.layers}"
            raise ValueError(f"{found}; give one a layer")
        for letter, key, given in (("M", "mamba", self.mamba), ("E", "experts", self.experts)):
            if letter in self.pattern and not given:
                raise ValueError(f"pattern has {letter}, {_LAYER_KINDS[letter]}, but {key} is not given; add it")
        if self.mamba and "M" not in self.pattern:
            raise ValueError("mamba is given, but no layer is one; give pattern, with M for each such layer")
        strange = sorted(set(self.mtp_pattern) - set(self.pattern))
        if strange:
            raise ValueError(f"mtp_pattern has {listed(strange)}, of which pattern has no layer; take its letters")
        if self.pattern and (self.mla or (self.experts and self.experts.dense_layers)):
            raise ValueError("pattern takes neither mla nor experts.dense_layers; leave them out")
        return self

    @model_validator(mode="after")
    def _whole_heads(self) -> Decoder:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} / kv_heads {self.kv_heads} is not whole")
        if self.mla and self.kv_heads != self.heads:
            raise ValueError(f"with mla every head has its key and value: kv_heads is {self.heads}")
        if self.experts and self.experts.top_k > self.experts.count:
            raise ValueError(f"experts.top_k {self.experts.top_k} is more than count {self.experts.count}")
        if self.experts and self.experts.dense_layers >= self.layers:
            raise ValueError(f"experts.dense_layers {self.experts.dense_layers} leaves no layer with experts")
        return self


class Transformer(_Layered):
    """Transformer layers without a language model's head: text encoder, DiT, action expert, resampler."""

    arch: Literal["transformer"]
    """Layers without embedding and output of their own."""
    kv_heads: Positive | None = None
    """Key/value heads; as many as heads where it is not given."""
    ffn: NonNegative
    """Width of the MLP's inner layer; 0: layers of attention only."""
    tokens: Positive | None = None
    """Tokens of one pass; what its edges bring where it is not given, the sequence if it is the trunk."""
    gated_mlp: bool = False
    """The MLP has a gate (SwiGLU)."""
    norm: Literal["rmsnorm", "layernorm"] = "layernorm"
    """Of each layer."""
    norm_affine: bool = True
    """Norms have parameters of their own; adaptive ones have not."""
    post_norms: bool = False
    """A norm after each branch too."""
    qkv_bias: bool = True
    """The projections of queries, keys and values have a bias."""
    out_bias: bool = True
    """Attention's output projection has a bias."""
    mlp_bias: bool = True
    """The MLP's matrices have a bias."""
    causal: bool = False
    """A token sees those before it only."""
    vocab: NonNegative = 0
    """Rows of a token table; 0: its tokens come from other components."""
    positions: NonNegative = 0
    """Rows of a learnt position table."""
    position_buckets: NonNegative = 0
    """Relative position bias by head, one table for all layers (T5's 32 buckets)."""
    queries: NonNegative = 0
    """Learnt tokens of its own (Q-former, resampler, GR00T's future tokens)."""
    pre_norm: bool = False
    """A norm before the first layer (BART)."""
    post_norm: bool = True
    """A norm after the last layer."""
    output: NonNegative = 0
    """Width of a linear layer after the last norm; 0: there is none."""
    cross: CrossAttention | None = None
    """Cross-attention to another component."""
    modulation: Modulation | None = None
    """Scale and shift by a condition (adaLN)."""

    @model_validator(mode="after")
    def _whole_kv_heads(self) -> Transformer:
        if self.kv_heads and self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} / kv_heads {self.kv_heads} is not whole")
        return self


class ViT(_Layered):
    """A vision transformer over square patches: ViT, CLIP, SigLIP, DINOv2, InternViT, Qwen's towers."""

    arch: Literal["vit"]
    """A vision tower."""
    ffn: Positive
    """Inner width of the MLP."""
    patch: Positive
    """Side of a patch, pixels."""
    image: Positive
    """Side of the image, pixels."""
    channels: Positive = 3
    """Channels of an image."""
    temporal_patch: Positive = 1
    """Frames of one patch; a single image is repeated (Qwen2.5-VL: 2)."""
    class_token: bool = False
    """A learnt token stands before the patches."""
    registers: NonNegative = 0
    """Register tokens (DINOv2)."""
    patch_bias: bool = True
    """The patch embedding has a bias."""
    position: Literal["learned", "rope"] = "learned"
    """A learnt vector per position, or rotary."""
    position_rows: Positive | None = None
    """Rows of the position table where it is larger than an image needs (Qwen3-VL: 2,304, interpolated)."""
    norm: Literal["rmsnorm", "layernorm"] = "layernorm"
    """Of each layer."""
    qkv_bias: bool = True
    """The projections of queries, keys and values have a bias."""
    out_bias: bool = True
    """Attention's output projection has a bias."""
    mlp_bias: bool = True
    """The MLP's matrices have a bias."""
    pre_norm: bool = False
    """A LayerNorm before the first block (CLIP)."""
    post_norm: bool = True
    """A LayerNorm after the last block."""
    layer_scale: bool = False
    """A learnt scale per channel on both branches (DINOv2)."""
    gated_mlp: bool = False
    """The MLP has a gate (SwiGLU)."""
    attention_pooling: bool = False
    """SigLIP's pooling head: one more attention and MLP over a learnt query."""

    @property
    def patches(self) -> int:
        """Patch tokens of one image: what the next component gets."""
        return (self.image // self.patch) ** 2

    @property
    def tokens(self) -> int:
        """Tokens of one pass through the blocks: patches, class token and registers."""
        return self.patches + int(self.class_token) + self.registers

    @model_validator(mode="after")
    def _whole_patches(self) -> ViT:
        if self.image % self.patch:
            raise ValueError(f"image {self.image} is not a whole number of patches of {self.patch} pixels")
        return self


class Mlp(_Component):
    """A stack of linear layers applied to each token, such as a projector."""

    arch: Literal["mlp"]
    """A stack of linear layers."""
    dims: Counts
    """Width of the input and of each layer's output."""
    tokens: Positive | None = None
    """Tokens of one pass; what its edges bring where it is not given."""
    merge: Positive = 1
    """Neighbouring tokens that are joined into one of dims[0] before the first layer (pixel unshuffle)."""
    bias: bool = True
    """The matrices have a bias."""
    gated: bool = False
    """The first layer has two halves, multiplied."""
    norm: bool = False
    """A norm on the input."""
    norm_kind: Literal["rmsnorm", "layernorm"] = "layernorm"
    """Of the norms that it has."""
    norm_before_merge: bool = False
    """The input's norm has the width of one token before `merge`."""
    inner_norms: bool = False
    """A norm before each later layer too."""
    categories: Positive = 1
    """Sets of weights, one of which a sample goes through (GR00T: one for each embodiment)."""

    @model_validator(mode="after")
    def _two_dims(self) -> Mlp:
        if len(self.dims) < 2:
            raise ValueError(f"dims needs an input and an output width, found {list(self.dims)}")
        if self.dims[0] % self.merge:
            raise ValueError(f"dims[0] {self.dims[0]} / merge {self.merge} is not whole")
        if self.train == "layers":
            raise ValueError("train is layers, but an MLP is one layer. Allowed: all, nothing, lora, qlora")
        return self


class Other(_Component):
    """A network of another kind, by its figures: convolutions, a hierarchy of stages. It is never cut."""

    arch: Literal["other"]
    """A component that is counted in parameters only."""
    params: Positive
    """Parameters, all of them."""
    hidden: Positive
    """Width of the tokens that it passes on."""
    tokens: Positive
    """Tokens of one pass that it passes on."""
    gflops: PositiveFloat
    """Forward GFLOPs (10**9) of one pass, two for a multiply-add."""
    activation_mib: PositiveFloat
    """What one pass keeps for the backward pass in 16 bits, MiB (2**20 bytes)."""

    @model_validator(mode="after")
    def _whole(self) -> Other:
        if self.train not in ("all", "nothing"):
            raise ValueError(f"train is {self.train}, but only figures are known. Allowed: all, nothing")
        return self


Component = Annotated[Decoder | Transformer | ViT | Mlp | Other, Field(discriminator="arch")]
