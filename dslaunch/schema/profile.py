"""A profiler around chosen ranks, on chosen steps."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dslaunch.schema.base import NonNegative, Part, Positive, Texts


class Profile(Part):
    """What is recorded, into `profiles` in the run folder."""

    kind: Literal["none", "torch", "nsys"] = "none"
    """torch: PyTorch's profiler; nsys: NVIDIA Nsight Systems (CUDA GPUs). profile=torch on the command line."""
    ranks: Annotated[tuple[NonNegative, ...], Field(strict=False, min_length=1)] = (0,)
    """Ranks that are recorded."""
    first_step: Positive = 5
    """The first optimizer step that is recorded, counted from 1 in each attempt; the very first are no measure."""
    steps: Positive = 3
    """How many are recorded."""
    nsys_options: Texts = ("--trace=cuda,nvtx,osrt", "--sample=none", "--cpuctxsw=none")
    """Options of `nsys profile` beside the output's name and the range of the capture."""
