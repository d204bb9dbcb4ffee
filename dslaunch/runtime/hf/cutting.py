"""A rank's part of a model of transformers: made on the meta device, cut, and only then given memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from dslaunch.errors import ConfigError, listed
from dslaunch.runtime.hf.families import FAMILIES, Family
from dslaunch.runtime.own import Build
from dslaunch.runtime.tensor_parallel import (
    FusedColumnLinear,
    RowLinear,
    Shard,
    VocabularyEmbedding,
    column,
    column_in_pieces,
    in_slice,
    sum_of_shards,
)

_RECOMPUTED = "dslaunch_recomputed"


def _recomputed(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **more: Any
) -> tuple[Tensor, None]:
    """transformers' attention of its own, its core computed again in the backward pass."""

    def core(query: Tensor, key: Tensor, value: Tensor) -> Any:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **more)[0]

    return checkpoint(core, query, key, value, use_reentrant=False), None


AttentionInterface.register(_RECOMPUTED, _recomputed)
AttentionMaskInterface.register(_RECOMPUTED, sdpa_mask)


class Passing(nn.Module):
    """In the place of a module of another stage: gives what it gets."""

    def forward(self, x: Tensor, *_args: Any, **_more: Any) -> Tensor:
        return x


class CutEmbedding(VocabularyEmbedding):
    """A slice of a table of tokens, with the padding token and the scale of the one that it stands for."""

    def __init__(self, whole: nn.Embedding, shard: Shard) -> None:
        super().__init__(whole.num_embeddings, whole.embedding_dim, shard)
        self.padding = whole.padding_idx
        self.scale = getattr(whole, "scalar_embed_scale", None)

    def forward(self, tokens: Tensor) -> Tensor:
        local, held = in_slice(tokens, self.num_embeddings, self.shard)
        rows = F.embedding(local, self.weight) * held[..., None]
        if self.padding is not None:
            # As nn.Embedding does: the row of the padding token gets no gradient.
            rows = torch.where((tokens == self.padding)[..., None], rows.detach(), rows)
        rows = sum_of_shards(rows, self.shard)
        # The scale is rounded to the table's type, as transformers does for Gemma.
        return rows if self.scale is None else rows * torch.tensor(self.scale).to(rows)


class Kept(nn.Module):
    """A module whose buffers (rotary frequencies) stay in fp32, whatever type its parameters are brought to."""

    model: Any
    """transformers' own, of which this is a part."""
    alone = True
    """Whether its configuration's class reads this component's files by itself: `dslaunch export` then writes
    config.json."""

    @property
    def units(self) -> list[nn.Module]:
        """Its layers: what FSDP2 shards one by one."""
        return list(self.model.get_submodule(FAMILIES[self.model.config.model_type].layers).children())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Kept:
        before = [(m, name, b) for m in self.modules() for name, b in m._buffers.items() if b is not None]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for module, name, buffer in before:
            moved = module._buffers[name]
            assert moved is not None
            module._buffers[name] = buffer.to(moved.device)
        return self


def config_of(build: Build, arguments: tuple[str, ...] = (), sized: bool = True) -> Any:
    """The configuration that `module_args.config` holds, or the file that it names.

    Args:
        arguments: what `module_args` may hold besides.
        sized: whether the component's settings are those of the configuration.

    Raises:
        ConfigError: an unknown key or family, sizes unlike the component's settings, or dropout.
    """
    allowed = ("config", "part", "names", *arguments)
    if unknown := sorted(set(build.args) - set(allowed)):
        raise build.fault("module_args", unknown[0], listed(allowed))
    given = build.args.get("config")
    if isinstance(given, str) and not (Path(given) / "config.json").is_file():
        raise build.fault("module_args.config", given, "a folder with config.json, or the settings themselves")
    try:
        if isinstance(given, str):
            config = AutoConfig.from_pretrained(given, local_files_only=True)
        else:
            config = AutoConfig.for_model(**build.argument("config", dict))
        if part := build.args.get("part"):
            config = getattr(config, part)
    except (AttributeError, TypeError, ValueError, StrictDataclassError) as error:
        raise build.fault("module_args.config", given, f"what transformers takes ({error})") from error
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise build.fault("module_args.config", f"model_type {config.model_type}", listed(FAMILIES))
    if sized:
        _check_config(build, config, family)
    return config


