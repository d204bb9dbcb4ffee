"""What decides convergence: batch, sequence, precision, optimizer, schedule."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from dslaunch.schema.base import NonNegative, NonNegativeFloat, Part, Positive, PositiveFloat

Share = Annotated[float, Field(ge=0, lt=1)]


Schedule = Literal[
    "1f1b", "gpipe", "interleaved", "zb-h1", "zb-h2", "zb-v", "zb-v-half", "zb-v-min", "dualpipe-v",
]  # fmt: skip


class Optimizer(Part):
    """AdamW, and its settings."""

    name: Literal["adamw"] = "adamw"
    """AdamW is the one that is planned and written."""
    lr: PositiveFloat
    """Peak learning rate."""
    betas: Annotated[tuple[Share, Share], Field(strict=False)] = (0.9, 0.95)
    """Decay of the first and the second moment."""
    eps: PositiveFloat = 1e-8
    """What is added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled from the gradient."""
    warmup_steps: NonNegative = 0
    """Optimizer steps over which the learning rate rises from 0."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """What the learning rate does after the warm-up, until training.steps; wsd (warm-up, stable, decay): it stays
    at its peak, and falls over the last decay_steps."""
    min_lr: NonNegativeFloat = 0.0
    """Where the linear, cosine and wsd schedules end."""
    decay_steps: Positive | None = None
    """Last optimizer steps, over which the wsd schedule falls."""
    decay_shape: Literal["linear", "cosine", "sqrt"] | None = None
    """How the wsd schedule falls; sqrt: by the square root of the steps done. Linear where it is not given."""

    @model_validator(mode="after")
    def _ends_below_the_peak(self) -> Optimizer:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr:g} is above lr {self.lr:g}")
        return self

    @model_validator(mode="after")
    def _decay_is_of_wsd(self) -> Optimizer:
        if self.schedule == "wsd" and self.decay_steps is None:
            raise ValueError("schedule is wsd, which needs decay_steps: the last steps, over which the rate falls")
        if self.schedule != "wsd" and (self.decay_steps or self.decay_shape):
            raise ValueError(
                f"decay_steps and decay_shape are of schedule wsd, but schedule is {self.schedule}; leave them "
                "out, or set schedule to wsd"
            )
        return self


class Training(Part):
    """One optimizer step, and how many."""

    global_batch: Positive
    """Samples per optimizer step: micro_batch * num_microbatches * dp, for each component."""
    micro_batch: Positive | None = None
    """Samples per replica and pass."""
    num_microbatches: Positive | None = None
    """Passes per optimizer step (gradient accumulation steps) of the trunk; derived where it is not given."""
    seq_len: Positive
    """Tokens per sample in the trunk, image tokens included."""
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Of weights and activations in the forward and backward pass; bf16 and fp16 keep fp32 masters."""
    grad_accum_dtype: Literal["bf16", "fp16", "fp32"] | None = None
    """Type that gradients are accumulated in; the engine's cheapest correct one where it is not given."""
    steps: Positive
    """Optimizer steps."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1234
    """Of the weights and the order of the data."""
    clip: NonNegativeFloat = 1.0
    """Global gradient norm above which gradients are scaled down; 0 turns it off."""
    schedule: Schedule | None = None
    """Order of micro-batches in the pipeline; where not given, interleaved with vpp of 2 or more, else 1f1b, and
    what strategy=auto finds. zb-h1 splits the backward pass (arXiv:2401.10241), which megatron_deepspeed executes
    with DeepSpeed up to 0.17.4; no engine does those behind it, which the ledgers know from published runs."""
    macro_batches: Positive = 1
    """Parts of a step that go one after another through the components before the trunk, its pipeline and back:
    less is held for later, and the pipeline fills and drains as often (engine native, components on the trunk's
    ranks). Divides every component's num_microbatches."""
    overlap_comm: bool = True
    """Overlap gradient reduction with the backward pass, where the engine honours it."""
    sequence_parallel: bool = True
    """Shard the norms' activations over tp, where the engine can (Megatron)."""
    optimizer: Optimizer

    def order(self, vpp: int) -> str:
        """The order of micro-batches, where the trunk has `vpp` virtual stages per rank."""
        return self.schedule or ("interleaved" if vpp > 1 else "1f1b")

    @model_validator(mode="after")
    def _warmup_ends(self) -> Training:
        warmup, decay = self.optimizer.warmup_steps, self.optimizer.decay_steps or 0
        if warmup > self.steps:
            raise ValueError(
                f"optimizer.warmup_steps {warmup} is more than steps {self.steps}; "
                f"set training.optimizer.warmup_steps to {self.steps} or less"
            )
        if warmup + decay > self.steps:
            raise ValueError(
                f"optimizer.warmup_steps {warmup} + decay_steps {decay} = {warmup + decay} is more than steps "
                f"{self.steps}; set training.optimizer.decay_steps to {self.steps - warmup} or less"
            )
        return self
