"""A model is a graph: components are its nodes, and an edge says which tokens go from one to the next."""

from __future__ import annotations

import graphlib
from typing import Annotated, Literal

from pydantic import Field, model_validator

from dslaunch.errors import listed, nearest
from dslaunch.schema.base import Counts, Name, NonNegative, NonNegativeFloat, Part, Positive, PositiveFloat


class _Component(Part):
    train: Literal["all", "nothing"] = "all"
    """Which parameters get a gradient."""
    passes: Positive = 1
    """Forward passes per sample: 3 for three cameras."""
    lr: PositiveFloat | None = None
    """Peak learning rate of this component; training.optimizer.lr where it is not given."""
    weight_decay: NonNegativeFloat | None = None
    """Weight decay of this component; training.optimizer.weight_decay where it is not given."""


class Decoder(_Component):
    """A transformer decoder: Llama and its relatives, GPT."""

    arch: Literal["decoder"]
    layers: Positive
    hidden: Positive
    heads: Positive
    kv_heads: Positive
    """Key/value heads (GQA); equal to heads for multi-head attention."""
    head_dim: Positive | None = None
    """hidden / heads where it is not given."""
    ffn: Positive
    """Width of the MLP's inner layer (of each of its two halves, where it is gated)."""
    vocab: Positive
    """Rows of the embedding table, padding included."""
    tied_embeddings: bool = False
    """The output head is the embedding table."""
    gated_mlp: bool = True
    """SwiGLU or GeGLU: three matrices instead of two."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    qkv_bias: bool = False
    out_bias: bool = False
    """Bias of the attention's output projection."""
    mlp_bias: bool = False
    position: Literal["rope", "learned"] = "rope"
    max_positions: Positive = 8192
    """Longest sequence; rows of the table where positions are learned."""
    rope_theta: PositiveFloat = 10000.0
    norm_eps: PositiveFloat = 1e-5

    @model_validator(mode="after")
    def _whole_heads(self) -> Decoder:
        if self.head_dim is None and self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} / heads {self.heads} is not whole; give head_dim")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} / kv_heads {self.kv_heads} is not whole")
        return self


class ViT(_Component):
    """A vision transformer over square patches: ViT, CLIP, SigLIP, DINOv2."""

    arch: Literal["vit"]
    layers: Positive
    hidden: Positive
    heads: Positive
    ffn: Positive
    patch: Positive
    """Side of a patch, pixels."""
    image: Positive
    """Side of the image, pixels."""
    channels: Positive = 3
    class_token: bool = False
    registers: NonNegative = 0
    """Register tokens (DINOv2)."""
    patch_bias: bool = True
    pre_norm: bool = False
    """A LayerNorm before the first block (CLIP)."""
    post_norm: bool = True
    """A LayerNorm after the last block."""
    layer_scale: bool = False
    """A learnt scale per channel on both branches (DINOv2)."""
    gated_mlp: bool = False
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
    def _whole_patches_and_heads(self) -> ViT:
        if self.image % self.patch:
            raise ValueError(f"image {self.image} is not a whole number of patches of {self.patch} pixels")
        if self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} / heads {self.heads} is not whole")
        return self


class Mlp(_Component):
    """A stack of linear layers applied to each token, such as a projector."""

    arch: Literal["mlp"]
    dims: Counts
    """Width of the input and of each layer's output."""
    bias: bool = True
    norm: bool = False
    """A LayerNorm on the input."""

    @model_validator(mode="after")
    def _two_dims(self) -> Mlp:
        if len(self.dims) < 2:
            raise ValueError(f"dims needs an input and an output width, found {list(self.dims)}")
        return self


Component = Annotated[Decoder | ViT | Mlp, Field(discriminator="arch")]


class Edge(Part):
    """Tokens that go from one component to another."""

    source: Name = Field(alias="from")
    """The component whose output it is."""
    to: Name
    """The component whose input it becomes."""
    tokens: Positive
    """Tokens per sample over this edge, all passes together."""
    join: Literal["sequence", "channel", "add"]
    """How it enters: more tokens in the sequence, more channels of the same tokens, or added to them."""
    from_layer: int = -1
    """The layer whose output is taken; -1 is the last, -2 leaves the last block without gradient."""


class Model(Part):
    """Components and edges."""

    name: Name
    source: str = ""
    """Where the shapes were published."""
    weights: str = ""
    """Folder or file of the weights to start from; empty starts from random weights."""
    components: dict[Name, Component]
    edges: Annotated[tuple[Edge, ...], Field(strict=False)] = ()

    @model_validator(mode="after")
    def _edges_join_components(self) -> Model:
        if not self.components:
            raise ValueError("components is empty: a model has at least one")
        if not any(isinstance(c, Decoder) for c in self.components.values()):
            raise ValueError("no component has `arch: decoder`: the trunk that sets the sequence is missing")
        for edge in self.edges:
            for end in (edge.source, edge.to):
                if end not in self.components:
                    raise ValueError(
                        f"edge {edge.source} -> {edge.to}: no component '{end}'; "
                        f"there are {listed(self.components)}.{nearest(end, self.components)}"
                    )
        alone = set(self.components) - {end for edge in self.edges for end in (edge.source, edge.to)}
        if len(self.components) > 1 and alone:
            raise ValueError(f"no edge joins {listed(sorted(alone))} to the rest of the model")
        try:
            graphlib.TopologicalSorter(_sources(self.edges)).prepare()
        except graphlib.CycleError as error:
            raise ValueError(f"edges form a circle: {' <- '.join(error.args[1])}; remove one") from error
        return self

    @property
    def trunk(self) -> str:
        """The decoder that the sequence runs through: the largest one."""
        decoders = {n: c for n, c in self.components.items() if isinstance(c, Decoder)}
        return max(decoders, key=lambda n: decoders[n].layers * decoders[n].hidden ** 2)


def _sources(edges: tuple[Edge, ...]) -> dict[str, set[str]]:
    return {to: {edge.source for edge in edges if edge.to == to} for to in {edge.to for edge in edges}}
