"""Qwen2.5-VL: its tower with window attention over images of any size, its merger, its decoder with mRoPE.

A batch holds, as transformers' processor of the model gives them, `images` [patches of all images, channels *
temporal_patch * patch * patch], `counts` (images by sample) and `more["image_grid_thw"]` [images, 3]: frames, rows
and columns of patches. A sample has room for as many patches as the tower's `image` and `passes` say.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLPatchMerger, Qwen2_5_VLRMSNorm
from transformers.vision_utils import get_vision_window_index

from dslaunch.errors import ConfigError
from dslaunch.runtime.data import Batch
from dslaunch.runtime.hf.cutting import Kept, config_of, cut_model
from dslaunch.runtime.hf.decoders import HfDecoder
from dslaunch.runtime.own import Build
from dslaunch.runtime.tensor_parallel import column, row

_GRID = "image_grid_thw"


def grids_of(batch: Batch) -> tuple[Tensor, Tensor]:
    """(grids [images, 3], images by sample [B]); ConfigError where the data has none."""
    if _GRID not in batch.more or batch.counts is None:
        raise ConfigError(f"data: Qwen2.5-VL needs a batch with `counts` and more['{_GRID}'].")
    return batch.more[_GRID], batch.counts


def patches_of(batch: Batch, per: int = 1) -> Tensor:
    """Patches by sample [B], `per` of them counted as one."""
    grids, counts = grids_of(batch)
    sizes = grids.prod(dim=1) // per
    owner = torch.repeat_interleave(torch.arange(len(counts), device=sizes.device), counts)
    return torch.zeros(len(counts), dtype=sizes.dtype, device=sizes.device).index_add(0, owner, sizes)


def packed(x: Tensor, lengths: Tensor) -> Tensor:
    """[B, S, H] -> the first lengths[b] rows of each sample, one after another."""
    return x[torch.arange(x.shape[1], device=x.device) < lengths[:, None]]


def with_room(rows: Tensor, lengths: Tensor, room: int, where: str) -> Tensor:
    """The inverse of `packed`: [B, room, H], zeros behind each sample's rows."""
    if int(lengths.max()) > room:
        raise ConfigError(
            f"data: a sample has {int(lengths.max())} patches or tokens of images; {where} has room for {room}. "
            "Raise the tower's image or passes, and the edges' tokens with it, or make the images smaller."
        )
    held = torch.arange(room, device=rows.device) < lengths[:, None]
    return rows.new_zeros(len(lengths), room, rows.shape[1]).masked_scatter(held[..., None], rows)


class Reached(nn.Module):
    """In the merger's place within transformers' forward pass: one row for each group of patches."""

    def __init__(self, group: int) -> None:
        super().__init__()
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        return x[:: self.group]


class Tower(Kept):
    """One stage of the blocks. Between stages, and to the merger, patches stand in the images' own order."""

    reads = True

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.piece, self.between, self.tokens = build.piece, build.between, build.tokens
        self.where = f"model.components.{build.name}"
        config = self.config = config_of(build)
        self.unit = config.spatial_merge_size**2
        self.model = cut_model(build, config)
        self.model.merger = Reached(self.unit)
        self.model.fullatt_block_indexes = [i - self.piece.layers[0] for i in config.fullatt_block_indexes]
        self.file_names = build.args.get("names") or {"model.": "visual."}
        self.unread = (f"{self.file_names.get('model.', '')}merger.",)
        self.alone = False  # the class has the merger too, and the names are those of the whole model's files

    def forward(self, x: Tensor | None, batch: Batch) -> Tensor:
        """Patches of all images, or what the stage before gives -> [B, room, H]."""
        grids, _ = grids_of(batch)
        lengths = patches_of(batch)
        if self.piece.first:
            rows = batch.images
        else:
            assert x is not None
            rows = packed(x, lengths)
        empty = not len(grids)
        if empty:  # One group of patches that nobody reads, so that every parameter gets its gradient.
            grids = grids.new_tensor([[1, self.config.spatial_merge_size, self.config.spatial_merge_size]])
            rows = batch.images.new_zeros(self.unit, batch.images.shape[1]) if x is None else x[0, : self.unit]
        out = self._run(rows, grids)
        room = self.tokens if self.piece.last else self.between
        if empty:
            return out.new_zeros(len(lengths), room, out.shape[1]) + 0.0 * out.sum()
        return with_room(out, lengths, room, self.where)

    def _run(self, rows: Tensor, grids: Tensor) -> Tensor:
        """transformers' own pass over this stage's blocks, in the images' order before and after."""
        windows, _ = get_vision_window_index(
            grids, self.config.spatial_merge_size, self.config.window_size, self.config.patch_size
        )
        by_window = self.model(rows, grid_thw=grids).last_hidden_state
        groups = by_window.view(-1, self.unit, by_window.shape[-1])
        restored: Tensor = groups[torch.argsort(windows)].flatten(0, 1)
        return restored


