"""Real deepspeed.initialize for 8 ranks in one process: `python -m tests.real.engine_worker`.

Reads a line of JSON a run, the fields of engine_draws.Asked, and answers with a line: null, or what was raised as
text. torch's fake process group answers every collective at once, so this is rank 0 alone. The only facts that are
replaced are those of a machine: that it computes in fp16, an operator that the CPU's backend would compile, and
processes that load data.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.real.engine_draws import Asked

WORLD = 8
ENVIRONMENT = {
    "CROSS_RANK": "0", "CROSS_SIZE": "1",
    "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0", "LOCAL_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "RANK": "0", "WORLD_SIZE": str(WORLD),
}  # fmt: skip
_STEPS = 12
"""Passes at most."""
_ROWS = 256


def main() -> None:
    os.environ.update(ENVIRONMENT)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    judge = _judge()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ds_config.json"
        os.chdir(folder)
        for line in sys.stdin:
            asked = Asked(**json.loads(line))
            path.write_text(json.dumps(asked.config), encoding="utf-8")
            raised = judge(str(path), asked)
            answers.write(json.dumps(None if raised is None else repr(raised)[:300]) + "\n")
            answers.flush()


def prepare() -> tuple[Any, dict[str, Any]]:
    """DeepSpeed over a fake process group: its module of groups, and what that holds before any is made."""
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import groups
    from torch.testing._internal.distributed.fake_pg import FakeStore

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    type(get_accelerator()).is_fp16_supported = lambda _self: True
    torch.distributed.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    deepspeed.init_distributed(dist_backend="fake")
    return groups, _state(groups)


def become(rank: int, world: int = WORLD) -> None:
    """Go on as another rank of the job, or in a job of another size."""
    import torch
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if (rank, world) == (torch.distributed.get_rank(), torch.distributed.get_world_size()):
        return
    torch.distributed.destroy_process_group()
    torch.distributed.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_SIZE=str(min(world, 4)))


def _judge() -> Callable[[str, Asked], BaseException | None]:
    import deepspeed
    import torch

    logging.disable(logging.CRITICAL)
    groups, fresh = prepare()
    sys.modules["deepspeed.runtime.dataloader"].DataLoader = _loader  # type: ignore[attr-defined]
    autocast = sys.modules["deepspeed.runtime.torch_autocast"]
    gc.freeze()  # DeepSpeed collects for each engine, and need not go through all modules each time

    def judge(path: str, asked: Asked) -> BaseException | None:
        restore(groups, fresh)
        restore(autocast, {"TORCH_AUTOCAST_INITIALIZED": False, "TORCH_AUTOCAST_DTYPE": None})
        become(0, asked.world)
        torch.manual_seed(0)
        engine = None
        try:
            model = _model(asked.stages)
            engine, _, loader, _ = deepspeed.initialize(model=model, config=path, **_handed(asked, model))
            if engine.optimizer is not None:
                _train(engine, asked, loader) if asked.stages == 1 else _train_first_stage(engine, asked)
            if asked.save:
                _save(engine, asked)
        # A warning that is raised, and an assertion of torch's, are answers too.
        except Exception as error:
            return error
        finally:
            if engine is not None:
                engine.destroy()
        return None

    return judge


def _loader(*given: Any, **how: Any) -> Any:
    """torch's loader, in this process."""
    import torch

    return torch.utils.data.DataLoader(*given, **{**how, "num_workers": 0})


def _handed(asked: Asked, model: Any) -> dict[str, Any]:
    """What the script hands over beside the model and the configuration."""
    import torch

    handed: dict[str, Any] = {"model_parameters": model.parameters()}
    if asked.optimizer:
        handed["optimizer"] = getattr(torch.optim, asked.optimizer)(model.parameters(), lr=0.1)
    if asked.schedule:
        handed["lr_scheduler"] = lambda made: torch.optim.lr_scheduler.LambdaLR(made, lambda _: 1.0)
    if asked.data:
        handed["training_data"] = [torch.ones(8)] * _ROWS
    return handed


def _state(module: Any) -> dict[str, Any]:
    """The process groups that the module has made: none yet."""
    kinds = (dict, list, int, bool, type(None))
    return {
        name: _copy(value)
        for name, value in vars(module).items()
        if _is_state(name) and isinstance(value, kinds)
    }


def _is_state(name: str) -> bool:
    return name in ("mpu", "mesh_device", "expert_tensor_parallel_world_size") or (
        name[:1] == "_" and name[:2] != "__"
    )


def restore(module: Any, state: dict[str, Any]) -> None:
    for name, value in state.items():
        setattr(module, name, _copy(value))


def _copy(value: Any) -> Any:
    return type(value)(value) if isinstance(value, dict | list) else value


def _model(stages: int) -> Any:
    import torch
    from deepspeed.pipe import PipelineModule

    if stages == 1:
        return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    layers = [torch.nn.Linear(8, 8) for _ in range(8)]
    return PipelineModule(layers, num_stages=stages, loss_fn=torch.nn.functional.mse_loss)


def _train(engine: Any, asked: Asked, loader: Any) -> None:
    import torch

    kind = next(engine.module.parameters()).dtype
    rows = iter(loader) if asked.data else None
    for _ in range(min(max(1, int(engine.gradient_accumulation_steps())) * asked.steps, _STEPS)):
        given = torch.ones(2, 8) if rows is None else next(rows)
        loss = engine(given.to(kind)).float().pow(2).mean()
        engine.backward(loss)
        engine.step()
        if asked.evaluate:
            engine.eval()
            with torch.no_grad():
                engine(torch.ones(2, 8, dtype=kind))
            engine.train()


def _train_first_stage(engine: Any, asked: Asked) -> None:
    """A batch of the pipeline as its first stage sees it: the others' gradients are what the buffers hold."""
    import torch

    kind = next(engine.module.parameters()).dtype
    sample = torch.ones(1, 8, dtype=kind)
    for _ in range(asked.steps):
        engine.train_batch(iter([(sample, sample)] * int(engine.gradient_accumulation_steps())))


def _save(engine: Any, asked: Asked) -> None:
    """A checkpoint, which a job of one rank reads again."""
    engine.save_checkpoint("checkpoint")
    if asked.world == 1:
        engine.load_checkpoint("checkpoint")
    shutil.rmtree("checkpoint")


if __name__ == "__main__":
    main()
