"""A LLaVA-like model with an action head: transformers' Llama, and on its last stage two layers for an action.

The loss of a sample is the cross-entropy of the answer's token, and the squared error of the action, read at "=".
"""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from dslaunch.runtime.data import Batch
from dslaunch.runtime.hf.decoders import HfDecoder
from dslaunch.runtime.own import Build
from own_models.sums import ACTIONS, EQUALS


class ActingDecoder(HfDecoder):
    """Llama as it is, and `action_head` where the last layer is."""

    fresh = ("action_head.",)
    """Starts from random weights, also where Llama's are given."""

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        if self.piece.last:
            hidden = self.config.hidden_size
            self.action_head = nn.Sequential(nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, ACTIONS))

    def judge(self, hidden: Tensor, batch: Batch) -> Tensor:
        actions = self.action_head(hidden[batch.tokens == EQUALS])
        missed = F.mse_loss(actions.float(), batch.more["actions"].float(), reduction="sum")
        return super().judge(hidden, batch) + missed

    def judged(self, batch: Batch) -> Tensor:
        """The loss is a mean over samples."""
        return (batch.tokens == EQUALS).sum()


def decoder(build: Build) -> nn.Module:
    return ActingDecoder(build)
