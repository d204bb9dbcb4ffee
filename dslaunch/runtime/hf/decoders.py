"""Decoders of transformers: Llama, Mistral, Qwen 2 and 3, Gemma 1 to 3, the decoder of Qwen2.5-VL."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from dslaunch.errors import ConfigError
from dslaunch.runtime.data import Batch
from dslaunch.runtime.hf.cutting import Kept, config_of, cut_model
from dslaunch.runtime.own import Build, judged_in
from dslaunch.runtime.tensor_parallel import column, summed_cross_entropy


class HfDecoder(Kept):
    """One stage: `model` is transformers' own, with this stage's layers; the last one has `lm_head` too."""

    reads = True
    extra_arguments: tuple[str, ...] = ()
    """Of `module_args`, besides those of every decoder."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.piece = build.piece
        config = self.config = config_of(build, ("image_token", *self.extra_arguments))
        self.image_token = build.args.get("image_token")
        self.where = f"model.components.{build.name}"
        self.capped = getattr(config, "final_logit_softcapping", None)
        if config.tie_word_embeddings and not (self.piece.first and self.piece.last):
            raise ConfigError(
                f"strategy.{build.name}.pp: more than one stage, but tied embeddings stay in one. Set it to 1, or "
                f"untie them: {self.where}.tied_embeddings=false, and tie_word_embeddings in its configuration."
            )
        self.model = cut_model(build, config)
        _run_as_stage(self.model, config, build)
        if self.piece.last:
            self.lm_head = column(config.hidden_size, config.vocab_size, False, self.piece.shard)
            if config.tie_word_embeddings:
                self.lm_head.weight = self.model.embed_tokens.weight
        self.alone = not build.args.get("names")
        self.file_names = build.args.get("names") or {"model.": "model.", "lm_head.": "lm_head."}
        self.unread = (self.file_names.get("lm_head.", "lm_head."),) if config.tie_word_embeddings else ()

    def forward(self, x: Tensor | None, batch: Batch) -> Tensor:
        """Features of images [B, M, H], or what the stage before gives [B, S, H] -> [B, S, H], or the loss."""
        if self.piece.first:
            x = self.entered(x, batch.tokens)
        hidden: Tensor = self.model(
            inputs_embeds=x, position_ids=self.positions(batch), use_cache=False
        ).last_hidden_state
        return self.judge(hidden, batch) if self.piece.last else hidden

    def positions(self, _batch: Batch) -> Tensor | None:
        """Positions of the tokens, where they are not 0, 1, 2, ..."""
        return None

    def entered(self, features: Tensor | None, tokens: Tensor) -> Tensor:
        """The sequence: features in the places of image tokens; before the text, where there is no such token."""
        x: Tensor = self.model.embed_tokens(tokens)
        if features is None:
            return x
        features = features.to(x.dtype)
        if self.image_token is None:
            return torch.cat([features, x], dim=1)
        places = tokens == self.image_token
        counts = places.sum(dim=1)
        if int(counts.max()) > features.shape[1]:
            raise ConfigError(
                f"data: a sample has {int(counts.max())} image tokens, and the edge to {self.where} brings "
                f"{features.shape[1]}. Set the edge's tokens to the most that a sample has."
            )
        held = torch.arange(features.shape[1], device=x.device) < counts[:, None]
        return x.masked_scatter(places[..., None], features[held])

    def judge(self, hidden: Tensor, batch: Batch) -> Tensor:
        """The cross-entropy summed over the labels that are not -100; hidden [B, S, H], after the last norm."""
        judged = judged_in(batch.labels)
        logits = self.lm_head(hidden[:, -batch.labels.shape[1] : -1][judged])
        if self.capped is not None:
            logits = torch.tanh(logits / self.capped) * self.capped
        return summed_cross_entropy(logits, batch.labels[:, 1:][judged], self.piece.shard)


def _run_as_stage(model: Any, config: Any, build: Build) -> None:
    """Let transformers' own forward pass run over this stage's layers, which it counts from 0."""
    piece = build.piece
    model.config = copy.deepcopy(config)
    model.config._attn_implementation_internal = next(iter(model.layers)).self_attn.config._attn_implementation
    model.config.num_hidden_layers = len(piece.layers)
    if getattr(config, "layer_types", None):
        model.config.layer_types = [config.layer_types[layer] for layer in piece.layers]