class Merger(nn.Module):
    """Groups of neighbouring patches into tokens of the decoder: a norm, a column- and a row-parallel matrix."""

    reads = True

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.tokens, self.where = build.tokens, f"model.components.{build.name}"
        config, shard = config_of(build, sized=False), build.piece.shard
        self.unit = config.spatial_merge_size**2
        wide = config.hidden_size * self.unit
        if build.spec["dims"] != [wide, wide, config.out_hidden_size]:
            raise build.fault("dims", build.spec["dims"], str([wide, wide, config.out_hidden_size]))
        with torch.device("meta"):
            self.merger = Qwen2_5_VLPatchMerger(
                config.out_hidden_size, config.hidden_size, config.spatial_merge_size
            )
        self.merger.ln_q = Qwen2_5_VLRMSNorm(config.hidden_size, eps=self.merger.ln_q.variance_epsilon)
        self.merger.mlp[0] = column(wide, wide, True, shard)
        self.merger.mlp[2] = row(wide, config.out_hidden_size, True, shard)
        self.file_names = build.args.get("names") or {"merger.": "visual.merger."}

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """[B, room, H of the tower] -> [B, tokens, H of the decoder]"""
        lengths = patches_of(batch)
        empty = not int(lengths.sum())
        rows = x[0, : self.unit] if empty else packed(x, lengths)
        merged = self.merger(rows.to(self.merger.ln_q.weight.dtype))
        if empty:
            room: Tensor = merged.new_zeros(len(x), self.tokens, merged.shape[1]) + 0.0 * merged.sum()
            return room
        return with_room(merged, lengths // self.unit, self.tokens, self.where)


class Decoder(HfDecoder):
    """The decoder, whose tokens of images have positions in rows and columns."""

    extra_arguments = ("merge",)

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.merge = build.argument("merge", int, 2)
        self.placeholder: int = build.argument("image_token", int)

    def positions(self, batch: Batch) -> Tensor | None:
        """[3, B, S]: frame, row and column."""
        return mrope_positions(batch.tokens, self.placeholder, grids_of(batch)[0], self.merge)


def mrope_positions(tokens: Tensor, image_token: int, grids: Tensor, merge: int) -> Tensor:
    """Positions of tokens [B, S] in frame, row and column: [3, B, S] (Wang et al. 2024, arXiv:2409.12191, 2.1).

    A text token has one number in all three; an image's tokens have its frames, rows and columns, counted from
    the number that it begins at; what follows it begins after the longest side.

    Args:
        grids: of the images in order [I, 3], in patches, of which merge * merge are one token.
    """
    positions = torch.zeros(3, *tokens.shape, dtype=torch.int64)
    images = iter(grids.tolist())
    for sample, row_of_tokens in enumerate(tokens.tolist()):
        place = begin = 0
        while place < len(row_of_tokens):
            if row_of_tokens[place] != image_token:
                positions[:, sample, place] = begin
                place, begin = place + 1, begin + 1
                continue
            frames, rows, columns = next(images)
            sides = (frames, rows // merge, columns // merge)
            at = torch.cartesian_prod(*map(torch.arange, sides)).T
            positions[:, sample, place : place + at.shape[1]] = at + begin
            place, begin = place + at.shape[1], begin + max(sides[1:])
    return positions.to(tokens.device)
