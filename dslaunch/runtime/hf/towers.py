"""Towers of transformers that see images of one size: CLIP, SigLIP, ViT."""

from __future__ import annotations

from torch import Tensor, nn

from dslaunch.runtime.components import blocks_up_to
from dslaunch.runtime.data import Batch
from dslaunch.runtime.hf.cutting import Kept, config_of, cut_model
from dslaunch.runtime.hf.families import FAMILIES
from dslaunch.runtime.hf.images import by_image, by_sample, counts_of, places
from dslaunch.runtime.own import Build


class HfTower(Kept):
    """One stage. A sample has at most `passes` images; where it has fewer, zeros stand in their places."""

    reads = True

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.piece, self.where = build.piece, f"model.components.{build.name}"
        self.most = int(build.spec["passes"])
        config = self.config = config_of(build)
        self.family = FAMILIES[config.model_type]
        self.model = cut_model(build, config)
        for attribute, value in self.family.without:
            setattr(config, attribute, value)
        self.used_layers = blocks_up_to(build.from_layer, build.spec["layers"])
        self._freeze_unused(build.spec["layers"])
        self.alone = not build.args.get("names")
        self.file_names = build.args.get("names") or {"model.": ""}
        self.file_words = self.family.in_files
        self.unread = tuple(f"{self.file_names.get('model.', '')}{path}." for path in self.family.absent)

    def _freeze_unused(self, layers: int) -> None:
        """What does not run gets no gradient on any rank; frozen, every strategy treats it alike."""
        for number, layer in self._layers():
            layer.requires_grad_(number < self.used_layers)
        if self.used_layers < layers and self.piece.last:
            for path in self.family.tail:
                self.model.get_submodule(path).requires_grad_(False)

    def _layers(self) -> list[tuple[int, nn.Module]]:
        """This stage's layers, with their numbers in the whole."""
        layers = self.model.get_submodule(self.family.layers)
        return [(int(name), layer) for name, layer in layers.named_children()]

    def forward(self, x: Tensor | None, batch: Batch) -> Tensor:
        """Images [I, channels, h, w], or what the stage before gives -> [B, passes * N, H]."""
        samples = len(batch.tokens)
        counts = counts_of(batch.counts, len(batch.images), samples, self.most, self.where)
        held = places(counts.to(batch.tokens.device), self.most)
        if self.piece.first:
            rows = batch.images if len(batch.images) else batch.images.new_zeros(1, *batch.images.shape[1:])
            rows = rows.to(next(self.model.parameters()).dtype)
            for path in self.family.stem:
                rows = self.model.get_submodule(path)(rows)
        else:
            assert x is not None
            rows = by_image(x, held)
        for number, layer in self._layers():
            if number < self.used_layers:
                rows = layer(rows, None)
        if self.piece.last:
            rows = self._left(rows)
        return by_sample(rows, held, self.most)

    def _left(self, rows: Tensor) -> Tensor:
        """The patches, normed where the last layer is what is read."""
        if self.used_layers > self.piece.layers[-1]:
            for path in self.family.tail:
                rows = self.model.get_submodule(path)(rows)
        return rows[:, self.family.prefix :]
