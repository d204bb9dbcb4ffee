"""Real deepspeed.initialize for 8 ranks in one process: `python -m tests.real.engine_worker`.

Reads a line of JSON a configuration, `{"config": {...}, "stages": 1}`, and answers with a line: null, or what was
raised as text. torch's fake process group answers every collective at once, so this is rank 0 of 8 alone. The only
facts that are replaced are those of a machine: that it computes in fp16, and an operator that the CPU's backend
would compile.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORLD = 8
ENVIRONMENT = {
    "CROSS_RANK": "0", "CROSS_SIZE": "1",
    "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0", "LOCAL_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "RANK": "0", "WORLD_SIZE": str(WORLD),
}  # fmt: skip
_STEPS = 4


def main() -> None:
    os.environ.update(ENVIRONMENT)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    judge = _judge()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ds_config.json"
        for line in sys.stdin:
            asked = json.loads(line)
            path.write_text(json.dumps(asked["config"]), encoding="utf-8")
            raised = judge(str(path), asked["stages"])
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


def become(rank: int) -> None:
    """Go on as another rank of the job."""
    import torch
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if rank == torch.distributed.get_rank():
        return
    torch.distributed.destroy_process_group()
    torch.distributed.init_process_group("fake", rank=rank, world_size=WORLD, store=FakeStore())
    os.environ["RANK"] = str(rank)


def _judge() -> Callable[[str, int], BaseException | None]:
    import deepspeed
    import torch

    logging.disable(logging.CRITICAL)
    groups, fresh = prepare()

    def judge(path: str, stages: int) -> BaseException | None:
        restore(groups, fresh)
        torch.manual_seed(0)
        try:
            model = _model(stages)
            engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=path)
            if engine.optimizer is not None:
                _train(engine) if stages == 1 else _train_first_stage(engine)
            engine.destroy()
        # A warning that is raised, and an assertion of torch's, are answers too.
        except Exception as error:
            return error
        return None

    return judge


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


def _train(engine: Any) -> None:
    import torch

    kind = next(engine.module.parameters()).dtype
    for _ in range(min(int(engine.gradient_accumulation_steps()), _STEPS)):
        loss = engine(torch.ones(2, 8, dtype=kind)).float().pow(2).mean()
        engine.backward(loss)
        engine.step()


def _train_first_stage(engine: Any) -> None:
    """A batch of the pipeline as its first stage sees it: the others' gradients are what the buffers hold."""
    import torch

    kind = next(engine.module.parameters()).dtype
    sample = torch.ones(1, 8, dtype=kind)
    engine.train_batch(iter([(sample, sample)] * int(engine.gradient_accumulation_steps())))


if __name__ == "__main__":
    main()
