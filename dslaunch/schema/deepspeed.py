"""What DeepSpeed can do beside its ZeRO stages. All of it is off unless it is asked for."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from dslaunch.errors import listed
from dslaunch.schema.base import NonNegative, Part, Positive

Share = Annotated[float, Field(ge=0, le=1)]
OpenShare = Annotated[float, Field(gt=0, lt=1)]


class Switched(Part):
    """A mode that is off unless it is asked for, and whose settings then have no reader."""

    enabled: bool = False
    """Turns it on."""

    @model_validator(mode="after")
    def _settings_are_read(self) -> Self:
        given = sorted(self.model_fields_set - {"enabled"})
        if given and not self.enabled:
            raise ValueError(
                f"{listed(given)} set, but enabled is false, so nothing would read it; set enabled to true"
            )
        return self


class ZeroPlusPlus(Part):
    """ZeRO++ (arXiv:2306.10209): ZeRO-3 with less traffic between nodes."""

    hpz: Positive | Literal["node"] = 1
    """hpZ: ranks over which a second copy of the weights is cut, so that the backward pass gathers among them
    alone; node: a node's GPUs; 1 is off."""
    quantized_weights: bool = False
    """qwZ: weights are gathered as int8."""
    quantized_gradients: bool = False
    """qgZ: gradients are reduced as int4, in two all-to-alls."""


class Nvme(Part):
    """Where and how states go to NVMe; read where a component's offload is nvme or nvme_params."""

    path: str = ""
    """Folder on the nodes' NVMe, one for each job."""
    block_size: Positive = 1_048_576
    """Bytes of one read or write."""
    queue_depth: Positive = 8
    """Requests under way at a time."""
    threads: Positive = 1
    """Threads of one read or write (DeepSpeed's intra_op_parallelism)."""
    single_submit: bool = False
    """Hand requests over one by one, not queue_depth at a time."""
    overlap_events: bool = True
    """Hand requests over while others are waited for."""


class ZenFlow(Switched):
    """ZenFlow (arXiv:2505.12242): the largest gradients are applied on the GPU at once, the others on the host."""

    topk_ratio: OpenShare = 0.1
    """Share of a matrix's columns that is updated at once."""
    select_interval: Positive = 16
    """Steps between two choices of these columns; at least update_interval."""
    update_interval: Positive = 4
    """Steps whose other gradients are added up before the host applies them."""
    warmup_steps: NonNegative = 0
    """Steps at the start in which everything is updated."""
    overlap_step: bool = True
    """The host's step runs beside the next forward and backward pass."""


class SuperOffload(Switched):
    """SuperOffload: the host's step beside the backward pass, for GPUs joined to their CPU by NVLink-C2C."""

    cpu_cores: Share = 0.8
    """Share of a rank's CPU cores that the host's optimizer takes."""


class ActivationCheckpointing(Switched):
    """DeepSpeed's own recompute; only a script that calls deepspeed.checkpointing reads it."""

    partition_activations: bool = False
    """Cut kept activations over the tensor-parallel ranks."""
    cpu: bool = False
    """Keep them in host memory."""
    contiguous: bool = False
    """Keep them in one buffer; needs partition_activations and number."""
    number: Positive | None = None
    """Activations kept in a pass, which sizes that buffer."""
    synchronize: bool = False
    """Wait for the GPU at each of them."""
    profile: bool = False
    """Time the forward and backward pass of each."""


class TensorBoard(Switched):
    """Event files for TensorBoard, written by rank 0."""

    path: str = ""
    """Folder; the working folder where it is empty."""
    job: str = ""
    """Name below that folder; the run's where it is empty."""


class Csv(Switched):
    """One CSV file a measure, written by rank 0."""

    path: str = ""
    """Folder; the working folder where it is empty."""
    job: str = ""
    """Name below that folder; the run's where it is empty."""


class Wandb(Switched):
    """Weights & Biases; the key is handed over by name: launcher.pass_env=[WANDB_API_KEY]."""

    project: str = ""
    """The run's name where it is empty."""
    team: str = ""
    """The account that it goes to; the key's own where it is empty."""
    group: str = ""
    """Runs of one group stand together."""


class Comet(Switched):
    """Comet; the key is handed over by name: launcher.pass_env=[COMET_API_KEY]."""

    project: str = ""
    """The run's name where it is empty."""
    workspace: str = ""
    """The account that it goes to; the key's own where it is empty."""
    experiment: str = ""
    """Name of the experiment."""
    every: Positive = 100
    """Samples between two records."""


class Monitor(Part):
    """Where DeepSpeed itself records loss, learning rate and throughput."""

    tensorboard: TensorBoard = TensorBoard()
    csv: Csv = Csv()
    wandb: Wandb = Wandb()
    comet: Comet = Comet()
