"""Where a DeepSpeed engine keeps fp32 weights and moments, as pieces of parameters. Verified on 0.19.8.

deepspeed/runtime/zero/stage_1_and_2.py, zero/stage3.py, bf16_optimizer.py, utils/tensor_fragment.py: at stages 1
and 2 (and in bf16 with fp32 gradients) each group of parameters is one flat fp32 tensor of which a rank has a
partition, and a parameter's `_hp_mapping` tells where it lies there; at stage 3 each parameter is cut for itself,
and `grad_position` tells where its partition lies in the flat tensor of its sub-group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from dslaunch.runtime.held import Held, cut_of, fresh_states, shared_out
from dslaunch.runtime.proof import Copy
from dslaunch.runtime.schedule import place_scheduler
from dslaunch.runtime.tensor_parallel import Shard

Names = Mapping[nn.Parameter, str]


def held_by(engine: Any, names: Names, shard: Shard, replicas: Any, anew: bool) -> Iterator[Held]:
    """The pieces of the engine's parameters on this rank.

    Args:
        names: of its parameters in the whole model.
        replicas: the group of the ranks that hold the same parameters; None: the world.
        anew: make moments where there are none yet, to be filled.
    """
    stage, rank, size = engine.zero_optimization_stage(), dist.get_rank(replicas), dist.get_world_size(replicas)
    for parameter, name in names.items():
        if not parameter.requires_grad:
            yield _frozen(parameter, name, shard, stage, rank)
        elif stage == 0:
            yield replicated(engine.basic_optimizer, parameter, name, shard, rank, size, anew)
    if stage == 3:
        yield from _stage3(engine.optimizer, names, shard, rank, anew)
    elif stage:
        yield from _flat(engine.optimizer, names, shard, anew)


def copies_of(engine: Any, names: Names, shard: Shard, replicas: Any) -> Iterator[Copy]:
    """What this rank computes with: whole slices, at stage 3 a partition of each."""
    for parameter, name in names.items():
        if engine.zero_optimization_stage() == 3:
            partition: Tensor = parameter.ds_tensor  # type: ignore[attr-defined]
            where = f", shard {shard.rank}" if cut_of(parameter, shard).dim >= 0 else ""
            yield Copy(name, f"part {dist.get_rank(replicas)}{where}", partition)
        else:
            yield whole_copy(parameter, name, shard)


def whole_copy(parameter: Tensor, name: str, shard: Shard) -> Copy:
    """A parameter that all ranks of one shard hold alike, and where it is not cut all shards."""
    return Copy(name, f"shard {shard.rank}" if cut_of(parameter, shard).dim >= 0 else "", parameter)


def settle(engine: Any, updates: int) -> None:
    """Go on after `updates` updates with the fp32 weights that were set: what the passes compute with follows."""
    place_scheduler(engine.lr_scheduler, updates)
    engine.global_steps = updates
    engine.micro_steps = updates * engine.gradient_accumulation_steps()
    stage = engine.zero_optimization_stage()
    if stage == 3:
        _settle_stage3(engine.optimizer)
    elif stage:
        engine.optimizer.update_lp_params()


def _settle_stage3(optimizer: Any) -> None:
    for group, parameters in enumerate(optimizer.fp16_groups):
        flat = optimizer.fp32_partitioned_groups_flat[group]
        for parameter in parameters:
            _, start, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
            parameter.ds_tensor.data.copy_(flat.narrow(0, start, length).data)
    if small := optimizer.persistent_parameters:
        # They are kept whole on each rank, as they were before.
        small[0].partition(small)
        small[0].all_gather(small)


def loss_scaler(engine: Any) -> dict[str, Any]:
    """What fp16 scales the loss by, and its count of steps without an overflow; empty in other precisions."""
    kept = vars(engine.optimizer.loss_scaler) if engine.fp16_enabled() else {}
    return {key: value for key, value in kept.items() if isinstance(value, bool | int | float)}


def set_loss_scaler(engine: Any, kept: Mapping[str, Any]) -> None:
    if engine.fp16_enabled():
        vars(engine.optimizer.loss_scaler).update(kept)


def replicated(
    optimizer: Any, parameter: nn.Parameter, name: str, shard: Shard, rank: int, size: int, anew: bool
) -> Held:
    """A parameter that replica `rank` of `size` holds whole, with an optimizer of torch's."""
    states = fresh_states(optimizer, parameter) if anew else optimizer.state.get(parameter, {})
    cut, count = cut_of(parameter, shard), parameter.numel()
    written = shared_out(count, rank, size) if _writes(cut.dim, shard) else (0, 0)
    return Held(name, tuple(parameter.shape), cut, 0, parameter.detach().view(-1), states, 0, written)


