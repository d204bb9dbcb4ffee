"""What is measured in each step, and where it is written: a line, metrics.jsonl, TensorBoard."""

from __future__ import annotations

import dataclasses
import json
import math
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dslaunch.planfile import Plan
from dslaunch.runtime.saving import Saved
from dslaunch.runtime.step import StepResult
from dslaunch.runtime.world import World

_GIB = 2**30


@dataclass(frozen=True)
class Metrics:
    """One optimizer step of the whole job."""

    step: int
    """Steps done, this one included."""
    loss: float
    """Mean over the global batch."""
    grad_norm: float | None
    """2-norm of the gradient before clipping; None where it overflowed (fp16)."""
    lr: float
    samples_per_s: float
    tokens_per_s: float
    """Tokens as the decoder sees them, image tokens and padding included."""
    images_per_s: float
    data_wait_s: float
    """For samples that were not read yet, on the rank that waited most; of the first step all of them are."""
    memory_gib: float
    """Peak since the start, on the rank that needs most."""
    memory_kind: str
    """cuda_peak_allocated: tensors on the GPU; host_peak_rss: everything in the process."""
    step_time_s: float


def measure(
    step: int, result: StepResult, seconds: float, plan: Plan, world: World, waited_s: float = 0.0
) -> Metrics:
    """The metrics of step number `step` over all ranks; every rank calls it.

    Args:
        waited_s: of this step's `seconds`, for this rank's samples.

    Raises:
        FloatingPointError: the loss is not a number any more, on every rank alike.
    """
    loss = result.loss.to(torch.float64)
    dist.all_reduce(loss)
    memory, kind = _memory_bytes(world)
    worst = torch.tensor([memory, waited_s], dtype=torch.float64, device=world.device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    mean = float(loss) / world.size
    if not math.isfinite(mean):
        raise FloatingPointError(f"the loss of step {step} is {mean}; lower training.optimizer.lr")
    return Metrics(
        step=step,
        loss=mean,
        grad_norm=result.grad_norm if math.isfinite(result.grad_norm) else None,
        lr=result.lr,
        samples_per_s=plan.global_batch / seconds,
        tokens_per_s=plan.global_batch * plan.training.seq_len / seconds,
        images_per_s=result.images / seconds,
        data_wait_s=float(worst[1]),
        memory_gib=float(worst[0]) / _GIB,
        memory_kind=kind,
        step_time_s=seconds,
    )


def _memory_bytes(world: World) -> tuple[int, str]:
    if world.device.type == "cuda":
        return torch.cuda.max_memory_allocated(world.device), "cuda_peak_allocated"
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "host_peak_rss"


def progress(metrics: Metrics, steps: int) -> str:
    """The line of one step."""
    norm = "overflow" if metrics.grad_norm is None else f"{metrics.grad_norm:.3f}"
    return (
        f"step {metrics.step}/{steps}  loss {metrics.loss:.4f}  grad norm {norm}  lr {metrics.lr:.3e}  "
        f"{metrics.samples_per_s:.1f} samples/s  {metrics.tokens_per_s:.0f} tokens/s  "
        f"{metrics.memory_gib:.2f} GiB"
    )


class Recorder:
    """Writes the metrics of a run; one rank has one."""

    def __init__(self, folder: Path, start: int, steps: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.folder, self.steps = folder, steps
        folder.mkdir(parents=True, exist_ok=True)
        self.lines = _continued(folder / "metrics.jsonl", start)
        self.board: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=start + 1)

    def write(self, metrics: Metrics) -> None:
        row = dataclasses.asdict(metrics)
        self.lines.write(json.dumps(row, allow_nan=False) + "\n")
        self.lines.flush()
        for name, value in row.items():
            if isinstance(value, float):
                self.board.add_scalar(name, value, metrics.step)
        self.board.flush()
        print(progress(metrics, self.steps), flush=True)

    def saved(self, saved: Saved) -> None:
        """Note a checkpoint in checkpoints.jsonl, from which the best interval is told."""
        row = {
            "step": saved.step, "save_time_s": saved.waited_s, "written_in_s": saved.took_s,
            "folder": str(saved.folder),
        }  # fmt: skip
        with (self.folder / "checkpoints.jsonl").open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(row) + "\n")
        print(f"saved {saved.folder} in {saved.took_s:.1f} s: training waited {saved.waited_s:.1f} s", flush=True)

    def close(self) -> None:
        self.lines.close()
        self.board.close()


def _continued(path: Path, start: int) -> Any:
    """`path` open for appending, holding the steps up to `start` of the run that is continued."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= start]
    path.write_text("".join(kept), encoding="utf-8")
    return path.open("a", encoding="utf-8")