def _check_config(build: Build, config: Any, family: Family) -> None:
    for key, attribute in family.sizes:
        found, wanted = getattr(config, attribute), build.spec.get(key)
        if found != wanted:
            raise ConfigError(
                f"model.components.{build.name}.{key}: found {wanted}, but module_args.config has {attribute} = "
                f"{found}. The plan is made by the former: make them agree."
            )
    for attribute in family.dropouts:
        if rate := getattr(config, attribute, 0):
            raise build.fault(f"module_args.config.{attribute}", rate, "0, since draws would follow the layout")


def cut_model(build: Build, config: Any) -> Any:
    """This rank's part of the model of `config`: layers, heads and columns of `build.piece`.

    Parameters have no values yet but norms; on the meta device where torch makes tensors there.
    """
    family, shard = FAMILIES[config.model_type], build.piece.shard
    attention = family.attention
    if build.recompute == "selective":
        if attention != "sdpa":
            raise build.fault("recompute", "selective", f"none or full for {config.model_type}")
        attention = _RECOMPUTED
    there = torch.get_default_device()
    with torch.device("meta"):
        model = AutoModel.from_config(config, dtype=torch.float32, attn_implementation=attention)
        for path in family.absent:
            _put(model, path, None)
        _keep_stage(model, family, build)
        if shard.size > 1:
            cut_matrices(model, family, config, shard)
    if build.recompute == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if there.type != "meta":
        _give_memory(model, there)
    if shard.size > 1:
        _sum_gradients_by_head(model, family, shard)
    for path in family.idle:
        model.get_submodule(path).requires_grad_(False)
    return model


def _keep_stage(model: nn.Module, family: Family, build: Build) -> None:
    """Only the layers of this stage, under their numbers in the whole, and what stands before and after them."""
    layers, piece = model.get_submodule(family.layers), build.piece
    for number in set(range(len(list(layers.children())))) - set(piece.layers):
        del layers._modules[str(number)]
    for paths, here in ((family.stem, piece.first), (family.tail + family.idle, piece.last)):
        for path in paths if not here else ():
            _put(model, path, Passing())


def _put(model: nn.Module, path: str, module: nn.Module | None) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def cut_matrices(model: nn.Module, family: Family, config: Any, shard: Shard) -> None:
    """Replace the linear layers and tables that the family names by this shard's slices."""
    heads = getattr(config, "num_key_value_heads", 0) or 0
    cut: set[str] = set()
    for path, module in list(model.named_modules()):
        name = path.rpartition(".")[2]
        if isinstance(module, nn.Linear) and (made := _cut(name, module, family, heads, shard)) is not None:
            _put(model, path, made)
            cut.add(name)
        elif isinstance(module, nn.Embedding) and name == "embed_tokens":
            _put(model, path, CutEmbedding(module, shard))
        for attribute in family.local_heads:
            if isinstance(getattr(module, attribute, None), int):
                setattr(module, attribute, shard.part(getattr(module, attribute)))
        if heads and hasattr(module, "num_key_value_groups"):
            local = shard.part(config.num_attention_heads)
            module.num_key_value_groups = local // max(1, heads // shard.size)
    missed = {*family.column, *family.row, *family.fused} - cut
    assert not missed, f"{type(model).__name__} has no layers named {sorted(missed)}"


def _cut(name: str, whole: nn.Linear, family: Family, heads: int, shard: Shard) -> nn.Linear | None:
    inputs, outputs, bias = whole.in_features, whole.out_features, whole.bias is not None
    if heads and name in family.key_value:
        return column_in_pieces(inputs, outputs, bias, heads, shard)
    if name in family.column:
        return column(inputs, outputs, bias, shard)
    if name in family.row:
        return RowLinear(inputs, outputs, bias, shard)
    if name in family.fused:
        return FusedColumnLinear(inputs, outputs, bias, 3, shard)
    return None


def _give_memory(model: Any, device: torch.device) -> None:
    """Parameters and buffers on `device`: norms and buffers with their values, matrices without."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                made = nn.Parameter(torch.empty(parameter.shape, device=device), parameter.requires_grad)
                marks = ("tensor_model_parallel", "tp_dim", "tp_parts")
                vars(made).update({key: value for key, value in vars(parameter).items() if key in marks})
                module._parameters[name] = made
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
    with torch.no_grad():
        for module in model.modules():
            own = [p for p in module._parameters.values() if p is not None]
            if module._buffers or (own and all(p.ndim == 1 for p in own)):
                model._init_weights(module)


def _sum_gradients_by_head(model: nn.Module, family: Family, shard: Shard) -> None:
    def summed(gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total, group=shard.group)
        return total

    for path, module in model.named_modules():
        if path.rpartition(".")[2] in family.by_head:
            for parameter in module.parameters():
                parameter.register_hook(summed)