def _writes(dim: int, shard: Shard) -> bool:
    """Of what is whole on each shard, the first one writes."""
    return dim >= 0 or shard.rank == 0


def _frozen(parameter: Any, name: str, shard: Shard, stage: int, rank: int) -> Held:
    """No optimizer knows it, and no checkpoint holds it; at stage 3 it is cut like the others."""
    if stage < 3:
        return unwritten(parameter, name, shard)
    cut, flat = cut_of(parameter, shard), parameter.ds_tensor
    shape = tuple(parameter.ds_shape)
    start, stop = _partition(rank, flat.numel(), prod(shape))
    return Held(name, shape, cut, start, flat.detach().narrow(0, 0, stop - start), trains=False)


def unwritten(parameter: Tensor, name: str, shard: Shard) -> Held:
    """A parameter that does not train, whole on this rank."""
    return Held(
        name, tuple(parameter.shape), cut_of(parameter, shard), 0, parameter.detach().view(-1), trains=False
    )


def _partition(rank: int, length: int, count: int) -> tuple[int, int]:
    """Stage 3: elements of the `rank`-th partition, the last of which is padded."""
    return min(rank * length, count), min((rank + 1) * length, count)


def _flat(optimizer: Any, names: Names, shard: Shard, anew: bool) -> Iterator[Held]:
    bf16 = type(optimizer).__name__ == "BF16_Optimizer"
    groups = optimizer.bf16_groups if bf16 else optimizer.bit16_groups
    flats = optimizer.fp32_groups_flat_partition if bf16 else optimizer.single_partition_of_fp32_groups
    for parameters, flat in zip(groups, flats, strict=True):
        states = fresh_states(optimizer.optimizer, flat) if anew else optimizer.optimizer.state.get(flat, {})
        for parameter in parameters:
            piece = parameter._hp_mapping
            if piece is None:
                continue
            cut, there, here = cut_of(parameter, shard), piece.lp_fragment_address, piece.hp_fragment_address
            written = (0, here.numel) if _writes(cut.dim, shard) else (0, 0)
            weight = flat.detach().narrow(0, here.start, here.numel)
            yield Held(
                names[parameter], tuple(parameter.shape), cut, there.start, weight, states, here.start, written
            )


def _stage3(optimizer: Any, names: Names, shard: Shard, rank: int, anew: bool) -> Iterator[Held]:
    inner = optimizer.optimizer
    for group, parameters in enumerate(optimizer.fp16_groups):
        flat = optimizer.fp32_partitioned_groups_flat[group]
        states = fresh_states(inner, flat) if anew else inner.state.get(flat, {})
        for parameter in parameters:
            _, offset, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
            shape = tuple(parameter.ds_shape)
            start, stop = _partition(rank, length, prod(shape))
            weight = flat.detach().narrow(0, offset, stop - start)
            cut = cut_of(parameter, shard)
            written = (0, stop - start) if _writes(cut.dim, shard) else (0, 0)
            yield Held(names[parameter], shape, cut, start, weight, states, offset, written)
