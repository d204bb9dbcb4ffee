"""Checkpoints saved and loaded by DeepSpeed: `python -m tests.real.checkpoint_worker WORLD FOLDER ACTION ...`.

Rank 0 of WORLD over torch's fake process group (tests/real/engine_worker.py). `save` writes a step, and the
files of the other ranks under the names that DeepSpeed gives them; `load` and `load-serial` answer with a line
of JSON: what was raised, or whether a step was found.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from typing import Any

from tests.real import engine_worker

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.0001, "torch_adam": True}},
    "zero_optimization": {"stage": 2},
}


def main(world: int, folder: str, actions: list[str]) -> None:
    engine_worker.WORLD = world
    os.environ.update(engine_worker.ENVIRONMENT, WORLD_SIZE=str(world))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine_worker.prepare()
    for action in actions:
        if action == "save":
            _save(folder, world)
        else:
            answers.write(json.dumps(_load(folder, serial=action == "load-serial")) + "\n")
            answers.flush()


def _save(folder: str, world: int) -> None:
    engine = _engine(CONFIG)
    engine.save_checkpoint(folder, tag="global_step100")
    own = engine._get_zero_ckpt_name(folder, "global_step100")
    for rank in range(1, world):
        shutil.copy(own, engine._get_rank_zero_ckpt_name(folder, "global_step100", 0, rank, bf16_mode=False))


def _load(folder: str, serial: bool) -> str | None:
    zero = {"stage": 2, "pipeline_loading_checkpoint": serial}
    try:
        path, _ = _engine({**CONFIG, "zero_optimization": zero}).load_checkpoint(folder)
    # Whatever DeepSpeed raises is the answer.
    except Exception as error:
        return repr(error)[:300]
    return None if path else "nothing was loaded"


def _engine(config: dict[str, Any]) -> Any:
    import deepspeed
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
