"""Every touch of DeepSpeed that its documentation does not cover. Verified on 0.19.8."""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from dslaunch.runtime.meshes import Mpu


def use_cpu_accelerator() -> None:
    """Let DeepSpeed take the CPU as its device; it reads the variable when it is first imported."""
    assert "deepspeed" not in sys.modules or os.environ.get("DS_ACCELERATOR") == "cpu"
    os.environ["DS_ACCELERATOR"] = "cpu"


def leave_out_shared_memory_op() -> None:
    """Let CPU ranks talk through gloo alone. Call it before `deepspeed.init_distributed`.

    DeepSpeed compiles an operator for collectives in shared memory when it joins the process group
    (deepspeed/comm/torch.py, TorchBackend): minutes on a busy host, a lock file that blocks later jobs when
    one is killed, and no use over several hosts. `deepspeed.comm.torch` as an attribute is torch itself, so
    the module is taken from sys.modules.
    """
    module: Any = sys.modules["deepspeed.comm.torch"]
    assert hasattr(module, "build_shm_op"), "this DeepSpeed builds its shared-memory operator elsewhere"
    module.build_shm_op = lambda: None


def let_ranks_differ_at_stage3() -> None:
    """Let ZeRO-3 of a component do without the ranks that do not hold it.

    When the order of its modules is first recorded, an engine compares it with that of rank 0 of the world
    (runtime/zero/partitioned_param_coordinator.py), which may have no part in the component, or another one.
    """
    import deepspeed.runtime.zero.partitioned_param_coordinator as coordinator

    module: Any = coordinator
    assert hasattr(module, "assert_ints_same_as_other_ranks"), "this DeepSpeed compares modules elsewhere"
    module.assert_ints_same_as_other_ranks = lambda _ints: None


_LINEAR = torch.nn.functional.linear


def take_own_linear() -> None:
    """Give torch its linear back, which an engine of stage 3 replaces for the whole process.

    With the other one (runtime/zero/linear.py, 0.19.8) an engine of stage 2 made later got wrong gradients for
    layers that have a bias.
    """
    torch.nn.functional.linear = _LINEAR


@contextmanager
def linear_of(engine: Any) -> Iterator[None]:
    """DeepSpeed's linear for stage 3: torch's would keep every gathered weight for the backward pass."""
    if engine is None or engine.zero_optimization_stage() != 3:
        yield
        return
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    torch.nn.functional.linear = zero3_linear_wrap
    try:
        yield
    finally:
        take_own_linear()


def before_backward(engine: Any, done: int) -> None:
    """Let ZeRO-3 add this gradient to those of the `done` micro-batches before it in this step.

    It counts them by the forward passes that follow a backward pass (runtime/zero/stage3.py,
    clear_backward_seen_flag), and where there are none, as with several micro-batches in flight, a gradient takes
    the place of the one before.
    """
    if engine.zero_optimization_stage() == 3:
        assert hasattr(engine.optimizer, "micro_step_id"), "this DeepSpeed counts micro-batches elsewhere"
        engine.optimizer.micro_step_id = done


@contextmanager
def scope(mpu: Mpu) -> Iterator[None]:
    """Let DeepSpeed see the groups of one engine.

    Each `deepspeed.initialize` overwrites the module global `deepspeed.utils.groups.mpu`, which engines read
    later too (deepspeed/utils/groups.py), and saving waits for the world (runtime/engine.py:save_checkpoint).
    """
    from deepspeed import comm
    from deepspeed.utils import groups

    before, barrier = groups.mpu, comm.barrier
    groups.mpu = mpu
    comm.barrier = functools.partial(barrier, group=mpu.mesh.stage)
    try:
        yield
    finally:
        groups.mpu, comm.barrier = before, barrier


def squared_norm(engine: Any, mpu: Mpu) -> float:
    """The squared 2-norm of the gradient of one engine's parameters, whole; infinite where it is not a number.

    Every rank of the engine's stage calls it, when all gradients are reduced.
    """
    optimizer = engine.optimizer
    match type(optimizer).__name__:
        case "DeepSpeedZeroOptimizer":
            norm = float(type(optimizer).scaled_global_norm(optimizer))
        case "DeepSpeedZeroOptimizer_Stage3":
            groups = type(optimizer)._get_norm_groups(optimizer)
            norm = -1.0 if any(group < 0 for group in groups) else math.hypot(*map(float, groups))
        case "BF16_Optimizer":
            norm = float(_bf16_norm(engine))
        case _:
            return _replicated_norm(engine, mpu)
    return norm**2 if norm >= 0 else math.inf


def take_norm(engine: Any, norm: float, clip: float) -> None:
    """Let the next `engine.step` clip by `norm`, that of all components, instead of its own."""
    optimizer = engine.optimizer
    match type(optimizer).__name__:
        case "DeepSpeedZeroOptimizer":
            optimizer.scaled_global_norm = lambda norm_type=2: torch.tensor(norm, device=optimizer.device)
        case "DeepSpeedZeroOptimizer_Stage3":
            optimizer._get_norm_groups = lambda: [torch.tensor(norm, device=optimizer.device)]
        case "BF16_Optimizer":
            module: Any = sys.modules[type(optimizer).__module__]
            module.get_global_norm_of_tensors = lambda **_: torch.tensor(norm)
        case _:
            engine.clip_fp32_gradients = lambda: None
            if clip and norm > clip:
                for parameter in engine.module.parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(clip / (norm + 1e-6))


def _bf16_norm(engine: Any) -> Any:
    from deepspeed.runtime.utils import get_global_norm_of_tensors

    tensors, _ = engine.optimizer.get_grads_for_norm()
    none = torch.zeros(1, device=engine.device)  # on a shard that counts nothing of its own
    return get_global_norm_of_tensors(input_tensors=[none, *tensors], mpu=engine.optimizer.mpu, norm_type=2)


def _replicated_norm(engine: Any, mpu: Mpu) -> float:
    """Without ZeRO: gradients are whole on each replica; a cut parameter counts on each shard, others on one."""
    total = torch.zeros((), dtype=torch.float64, device=engine.device)
    for parameter in engine.module.parameters():
        counts = mpu.mesh.place.shard == 0 or getattr(parameter, "tensor_model_parallel", False)
        if parameter.grad is not None and counts:
            total += parameter.grad.double().square().sum()
    dist.all_reduce(total, group=mpu.mesh.shards)
    return float(total)
